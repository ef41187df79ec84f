"""Paired comparisons over seeds, and what may be said after them.

Differences are paired by seed: two methods with one seed met the same problems and uniforms. The
seed is the unit, never the single problem, since what is claimed is about training runs; so few of
them want Student's t, for a percentile bootstrap of five is too narrow by a third.

    non-inferior   the lower bound of the difference lies above -MARGIN
    better         ... above +MARGIN
    inferior       the upper bound lies below -MARGIN

Bounds are the ends of Student's two-sided 95 % interval (ALPHA on each side); over a family of
comparisons each of the three is Holm-corrected. With fewer than MIN_PAIRS seeds nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from ..student import mean_interval, p_at_most

MARGIN = 0.03
ALPHA = 0.025
MIN_PAIRS = 5

Judgement = Literal["better", "non-inferior", "inferior", "undecided", "too few seeds"]
Answer = Literal["holds", "in part", "not here", "undecided", "not run"]


@dataclass(frozen=True, slots=True)
class Paired:
    """One method against a reference, accuracy in [0, 1].

    difference: mean over the shared seeds, method - reference; low, high: its 95 %
    interval, NaN of a single seed; p_*: one-sided p-values, before any correction."""

    num_pairs: int
    difference: float
    low: float
    high: float
    p_non_inferior: float
    p_better: float
    p_inferior: float

    def told(self) -> str:
        """As tables tell it."""
        return with_interval(self.difference, self.low, self.high, "+.3f")


def compare_seeds(method: Mapping[int, float], reference: Mapping[int, float]) -> Paired | None:
    """method, reference: seed -> accuracy. None where they share no seed. Raises ValueError for one
    that is not finite: it would win every comparison."""
    seeds = sorted(method.keys() & reference.keys())
    if not seeds:
        return None
    differences = [method[seed] - reference[seed] for seed in seeds]
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"an accuracy of the seeds {seeds} is not finite: {differences}")
    interval = mean_interval(differences)
    if interval is None:
        return Paired(1, differences[0], math.nan, math.nan, 1.0, 1.0, 1.0)
    return Paired(
        len(seeds),
        fmean(differences),
        *interval,
        p_non_inferior=p_at_most(differences, -MARGIN),
        p_better=p_at_most(differences, MARGIN),
        p_inferior=p_at_most([-difference for difference in differences], MARGIN),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979, "A simple sequentially
    rejective multiple test procedure")."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def judge(family: Mapping[str, Paired | None]) -> dict[str, Judgement]:
    """The judgement of each comparison of one family, Holm-corrected within it."""
    tested = {n: p for n, p in family.items() if p is not None and p.num_pairs >= MIN_PAIRS}
    rejected: dict[str, set[str]] = {}
    for kind in ("p_better", "p_non_inferior", "p_inferior"):
        adjusted = holm([getattr(p, kind) for p in tested.values()])
        rejected[kind] = {n for n, p in zip(tested, adjusted, strict=True) if p <= ALPHA}
    judgements: dict[str, Judgement] = {}
    for name in family:
        if name not in tested:
            judgements[name] = "too few seeds"
        elif name in rejected["p_better"]:
            judgements[name] = "better"
        elif name in rejected["p_non_inferior"]:
            judgements[name] = "non-inferior"
        elif name in rejected["p_inferior"]:
            judgements[name] = "inferior"
        else:
            judgements[name] = "undecided"
    return judgements


def is_better(pair: Paired | None, judgement: Judgement) -> bool | None:
    """Whether a method is better than its reference; None: that is not decided."""
    if pair is None or judgement == "too few seeds":
        return None
    if judgement == "better":
        return True
    return False if pair.high < MARGIN else None


def with_interval(value: float, low: float, high: float, form: str) -> str:
    """value [low, high], each as `form`; a single seed has a value and no interval."""
    if math.isnan(value):
        return "no figure"
    if math.isnan(low) or math.isnan(high):
        return f"{value:{form}} (no interval)"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def answer(found: Mapping[str, bool | None]) -> Answer:
    """One answer from what was found in each regime; None: nothing could be decided there.

    holds: in all of them; in part: in some; not here: in none of those decided. A regime left
    undecided keeps a claim from holding, not from failing."""
    if not found:
        return "not run"
    decided = [value for value in found.values() if value is not None]
    if not decided:
        return "undecided"
    if not any(decided):
        return "not here"
    return "holds" if all(decided) and len(decided) == len(found) else "in part"
