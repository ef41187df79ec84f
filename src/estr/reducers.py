"""Reducers: what a metric keeps of the values in it, so that its parts can be put together.

    part.merged(part) --> part --values(name)--> {name: number}

A mean is kept as total and count, a quantile as counted values, an effective sample size as sums:
whatever the order and the grouping in which parts are merged, the number is that of all values
together, never a mean of means. Plain Python data, so that it crosses process borders.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

Row = dict[str, float | None]

QUANTILES = (0.5, 0.9, 0.99)


class Reducer(Protocol):
    """Part of a metric. `merged` is associative and commutative up to float rounding."""

    def merged(self, other: Any) -> Reducer:
        """This part and another one of the same class, together."""
        ...

    def values(self, name: str) -> Row:
        """What the metric `name` contributes to a row; None where there is nothing to say."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count."""

    total: float
    count: float

    def merged(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def values(self, name: str) -> Row:
        return {name: self.total / self.count if self.count else None}


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def merged(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def values(self, name: str) -> Row:
        return {name: self.total}


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def merged(self, other: Max) -> Max:
        return Max(max(self.value, other.value))

    def values(self, name: str) -> Row:
        return {name: self.value}


@dataclass(frozen=True, slots=True)
class Min:
    value: float

    def merged(self, other: Min) -> Min:
        return Min(min(self.value, other.value))

    def values(self, name: str) -> Row:
        return {name: self.value}


@dataclass(frozen=True, slots=True)
class Moments:
    """Sum, sum of squares and number of some values x; what is read from them is the subclass's."""

    total: float
    squares: float
    count: float

    def merged(self, other: Moments) -> Self:
        return type(self)(
            self.total + other.total, self.squares + other.squares, self.count + other.count
        )


class Variance(Moments):
    """Mean of x^2 - (mean of x)^2, the population variance."""

    __slots__ = ()

    def values(self, name: str) -> Row:
        if not self.count:
            return {name: None}
        return {name: max(0.0, self.squares / self.count - (self.total / self.count) ** 2)}


class EffectiveSampleSize(Moments):
    """(sum x)^2 / (n * sum x^2) of n weights x, as a share of n: 1 where all are equal (Kish 1965,
    Survey Sampling)."""

    __slots__ = ()

    def values(self, name: str) -> Row:
        return {name: self.total**2 / (self.count * self.squares) if self.squares else None}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Every distinct value with its count: exact, and small for what is a whole number (lags,
    lengths). Quantile q is the smallest value that at least a share q of all values do not exceed,
    so it is always a value that occurred."""

    counts: Mapping[float, int]

    def merged(self, other: Quantiles) -> Quantiles:
        return Quantiles(Counter(self.counts) + Counter(other.counts))

    def values(self, name: str) -> Row:
        keys = [f"{name}_mean", *(f"{name}_p{100 * q:g}" for q in QUANTILES), f"{name}_max"]
        if not self.counts:
            return dict.fromkeys(keys)
        values = np.array(sorted(self.counts), dtype=np.float64)
        counts = np.array([self.counts[value] for value in values.tolist()])
        reached = np.cumsum(counts)
        at = [int(np.searchsorted(reached, q * reached[-1])) for q in QUANTILES]
        mean = float(values @ counts / reached[-1])
        return dict(
            zip(keys, [mean, *(float(values[i]) for i in at), float(values[-1])], strict=True)
        )


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Mean, Sum, Max, Min, Variance, EffectiveSampleSize, Quantiles)
}


def pack_reducer(reducer: Reducer) -> list[Any]:
    """[kind, fields] as JSON data."""
    fields: list[Any]
    if isinstance(reducer, Quantiles):
        fields = [sorted(reducer.counts.items())]  # JSON has no numbers as keys
    else:
        fields = list(dataclasses.astuple(reducer))  # type: ignore[call-overload]
    return [type(reducer).__name__, fields]


def unpack_reducer(kind: str, fields: list[Any]) -> Reducer:
    """The inverse of pack_reducer. Raises KeyError, TypeError or ValueError on malformed data."""
    if kind == Quantiles.__name__:
        return Quantiles({float(value): int(count) for value, count in fields[0]})
    reducer: Reducer = _KINDS[kind](*fields)
    return reducer
