"""Which figures of a run warned of its collapse: how early, and how often for nothing.

    curves of a run --> change of an indicator since its first record --> first alarm
    accuracy        --> onset of the collapse                          --> lead = onset - alarm

An alarm is the first record at which an indicator has changed, in its direction, by more than a
factor. That factor is set on some runs, as low as lets FALSE_ALARMS of those that stay healthy cry
wolf, and judged on the others. Nothing is read from records at or after the onset.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .table import Row

FALSE_ALARMS = 0.1

Curve = list[tuple[int, float]]
"""(step, value), steps ascending."""


@dataclass(frozen=True, slots=True)
class Indicator:
    """measure: of the table. direction: which way is a warning. least: values below it count as it,
    so that a change of nothing is no change."""

    measure: str
    direction: Literal["up", "down"]
    least: float


INDICATORS: dict[str, Indicator] = {
    "variance of log-ratios, all": Indicator("log_ratio_variance", "up", 1e-4),
    "variance of log-ratios, kept": Indicator("log_ratio_variance_kept", "up", 1e-4),
    "KL (k3)": Indicator("kl_k3", "up", 1e-4),
    "rho_mask": Indicator("rho_mask", "up", 1e-3),
    "clip fraction": Indicator("clip_fraction", "up", 1e-3),
    "gradient norm": Indicator("grad_norm", "up", 1e-3),
    "effective sample size": Indicator("effective_sample_size", "down", 1e-3),
    "entropy falls": Indicator("policy_entropy", "down", 1e-3),
    "entropy rises": Indicator("policy_entropy", "up", 1e-3),
}


@dataclass(frozen=True, slots=True)
class RunCurves:
    """Of one run: curves by measure; onset: first step of its collapse, None where it stayed
    healthy."""

    seed: int
    curves: Mapping[str, Curve]
    onset: int | None


@dataclass(frozen=True, slots=True)
class Warned:
    """What an indicator did on runs that its factor was not set on. leads: steps from alarm to
    onset, of the collapses that it preceded. factor: the least and the greatest of the two used."""

    collapsed: int
    leads: tuple[int, ...]
    healthy: int
    false_alarms: int
    factor: tuple[float, float]


def runs_of(rows: Iterable[Row]) -> list[RunCurves]:
    """The runs of a table, by job."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    seeds: dict[str, int] = {}
    for row in rows:
        if row["value"] is not None:
            seeds[row["job"]] = row["seed"]
            found.setdefault(row["job"], {}).setdefault(row["measure"], {})[row["step"]] = row[
                "value"
            ]
    runs = []
    for job, measures in found.items():
        curves = {name: sorted(values.items()) for name, values in measures.items()}
        start = curves["accuracy"][0][1]
        nonfinite = any(value > 0 for _, value in curves.get("nonfinite_run", []))
        runs.append(RunCurves(seeds[job], curves, onset(curves["accuracy"], start, nonfinite)))
    return runs


def onset(accuracy: Curve, start: float, nonfinite: bool = False) -> int | None:
    """The first step from which on accuracy stays below half of its start; the last step where a
    loss or gradient was not finite; None where it ended above."""
    first: int | None = accuracy[-1][0] if nonfinite else None
    for step, value in reversed(accuracy):
        if value >= 0.5 * start:
            break
        first = step
    return first


def changes(curve: Curve, indicator: Indicator) -> Curve:
    """log of the factor by which each value has changed since the first, in the indicator's
    direction."""
    sign = 1.0 if indicator.direction == "up" else -1.0
    logs = [(step, math.log(max(value, indicator.least))) for step, value in curve]
    return [(step, sign * (value - logs[0][1])) for step, value in logs]


def first_alarm(change: Curve, threshold: float, before: int | None) -> int | None:
    """The first step at which the change exceeds the threshold, before the onset."""
    return next(
        (s for s, value in change if value > threshold and (before is None or s < before)), None
    )


def threshold_of(runs: Sequence[RunCurves], indicator: Indicator) -> float | None:
    """The least that at most FALSE_ALARMS of the healthy runs ever exceed; None without any."""
    highest = sorted(
        max(value for _, value in changes(run.curves[indicator.measure], indicator))
        for run in runs
        if run.onset is None and indicator.measure in run.curves
    )
    if not highest:
        return None
    # A change of 0 is what every run begins with.
    allowed = math.floor(FALSE_ALARMS * len(highest))
    return max(highest[len(highest) - 1 - allowed], 0.0)


def warned(runs: Sequence[RunCurves], indicator: Indicator) -> Warned | None:
    """Thresholds set on runs of even seeds judge those of odd ones, and the other way round; None
    where a half has no healthy run, or no run collapsed."""
    halves = [[run for run in runs if run.seed % 2 == half] for half in (0, 1)]
    thresholds = [threshold_of(half, indicator) for half in halves]
    if None in thresholds or all(run.onset is None for run in runs):
        return None
    leads: list[int] = []
    collapsed = healthy = false_alarms = 0
    for half, threshold in zip(halves, reversed(thresholds), strict=True):
        for run in half:
            if indicator.measure not in run.curves or threshold is None:
                continue
            alarm = first_alarm(
                changes(run.curves[indicator.measure], indicator), threshold, run.onset
            )
            if run.onset is None:
                healthy += 1
                false_alarms += alarm is not None
            else:
                collapsed += 1
                leads += [] if alarm is None else [run.onset - alarm]
    factors = sorted(math.exp(t) for t in thresholds if t is not None)
    return Warned(collapsed, tuple(leads), healthy, false_alarms, (factors[0], factors[-1]))


def as_line(name: str, found: Warned) -> dict[str, Any]:
    """A line of the table."""
    leads = np.array(found.leads)
    quartiles = np.percentile(leads, [25, 50, 75]) if len(leads) else None
    least, most = found.factor
    return {
        "indicator": name,
        "alarm at a change by": f"{least:.3g}"
        if math.isclose(least, most)
        else f"{least:.3g} and {most:.3g}",
        "collapses preceded": f"{len(leads)} of {found.collapsed}",
        "steps before, median (quartiles)": ""
        if quartiles is None
        else f"{quartiles[1]:.0f} ({quartiles[0]:.0f} to {quartiles[2]:.0f})",
        "cried wolf": f"{found.false_alarms} of {found.healthy}",
    }
