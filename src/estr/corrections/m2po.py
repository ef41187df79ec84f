"""`m2po`: hold the second moment of the step's log-ratios to a budget."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..options.corrections import M2poOptions
from .base import WHOLE_STEP, TokenColumns, Verdict
from .surrogates import ImportanceSurrogate


class M2po:
    """Drop the tokens of largest (log q - log mu)^2 until the mean of the rest is at most budget
    (M2PO, Zheng et al. 2025, "Prosperity before collapse").

    tokens "harmful": only those whose advantage pushes further out (A > 0 with q > mu, A < 0 with
    q < mu) are counted, and dropped; "all": every eligible token is. Where kept, the surrogate is
    r A without a clip, on pi/mu.

    The mean is that of the whole optimizer step, so the limit is found in a pass before the
    gradient: see `StepCorrection`. Tokens of equal size stay or go together.
    """

    Options = M2poOptions
    needs = frozenset({"proximal_logprobs", WHOLE_STEP})

    def __init__(self, options: M2poOptions, limit: float | None = None) -> None:
        self._options = options
        self._limit = limit
        self._surrogate = ImportanceSurrogate("E")

    def for_step(self, columns: TokenColumns) -> M2po:
        squares, counted = self._squares(columns)
        return M2po(self._options, second_moment_limit(squares[counted], self._options.budget))

    def __call__(self, columns: TokenColumns) -> Verdict:
        if self._limit is None:
            return self.for_step(columns)(columns)
        squares, counted = self._squares(columns)
        keep = columns.loss_mask & ~(counted & (squares >= self._limit))
        return Verdict(keep, surrogate=self._surrogate)

    def _squares(self, columns: TokenColumns) -> tuple[Tensor, Tensor]:
        """(squared log-ratio, bool: counted in the mean) of every token."""
        log_ratio = columns.log_ratio("B")
        # A token that mu could not have drawn is rejected anyway and has no size.
        counted = columns.loss_mask & (columns.behavior_logprobs != -math.inf)
        if self._options.tokens == "harmful":
            counted = counted & (log_ratio * columns.advantages > 0)
        return log_ratio.square(), counted


def second_moment_limit(squares: Tensor, budget: float) -> float:
    """The least value that must go, together with all above it, so that the mean of the others is
    at most `budget`; inf if none must. squares: [N]; the sums are float64."""
    ordered = squares.double().sort().values
    counts = torch.arange(1, len(ordered) + 1, dtype=torch.float64, device=squares.device)
    over = ordered.cumsum(0) / counts > budget  # ascending: once over the budget, always over
    return float(squares.sort().values[over.int().argmax()]) if bool(over.any()) else math.inf
