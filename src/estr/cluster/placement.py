"""Where each actor goes.

    node of the controller    the board of weights, the evaluator (which takes only idle time)
    placement group PACK      the trainer, one bundle for each rank
    placement group SPREAD    the engines, one bundle each

The groups reserve what the actors need before any is started. A bundle outlives its actor: where
only the actor died, its replacement starts in the same place; where the node is gone, Ray moves the
bundle to another one as soon as there is room, and the replacement waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..calls import all_or_none
from ..config import Recipe
from ..engines.pool import EnginePool
from ..engines.process import EngineProcess
from ..errors import ConfigError
from ..evaluator_process import EvaluatorProcess
from ..processes import Processes, bytes_needed
from ..rank_workers import Place as RankPlace
from ..rank_workers import RankWorkers, log_of
from ..run_folder import RunFolder
from ..trainer_process import TrainerProcess
from ..types import Segment
from .ray_child import spawn_of
from .ray_weights import RayWeightStore, start_board
from .ray_worker import Place, RayWorker
from .session import Session

_EVALUATOR_NICE = 10
_KINDS = ("CPU", "GPU")


class RayProcesses(Processes):
    """Actors of a Ray cluster; weights cross in its object store."""

    engine: EnginePool

    def __init__(self, model: Path, recipe: Recipe, folder: RunFolder) -> None:
        """Connects to the cluster. Raises ConfigError where none answers."""
        self._model, self._recipe = model.absolute(), recipe
        self._folder, self._log = folder.path.absolute(), folder.log.absolute()
        engines = recipe.engine.count * recipe.engine.threads
        # Each version once more, since those that receive it keep it in shared memory for a moment.
        weights = 2 * bytes_needed(model, recipe)
        self._session = Session(
            recipe.ray,
            num_cpus=engines + recipe.trainer.ranks * recipe.trainer.threads,
            weights_bytes=weights,
        )
        self._deadline = time.monotonic() + recipe.ray.start_timeout_s
        self._board = start_board(recipe.max_staleness + 2)
        self.store: RayWeightStore = RayWeightStore(self._board)
        self._groups: list[Any] = []

    @classmethod
    async def start(
        cls, model: Path, recipe: Recipe, folder: RunFolder, tell: Callable[[str], None]
    ) -> RayProcesses:
        """All at once; as soon as one does not come up, the others are given up."""
        processes = cls(model, recipe, folder)
        try:
            await processes._start(tell)
        except BaseException:
            await processes._leave()
            raise
        return processes

    async def _start(self, tell: Callable[[str], None]) -> None:
        trainer, engine = self._recipe.trainer, self._recipe.engine
        ranks = await self._reserve("trainer", trainer.ranks, trainer.threads, trainer.device)
        places = await self._reserve("engine", engine.count, engine.threads, engine.device)

        async def start_engine(index: int) -> EngineProcess:
            return await self._start_engine(index, places[index])

        engines = asyncio.create_task(EnginePool.bring_up(engine.count, start_engine, tell=tell))
        learner = asyncio.create_task(self._start_trainer(ranks))
        evaluator = asyncio.create_task(self._start_evaluator())
        self.engine, self.trainer, self.evaluator = await all_or_none(engines, learner, evaluator)

    async def _reserve(self, what: str, count: int, threads: int, device: str) -> list[Place]:
        """A placement group of `count` bundles. Raises ConfigError where the cluster has no room
        for it within ray.start_timeout_s."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        num_gpus = 0 if device == "cpu" else 1
        bundle = {"CPU": threads, **({"GPU": num_gpus} if num_gpus else {})}
        strategy = "SPREAD" if what == "engine" else "PACK"
        group = placement_group([bundle] * count, strategy=strategy)
        self._groups.append(group)
        while not await asyncio.to_thread(group.wait, 1):
            if time.monotonic() > self._deadline:
                raise ConfigError(
                    f"the Ray cluster has no room for {count} x {bundle} of the {what} within "
                    f"ray.start_timeout_s = {self._recipe.ray.start_timeout_s:g} s; "
                    f"it has {_resources()}"
                )
        return [
            Place(PlacementGroupSchedulingStrategy(group, index), threads, num_gpus)
            for index in range(count)
        ]

    async def _start_engine(self, index: int, place: Place) -> EngineProcess:
        options = self._recipe.engine
        worker = await RayWorker.start(
            f"engine {index}" if options.count > 1 else "engine",
            "estr.engines.process:EngineHost",
            {
                "folder": self._model,
                "options": options,
                "version": 0,
                "in_flight": self._recipe.in_flight,
            },
            place,
            threads=options.threads,
            log=self._log,
            shared=[self._model],
            timeout_s=self._recipe.ray.start_timeout_s,
            spawn=spawn_of(options),
        )
        return EngineProcess(worker, 0)

    async def _start_trainer(self, places: list[Place]) -> TrainerProcess:
        options = self._recipe.trainer

        async def start_rank(rank: RankPlace | None) -> RayWorker:
            index = 0 if rank is None else rank.rank
            return await RayWorker.start(
                "trainer" if rank is None else f"trainer rank {index}",
                "estr.trainer_process:TrainerHost",
                self._host_kwargs() if rank is None else {**self._host_kwargs(), "place": rank},
                places[index],
                threads=options.threads,
                log=log_of(self._log, index),
                shared=[self._model, self._folder],
                timeout_s=self._recipe.ray.start_timeout_s,
            )

        workers = await RankWorkers.bring_up(options.ranks, start_rank, shared=self._folder)
        return TrainerProcess(workers, options.timeout_s)

    async def _start_evaluator(self) -> EvaluatorProcess:
        worker = await RayWorker.start(
            "evaluator",
            "estr.evaluation:EvaluatorHost",
            self._host_kwargs(),
            Place(_here()),
            nice=_EVALUATOR_NICE,
            log=self._log,
            shared=[self._model, self._folder],
            timeout_s=self._recipe.ray.start_timeout_s,
        )
        evaluation = self._recipe.eval
        return EvaluatorProcess(worker, k=evaluation.k, timeout_s=evaluation.timeout_s)

    def _host_kwargs(self) -> dict[str, Any]:
        return {"folder": self._model, "recipe": self._recipe, "store": self.store}

    async def _probes(self, temperature: float) -> list[list[Segment]]:
        return await self.engine.probes(temperature)

    def gauges(self) -> dict[str, float]:
        return {**super().gauges(), "engines": float(len(self.engine.living))}

    async def close(self) -> None:
        try:
            await asyncio.gather(self.engine.close(), self.trainer.close(), self.evaluator.close())
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Give back what was reserved and leave the cluster."""
        import ray
        from ray.util import remove_placement_group

        with contextlib.suppress(Exception):  # the cluster may be gone, and with it all of this
            ray.kill(self._board)
            for group in self._groups:
                remove_placement_group(group)
        self._session.close()


def _here() -> Any:
    """The node of the controller."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _resources() -> str:
    """What the cluster has in all, and what is free of it."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{free.get(key, 0):g} of {total.get(key, 0):g} {key}" for key in ("CPU", "GPU")
    )
