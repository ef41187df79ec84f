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
import shutil
import statistics
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
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
        measure = {"steps": 10, "warmup_steps": 4, "repeats": 1}
    regimes = {
        name: asyncio.run(_measure_regime(_recipe(table["recipe"], regime, measure), measure))
        for name, regime in table["regime"].items()
    }
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


async def _measure_regime(recipe: Recipe, measure: dict[str, Any]) -> dict[str, float]:
    two = dataclasses.replace(
        recipe,
        max_staleness=0,
        engine=dataclasses.replace(recipe.engine, threads=2),
        trainer=dataclasses.replace(recipe.trainer, threads=2),
    )
    loops = {"sync": dataclasses.replace(recipe, max_staleness=0), "sync_two": two, "async": recipe}
    found: dict[str, list[float]] = {}
    for _ in range(measure["repeats"]):
        for name, value in (await _measure_alone(recipe, measure)).items():
            found.setdefault(name, []).append(value)
        for name, its in loops.items():
            found.setdefault(name, []).append(await _measure_loop(its, measure))
    rates = {f"{name}_tokens_per_s": statistics.median(v) for name, v in found.items()}
    bound = min(rates["generation_tokens_per_s"], rates["training_tokens_per_s"])
    sync = max(rates["sync_tokens_per_s"], rates["sync_two_tokens_per_s"])
    return {
        **rates,
        "bound_tokens_per_s": bound,
        "async_over_bound": rates["async_tokens_per_s"] / bound,
        "speedup": rates["async_tokens_per_s"] / sync,
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


@contextmanager
def _scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _measure_loop(recipe: Recipe, measure: dict[str, Any]) -> float:
    """Trained tokens per second of a loop after its first steps."""
    model = resolve_model(recipe.model)
    task, codec, sampling = resolve_play(model, recipe, temperature=1.0)
    clock = _Clock()
    with _scratch() as folder, MetricsWriter(folder / "run", tensorboard=False) as writer:
        store = FileWeightStore(folder / "weights", keep=recipe.max_staleness + 2)
        engine = await EngineProcess.start(model, recipe.engine)
        trainer = await TrainerProcess.start(model, recipe, store)
        try:
            await engine.load(await trainer.publish(), store, recipe.kv)
            setting = RolloutSetting(engine, task, codec, sampling, recipe.rollout)
            await Loop(recipe, setting, trainer, store, reporter=clock, writer=writer).run()
        finally:
            await asyncio.gather(engine.close(), trainer.close())
    return clock.tokens_per_s(measure["warmup_steps"])


async def _measure_alone(recipe: Recipe, measure: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of generation and of training, one after the other."""
    model = resolve_model(recipe.model)
    task, codec, sampling = resolve_play(model, recipe, temperature=1.0)
    with _scratch() as folder:
        store = FileWeightStore(folder, keep=2)
        engine = await EngineProcess.start(model, recipe.engine)
        try:
            setting = RolloutSetting(engine, task, codec, sampling, recipe.rollout)
            groups, generation = await _generate(recipe, setting, measure)
        finally:
            await engine.close()
        trainer = await TrainerProcess.start(model, recipe, store)
        try:
            training = await _train(recipe, trainer, groups, measure)
        finally:
            await trainer.close()
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
