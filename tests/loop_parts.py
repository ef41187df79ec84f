"""A task, a codec and a trainer small enough to see through, for the tests of the loop."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from estr.buffer import StepResult
from estr.config import Recipe, recipe_from_table
from estr.diagnostics import trajectory_diagnostics
from estr.engine import Engine, ScriptedEngine
from estr.environment import Environment, Reply, ScriptedEnvironment
from estr.loop import Loop
from estr.metrics import MetricsWriter
from estr.progress import SilentReporter
from estr.rollout import RolloutSetting
from estr.types import SamplingSettings
from estr.weights import MemoryWeightStore

STOP = 9


class IdCodec:
    """Text is the token ids, written as digits."""

    def encode_prompt(self, prompt: Any) -> list[int]:
        return [int(c) for c in prompt]

    def encode_observation(self, observation: Any, last_id: int | None) -> list[int]:
        return [int(c) for c in observation]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(str(t) for t in token_ids)


class CoinTask:
    """One turn, graded 1 and 0 in turn, so that groups have variance. `size_` problems."""

    name = "coin"
    stop = ("9",)
    max_turns = 4
    unfinished_outcome: float | None = 0.0

    def __init__(
        self,
        size: int | None = None,
        make: Callable[[int], Environment] | None = None,
    ) -> None:
        self._size = size
        self._make = make
        self._coin = itertools.cycle([1.0, 0.0])
        self.made: list[int] = []

    def size(self, split: str) -> int | None:
        return self._size

    def make(self, split: str, index: int) -> Environment:
        self.made.append(index)
        if self._make is not None:
            return self._make(index)
        return ScriptedEnvironment("12", [Reply(outcome=next(self._coin))])

    def gold(self, split: str, index: int) -> Sequence[str]:
        return []


class CountingTrainer:
    """A TrainerClient whose optimizer step is a count; remembers what it consumed."""

    def __init__(self, recipe: Recipe, store: MemoryWeightStore, *, step_s: float = 0.0) -> None:
        self.recipe = recipe
        self.store = store
        self.step_s = step_s
        self.step = 0
        self.version = 0
        self.published = 0
        self.consumed: list[int] = []
        self.staleness: list[int] = []
        self.intra: list[int] = []
        self.hang = asyncio.Event()
        self.hang.set()
        self.skip: set[int] = set()
        self.fail_at: int | None = None

    async def train(self, minibatches: Sequence[Sequence[Any]]) -> list[StepResult]:
        results = []
        for groups in minibatches:
            await self.hang.wait()
            await asyncio.sleep(self.step_s)
            if self.fail_at == self.step:
                raise RuntimeError("the optimizer broke")
            target = self.version
            trajectories = [t for g in groups for t in g.trajectories]
            metrics = trajectory_diagnostics(
                trajectories, target_version=target, max_staleness=self.recipe.max_staleness
            )
            self.consumed += [g.id for g in groups]
            self.staleness += [target - (t.first_version or 0) for t in trajectories]
            self.intra += [t.intra for t in trajectories]
            if self.step not in self.skip:
                self.version += 1
            self.step += 1
            results.append(StepResult(self.step, target, self.version, metrics))
        if self.version - self.published >= self.recipe.publish_every:
            await self.publish()
        return results

    async def publish(self) -> int:
        self.published = self.version
        self.store.publish(self.version, {"w": torch.zeros(1)})
        return self.version

    async def save(self, folder: Path) -> None:
        (folder / "trainer.json").write_text(
            json.dumps({"step": self.step, "version": self.version})
        )

    async def restore(self, folder: Path) -> int:
        state = json.loads((folder / "trainer.json").read_text())
        self.step, self.version = state["step"], state["version"]
        return self.version

    async def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    async def statistics(self) -> dict[str, float]:
        return {"busy_s": 0.0, "wall_s": 1.0}

    async def close(self) -> None:
        pass


def recipe(**table: Any) -> Recipe:
    """Two groups of two per step, five steps, unless said otherwise."""
    base = {"steps": 5, "groups_per_step": 2, "group_size": 2, "max_staleness": 2}
    return recipe_from_table({**base, **table})


def build(
    tmp_path: Path,
    the_recipe: Recipe,
    *,
    engine: Engine | None = None,
    task: CoinTask | None = None,
    step_s: float = 0.0,
    other_tasks: Sequence[CoinTask] = (),
    **kwargs: Any,
) -> tuple[Loop, CountingTrainer]:
    """A loop over fakes, with version 0 published. Three tokens a turn, the last one a stop."""
    store = MemoryWeightStore(keep=the_recipe.max_staleness + 2)
    store.publish(0, {"w": torch.zeros(1)})
    trainer = CountingTrainer(the_recipe, store, step_s=step_s)
    setting = RolloutSetting(
        engine or ScriptedEngine(lambda request: [1, 2, STOP]),
        task or CoinTask(),
        IdCodec(),
        SamplingSettings(max_new_tokens=8, max_tokens=64, stop_token_ids=(STOP,)),
        the_recipe.rollout,
    )
    writer = MetricsWriter(tmp_path / "run", tensorboard=False)
    kwargs.setdefault("reporter", SilentReporter())
    settings = [setting, *(replace(setting, task=other) for other in other_tasks)]
    return Loop(the_recipe, settings, trainer, store, writer=writer, **kwargs), trainer
