"""`dual_clip`: PPO with a bounded negative branch."""

from __future__ import annotations

from ..options.corrections import DualClipOptions
from .base import TokenColumns, Verdict
from .surrogates import DualClippedSurrogate


class DualClip:
    """Every token is kept; where A < 0 the clipped surrogate is at least bound * A (Ye et al. 2020,
    "Mastering complex control in MOBA games with deep reinforcement learning", eq. 4).

    PPO alone leaves r * A unbounded for A < 0: a token that became likelier against its advantage
    gets a gradient that grows with r. Beyond r = bound it gets none.
    """

    Options = DualClipOptions

    def __init__(self, options: DualClipOptions) -> None:
        self.needs = frozenset({"proximal_logprobs"} if options.edge == "U" else ())
        self._surrogate = DualClippedSurrogate(
            options.edge, options.bound, options.clip_low, options.clip_high
        )

    def __call__(self, columns: TokenColumns) -> Verdict:
        return Verdict(columns.loss_mask, surrogate=self._surrogate)
