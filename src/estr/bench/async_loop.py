"""Asynchronous against synchronous training, and against the bound that neither can pass.

For each regime of benchmarks/async.toml, with the same model, task, batch and processes:

    generation   rollouts alone, as many at once as the bound on staleness lets in, tokens/s
    training     the trainer alone, fed with those rollouts, tokens/s
    bound        the lower of the two: what a pipeline with a core for each could reach
    sync         max_staleness = 0: all rollouts of a step at once, then the step
    sync_two     the same, with two threads for each phase
    async        the loop as it runs

`ratio` is async over bound in the worst regime; `speedup` is async over the better sync.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..buffer import TrainingGroup
from ..config import Recipe, recipe_from_table
from ..engines.process import EngineProcess
from ..errors import ConfigError
from ..loop import Loop
from ..metrics import MetricsWriter
from ..models import resolve_model
from ..progress import Row, SilentReporter
from ..rollout import RolloutSetting, run_rollout
from ..subject import resolve_play
from ..trainer_process import TrainerProcess
from ..types import RolloutId, Trajectory
from ..weights import FileWeightStore
from . import machine

CONFIG = Path("benchmarks/async.toml")


def run(quick: bool = False, config: Path = CONFIG) -> dict[str, Any]:
    """Measure every regime. quick: one short measurement of each kind."""
    table = _read(config)
    measure = table["measure"]
    if quick:
        measure = {"steps": 8, "warmup_steps": 3, "repeats": 1}
    regimes = {}
    for name, regime in table["regime"].items():
        recipe = _recipe(table["recipe"], regime, measure)
        regimes[name] = asyncio.run(_measure_regime(name, recipe, measure))
    return {
        "name": "async",
        "ratio": min(r["async_over_bound"] for r in regimes.values()),
        "regimes": regimes,
        "measure": measure,
        "quick": quick,
        "machine": machine(),
    }


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {config}: {error.strerror}; run this from the root of the repository"
        ) from error


def _recipe(base: dict[str, Any], regime: dict[str, Any], measure: dict[str, Any]) -> Recipe:
    merged = dict(base)
    for key, value in regime.items():
        own = merged.get(key)
        both = isinstance(value, dict) and isinstance(own, dict) and key != "task"
        merged[key] = {**own, **value} if both and own is not None else value
    return recipe_from_table({**merged, "steps": measure["steps"]})


async def _measure_regime(name: str, recipe: Recipe, measure: dict[str, Any]) -> dict[str, Any]:
    """Every kind in turn, again and again, with processes that stay up: the machine's own speed
    wanders, so only what was measured side by side is compared."""
    two_threads = dataclasses.replace(
        recipe,
        engine=dataclasses.replace(recipe.engine, threads=2),
        trainer=dataclasses.replace(recipe.trainer, threads=2),
    )
    sync, sync_two = (dataclasses.replace(its, max_staleness=0) for its in (recipe, two_threads))
    rounds: list[dict[str, float]] = []
    async with _bench(recipe) as one, _bench(two_threads) as two:
        for number in range(1, measure["repeats"] + 1):
            rates = {
                **await one.alone(measure),
                "async": await one.loop(recipe, measure),
                "sync": await one.loop(sync, measure),
                "sync_two": await two.loop(sync_two, measure),
            }
            rounds.append(rates)
            told = ", ".join(f"{kind} {rate:,.0f}" for kind, rate in rates.items())
            print(f"{name}, round {number}, tokens/s: {told}", file=sys.stderr, flush=True)
    return _summary(rounds)


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rates, and of the ratios taken within each round."""
    bounds = [min(r["generation"], r["training"]) for r in rounds]
    ratios = [r["async"] / bound for r, bound in zip(rounds, bounds, strict=True)]
    speedups = [r["async"] / max(r["sync"], r["sync_two"]) for r in rounds]
    return {
        **{f"{k}_tokens_per_s": statistics.median(r[k] for r in rounds) for k in rounds[0]},
        "bound_tokens_per_s": statistics.median(bounds),
        "async_over_bound": statistics.median(ratios),
        "async_over_bound_each": [round(ratio, 3) for ratio in ratios],
        "speedup": statistics.median(speedups),
        "speedup_each": [round(speedup, 3) for speedup in speedups],
    }


class _Clock(SilentReporter):
    """Tokens and time of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        self.steps.append((wall_s, row["eligible_tokens"] or 0.0))

    def tokens_per_s(self, warmup_steps: int) -> float:
        start_s = self.steps[warmup_steps - 1][0]
        tokens = sum(tokens for _, tokens in self.steps[warmup_steps:])
        return float(tokens / (self.steps[-1][0] - start_s))


@asynccontextmanager
async def _bench(recipe: Recipe) -> AsyncIterator[_Bench]:
    """Engine and trainer of a recipe, and a state of the trainer to begin every measurement at."""
    model = resolve_model(recipe.model)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folder = Path(scratch)
        store = FileWeightStore(folder / "weights", keep=recipe.max_staleness + 2)
        engine, trainer = await asyncio.gather(
            EngineProcess.start(model, recipe.engine), TrainerProcess.start(model, recipe, store)
        )
        try:
            (folder / "start").mkdir()
            await trainer.save(folder / "start")
            play = resolve_play(model, recipe, temperature=1.0)
            setting = RolloutSetting(engine, *play, recipe.rollout)
            yield _Bench(recipe, setting, engine, trainer, store, folder)
        finally:
            await asyncio.gather(engine.close(), trainer.close())


@dataclasses.dataclass(frozen=True, slots=True)
class _Bench:
    """Processes that stay up between measurements."""

    recipe: Recipe
    setting: RolloutSetting
    engine: EngineProcess
    trainer: TrainerProcess
    store: FileWeightStore
    folder: Path

    async def reset(self) -> None:
        """Weights, optimizer and counters as at the start, in trainer and engine."""
        await self.trainer.restore(self.folder / "start")
        await self.engine.load(await self.trainer.publish(), self.store, self.recipe.kv)

    async def loop(self, recipe: Recipe, measure: dict[str, Any]) -> float:
        """Trained tokens per second of a loop after its first steps."""
        await self.reset()
        clock = _Clock()
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as run,
            MetricsWriter(run, tensorboard=False) as writer,
        ):
            trainer, store = self.trainer, self.store
            await Loop(recipe, self.setting, trainer, store, reporter=clock, writer=writer).run()
        return clock.tokens_per_s(measure["warmup_steps"])

    async def alone(self, measure: dict[str, Any]) -> dict[str, float]:
        """Tokens per second of generation and of training, one after the other."""
        await self.reset()
        groups, generation = await _generate(self.recipe, self.setting, measure)
        training = await _train(self.recipe, self.trainer, groups, measure)
        return {"generation": generation, "training": training}


async def _generate(
    recipe: Recipe, setting: RolloutSetting, measure: dict[str, Any]
) -> tuple[list[list[Trajectory]], float]:
    """All groups of the measurement, with as many at once as the loop may have outstanding."""
    room = asyncio.Semaphore((recipe.max_staleness + 1) * recipe.groups_per_step)
    ends: list[tuple[float, int]] = []

    async def one(group: int) -> list[Trajectory]:
        async with room:
            members = await asyncio.gather(
                *(
                    run_rollout(
                        setting,
                        RolloutId(recipe.seed, group, index),
                        group,
                        dispatch_version=0,
                        deadline_version=group,
                    )
                    for index in range(recipe.group_size)
                )
            )
        ends.append((time.monotonic(), sum(t.num_sampled_tokens for t in members)))
        return list(members)

    count = measure["steps"] * recipe.groups_per_step
    groups = await asyncio.gather(*(one(group) for group in range(count)))
    warm = measure["warmup_steps"] * recipe.groups_per_step
    tokens = sum(n for _, n in ends[warm:])
    return groups, tokens / (ends[-1][0] - ends[warm - 1][0])


async def _train(
    recipe: Recipe,
    trainer: TrainerProcess,
    groups: list[list[Trajectory]],
    measure: dict[str, Any],
) -> float:
    """The same groups, one batch after the other."""
    size = recipe.groups_per_step
    ends: list[tuple[float, int]] = []
    for step in range(measure["steps"]):
        members = groups[step * size : (step + 1) * size]
        batch = [
            TrainingGroup(
                step * size + place,
                step,
                tuple(group),
                tuple(1.0 if i % 2 else -1.0 for i in range(len(group))),
            )
            for place, group in enumerate(members)
        ]
        await trainer.train([batch])
        tokens = sum(t.num_sampled_tokens for group in members for t in group)
        ends.append((time.monotonic(), tokens))
    warm = measure["warmup_steps"]
    tokens = sum(n for _, n in ends[warm:])
    return float(tokens / (ends[-1][0] - ends[warm - 1][0]))
