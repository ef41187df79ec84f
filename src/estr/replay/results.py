"""What a replay of logged tokens says: typed results, and their form as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

OWN = "as trained"
"""The label of a run's own correction; it stands first."""


@dataclass(frozen=True, slots=True)
class Check:
    """The run's own correction replayed against the verdicts in the ledger. first: where the first
    difference is, in words; None: there is none."""

    tokens: int = 0
    kept_differ: int = 0
    clipped_differ: int = 0
    first: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What one correction makes of all replayed tokens.

    kept, clipped: numbers of tokens. weight_mean, weight_max: over kept tokens. mass: sum of the
    absolute gradient coefficients, net: their sum (the coefficient is the factor of the token's
    grad log pi in the gradient of its step's loss). loss: mean over the steps. second_moment: mean
    log_ratio^2 of the kept tokens.
    """

    label: str
    kept: int
    clipped: int
    rho_mask: float
    weight_mean: float
    weight_max: float
    mass: float
    net: float
    loss: float
    second_moment: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of the tokens: an entropy bin (its lower border, nats; None: no entropy was recorded),
    a lag, and the signs of advantage and log_ratio ("+-": advantage above 0, log_ratio below; "0":
    one of them is 0). kept[i], mass[i]: of correction i."""

    entropy_bin: float | None
    lag: int
    signs: str
    tokens: int
    kept: tuple[int, ...]
    mass: tuple[float, ...]


Part = Literal["entropy_bin", "lag", "signs"]


def by_part(cells: Sequence[Cell], part: Part) -> dict[Any, Cell]:
    """The cells added up over all but one of their coordinates, in its order (unknown last)."""
    sums: dict[Any, Cell] = {}
    for cell in sorted(cells, key=lambda c: (getattr(c, part) is None, getattr(c, part))):
        before = sums.get(key := getattr(cell, part))
        sums[key] = cell if before is None else _sum(before, cell)
    return sums


def _sum(a: Cell, b: Cell) -> Cell:
    kept = tuple(x + y for x, y in zip(a.kept, b.kept, strict=True))
    mass = tuple(x + y for x, y in zip(a.mass, b.mass, strict=True))
    return dataclasses.replace(a, tokens=a.tokens + b.tokens, kept=kept, mass=mass)


@dataclass(frozen=True, slots=True)
class Example:
    """A token that the run's own correction keeps and `correction` does not, or the other way
    round. before, after: token ids around it, of its segment. kept[i], coefficients[i]: of
    correction i."""

    correction: str
    step: int
    group: int
    trajectory: int
    position: int
    token_id: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    lag: int
    behavior_logprob: float
    policy_logprob: float
    entropy: float
    advantage: float
    kept: tuple[bool, ...]
    clipped: tuple[bool, ...]
    coefficients: tuple[float, ...]

    @property
    def log_ratio(self) -> float:
        return self.policy_logprob - self.behavior_logprob


@dataclass(frozen=True, slots=True)
class Replay:
    """Corrections on the same logged tokens. figures[0] is the run's own, which `own` describes
    (JSON, several where the run changed it); matrices and tuples have one entry for each of
    `figures`, in their order.

    rejected_by_both[i][j]: tokens. agreement[i][j]: share of tokens with the same kept. cosine:
    between the vectors of gradient coefficients (None: one of them is 0 everywhere); it needs no
    model, and treats the grad log pi of different tokens as orthogonal and equally long. refused:
    label and reason of what was left out.
    """

    run: str
    own: tuple[str, ...]
    steps: tuple[int, ...]
    tokens: int
    check: Check
    figures: tuple[Figures, ...]
    rejected_by_both: tuple[tuple[int, ...], ...]
    cosine: tuple[tuple[float | None, ...], ...]
    cells: tuple[Cell, ...]
    examples: tuple[Example, ...]
    refused: tuple[tuple[str, str], ...] = ()
    torn: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(figures.label for figures in self.figures)

    @property
    def agreement(self) -> tuple[tuple[float, ...], ...]:
        """Share of tokens that both keep or both reject."""
        rejected = [self.tokens - figures.kept for figures in self.figures]
        return tuple(
            tuple(
                1.0 - (rejected[i] + rejected[j] - 2 * both) / max(1, self.tokens)
                for j, both in enumerate(row)
            )
            for i, row in enumerate(self.rejected_by_both)
        )

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self) | {"agreement": self.agreement}
        return {name: plain(value) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Gradient:
    """The exact gradient of one step's loss under one correction; norm: before clipping."""

    label: str
    loss: float
    norm: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """Losses and gradients of the corrections on one logged step, under the weights that its loss
    was taken at. cosine: between whole gradients. max_difference: largest |re-scored - logged|
    policy log-prob. largest_lag: of the step's trained tokens; at 0 corrections hardly differ.
    passed_over: a line on each torn checkpoint, whose weights could not be chosen. recorded_*: what
    the run wrote down for its own correction, where it did."""

    run: str
    step: int
    version: int
    weights: str
    tokens: int
    max_difference: float
    largest_lag: int
    gradients: tuple[Gradient, ...]
    cosine: tuple[tuple[float | None, ...], ...]
    passed_over: tuple[str, ...] = ()
    recorded_loss: float | None = None
    recorded_norm: float | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(gradient.label for gradient in self.gradients)

    def to_json(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in dataclasses.asdict(self).items()}


def plain(value: Any) -> Any:
    """As JSON has it: what is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def cosines(products: Any) -> tuple[tuple[float | None, ...], ...]:
    """Cosines from a matrix of inner products [K, K]; None where a norm is 0."""
    norms = [math.sqrt(max(0.0, float(products[i][i]))) for i in range(len(products))]
    return tuple(
        tuple(
            float(products[i][j]) / (norms[i] * norms[j]) if norms[i] and norms[j] else None
            for j in range(len(norms))
        )
        for i in range(len(norms))
    )
