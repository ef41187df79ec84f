"""The time to a quality: when a kind of training is first as good as synchronous training ends up.

Every kind trains once per seed, from the same weights, on the same problems, as many steps as every
other; the seed decides the uniforms. Versions are kept and evaluated afterwards, all on the same
held-out problems, so that no evaluation takes time from the training that is timed.

    plateau    of a seed: mean accuracy of its synchronous run over the last third of evaluations
    reached    the first evaluation at which accuracy - plateau, paired by seed, is non-inferior
               (`estr.lab.statistics`: the lower bound of its interval lies above -MARGIN)
    bound_s    tokens that synchronous training took until it was, over the bound of the regime

A first time is the best of several looks, for each kind alike. With fewer than MIN_PAIRS seeds
nothing is reached.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..config import Recipe, read_options
from ..evaluator_process import EvaluatorProcess
from ..lab.statistics import MARGIN, MIN_PAIRS, compare_seeds
from ..options.corrections import require
from ..scores import bootstrap_intervals
from ..subject import model_folder
from .async_parts import Clock, Kind, Pair, open_pair


@dataclass(frozen=True, slots=True)
class Quality:
    """What is trained for how long, and how it is looked at."""

    regimes: tuple[str, ...]
    seeds: int = 5
    steps: int = 80
    every: int = 8
    """Steps between two evaluations."""
    problems: int = 256
    recipe: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe that differ from the throughput's, such as the learning rate."""

    def __post_init__(self) -> None:
        require(self.seeds >= 1, f"seeds must be at least 1, not {self.seeds}")
        require(
            1 <= self.every <= self.steps // 3,
            f"every must be between 1 and a third of steps = {self.steps}, not {self.every}",
        )

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Quality:
        """Raises ConfigError on unknown keys, wrong types and values out of range."""
        return read_options(cls, table, "quality")

    def quick(self) -> Quality:
        """One seed and six steps."""
        return replace(self, seeds=1, steps=6, every=2, problems=16)


class Look(NamedTuple):
    """One evaluation: optimizer steps, seconds and tokens of training so far, accuracy."""

    step: int
    wall_s: float
    tokens: float
    accuracy: float


Curves = Mapping[int, Sequence[Look]]
"""seed -> its evaluations, the same steps for every seed."""


async def time_to_quality(
    recipe: Recipe, kinds: Mapping[str, Kind], quality: Quality, bound_tokens_per_s: float
) -> dict[str, Any]:
    """Train and evaluate every kind under every seed. kinds: one of them is called "sync"."""
    opened: dict[tuple[bool, int], tuple[Pair, EvaluatorProcess]] = {}
    curves: dict[str, dict[int, list[Look]]] = {label: {} for label in kinds}
    async with AsyncExitStack() as stack:
        for kind in kinds.values():
            if (needs := (kind.in_flight, kind.threads)) not in opened:
                shared = Kind(in_flight=kind.in_flight, threads=kind.threads)
                opening = open_pair(shared.of(recipe), keep=quality.steps + 1)
                pair = await stack.enter_async_context(opening)
                evaluator = await EvaluatorProcess.start(model_folder(recipe), recipe, pair.store)
                stack.push_async_callback(evaluator.close)
                opened[needs] = pair, evaluator
        for seed in range(quality.seeds):
            for label, kind in kinds.items():
                its = replace(kind.of(recipe), seed=seed)
                curve = await _curve(*opened[kind.in_flight, kind.threads], its, quality)
                curves[label][seed] = curve
                told = f"{curve[-1].accuracy:.3f} after {curve[-1].wall_s:.0f} s"
                print(f"seed {seed}, {label}: {told}", file=sys.stderr, flush=True)
    return judged(curves, bound_tokens_per_s) | {
        "curves": {
            label: {seed: [look._asdict() for look in looks] for seed, looks in its.items()}
            for label, its in curves.items()
        }
    }


async def _curve(
    pair: Pair, evaluator: EvaluatorProcess, recipe: Recipe, quality: Quality
) -> list[Look]:
    """Train once, then look at the versions that were kept."""
    clock = Clock(warmup_steps=1)
    await pair.loop(recipe, clock)
    looks = []
    for step in range(0, quality.steps + 1, quality.every):
        done = clock.steps[:step]
        version = done[-1].version if done else 0
        (result,) = await evaluator.evaluate(version, quality.problems)
        wall_s = done[-1].wall_s if done else 0.0
        tokens = sum(each.tokens for each in done)
        looks.append(Look(step, wall_s, tokens, float(result.avg_at_k)))
    return looks


def judged(curves: Mapping[str, Curves], bound_tokens_per_s: float) -> dict[str, Any]:
    """For each kind when it was first non-inferior to the plateau of "sync": step, mean seconds
    over the seeds and their 95 % bootstrap interval, or None where it never was."""
    plateaus = {
        seed: statistics.fmean(look.accuracy for look in looks[-(len(looks) // 3) :])
        for seed, looks in curves["sync"].items()
    }
    kinds = {label: _reached(its, plateaus) for label, its in curves.items()}
    sync = kinds["sync"]
    for found in kinds.values():
        both = sync["reached_s"] is not None and found["reached_s"] is not None
        found["speedup"] = sync["reached_s"] / found["reached_s"] if both else None
    reached = sync["reached_tokens"]
    return {
        "plateau": statistics.fmean(plateaus.values()),
        "kinds": kinds,
        "bound_s": None if reached is None else reached / bound_tokens_per_s,
        "margin": MARGIN,
        "seeds": len(plateaus),
        "too_few_seeds": len(plateaus) < MIN_PAIRS,
    }


def _reached(curves: Curves, plateaus: Mapping[int, float]) -> dict[str, Any]:
    number = len(next(iter(curves.values())))
    last = {seed: looks[-1].accuracy for seed, looks in curves.items()}
    end = compare_seeds(last, plateaus)
    found: dict[str, Any] = {
        "reached_step": None,
        "reached_s": None,
        "interval_s": None,
        "reached_tokens": None,
        "end_accuracy": statistics.fmean(last.values()),
        "end_minus_plateau": None if end is None else [end.difference, end.low, end.high],
    }
    for i in range(number):
        here = {seed: looks[i].accuracy for seed, looks in curves.items()}
        paired = compare_seeds(here, plateaus)
        if paired is None or paired.num_pairs < MIN_PAIRS or paired.low <= -MARGIN:
            continue
        times = np.array([looks[i].wall_s for looks in curves.values()])
        found["reached_step"] = next(iter(curves.values()))[i].step
        found["reached_s"] = float(times.mean())
        (found["interval_s"],) = bootstrap_intervals(times[:, None], seed=0)
        found["reached_tokens"] = statistics.fmean(looks[i].tokens for looks in curves.values())
        break
    return found
