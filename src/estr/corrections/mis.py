"""`mis`: a masked importance weight."""

from __future__ import annotations

import math

from ..options.corrections import MisOptions
from .base import TokenColumns, Verdict
from .sequences import level_log_ratio, level_needs
from .surrogates import bounded_ratio


class Mis:
    """Weigh with q/mu where low <= q/mu <= high, drop the rest (Liu et al. 2025, "When speed kills
    stability: demystifying RL collapse from the training-inference mismatch").

    level "token" is the mask and weight of `icepop` on edge B. "turn", "sequence": the product of
    the turn's or trajectory's ratios, which decides over it as a whole and is its weight;
    "geometric": the geometric mean of the trajectory's. Brings no surrogate; the default is then
    the clipped one on pi/q.
    """

    Options = MisOptions

    def __init__(self, options: MisOptions) -> None:
        self.needs = level_needs(options.level) | {"proximal_logprobs"}
        self._level = options.level
        self._low = math.log(options.low) if options.low > 0 else -math.inf
        self._high = math.log(options.high)

    def __call__(self, columns: TokenColumns) -> Verdict:
        log_ratio = level_log_ratio(columns, "B", self._level)
        inside = (log_ratio >= self._low) & (log_ratio <= self._high)
        return Verdict(inside & columns.loss_mask, bounded_ratio(log_ratio), weight_edge="B")
