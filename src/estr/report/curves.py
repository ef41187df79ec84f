"""metrics.jsonl as curves, thinned alike for all runs; intervals over the seeds of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from .. import student
from ..scores import Interval

Record = Mapping[str, Any]
Values = list[float | None]

MOST_POINTS = 500
"""Points of one curve; longer runs have so many consecutive steps drawn together."""

SERIES = (
    "reward_mean", "outcome_mean", "loss", "grad_norm", "lr", "rho_mask", "clip_fraction",
    "ratio_deviation", "ratio_deviation_kept", "log_ratio_variance", "log_ratio_variance_kept",
    "kl_k1", "kl_k3", "effective_sample_size", "behavior_entropy", "policy_entropy",
    "low_entropy_share", "lag_mean", "intra_mean", "intra_max", "inter_mean", "inter_max",
    "staleness_mean", "staleness_max", "staleness_allowed", "length_mean", "length_p90",
    "length_trained_mean", "length_failed_mean", "engine_busy", "trainer_busy", "trainer_s",
    "eligible_tokens", "num_trajectories", "num_groups", "num_zero_variance_groups",
    "num_unscored", "skipped_updates", "nonfinite",
)  # fmt: skip
"""Metrics that the page draws; the meaning of each is in docs/metrics.md."""

_SUMMED = ("eligible_tokens", "num_", "nonfinite", "skipped_", "status/")

_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out accuracy with its 95 % interval (`over` what: "problems" or "seeds"); runs: how
    many seeds it is the mean of."""

    step: int
    wall_s: float
    tokens: float
    accuracy: float
    low: float
    high: float
    over: str
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Curves:
    """What one line of every chart is drawn from. x: "step", "wall_s" and "tokens" (trained so far)
    of every point; values, low, high: under the names of the metrics, one entry for each point;
    the interval is over seeds, and absent for a single run."""

    x: dict[str, list[float]]
    values: dict[str, Values]
    low: dict[str, Values] = field(default_factory=dict)
    high: dict[str, Values] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)


def stride_for(num_steps: int) -> int:
    """How many consecutive steps are one point."""
    return max(1, math.ceil(num_steps / MOST_POINTS))


def curves_of(records: Sequence[Record], stride: int) -> Curves:
    """The curves of one run from the lines of its metrics.jsonl."""
    steps = [record for record in records if "eval/accuracy" not in record]
    parts: dict[int, list[Record]] = {}
    for record in steps:
        parts.setdefault((int(record["step"]) - 1) // stride, []).append(record)
    x: dict[str, list[float]] = {"step": [], "wall_s": [], "tokens": []}
    values: dict[str, Values] = {name: [] for name in SERIES}
    tokens = 0.0
    for part in parts.values():
        tokens += sum(record.get("eligible_tokens") or 0.0 for record in part)
        x["step"].append(part[-1]["step"])
        x["wall_s"].append(part[-1]["wall_s"])
        x["tokens"].append(tokens)
        for name, column in values.items():
            column.append(_together(name, [record.get(name) for record in part]))
    evaluations = list(_evaluations(records, steps))
    return Curves(x, values, evaluations=evaluations)


def statuses_of(records: Sequence[Record]) -> dict[str, int]:
    """How many trajectories of the whole run ended in each status."""
    counts: dict[str, int] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("status/") and value:
                status = name.removeprefix("status/")
                counts[status] = counts.get(status, 0) + int(value)
    return counts


def over_seeds(runs: Sequence[Curves]) -> Curves:
    """Means over runs that differ in their seed only, with 95 % intervals (Student's t), at the
    points that all of them have."""
    shared = sorted(set.intersection(*(set(run.x["step"]) for run in runs)))
    at = [{step: i for i, step in enumerate(run.x["step"])} for run in runs]
    x = {
        name: [
            fmean(run.x[name][where[step]] for run, where in zip(runs, at, strict=True))
            for step in shared
        ]
        for name in runs[0].x
    }
    values: dict[str, Values] = {}
    low: dict[str, Values] = {}
    high: dict[str, Values] = {}
    for name in SERIES:
        rows = [
            [run.values[name][where[step]] for run, where in zip(runs, at, strict=True)]
            for step in shared
        ]
        found = [mean_interval([v for v in row if v is not None]) for row in rows]
        values[name] = [None if one is None else one[0] for one in found]
        low[name] = [None if one is None else one[1][0] for one in found]
        high[name] = [None if one is None else one[1][1] for one in found]
    return Curves(x, values, low, high, list(_evaluations_over_seeds(runs)))


def mean_interval(values: Sequence[float]) -> tuple[float, Interval] | None:
    """The mean of independent values and Student's 95 % interval of it; None of no value. The
    interval of a single one is that value, for nothing is known of the spread."""
    if not values:
        return None
    mean = fmean(values)
    return mean, student.mean_interval(values) or (mean, mean)


def wilson_interval(share: float, number: float) -> Interval:
    """The 95 % score interval of a share of `number` independent trials.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    if number <= 0:
        return 0.0, 1.0
    squared = _NORMAL**2
    center = share + squared / (2 * number)
    half = _NORMAL * math.sqrt(share * (1 - share) / number + squared / (4 * number**2))
    scale = 1 + squared / number
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def _together(name: str, entries: Sequence[float | None]) -> float | None:
    """Several steps as one point."""
    known = [value for value in entries if value is not None]
    if not known:
        return None
    if name.endswith("_max") or name == "staleness_allowed":
        return max(known)
    return sum(known) if name.startswith(_SUMMED) else fmean(known)


def _evaluations(records: Sequence[Record], steps: Sequence[Record]) -> Iterator[Evaluation]:
    """Each where its version was made: an evaluation ends, and is recorded, some steps later."""
    made = {0: (0, 0.0, 0.0)}
    tokens = 0.0
    for record in steps:
        tokens += record.get("eligible_tokens") or 0.0
        made.setdefault(int(record["version"]), (int(record["step"]), record["wall_s"], tokens))
    for record in records:
        accuracy = record.get("eval/accuracy")
        if accuracy is not None:
            low, high = record.get("eval/accuracy_low"), record.get("eval/accuracy_high")
            if low is None or high is None:
                low, high = wilson_interval(accuracy, record.get("eval/problems") or 0.0)
            recorded = (int(record["step"]), record["wall_s"], tokens)
            place = made.get(int(record["version"]), recorded)
            yield Evaluation(*place, accuracy, low, high, "problems")


def _evaluations_over_seeds(runs: Sequence[Curves]) -> Iterator[Evaluation]:
    """At the steps at which every run was evaluated; of two evaluations of a step, the later."""
    by_step = [{e.step: e for e in run.evaluations} for run in runs]
    for step in sorted(set.intersection(*(set(found) for found in by_step))):
        here = [found[step] for found in by_step]
        known = mean_interval([e.accuracy for e in here])
        if known is not None:
            mean, (low, high) = known
            wall_s, tokens = fmean(e.wall_s for e in here), fmean(e.tokens for e in here)
            yield Evaluation(step, wall_s, tokens, mean, low, high, "seeds", len(here))
