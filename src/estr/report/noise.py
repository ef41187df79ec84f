"""Does E[log_ratio^2] grow with the entropy as a trust region supposes that scales with it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..scores import LEVEL

FEWEST_TOKENS = 100
"""Of a bin that a line is fitted to."""

_FEWEST_BINS = 3
_FEWEST_STRETCHES = 5
"""Fewer are too few to resample."""

_NUM_RESAMPLES = 1000

_FITS_FROM = (0.0, 0.1)
"""Nats. Tokens that are all but certain move by rounding alone, which bends a line through all."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseBin:
    """Tokens of like entropy: mean entropy, E[log_ratio^2] with its interval, how many, and whether
    they are enough to fit a line to."""

    entropy: float
    second_moment: float
    low: float | None
    high: float | None
    tokens: int
    fitted: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """log E[log_ratio^2] = intercept + slope * log(entropy + eps), by least squares over the bins
    of at least from_entropy; 95 % interval of the slope, None of too few stretches."""

    from_entropy: float
    slope: float
    intercept: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Noise:
    """which: the tokens that this is about, in words. A slope of 1 is what the trust region
    supposes."""

    which: str
    eps: float
    bins: list[NoiseBin]
    fits: list[Fit]


def noise_by_entropy(cube: Mapping[str, Any], eps: float, num_stretches: int) -> Noise:
    """cube: columns "stretch", "lag", "noise_bin" and, of the tokens there, the sums "finite"
    (how many), "entropy" and "squares" (of the log-ratio).

    Of stale tokens where there are any: at lag 0 the weights are the same, and what differs is
    arithmetic.
    """
    lags = np.asarray(cube["lag"])
    chosen = lags >= 1 if (lags >= 1).any() else np.ones(len(lags), dtype=np.bool_)
    bins, place = np.unique(np.asarray(cube["noise_bin"])[chosen], return_inverse=True)
    sums = np.zeros((3, num_stretches, len(bins)))
    for total, name in zip(sums, ("finite", "entropy", "squares"), strict=True):
        values = np.asarray(cube[name], dtype=np.float64)[chosen]
        np.add.at(total, (np.asarray(cube["stretch"])[chosen], place), values)
    sums = sums[:, :, sums[0].sum(axis=0) > 0]
    resampled = _resampled(sums)
    return Noise(
        which="lag 1 and more" if (lags >= 1).any() else "lag 0",
        eps=eps,
        bins=_bins(sums.sum(axis=1), resampled),
        fits=_fits(sums.sum(axis=1), resampled, eps),
    )


def _bins(totals: Floats, resampled: Floats | None) -> list[NoiseBin]:
    found = []
    for i, (tokens, entropy, squares) in enumerate(totals.T.tolist()):
        low = high = None
        enough = tokens >= FEWEST_TOKENS
        if resampled is not None and enough:
            drawn = resampled[resampled[:, 0, i] > 0][:, :, i]
            low, high = _interval(drawn[:, 2] / drawn[:, 0])
        found.append(
            NoiseBin(
                entropy / tokens, squares / tokens, low, high, int(tokens), enough and squares > 0
            )
        )
    return found


def _fits(totals: Floats, resampled: Floats | None, eps: float) -> list[Fit]:
    fits: list[Fit] = []
    for start in _FITS_FROM:
        tokens, entropy, squares = totals
        used = (tokens >= FEWEST_TOKENS) & (squares > 0) & (entropy >= start * tokens)
        line = _line(totals[:, used], eps)
        if line is None or (fits and used.sum() == len(tokens)):
            continue
        low = high = None
        if resampled is not None:
            lines = [_line(one[:, used], eps) for one in resampled]
            low, high = _interval(np.array([one[0] for one in lines if one is not None]))
        fits.append(Fit(start, *line, low, high))
    return fits


def _resampled(sums: Floats) -> Floats | None:
    """Totals [resample, 3, bin] with the stretches drawn anew: the tokens of a stretch share their
    weights, so they are not independent, while stretches nearly are. None: too few of them."""
    num_stretches = sums.shape[1]
    if num_stretches < _FEWEST_STRETCHES:
        return None
    rng = np.random.default_rng(0)
    even = np.full(num_stretches, 1 / num_stretches)
    times = rng.multinomial(num_stretches, even, _NUM_RESAMPLES).astype(np.float64)
    drawn: Floats = np.einsum("rs,ksb->rkb", times, sums)
    return drawn


def _line(totals: Floats, eps: float) -> tuple[float, float] | None:
    """(slope, intercept); None of too few bins."""
    tokens, entropy, squares = totals
    usable = (tokens > 0) & (squares > 0)
    if usable.sum() < _FEWEST_BINS:
        return None
    x = np.log(entropy[usable] / tokens[usable] + eps)
    y = np.log(squares[usable] / tokens[usable])
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def _interval(values: Floats) -> tuple[float | None, float | None]:
    if not len(values):
        return None, None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
