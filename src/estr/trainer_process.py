"""A trainer in a process of its own: the controller's end, and the host inside the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .buffer import StepResult, TrainingGroup
from .calls import Calls
from .config import Recipe
from .types import Finding, Segment
from .weights import WeightStore
from .worker import CpuBudget, Worker, busy_share, require_determinism

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
    """TrainerClient over a TrainerHost elsewhere."""

    def __init__(self, worker: Calls, timeout_s: float) -> None:
        self.worker = worker
        self.busy = 0.0
        """Share of wall time at work, from the last batch's end to this one's."""
        self._timeout_s = timeout_s
        self._seen = {"busy_s": 0.0, "wall_s": 0.0}

    @classmethod
    async def start(
        cls, folder: Path, recipe: Recipe, store: WeightStore, *, log: Path | None = None
    ) -> TrainerProcess:
        """Spawn it on the model in `folder`."""
        worker = await Worker.start(
            "trainer",
            "estr.trainer_process:TrainerHost",
            {"folder": folder, "recipe": recipe, "store": store},
            threads=recipe.trainer.threads,
            log=log,
        )
        return cls(worker, recipe.trainer.timeout_s)

    async def train(self, minibatches: Sequence[Sequence[TrainingGroup]]) -> list[StepResult]:
        results: list[StepResult]
        results = await self.worker.call("train", minibatches, timeout_s=self._timeout_s)
        before, self._seen = self._seen, await self.statistics()
        self.busy = busy_share(before, self._seen)
        return results

    async def check_canaries(
        self, canaries: Sequence[Segment], engine: Mapping[str, float]
    ) -> list[Finding]:
        found: list[Finding]
        found = await self.worker.call(
            "check_canaries", canaries, engine, timeout_s=self._timeout_s
        )
        return found

    async def publish(self) -> int:
        return int(await self.worker.call("publish", timeout_s=_FILE_TIMEOUT_S))

    async def save(self, folder: Path) -> None:
        await self.worker.call("save", folder.absolute(), timeout_s=_FILE_TIMEOUT_S)

    async def restore(self, folder: Path) -> int:
        return int(await self.worker.call("restore", folder.absolute(), timeout_s=_FILE_TIMEOUT_S))

    async def export(self, folder: Path) -> None:
        await self.worker.call("export", folder.absolute(), timeout_s=_FILE_TIMEOUT_S)

    async def statistics(self) -> dict[str, float]:
        counters: dict[str, float]
        counters = await self.worker.call("statistics", timeout_s=self._timeout_s)
        return counters

    async def close(self) -> None:
        await self.worker.close()


class TrainerHost:
    """What runs inside the process."""

    def __init__(self, folder: Path, recipe: Recipe, store: WeightStore) -> None:
        import torch

        from .guard import Guard
        from .models import load_model, vocabulary_size
        from .trainer import Trainer

        if recipe.deterministic:
            require_determinism()

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
        if recipe.guard != "off":
            self._guard = Guard(model, recipe, store, vocab_size=vocab_size)
        self._trainer = Trainer(model, recipe, store, publish_dtype=dtype, vocab_size=vocab_size)

    def train(self, minibatches: Sequence[Sequence[TrainingGroup]]) -> list[StepResult]:
        if self._guard is None:
            return self._trainer.train(minibatches)
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

        tokenizer = load_tokenizer(self._folder)
        save_model(self._trainer.model, tokenizer, folder, self._trainer.weights.published())

    def statistics(self) -> dict[str, float]:
        budget = CpuBudget() if self._guard is None else self._guard.budget
        return {**self._trainer.statistics(), **budget.statistics()}
