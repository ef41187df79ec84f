"""Statistics of `scaling`: what pooled sums over tokens say of one task and source.

Each takes sums over seeds by bin, [bins], as `estr.lab.token_noise` makes them, and gives one
number; `statistic` brings its interval over seeds. ValueError or NaN: too few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .fits import Tail, fit_line, fit_power, fit_tails, seed_interval
from .moments import Floats
from .table import Row
from .token_noise import (
    ENTROPY_EDGES,
    EPS,
    PROBABILITY_EDGES,
    SCALE_EDGES,
    TAIL_EDGES,
)

FEWEST = 200
"""Tokens of a bin that anything is fitted to, all seeds together."""

FROM = ENTROPY_EDGES.index(EPS) + 1
"""The first bin of entropy (of any scale) that fits begin at: from eps on."""

Interval = tuple[float, float]
Sums = dict[str, dict[str, Floats]]
"""axis -> measure -> [seeds, bins]"""
Pools = dict[tuple[str, str], Sums]
"""(task, source) -> sums"""


def pooled(rows: Sequence[Row]) -> Pools:
    """Sums by seed and bin, missing ones 0."""
    rows = [row for row in rows if "axis" in row]
    seeds = {seed: i for i, seed in enumerate(sorted({row["seed"] for row in rows}))}
    size = 1 + max(len(ENTROPY_EDGES), len(SCALE_EDGES), len(TAIL_EDGES))
    pools: Pools = {}
    for row in rows:
        sums = pools.setdefault((row["task"], row["source"]), {}).setdefault(row["axis"], {})
        column = sums.setdefault(row["measure"], np.zeros((len(seeds), size)))
        column[seeds[row["seed"]], row["bin"]] += row["value"]
    return pools


def statistic(
    sums: Mapping[str, Floats], names: Sequence[str], of: Callable[..., float]
) -> tuple[float, Interval]:
    """of(*sums over seeds, each [bins]) and its interval over seeds; NaN where it has too few
    bins. A sum that is not there is 0: rows of 0 are not kept."""

    def value(stacked: Floats) -> float:
        try:
            return of(*stacked)
        except ValueError:
            return float("nan")

    nothing = np.zeros_like(sums["tokens"])
    found = np.stack([sums.get(name, nothing) for name in names], axis=1)
    found = found[sums["tokens"].any(axis=1)]  # a task may have fewer seeds than another
    return value(found.sum(axis=0)), seed_interval(value, found)


def exponent(tokens: Floats, scale: Floats, delta2: Floats) -> float:
    """Slope of log E[delta^2] over log mean scale, bins from eps on."""
    x, y = _means(tokens, scale, delta2)
    return fit_power(x, y).slope


def linearity(tokens: Floats, scale: Floats, delta2: Floats) -> float:
    """R2 of the line through the same bins."""
    x, y = _means(tokens, scale, delta2)
    return fit_line(x, y).r2


def z_variance(tokens: Floats, z: Floats, z2: Floats) -> Floats:
    """Variance of z in the bins from eps on that hold enough tokens."""
    used = _used(tokens)
    n = tokens[used]
    found: Floats = z2[used] / n - (z[used] / n) ** 2
    return found


def spread(tokens: Floats, z: Floats, z2: Floats) -> float:
    """Largest over smallest variance of z."""
    found = z_variance(tokens, z, z2)
    return float(found.max() / found.min()) if len(found) > 1 else float("nan")


def likelihood(tokens: Floats, ratio: Floats, log: Floats) -> float:
    """-log of the Gaussian likelihood a token of delta with variance sigma^2 * (scale + eps), at
    the best sigma, without its constants."""
    n = tokens[0]
    return 0.5 * float(np.log(ratio[0] / n) + log[0] / n)


def _used(tokens: Floats) -> Any:
    return (np.arange(len(tokens)) >= FROM) & (tokens >= FEWEST)


def _means(tokens: Floats, scale: Floats, delta2: Floats) -> tuple[Floats, Floats]:
    used = _used(tokens) & (delta2 > 0)
    return scale[used] / tokens[used], delta2[used] / tokens[used]


def excess_kl(tokens: Floats, half: Floats, kl: Floats) -> float:
    """Half E_mu[delta^2] over exact KL(mu || pi), all tokens."""
    return float(half.sum() / kl.sum()) if kl.sum() > 0 else float("nan")


def outside_excess(tokens: Floats, outside: Floats) -> float:
    """Share of tokens with z^2 > 1 at H < eps, less that from eps on."""
    low, high = tokens[:FROM].sum(), tokens[FROM:].sum()
    if min(low, high) < FEWEST:
        return float("nan")
    return float(outside[:FROM].sum() / low - outside[FROM:].sum() / high)


RARE = PROBABILITY_EDGES.index(3e-3) + 1
UNLIKELY = slice(PROBABILITY_EDGES.index(0.01) + 1, PROBABILITY_EDGES.index(0.1) + 1)


def rare_excess(tokens: Floats, delta2: Floats) -> float:
    """E[delta^2] of drawn tokens with p_y < 0.003 over that of 0.01 <= p_y < 0.1."""
    if min(tokens[:RARE].sum(), tokens[UNLIKELY].sum()) < FEWEST / 4:
        return float("nan")
    rare = delta2[:RARE].sum() / tokens[:RARE].sum()
    return float(rare / (delta2[UNLIKELY].sum() / tokens[UNLIKELY].sum()))


def tails(sums: Sums, where: str) -> dict[str, Tail]:
    """The laws of either side, where ("low" or "high" entropy) enough tokens lie beyond."""
    counts = {side: sums[f"{side} {where}"]["tokens"].sum(axis=0) for side in ("left", "right")}
    total = sum(float(c.sum()) for c in counts.values())
    found = {}
    for side, own in counts.items():
        try:
            fits = fit_tails(TAIL_EDGES, own[: len(TAIL_EDGES) + 1], total)
        except ValueError:
            continue
        if not math.isnan(fits.gaussian.r2):  # as many beyond every edge: no law to tell
            found[side] = fits
    return found


Found = dict[str, dict[tuple[str, str], tuple[float, Interval]]]
"""name of a statistic -> (task, source) -> value and interval over seeds"""


def measured(pools: Pools) -> Found:
    """Every statistic of every task and source."""
    found: Found = {}
    for cell, sums in pools.items():
        for name, value in _of_source(sums).items():
            found.setdefault(name, {})[cell] = value
    return found


def _of_source(sums: Sums) -> dict[str, tuple[float, Interval]]:
    entropy, gini, token = sums["entropy"], sums["gini"], sums["token"]
    return {
        "exponent": statistic(entropy, ["tokens", "entropy", "delta2"], exponent),
        "R2": statistic(entropy, ["tokens", "entropy", "delta2"], linearity),
        "exponent of gini": statistic(gini, ["tokens", "gini", "delta2"], exponent),
        "exponent of token": statistic(token, ["tokens", "token", "delta2"], exponent),
        "spread of var z": statistic(entropy, ["tokens", "z", "z2"], spread),
        "entropy over constant": _gain(sums["all"], "entropy", "constant"),
        "gini over entropy": _gain(sums["all"], "gini", "entropy"),
        "token over gini": _gain(sums["all"], "token", "gini"),
        "half moment / KL": statistic(entropy, ["tokens", "half", "kl"], excess_kl),
        "outside, H < eps": statistic(entropy, ["tokens", "outside"], outside_excess),
        "rare over unlikely": statistic(sums["probability"], ["tokens", "delta2"], rare_excess),
    }


def _gain(sums: Mapping[str, Floats], better: str, worse: str) -> tuple[float, Interval]:
    """By how much one scale is likelier than another, nats a token."""
    names = [f"{part}_{scale}" for scale in (better, worse) for part in ("ratio", "log")]

    def gain(tokens: Floats, ratio: Floats, log: Floats, other: Floats, other_log: Floats) -> float:
        return likelihood(tokens, other, other_log) - likelihood(tokens, ratio, log)

    return statistic(sums, ["tokens", *names], gain)
