"""What sums over tokens say: pure functions of numbers, no torch.

fit_line         is it linear?  y = slope * x + intercept, R2
fit_power        with what exponent?
fit_tails        does P(|z| > x) fall like a Gaussian, an exponential or a power?
rank_correlation do two columns put things into the same order?
seed_interval    of any smooth statistic of pooled sums, over seeds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ..scores import LEVEL, Interval
from ..student import student_quantile
from .moments import Floats


class Line(NamedTuple):
    """y = slope * x + intercept by least squares; r2: the share of the variance it explains, NaN
    where y does not vary."""

    slope: float
    intercept: float
    r2: float


class Tail(NamedTuple):
    """log P(|z| > x) = const - rate * f(x): r2 and rate for f(x) = x^2, x and log x."""

    gaussian: Line
    exponential: Line
    power: Line

    @property
    def best(self) -> str:
        """The law with the highest r2."""
        return max(self._fields, key=lambda name: getattr(self, name).r2)


def fit_line(x: Floats, y: Floats) -> Line:
    """Least squares, every point alike. Raises ValueError on fewer than 3 points."""
    if len(x) < 3:
        raise ValueError(f"a line through {len(x)} points says nothing; needs at least 3")
    slope, intercept = np.polyfit(x, y, 1)
    rest, spread = y - slope * x - intercept, y - y.mean()
    total = float(spread @ spread)
    r2 = 1.0 - float(rest @ rest) / total if total > 0 else float("nan")
    return Line(float(slope), float(intercept), r2)


def fit_power(x: Floats, y: Floats) -> Line:
    """The line through (log x, log y); its slope is the exponent. x, y above 0."""
    return fit_line(np.log(x), np.log(y))


def fit_tails(edges: Sequence[float], counts: Floats, total: float, *, least: float = 10.0) -> Tail:
    """The three laws fitted to log P(|z| > x) at those of the ascending edges beyond which at least
    `least` values lie. counts [len(edges) + 1]: values by bin as in `binned_sums`; total: of all
    values, those on the other side included. Raises ValueError on fewer than 3 such edges."""
    beyond = counts[::-1].cumsum()[::-1][1:]
    x = np.asarray(edges)[beyond >= least]
    log_share = np.log(beyond[beyond >= least] / total)
    fits = [fit_line(f, log_share) for f in (x**2, x, np.log(x))]
    return Tail(*(Line(-fit.slope, fit.intercept, fit.r2) for fit in fits))


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's, ties at their mean rank; NaN where a column has one value alone."""
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length > 0 else float("nan")


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks: Floats = (last - (counts - 1) / 2)[place]
    return ranks


def rank_interval(correlation: float, n: int) -> Interval:
    """95 % interval of Spearman's correlation of n independent pairs; NaN of fewer than 4.

    Source: Bonett and Wright, "Sample size requirements for estimating Pearson, Kendall and
    Spearman correlations" (2000): Fisher's z, standard error sqrt((1 + r^2 / 2) / (n - 3))."""
    if n < 4:
        return float("nan"), float("nan")
    error = math.sqrt((1 + correlation**2 / 2) / (n - 3))
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * error
    inside = max(-1 + 1e-12, min(1 - 1e-12, correlation))
    return math.tanh(math.atanh(inside) - half), math.tanh(math.atanh(inside) + half)


def seed_interval(statistic: Callable[[Floats], float], by_seed: Floats) -> Interval:
    """95 % interval of statistic(sum over seeds): by_seed [seeds, ...] holds the sums of each seed.
    Student's t with the jackknife's standard error, one whole seed left out at a time; for a smooth
    statistic (a ratio, a slope, a cosine). NaN of fewer than 2 seeds, and where the statistic is
    not finite without some seed.

    Source: Tukey, "Bias and confidence in not quite large samples" (1958); Efron and Tibshirani,
    "An introduction to the bootstrap" (1993), chapter 11."""
    n = len(by_seed)
    if n < 2:
        return float("nan"), float("nan")
    without = np.array([statistic(np.delete(by_seed, i, axis=0).sum(axis=0)) for i in range(n)])
    spread = without - without.mean()
    error = math.sqrt((n - 1) / n * float(spread @ spread))
    middle, half = statistic(by_seed.sum(axis=0)), student_quantile((1 + LEVEL) / 2, n - 1) * error
    return middle - half, middle + half
