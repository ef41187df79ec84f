"""Held-out evaluation: avg@k and pass@k of one version, with intervals.

    problems x k --run_rollout--> solved or not --> avg@k, pass@k --bootstrap--> intervals

It runs here (`estr eval`), or inside the low-priority process beside a training run
(`EvaluatorHost`), which takes the version that it is asked for out of the weight store.

A rollout is solved iff its outcome is at least 1, the full outcome. Rollouts that failed or could
not be graded count as not solved, so they lower every figure, and they are named beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import Recipe
from .errors import ConfigError, EngineError, WeightsError
from .rollout import RolloutSetting, run_rollout
from .subject import (
    Subject,
    WhichWeights,
    build_setting,
    find_subject,
    stamp_version,
    torch_threads,
)
from .types import RolloutId, Status, Trajectory
from .weights import WeightStore

Float64Array = npt.NDArray[np.float64]
Interval = tuple[float, float]

EVALUATION_RUNS = 1 << 63
"""Added to the seed in the names of evaluation rollouts. A training run is named by its seed, which
is smaller, so no evaluation ever draws a training rollout's random numbers."""

SOLVED_OUTCOME = 1.0

_NUM_RESAMPLES = 2000
_LEVEL = 0.95
_MAX_K = 1 << 16


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found.

    avg_at_k: share of solved rollouts. pass_at_k[j]: estimated share of problems that at least one
    of j rollouts solves, for j = 1, 2, 4, ... and k. Intervals: 95 %, percentile bootstrap over
    problems; an interval of width 0 means that the problems do not differ, not that it is certain.
    mean_outcome: over the scored rollouts only (None: there are none). failures: every status other
    than "ok", with its number; unscored: rollouts without an outcome; errors: the first message of
    each failing status. tokens: sampled ones. version: None for a model folder without one.
    """

    task: str
    split: str
    version: int | None
    k: int
    temperature: float
    seed: int
    num_problems: int
    num_rollouts: int
    avg_at_k: float
    avg_interval: Interval
    pass_at_k: dict[int, float]
    pass_intervals: dict[int, Interval]
    mean_outcome: float | None
    failures: dict[Status, int]
    unscored: int
    errors: dict[Status, str]
    tokens: int
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """As JSON writes it; both kinds of interval stand under "intervals"."""
        table = dataclasses.asdict(self)
        average, passes = table.pop("avg_interval"), table.pop("pass_intervals")
        table["pass_at_k"] = {str(j): value for j, value in self.pass_at_k.items()}
        table["intervals"] = {
            "avg_at_k": list(average),
            "pass_at_k": {str(j): list(interval) for j, interval in passes.items()},
        }
        return table


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate, from c solved rollouts of n, of the chance that at least one of k is
    solved: 1 - C(n-c, k) / C(n, k), in exact integers until the last division.

    Source: Chen et al., "Evaluating large language models trained on code" (2021), equation 1.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def bootstrap_intervals(values: Float64Array, *, seed: int) -> list[Interval]:
    """95 % percentile bootstrap intervals of the column means of values [num_problems, m], with the
    problems drawn anew, whole rows at a time. Source: Efron and Tibshirani, "An introduction to the
    bootstrap" (1993), chapter 13."""
    rng = np.random.default_rng(seed)
    num_problems = len(values)
    means = np.stack(
        [
            values[rng.integers(0, num_problems, num_problems)].mean(axis=0)
            for _ in range(_NUM_RESAMPLES)
        ]
    )
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


async def evaluate(
    setting: RolloutSetting,
    *,
    problems: Sequence[int],
    k: int,
    seed: int,
    concurrency: int = 128,
) -> EvalResult:
    """Play every problem k times, `concurrency` rollouts at once, under one version.

    The random numbers of a rollout depend on seed, problem and its number among the k only.
    Raises ConfigError for an impossible request; WeightsError if the engine changed its weights
    meanwhile; EngineError if it failed in every rollout, so that there is nothing to report. Other
    failures of engine, environment and grader are counted, not raised.
    """
    _check_request(problems, k, seed, concurrency)
    version = setting.engine.version
    tally = _Tally()
    clock = time.monotonic()
    pending = iter([(problem, index) for problem in problems for index in range(k)])

    async def play(names: Iterator[tuple[int, int]]) -> None:
        for problem, index in names:
            tally.add(await _rollout(setting, seed, problem, index))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(problems) * k)):
            tasks.create_task(play(pending))
    if set(tally.statuses) == {"engine_error"}:
        raise EngineError(f"no rollout got an answer: {tally.errors['engine_error']}")
    if tally.versions - {version}:
        raise WeightsError(
            f"the engine went from version {version} to {sorted(tally.versions)} "
            "during an evaluation; evaluate on an engine of its own"
        )
    return tally.result(setting, version, k, seed, time.monotonic() - clock)


def _check_request(problems: Sequence[int], k: int, seed: int, concurrency: int) -> None:
    if not problems:
        raise ConfigError("there is no problem to evaluate")
    if len(set(problems)) != len(problems):
        raise ConfigError("a problem is named twice; its rollouts would be the same ones")
    if not 1 <= k <= _MAX_K:
        raise ConfigError(f"k must be in [1, {_MAX_K}], not {k}")
    if not 0 <= seed < EVALUATION_RUNS:
        raise ConfigError(f"seed must be in [0, 2^63), not {seed}")
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")


@dataclass(slots=True)
class _Tally:
    """What is kept of the rollouts while they come in."""

    num_solved: Counter[int] = field(default_factory=Counter)
    outcomes: list[float] = field(default_factory=list)
    statuses: Counter[Status] = field(default_factory=Counter)
    errors: dict[Status, str] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    tokens: int = 0

    def add(self, trajectory: Trajectory) -> None:
        solved = trajectory.outcome is not None and trajectory.outcome >= SOLVED_OUTCOME
        self.num_solved[trajectory.problem] += solved
        self.statuses[trajectory.status] += 1
        self.tokens += trajectory.num_sampled_tokens
        self.versions.update(trajectory.sampled_versions().tolist())
        if trajectory.outcome is not None:
            self.outcomes.append(trajectory.outcome)
        if trajectory.error is not None:
            self.errors.setdefault(trajectory.status, trajectory.error)

    def result(
        self, setting: RolloutSetting, version: int, k: int, seed: int, wall_s: float
    ) -> EvalResult:
        sizes = sorted({2**i for i in range(k.bit_length())} | {k})
        values = np.array(
            [
                [count / k, *(pass_at_k(k, count, size) for size in sizes)]
                for _, count in sorted(self.num_solved.items())
            ]
        )
        average, *passes = values.mean(axis=0).tolist()
        interval, *intervals = bootstrap_intervals(values, seed=seed)
        num_rollouts = self.statuses.total()
        return EvalResult(
            task=setting.task.name,
            split=setting.split,
            version=version,
            k=k,
            temperature=setting.sampling.temperature,
            seed=seed,
            num_problems=len(values),
            num_rollouts=num_rollouts,
            avg_at_k=average,
            avg_interval=interval,
            pass_at_k=dict(zip(sizes, passes, strict=True)),
            pass_intervals=dict(zip(sizes, intervals, strict=True)),
            mean_outcome=sum(self.outcomes) / len(self.outcomes) if self.outcomes else None,
            failures={s: n for s, n in sorted(self.statuses.items()) if s != "ok"},
            unscored=num_rollouts - len(self.outcomes),
            errors=dict(sorted(self.errors.items())),
            tokens=self.tokens,
            wall_s=round(wall_s, 3),
        )


def evaluate_model(
    source: str | Path,
    *,
    task: str | None = None,
    k: int | None = None,
    problems: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    weights: WhichWeights = "best",
    overrides: Sequence[str] = (),
    runs: Path = Path("runs"),
) -> EvalResult:
    """Evaluate a run or a model on a task, in this process; exported as `estr.evaluate`.

    source: a run folder, the name of a run under `runs`, "builtin", or a model folder. weights:
    which ones of a run. What is left out comes from the run's recipe, for a model from the default
    recipe; overrides are recipe keys ("task.num_terms=3", "sampling.max_new_tokens=512").
    Raises ConfigError or DataError before anything is computed.
    """
    chosen = {"eval.k": k, "eval.problems": problems, "eval.temperature": temperature, "seed": seed}
    keys = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    subject = find_subject(
        source, task=task, overrides=[*overrides, *keys], weights=weights, runs=runs
    )
    recipe = subject.recipe
    with torch_threads(recipe.engine.threads):
        work = _evaluate_first(_setting(subject), recipe, recipe.eval.problems, recipe.eval.k)
        result = asyncio.run(work)
    return dataclasses.replace(result, version=subject.version)


def sample_rollouts(
    subject: Subject, num_problems: int
) -> tuple[list[Trajectory], Callable[[list[int]], str]]:
    """One rollout of each of the first held-out problems, as `evaluate_model` would draw them, and
    what turns token ids into text."""
    recipe = subject.recipe
    with torch_threads(recipe.engine.threads):
        setting = _setting(subject)
        problems = _first_problems(setting, num_problems)

        async def play() -> list[Trajectory]:
            return list(
                await asyncio.gather(*(_rollout(setting, recipe.seed, p) for p in problems))
            )

        return asyncio.run(play()), setting.codec.decode


def _setting(subject: Subject) -> RolloutSetting:
    return build_setting(
        subject.load_model(),
        subject.folder,
        subject.recipe,
        version=subject.version or 0,
        temperature=subject.recipe.eval.temperature,
    )


async def _rollout(setting: RolloutSetting, seed: int, problem: int, index: int = 0) -> Trajectory:
    version = setting.engine.version
    return await run_rollout(
        setting,
        RolloutId(EVALUATION_RUNS + seed, problem, index),
        problem,
        dispatch_version=version,
        deadline_version=version,
    )


async def _evaluate_first(
    setting: RolloutSetting, recipe: Recipe, num_problems: int, k: int
) -> EvalResult:
    return await evaluate(
        setting,
        problems=_first_problems(setting, num_problems),
        k=k,
        seed=recipe.seed,
        concurrency=recipe.engine.max_batch,
    )


def _first_problems(setting: RolloutSetting, num_problems: int) -> range:
    """The first problems of the split, as many as there are."""
    size = setting.task.size(setting.split)
    return range(num_problems if size is None else min(num_problems, size))


class EvaluatorHost:
    """What runs inside the evaluator process: an engine of its own on the model in `folder`."""

    def __init__(self, folder: Path, recipe: Recipe, store: WeightStore) -> None:
        from .models import load_model

        self._folder = folder
        self._recipe = recipe
        self._store = store
        self._model = load_model(folder, dtype=recipe.engine.dtype, device=recipe.engine.device)
        self._setting = build_setting(
            self._model, folder, recipe, version=-1, temperature=recipe.eval.temperature
        )

    def evaluate(self, version: int, num_problems: int, k: int) -> EvalResult:
        """Load that version and evaluate it. Raises WeightsError if the store no longer has it."""
        return asyncio.run(self._evaluate(version, num_problems, k))

    async def _evaluate(self, version: int, num_problems: int, k: int) -> EvalResult:
        if self._setting.engine.version != version:
            await self._setting.engine.load(version, self._store, "recompute")
        return await _evaluate_first(self._setting, self._recipe, num_problems, k)

    def export(self, folder: Path) -> None:
        """The weights evaluated last as a Hugging Face folder, which remembers their version."""
        from .models import load_tokenizer, save_model

        stamp_version(self._model, self._setting.engine.version)
        save_model(self._model, load_tokenizer(self._folder), folder)
