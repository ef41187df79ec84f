"""Held-out rollouts: every problem k times, under one version of the weights.

    problems x k --run_rollout--> RolloutRecord --summarize--> EvalResult

A rollout is solved iff its outcome is at least 1, the full outcome. Rollouts that failed or could
not be graded count as not solved, so they lower every figure, and they are named beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from .config import Recipe
from .environment import Task
from .errors import ConfigError, EngineError, WeightsError, first_raised
from .evaluation_records import RolloutFile, RolloutRecord, replies, transcribe
from .evaluation_result import EvalResult, Request, summarize
from .options.run import MOST_ROLLOUTS
from .rollout import RolloutSetting, run_rollout
from .types import RolloutId, Trajectory

EVALUATION_RUNS = 1 << 63
"""Added to the seed in the names of evaluation rollouts. A training run is named by its seed, which
is smaller, so no evaluation ever draws a training rollout's random numbers."""

_MAX_K = 1 << 16


async def evaluate(
    setting: RolloutSetting,
    *,
    problems: Sequence[int],
    k: int,
    seed: int,
    concurrency: int = 128,
    kept: RolloutFile | None = None,
) -> EvalResult:
    """Play every problem k times, `concurrency` rollouts at once, under one version.

    The random numbers of a rollout depend on seed, problem and its number among the k only. kept:
    where rollouts are found that need not be played again, and where every other one is put.
    Raises ConfigError for an impossible request; WeightsError if the engine changed its weights
    meanwhile; EngineError if it failed in every rollout, so that there is nothing to report; what
    `kept` raises where it cannot be written. Other failures of engine, environment and grader are
    counted, not raised.
    """
    _check_request(problems, k, seed, concurrency)
    version = setting.engine.version
    records: list[RolloutRecord] = []
    versions: set[int] = set()
    clock = time.monotonic()
    left: list[tuple[str, int, int]] = []
    for problem, example in _examples(setting, problems):
        for index in range(k):
            found = None if kept is None else kept.find(example, index)
            if found is None:
                left.append((example, problem, index))
            else:
                records.append(found)
    num_found = len(records)
    pending = iter(left)

    async def play(names: Iterator[tuple[str, int, int]]) -> None:
        for example, problem, index in names:
            trajectory = await play_held_out(setting, seed, problem, index)
            record = _record(setting, example, trajectory, keep_text=kept is not None)
            versions.update(trajectory.sampled_versions().tolist())
            records.append(record)
            if kept is not None:
                kept.add(record)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(left))):
                tasks.create_task(play(pending))
    except BaseExceptionGroup as failures:
        raise first_raised(failures) from failures
    if {record.status for record in records} == {"engine_error"}:
        raise EngineError(f"no rollout got an answer: {records[0].error}")
    if versions - {version}:
        raise WeightsError(
            f"the engine went from version {version} to {sorted(versions)} "
            "during an evaluation; evaluate on an engine of its own"
        )
    return summarize(
        setting,
        Request(version, k, seed),
        records,
        wall_s=time.monotonic() - clock,
        num_found=num_found,
    )


def _examples(setting: RolloutSetting, problems: Sequence[int]) -> list[tuple[int, str]]:
    """Each problem with the name that its rollouts are kept and found by."""
    named = [(problem, _example(setting.task, setting.split, problem)) for problem in problems]
    first: dict[str, int] = {}
    for problem, example in named:
        if first.setdefault(example, problem) != problem:
            raise ConfigError(
                f"task {setting.task.name} calls its problems {first[example]} and {problem} both "
                f"{example!r}, and their rollouts would be mistaken for each other; its "
                "example_id() must give each a name of its own"
            )
    return named


def _example(task: Task, split: str, problem: int) -> str:
    name = getattr(task, "example_id", None)
    return f"{split}/{problem}" if name is None else str(name(split, problem))


def _record(
    setting: RolloutSetting, example: str, trajectory: Trajectory, *, keep_text: bool
) -> RolloutRecord:
    decode = setting.codec.decode
    said = replies(trajectory, decode)
    return RolloutRecord(
        example=example,
        problem=trajectory.problem,
        index=trajectory.id.index,
        status=trajectory.status,
        outcome=trajectory.outcome,
        answer=_answer(setting.task, said[-1]) if trajectory.status == "ok" and said else None,
        tokens=trajectory.num_sampled_tokens,
        error=trajectory.error,
        turns=transcribe(trajectory, decode) if keep_text else (),
        replies=said,
    )


def _answer(task: Task, reply: str) -> str | None:
    """What a rollout votes for: of its last turn, what the task says."""
    answer = getattr(task, "answer", None)
    found = None if answer is None else answer(reply)
    return None if found is None else str(found)


def _check_request(problems: Sequence[int], k: int, seed: int, concurrency: int) -> None:
    if not problems:
        raise ConfigError("there is no problem to evaluate")
    if len(problems) * k > MOST_ROLLOUTS:
        raise ConfigError(
            f"{len(problems)} problems {k} times are more than {MOST_ROLLOUTS} rollouts; "
            "lower the number of problems or k"
        )
    if len(set(problems)) != len(problems):
        raise ConfigError("a problem is named twice; its rollouts would be the same ones")
    if not 1 <= k <= _MAX_K:
        raise ConfigError(f"k must be in [1, {_MAX_K}], not {k}")
    if not 0 <= seed < EVALUATION_RUNS:
        raise ConfigError(f"seed must be in [0, 2^63), not {seed}")
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")


async def evaluate_first(
    setting: RolloutSetting,
    recipe: Recipe,
    num_problems: int,
    k: int,
    kept: RolloutFile | None = None,
) -> EvalResult:
    """The same of the first problems of the split, with what else the recipe says."""
    return await evaluate(
        setting,
        problems=first_problems(setting, num_problems),
        k=k,
        seed=recipe.seed,
        concurrency=recipe.engine.max_batch,
        kept=kept,
    )


def first_problems(setting: RolloutSetting, num_problems: int) -> range:
    """The first problems of the split, as many as there are."""
    size = setting.task.size(setting.split)
    return range(num_problems if size is None else min(num_problems, size))


async def play_held_out(
    setting: RolloutSetting, seed: int, problem: int, index: int = 0
) -> Trajectory:
    """One rollout; its random numbers depend on seed, problem and index only."""
    version = setting.engine.version
    return await run_rollout(
        setting,
        RolloutId(EVALUATION_RUNS + seed, problem, index),
        problem,
        dispatch_version=version,
        deadline_version=version,
    )
