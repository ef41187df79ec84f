"""`none`: every eligible token is kept, under the clipped surrogate."""

from __future__ import annotations

from ..options.corrections import NoneOptions
from .base import TokenColumns, Verdict
from .surrogates import ClippedSurrogate


class NoCorrection:
    """PPO's clipped surrogate and nothing else (Schulman et al. 2017, eq. 7).

    edge E clips pi/mu. edge U clips pi/q and never looks at mu, as a trainer does that recomputes
    its old log-probs.
    """

    Options = NoneOptions

    def __init__(self, options: NoneOptions) -> None:
        self.needs = frozenset({"proximal_logprobs"} if options.edge == "U" else ())
        self._surrogate = ClippedSurrogate(options.edge, options.clip_low, options.clip_high)

    def __call__(self, columns: TokenColumns) -> Verdict:
        return Verdict(keep=columns.loss_mask, surrogate=self._surrogate)
