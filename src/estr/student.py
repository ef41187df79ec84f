"""Student's t distribution for whole degrees of freedom: what a mean over few seeds follows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import fmean, stdev

from .scores import LEVEL, Interval


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t), in closed form. Source: Abramowitz and Stegun, "Handbook of mathematical
    functions" (1964), 26.7.3 and 26.7.4. Raises ValueError below one degree of freedom."""
    if freedom < 1:
        raise ValueError(f"Student's t needs a degree of freedom, not {freedom}")
    angle = math.atan2(t, math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return (1 + inside) / 2


@functools.cache
def student_quantile(level: float, freedom: int) -> float:
    """The t with P(T <= t) = level, level in [0.5, 1): by bisection, to 1e-9 of itself."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < level:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < level else (low, middle)
    return high


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean of independent values; None of fewer than two, of whose
    spread nothing is known."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    quantile = student_quantile((1 + LEVEL) / 2, len(values) - 1)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def p_at_most(values: Sequence[float], bound: float) -> float:
    """The one-sided p-value, by Student's t, of "the mean is at most `bound`": small where the
    values, at least two and independent, lie above it."""
    spread = stdev(values) / math.sqrt(len(values))
    distance = fmean(values) - bound
    if spread == 0:
        return 0.0 if distance > 0 else 1.0
    return student_cdf(-distance / spread, len(values) - 1)
