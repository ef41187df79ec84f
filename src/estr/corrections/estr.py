"""`estr`: the Entropy-Scaled Trust Region."""

from __future__ import annotations

from ..options.corrections import EstrOptions
from .base import ClippedSurrogate, TokenColumns, Verdict


class Estr:
    """Keep a token iff its score S = delta^2 / (H + eps) is at most tau.

    delta = log pi - log mu of the token, H the Shannon entropy (nats) of the whole distribution
    that mu drew it from. The radius |delta| <= sqrt(tau (H + eps)) grows with the entropy: where mu
    was sure, a small move is already far; where it was not, a large one is noise. Two-sided,
    whatever the sign of the advantage. Clipped surrogate on pi/mu (the ESTR objective).
    """

    Options = EstrOptions
    needs = frozenset({"behavior_entropies"})

    def __init__(self, options: EstrOptions) -> None:
        self._options = options
        self._surrogate = ClippedSurrogate("E", options.clip_low, options.clip_high)

    def __call__(self, columns: TokenColumns) -> Verdict:
        entropies = columns.require("behavior_entropies").clamp(min=0.0)
        distance = columns.log_ratio("E").detach().square()
        # Multiplied out: a division would make tau = inf and H = 0 special.
        inside = distance <= self._options.tau * (entropies + self._options.eps)
        return Verdict(keep=inside & columns.loss_mask, surrogate=self._surrogate)
