"""`estr`: the Entropy-Scaled Trust Region."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..options.corrections import EstrOptions
from .base import TokenColumns, Verdict
from .surrogates import ClippedSurrogate, ImportanceSurrogate, Surrogate

_NEEDS = {
    "entropy": frozenset({"behavior_entropies"}),
    "gini": frozenset({"behavior_gini"}),
    "token": frozenset({"behavior_gini"}),
    "constant": frozenset[str](),
}


class Estr:
    """Keep a token iff its score S = delta^2 / (H + eps) is at most tau.

    delta = log pi - log mu of the token, H the Shannon entropy (nats) of the whole distribution
    that mu drew it from. The radius |delta| <= sqrt(tau (H + eps)) grows with the entropy: where mu
    was sure, a small move is already far; where it was not, a large one is noise. Two-sided,
    whatever the sign of the advantage. Clipped surrogate on pi/mu (the ESTR objective).

    Options beyond the paper, off by default:

    - scale: what stands for H. Under independent noise of variance s^2 on every logit the second
      moment of delta is s^2 * gini over the draw ("gini"), and s^2 * (2 (1 - p_y) - gini) given the
      drawn token y ("token"), to first order. "constant" takes 1: one radius for all tokens.
    - side "outward": a token outside the region is dropped only if its gradient carries it further
      out (A > 0 with r > 1, A < 0 with r < 1). What is then kept beside the region is restoring;
      its r is truncated at restore_cap where A < 0 and, without the clip, lifted to restore_floor
      where A > 0: a token that has fallen far would otherwise come back with a gradient near 0.
    - mask "soft": nothing is dropped; outside, the term is weighed with exp(1 - S / tau).
    - surrogate "importance": r A without PPO's clip; "none": left to another correction of the
      list.
    """

    Options = EstrOptions

    def __init__(self, options: EstrOptions) -> None:
        self.needs = _NEEDS[options.scale]
        self._options = options
        self._surrogate = _surrogate(options)

    def __call__(self, columns: TokenColumns) -> Verdict:
        options = self._options
        delta = columns.log_ratio("E").detach()
        # Multiplied out: a division would make tau = inf and H = 0 special.
        bound = options.tau * (self.scale(columns) + options.eps)
        distance = delta.square()
        spared = distance <= bound
        if options.side == "outward":
            spared = spared | (delta * columns.advantages <= 0)
        if options.mask == "hard":
            return Verdict(spared & columns.loss_mask, surrogate=self._surrogate)
        weight = torch.where(spared, 1.0, (1.0 - distance / bound).exp())
        return Verdict(columns.loss_mask, weight, self._surrogate)

    def scale(self, columns: TokenColumns) -> Tensor:
        """What stands for H at each token, at least 0, in the columns' shape; no gradient."""
        if self._options.scale == "constant":
            return torch.ones_like(columns.behavior_logprobs)
        if self._options.scale == "entropy":
            return columns.require("behavior_entropies").clamp(min=0.0)
        gini = columns.require("behavior_gini").clamp(min=0.0)
        if self._options.scale == "gini":
            return gini
        others = -torch.expm1(columns.behavior_logprobs)
        return (2.0 * others - gini).clamp(min=0.0)


def _surrogate(options: EstrOptions) -> Surrogate | None:
    cap = options.restore_cap if options.side == "outward" else math.inf
    if options.surrogate == "clip":
        return ClippedSurrogate("E", options.clip_low, options.clip_high, cap)
    if options.surrogate == "importance":
        return ImportanceSurrogate("E", restore_cap=cap, restore_floor=options.restore_floor)
    return None
