"""The processes of one run: engine, trainer, evaluator, and the store between them.

    LocalProcesses                       spawned on this machine
    estr.cluster.placement.RayProcesses  actors of a Ray cluster

Once they are up, a run does not know which of the two they are.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from .calls import all_or_none
from .config import Recipe
from .engines.pool import EnginePool
from .engines.process import EngineProcess
from .engines.transfer import TransferStore
from .errors import ScheduleError
from .evaluator_process import EvaluatorProcess
from .run_folder import RunFolder, weights_folder
from .schedule import ENGINE_FILE, EngineSchedule, Position
from .trainer_process import TrainerProcess
from .types import Finding, RolloutId, Segment
from .weights import FileWeightStore, WeightStore

_BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2}


class Processes(ABC):
    """All of them, closed together."""

    engine: EngineProcess | EnginePool
    trainer: TrainerProcess
    evaluator: EvaluatorProcess
    store: WeightStore

    def watchers(self, recipe: Recipe) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What notices the death of a process, or an engine that hangs."""
        return [
            lambda: self.engine.watch(recipe.engine.timeout_s),
            self.trainer.alive,
            self.evaluator.worker.alive,
        ]

    def gauges(self) -> dict[str, float]:
        """Shares of wall time that the processes spent at work since the last step."""
        return {"engine_busy": self.engine.take_busy(), "trainer_busy": self.trainer.busy}

    async def statistics(self) -> list[dict[str, float]]:
        """Of engine and trainer, and the CPU time of this process."""
        own = {"cpu_s": time.process_time(), "guard_s": 0.0}
        return [await self.engine.statistics(), await self.trainer.statistics(), own]

    def canaries(self, recipe: Recipe) -> Callable[[], Coroutine[Any, Any, list[Finding]]]:
        """What each engine draws behind fixed prompts, judged by the trainer's guard."""

        async def check() -> list[Finding]:
            found: list[Finding] = []
            for drawn in await self._probes(recipe.sampling.temperature):
                found += await self.trainer.check_canaries(drawn, self.engine.seen)
            return found

        return check

    @abstractmethod
    async def _probes(self, temperature: float) -> list[list[Segment]]:
        """The canaries of every engine."""

    @property
    def position(self) -> Position | None:
        """Of a deterministic engine: where its schedule stood at the last snapshot."""
        return None

    def forget(self, rollout_id: RolloutId) -> None:
        """Of a deterministic engine: this rollout has ended, and is waited for no longer."""
        raise ScheduleError(f"engines of {type(self).__name__} follow no schedule")

    async def begin(self, position: Position | None) -> None:
        """Of a deterministic engine: its schedule begins, or goes on where a checkpoint stands."""
        raise ScheduleError(f"engines of {type(self).__name__} follow no schedule")

    @abstractmethod
    async def close(self) -> None:
        """End all of them; what the store held is gone."""


class LocalProcesses(Processes):
    """Spawned on this machine; weights cross in files."""

    engine: EngineProcess

    def __init__(self, store: FileWeightStore) -> None:
        self.store: FileWeightStore = store

    @classmethod
    async def start(
        cls, model: Path, recipe: Recipe, folder: RunFolder, replay: Path | None
    ) -> LocalProcesses:
        """All at once; as soon as one does not come up, the others are given up."""
        needed = bytes_needed(model, recipe)
        processes = cls(weight_store(weights_folder(folder.path, needed), recipe))
        try:
            await processes._start(model, recipe, folder, replay)
        except BaseException:
            processes._forget_weights()
            raise
        return processes

    async def _start(
        self, model: Path, recipe: Recipe, folder: RunFolder, replay: Path | None
    ) -> None:
        log, store = folder.log, self.store
        schedule = None
        if recipe.deterministic:
            plan = None if replay is None else replay / ENGINE_FILE
            schedule = EngineSchedule(folder.path / ENGINE_FILE, plan)
        engine = asyncio.create_task(
            EngineProcess.start(
                model, recipe.engine, in_flight=recipe.in_flight, log=log, schedule=schedule
            )
        )
        trainer = asyncio.create_task(TrainerProcess.start(model, recipe, store, log=log))
        evaluator = asyncio.create_task(EvaluatorProcess.start(model, recipe, store, log=log))
        self.engine, self.trainer, self.evaluator = await all_or_none(engine, trainer, evaluator)

    async def _probes(self, temperature: float) -> list[list[Segment]]:
        return [await self.engine.probe(temperature)]

    @property
    def position(self) -> Position | None:
        return self.engine.position

    def forget(self, rollout_id: RolloutId) -> None:
        self.engine.forget(rollout_id)

    async def begin(self, position: Position | None) -> None:
        await self.engine.begin(position or Position())

    async def close(self) -> None:
        try:
            await asyncio.gather(self.engine.close(), self.trainer.close(), self.evaluator.close())
        finally:
            self._forget_weights()

    def _forget_weights(self) -> None:
        shutil.rmtree(self.store.folder, ignore_errors=True)


def weight_store(folder: Path, recipe: Recipe) -> FileWeightStore:
    """Between the processes of this machine; `engine.weight_transfer` says whether versions travel
    in its files alone."""
    keep, engine = recipe.max_staleness + 2, recipe.engine
    if engine.weight_transfer == "file":
        return FileWeightStore(folder, keep)
    return TransferStore(
        folder,
        keep,
        backend=engine.weight_transfer,
        device="cpu" if engine.weight_transfer == "gloo" else recipe.trainer.device,
        timeout_s=engine.timeout_s / 2,  # it fails with a reason before it is taken for hung
    )


def bytes_needed(model: Path, recipe: Recipe) -> int:
    """By all versions that the store keeps, in the type that the engine takes."""
    from safetensors import safe_open

    count = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            names = file.keys()  # it cannot be iterated over itself
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return (recipe.max_staleness + 2) * count * _BYTES_PER_WEIGHT[recipe.engine.dtype]
