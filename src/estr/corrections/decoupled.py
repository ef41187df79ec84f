"""`decoupled`: clip on pi/q, weigh with a capped q/mu."""

from __future__ import annotations

import math

from ..options.corrections import DecoupledOptions
from .base import TokenColumns, Verdict
from .surrogates import ClippedSurrogate, bounded_ratio


class Decoupled:
    """min(q/mu, cap) times the clipped surrogate on pi/q: the decoupled objective (Hilton et al.
    2022, eq. 4; for asynchronous RL of language models: AReaL, Fu et al. 2025, eq. 5).

    The clip holds pi near the trainer's own policy at the start of the batch, the weight answers
    for the gap between that and mu. Every token is kept.
    """

    Options = DecoupledOptions
    needs = frozenset({"proximal_logprobs"})

    def __init__(self, options: DecoupledOptions) -> None:
        self._log_cap = math.log(options.cap)
        self._surrogate = ClippedSurrogate("U", options.clip_low, options.clip_high)

    def __call__(self, columns: TokenColumns) -> Verdict:
        weight = bounded_ratio(columns.log_ratio("B").clamp(max=self._log_cap))
        return Verdict(columns.loss_mask, weight, self._surrogate, weight_edge="B")
