"""`tis`: a truncated importance weight."""

from __future__ import annotations

import math

from ..options.corrections import TisOptions
from .base import TokenColumns, Verdict
from .sequences import level_log_ratio, level_needs
from .surrogates import bounded_ratio


class Tis:
    """Weigh with min(q/mu, cap), keep every token (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"; truncation: Ionides 2008).

    level "turn": the product of the ratios of the token's turn, so that a turn is not weighed by
    what went wrong in another; "sequence": that of the trajectory's ratios; "geometric": their
    geometric mean.
    Brings no surrogate; the default is then the clipped one on pi/q.
    """

    Options = TisOptions

    def __init__(self, options: TisOptions) -> None:
        self.needs = level_needs(options.level) | {"proximal_logprobs"}
        self._level = options.level
        self._log_cap = math.log(options.cap)

    def __call__(self, columns: TokenColumns) -> Verdict:
        log_ratio = level_log_ratio(columns, "B", self._level)
        weight = bounded_ratio(log_ratio.clamp(max=self._log_cap))
        return Verdict(columns.loss_mask, weight, weight_edge="B")
