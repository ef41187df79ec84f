"""A trainer in processes of its own: the controller's end, and the host inside each process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .buffer import StepResult, TrainingGroup
from .config import Recipe
from .rank_workers import Place, RankWorkers
from .types import Finding, Segment
from .weights import WeightStore
from .worker import CpuBudget, busy_share, require_determinism

_FILE_TIMEOUT_S = 600.0


class TrainerClient(Protocol):
    """What the loop asks of a trainer, wherever it lives. Paths are written by the trainer."""

    async def train(self, minibatches: Sequence[Sequence[TrainingGroup]]) -> list[StepResult]:
        """One optimizer step per mini-batch; publishes the newest version when it is due."""
        ...

    async def check_canaries(
        self, canaries: Sequence[Segment], engine: Mapping[str, float]
    ) -> list[Finding]:
        """What the guard says to an engine's canaries. engine: its statistics, whose CPU time
        counts in the guard's budget. Raises GuardError where guard = "stop"."""
        ...

    async def publish(self) -> int:
        """Put the current version into the store; returns it."""
        ...

    async def save(self, folder: Path) -> None:
        """The trainer's part of a checkpoint."""
        ...

    async def restore(self, folder: Path) -> int:
        """Put a checkpoint back; returns its version."""
        ...

    async def export(self, folder: Path) -> None:
        """The current weights as a Hugging Face folder."""
        ...

    async def statistics(self) -> dict[str, float]:
        """busy_s, wall_s, cpu_s and guard_s since the start."""
        ...

    async def close(self) -> None:
        """End it. May be called twice."""
        ...


class TrainerProcess:
    """TrainerClient over a Trainer elsewhere, or several that train together (`estr.ranks`)."""

    def __init__(self, workers: RankWorkers, timeout_s: float) -> None:
        self.busy = 0.0
        """Share of wall time at work, from the last batch's end to this one's."""
        self._workers = workers
        self._timeout_s = timeout_s
        self._seen = {"busy_s": 0.0, "wall_s": 0.0}

    @classmethod
    async def start(
        cls, folder: Path, recipe: Recipe, store: WeightStore, *, log: Path | None = None
    ) -> TrainerProcess:
        """Spawn it on the model in `folder`."""
        workers = await RankWorkers.start(
            "estr.trainer_process:TrainerHost",
            {"folder": folder, "recipe": recipe, "store": store},
            size=recipe.trainer.ranks,
            threads=recipe.trainer.threads,
            log=log,
        )
        return cls(workers, recipe.trainer.timeout_s)

    async def alive(self) -> None:
        """Returns never; raises WorkerDied when a process of the trainer has ended."""
        await self._workers.alive()

    async def train(self, minibatches: Sequence[Sequence[TrainingGroup]]) -> list[StepResult]:
        results: list[StepResult]
        results, *_ = await self._workers.call("train", minibatches, timeout_s=self._timeout_s)
        before, self._seen = self._seen, await self.statistics()
        self.busy = busy_share(before, self._seen)
        return results

    async def check_canaries(
        self, canaries: Sequence[Segment], engine: Mapping[str, float]
    ) -> list[Finding]:
        found: list[Finding]
        found, *_ = await self._workers.call(
            "check_canaries", canaries, engine, timeout_s=self._timeout_s
        )
        return found

    async def publish(self) -> int:
        version, *_ = await self._workers.call("publish", timeout_s=_FILE_TIMEOUT_S)
        return int(version)

    async def save(self, folder: Path) -> None:
        await self._workers.call("save", folder.absolute(), timeout_s=_FILE_TIMEOUT_S)

    async def restore(self, folder: Path) -> int:
        version, *_ = await self._workers.call(
            "restore", folder.absolute(), timeout_s=_FILE_TIMEOUT_S
        )
        return int(version)

    async def export(self, folder: Path) -> None:
        await self._workers.call("export", folder.absolute(), timeout_s=_FILE_TIMEOUT_S)

    async def statistics(self) -> dict[str, float]:
        """Of rank 0, with the CPU time of all."""
        counters: dict[str, float]
        counters, *others = await self._workers.call("statistics", timeout_s=self._timeout_s)
        return counters | {"cpu_s": counters["cpu_s"] + sum(other["cpu_s"] for other in others)}

    async def close(self) -> None:
        await self._workers.close()


class TrainerHost:
    """What runs inside the process. place: among the ranks, where there are several."""

    def __init__(
        self, folder: Path, recipe: Recipe, store: WeightStore, place: Place | None = None
    ) -> None:
        import torch

        from .guard import Guard
        from .models import load_model, vocabulary_size
        from .ranks import ALONE, join
        from .trainer import Trainer

        if recipe.deterministic:
            require_determinism()
        self._ranks = ALONE
        if place is not None:
            recipe = _of_rank(recipe, place)
            options = recipe.trainer
            self._ranks = join(place, options.device, options.timeout_s)

        model = load_model(
            folder,
            dtype="float32",
            device=recipe.trainer.device,
            attn=recipe.trainer.attention,
        )
        dtype = getattr(torch, recipe.engine.dtype)
        self._folder = folder
        vocab_size = vocabulary_size(folder, model)
        self._guard = None
        if recipe.guard != "off" and self._ranks.rank == 0:
            self._guard = Guard(model, recipe, store, vocab_size=vocab_size)
        self._trainer = Trainer(
            model,
            recipe,
            store,
            publish_dtype=dtype,
            vocab_size=vocab_size,
            ranks=self._ranks,
        )

    def train(self, minibatches: Sequence[Sequence[TrainingGroup]]) -> list[StepResult]:
        if self._guard is None:
            results = self._trainer.train(minibatches)
            return results if self._ranks.rank == 0 else []  # they are the same everywhere
        found, metrics = self._guard.check(minibatches, self._trainer.version)
        first, *others = self._trainer.train(minibatches)
        first.metrics.merge(metrics)
        return [dataclasses.replace(first, findings=tuple(found)), *others]

    def check_canaries(
        self, canaries: Sequence[Segment], engine: Mapping[str, float]
    ) -> list[Finding]:
        if self._guard is None:
            return []
        self._guard.budget.share_with(engine)
        return self._guard.check_canaries(canaries)

    def publish(self) -> int:
        return self._trainer.publish()

    def save(self, folder: Path) -> None:
        from .checkpoint import save_trainer

        save_trainer(self._trainer, folder)

    def restore(self, folder: Path) -> int:
        from .checkpoint import restore_trainer

        restore_trainer(self._trainer, folder)
        if self._guard is not None:
            self._guard.forget()
        return self._trainer.version

    def export(self, folder: Path) -> None:
        from .models import load_tokenizer, save_model

        state = self._ranks.gather(self._trainer.weights.published())
        if self._ranks.rank == 0:
            save_model(self._trainer.model, load_tokenizer(self._folder), folder, state)

    def statistics(self) -> dict[str, float]:
        budget = CpuBudget() if self._guard is None else self._guard.budget
        return {**self._trainer.statistics(), **budget.statistics()}

    def close(self) -> None:
        self._ranks.leave()


def _of_rank(recipe: Recipe, place: Place) -> Recipe:
    from .ranks import rank_device

    if place.own_devices:
        return recipe
    options = recipe.trainer
    own = dataclasses.replace(options, device=rank_device(options.device, place.rank))
    return dataclasses.replace(recipe, trainer=own)
