"""What a correction reads (TokenColumns) and what it answers (Verdict).

With behavior mu (what drew the token), proximal q (the trainer's policy at the start of the batch)
and current pi, a correction looks along one or more of three edges:

    mu --B--> q --U--> pi        B = q/mu    U = pi/q    E = pi/mu = B * U
     `---------E--------^

It makes the four choices of an off-policy objective: which tokens to keep, with which weight, under
which surrogate, and the edge that each of them reads. The aggregation is not its business; that is
`estr.losses`. With one optimizer step per batch q is pi itself, detached: U has value 1 and the
gradient of log pi, and no proximal pass is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..errors import DataError, NumericsError
from ..options.corrections import Edge
from .surrogates import ClippedSurrogate, Surrogate, bounded_ratio

OPTIONAL_COLUMNS: frozenset[str] = frozenset(
    {
        "proximal_logprobs",
        "behavior_entropies",
        "behavior_gini",
        "versions",
        "sequence_ids",
        "turn_ids",
    }
)
"""What a correction may name in `needs`. The other columns are always there."""

WHOLE_STEP = "whole_step"
"""A need that is no column: the rule reads statistics of all tokens of the optimizer step; see
`StepCorrection`."""

_LEAST_ENTROPY = -1e-3
"""Rounding may leave an entropy a little below 0; anything lower is another quantity."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Per-token columns of one micro-batch, own-token aligned, all of one shape ([N] or [B, T]).

    policy_logprobs: log pi of the token, with gradient. behavior_logprobs: log mu, as recorded at
    the draw. advantages: of the token's trajectory. loss_mask: bool, the eligible tokens; whatever
    the other columns hold elsewhere (NaN, inf) has no effect on any value or gradient.
    proximal_logprobs: log q; None means pi itself, detached. behavior_entropies (nats),
    behavior_gini: of the whole distribution that the token was drawn from. versions: of the weights
    that drew it. sequence_ids: equal for the tokens of one trajectory. turn_ids: equal for the
    tokens that a model wrote in one go, unlike those of the micro-batch's other turns.

    Raises ValueError on unequal shapes, a mask that is not bool, or log-probs in 16 bits.
    """

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    proximal_logprobs: Tensor | None = None
    behavior_entropies: Tensor | None = None
    behavior_gini: Tensor | None = None
    versions: Tensor | None = None
    sequence_ids: Tensor | None = None
    turn_ids: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.policy_logprobs.shape
        for name in (field.name for field in fields(self)):
            column = getattr(self, name)
            if column is None:
                continue
            if column.shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(column.shape)}, policy_logprobs {tuple(shape)}"
                )
            if column.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{name} is {column.dtype}: 16 bits round log-probs into false ratios; "
                    "compute and store them in float32"
                )
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask is {self.loss_mask.dtype}, not bool")

    def log_ratio(self, edge: Edge) -> Tensor:
        """log of the ratio along `edge`; exactly 0, in value and gradient, where not eligible and
        where both probabilities are 0.

        E and U carry the gradient of log pi, B carries none. May be inf on an eligible token: +inf
        where the denominator's probability is 0, -inf where the numerator's is.
        """
        above = self.log_proximal if edge == "B" else self.policy_logprobs
        below = self.log_proximal if edge == "U" else self.behavior_logprobs
        both_zero = (above == -torch.inf) & (below == -torch.inf)
        return torch.where(self.loss_mask & ~both_zero, above - below, 0.0)

    @property
    def log_proximal(self) -> Tensor:
        """log q, detached; log pi itself where no proximal pass was made."""
        given = self.proximal_logprobs
        return (self.policy_logprobs if given is None else given).detach()

    def require(self, name: str) -> Tensor:
        """The optional column `name`. Raises DataError where the batch does not carry it."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise DataError(
                f"this correction needs {name}, which the batch does not carry: "
                "a missing value is not zero. Record it at sampling, or choose another correction"
            )
        return column

    def check(self, needs: frozenset[str]) -> None:
        """Refuse what no correction may silently mask: a missing column among `needs`, and on an
        eligible token a NaN, an infinite value other than a log-prob of -inf, a negative entropy.

        Raises DataError for the first, NumericsError (column, count and first place) for the rest.
        """
        names = ["policy_logprobs", "behavior_logprobs", "advantages"]
        for name in sorted(needs - {WHOLE_STEP}):
            if name == "proximal_logprobs" and self.proximal_logprobs is None:
                continue
            if self.require(name).is_floating_point():
                names.append(name)
        bad = {name: self.loss_mask & ~_valid(name, getattr(self, name)) for name in names}
        counts = torch.stack([b.sum() for b in bad.values()]).tolist()
        for (name, places), count in zip(bad.items(), counts, strict=True):
            if count:
                first = places.nonzero()[0]
                value = float(getattr(self, name).detach()[tuple(first)])
                raise NumericsError(
                    f"{name}: {count} of {int(self.loss_mask.sum())} eligible tokens hold an "
                    f"impossible value, the first is {value} at {first.tolist()}; "
                    "masking it would hide a fault of the model or of the record"
                )


def _valid(name: str, column: Tensor) -> Tensor:
    if name.endswith("_logprobs"):
        return column < torch.inf
    if name == "behavior_entropies":
        return column.isfinite() & (column >= _LEAST_ENTROPY)
    return column.isfinite()


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """A correction's answer for every token of the columns it was given.

    keep: bool, detached; False drops the token's term, never its place in the denominator.
    weight: detached factor of the term, or None for 1; read only where the token is kept.
    surrogate: what is maximized, or None to leave the choice to another correction of the list.
    weight_edge: "B" where the weight stands for q/mu, so that the surrogate must read U; None where
    it is another factor.
    """

    keep: Tensor
    weight: Tensor | None = None
    surrogate: Surrogate | None = None
    weight_edge: Literal["B"] | None = None


def region_verdict(
    columns: TokenColumns, inside: Tensor, edge: Literal["E", "B"], clip: tuple[float, float]
) -> Verdict:
    """The verdict of a rule that keeps the tokens `inside` a region of `edge`.

    edge E: weight 1, clipped surrogate on pi/mu. edge B: mu and q are told apart as in the
    decoupled objective (Hilton et al. 2022): weight q/mu inside, clipped surrogate on pi/q.
    """
    keep = inside & columns.loss_mask
    if edge == "E":
        return Verdict(keep, surrogate=ClippedSurrogate("E", *clip))
    weight = bounded_ratio(columns.log_ratio("B"))
    return Verdict(keep, weight, ClippedSurrogate("U", *clip), weight_edge="B")


class Correction(Protocol):
    """A rule against the gap between the policy that drew a token and the one being trained.

    `needs` names the optional columns that it reads (OPTIONAL_COLUMNS). They are then present and
    free of NaN on eligible tokens, except that proximal_logprobs may be None with one optimizer
    step per batch; `TokenColumns.log_ratio` handles that. With sequence_ids in it, all tokens of a
    trajectory are in one micro-batch. WHOLE_STEP in it asks for more: see `StepCorrection`.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, columns: TokenColumns) -> Verdict:
        """Judge every token; called again at every gradient step, with the current policy."""
        ...


class StepCorrection(Correction, Protocol):
    """A correction with WHOLE_STEP in `needs`: its rule reads all tokens of the optimizer step,
    however the step is cut into micro-batches.

    The trainer makes a pass without gradient over the whole step first (one more forward pass, also
    with one optimizer step per batch), hands all its columns to `for_step`, and judges every
    micro-batch by the answer. Called without that, it takes the columns it is given for the whole
    step.
    """

    def for_step(self, columns: TokenColumns) -> Correction:
        """The correction of one optimizer step, whose eligible tokens are `columns`, flat [N];
        policy_logprobs is log q there and carries no gradient."""
        ...


def concatenate(parts: Sequence[TokenColumns]) -> TokenColumns:
    """The flat columns of several micro-batches as one; a column that one lacks is left out. Turns
    are counted in each micro-batch, so they are numbered on."""
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(TokenColumns)}
    num_turns = 0
    for i, turns in enumerate(columns["turn_ids"]):
        if turns is not None and len(turns):
            columns["turn_ids"][i] = turns + num_turns
            num_turns += int(turns.max())
    return TokenColumns(
        **{n: torch.cat(c) for n, c in columns.items() if all(v is not None for v in c)}
    )
