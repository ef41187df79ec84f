"""`icepop`: a fixed band on the ratio."""

from __future__ import annotations

import math

from ..options.corrections import IcepopOptions
from .base import TokenColumns, Verdict, region_verdict


class Icepop:
    """Keep a token iff alpha <= ratio <= beta (IcePop, Ling Team 2025).

    edge B, the original: the band is on q/mu, which is also the weight of the term, and the
    surrogate reads pi/q. edge E, the form that the ESTR paper compares with: the band is on pi/mu,
    the weight is 1, and the surrogate reads pi/mu.
    """

    Options = IcepopOptions

    def __init__(self, options: IcepopOptions) -> None:
        self.needs = frozenset({"proximal_logprobs"} if options.edge == "B" else ())
        self._edge = options.edge
        self._low = math.log(options.alpha) if options.alpha > 0 else -math.inf
        self._high = math.log(options.beta)
        self._clip = (options.clip_low, options.clip_high)

    def __call__(self, columns: TokenColumns) -> Verdict:
        log_ratio = columns.log_ratio(self._edge).detach()
        inside = (log_ratio >= self._low) & (log_ratio <= self._high)
        return region_verdict(columns, inside, self._edge, self._clip)
