"""What an evaluation found: figures made of its rollouts, and two of them side by side."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .environment import Task
from .errors import ConfigError
from .evaluation_records import RolloutRecord
from .rollout import RolloutSetting
from .scores import (
    Comparison,
    Interval,
    bounded_intervals,
    compare_paired,
    majority,
    pass_at_k,
)
from .types import Status

SOLVED_OUTCOME = 1.0


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found.

    avg_at_k: share of solved rollouts. pass_at_k[j]: estimated share of problems that at least one
    of j rollouts solves, for j = 1, 2, 4, ... and k. majority_at_k: share of problems whose most
    frequent answer is right (None: the task does not say what an answer is). Intervals: 95 %,
    percentile bootstrap over problems, or the exact binomial bound where all problems are equal.
    mean_outcome: over the scored rollouts only (None: there are none). failures: every status other
    than "ok", with its number; unscored: rollouts without an outcome; errors: the first message of
    each failing status. tokens: sampled ones. num_found: rollouts that were on disk already.
    measures: what else the task measures of its rollouts.
    version: None for a model folder without one. num_solved: solved rollouts of every problem.
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
    majority_at_k: float | None
    majority_interval: Interval | None
    mean_outcome: float | None
    failures: dict[Status, int]
    unscored: int
    errors: dict[Status, str]
    tokens: int
    wall_s: float
    num_found: int
    measures: dict[str, float]
    num_solved: dict[int, int]

    def to_json(self) -> dict[str, Any]:
        """As JSON writes it, without num_solved; all intervals stand under "intervals"."""
        table = dataclasses.asdict(self)
        del table["num_solved"]
        average, passes = table.pop("avg_interval"), table.pop("pass_intervals")
        votes = table.pop("majority_interval")
        table["pass_at_k"] = {str(j): value for j, value in self.pass_at_k.items()}
        table["intervals"] = {
            "avg_at_k": list(average),
            "pass_at_k": {str(j): list(interval) for j, interval in passes.items()},
            "majority_at_k": None if votes is None else list(votes),
        }
        return table


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for: `k` rollouts of each problem with `seed`, under `version`."""

    version: int
    k: int
    seed: int


def summarize(
    setting: RolloutSetting,
    request: Request,
    records: Sequence[RolloutRecord],
    *,
    wall_s: float,
    num_found: int,
) -> EvalResult:
    """The figures of the rollouts, k of every problem."""
    k, seed = request.k, request.seed
    problems: dict[int, list[RolloutRecord]] = {}
    for record in sorted(records, key=lambda record: (record.problem, record.index)):
        problems.setdefault(record.problem, []).append(record)
    sizes = sorted({2**i for i in range(k.bit_length())} | {k})
    solved = {p: list(map(_is_solved, own)) for p, own in problems.items()}
    values = np.array(
        [
            [
                sum(solved[p]) / k,
                *(pass_at_k(k, sum(solved[p]), size) for size in sizes),
                majority([record.answer for record in own], solved[p]),
            ]
            for p, own in problems.items()
        ]
    )
    average, *passes, vote = values.mean(axis=0).tolist()
    interval, *intervals, vote_interval = bounded_intervals(
        values, lowest=0.0, highest=1.0, seed=seed
    )
    votes = hasattr(setting.task, "answer")
    statuses = Counter(record.status for record in records)
    outcomes = [record.outcome for record in records if record.outcome is not None]
    errors: dict[Status, str] = {}
    for record in records:
        if record.error is not None:
            errors.setdefault(record.status, record.error)
    return EvalResult(
        task=setting.task.name,
        split=setting.split,
        version=request.version,
        k=k,
        temperature=setting.sampling.temperature,
        seed=seed,
        num_problems=len(values),
        num_rollouts=len(records),
        avg_at_k=average,
        avg_interval=interval,
        pass_at_k=dict(zip(sizes, passes, strict=True)),
        pass_intervals=dict(zip(sizes, intervals, strict=True)),
        majority_at_k=vote if votes else None,
        majority_interval=vote_interval if votes else None,
        mean_outcome=sum(outcomes) / len(outcomes) if outcomes else None,
        failures={s: n for s, n in sorted(statuses.items()) if s != "ok"},
        unscored=len(records) - len(outcomes),
        errors=dict(sorted(errors.items())),
        tokens=sum(record.tokens for record in records),
        wall_s=round(wall_s, 3),
        num_found=num_found,
        measures=_measures(setting.task, records),
        num_solved={p: sum(flags) for p, flags in solved.items()},
    )


def _measures(task: Task, records: Sequence[RolloutRecord]) -> dict[str, float]:
    measures = getattr(task, "measures", None)
    return {} if measures is None else {name: float(v) for name, v in measures(records).items()}


def _is_solved(record: RolloutRecord) -> bool:
    return record.outcome is not None and record.outcome >= SOLVED_OUTCOME


def compare(first: EvalResult, second: EvalResult) -> Comparison:
    """The paired comparison of two evaluations. Raises ConfigError unless they are of the same
    problems, played equally often."""
    if (first.task, first.split, first.k) != (second.task, second.split, second.k) or (
        first.num_solved.keys() != second.num_solved.keys()
    ):
        raise ConfigError("only evaluations of the same problems, equally often, can be compared")
    scores = [
        np.array([result.num_solved[p] / result.k for p in first.num_solved])
        for result in (first, second)
    ]
    return compare_paired(scores[0], scores[1], seed=first.seed)
