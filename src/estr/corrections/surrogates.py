"""What is maximized on a kept token: the surrogates that corrections bring.

A surrogate reads the ratio of one edge and the advantage, and says where its bound is active, so
that a token has no gradient. Log-ratios are bounded before exp, so that ratio * advantage stays
finite in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..options.corrections import Edge

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp, which keeps ratio * advantage finite in float32."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)); beyond the bounds the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class Surrogate(Protocol):
    """What is maximized on a kept token."""

    @property
    def edge(self) -> Edge:
        """The edge whose ratio it reads."""
        ...

    def __call__(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(values, with gradient; bool: where a bound is active, so that the gradient is zero)."""
        ...


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (Schulman et al. 2017, eq. 7), with the
    two bounds apart as in DAPO (Yu et al. 2025).

    restore_cap: where A < 0 the first r is truncated there, see `truncated_ratio`; such a token has
    drifted out and its gradient, which grows with r, brings it back."""

    edge: Edge
    clip_low: float = 0.2
    clip_high: float = 0.2
    restore_cap: float = math.inf

    def __call__(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        free = _restoring(ratio, advantages, self.restore_cap) * advantages
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        # By the ratio, not by the values: at restore_cap = 1 + clip_high both are the same but for
        # rounding, and a minimum would halve the gradient of a tie.
        active = torch.where(
            advantages > 0,
            ratio > 1.0 + self.clip_high,
            (advantages < 0) & (ratio < 1.0 - self.clip_low),
        )
        return torch.where(active, bounded, free), active


@dataclass(frozen=True, slots=True)
class DualClippedSurrogate:
    """The clipped surrogate, and where A < 0 at least bound * A: dual-clip PPO (Ye et al. 2020,
    eq. 4). The gradient of a negative advantage is 0 beyond r = bound."""

    edge: Edge
    bound: float = 3.0
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        values, bounded = ClippedSurrogate(self.edge, self.clip_low, self.clip_high)(
            ratio, advantages
        )
        floor = self.bound * advantages
        below = (advantages < 0) & (values < floor)
        return torch.where(below, floor, values), bounded | below


@dataclass(frozen=True, slots=True)
class ImportanceSurrogate:
    """r A, without PPO's clip; its gradient is r A grad log pi.

    cap: r is truncated there (see `truncated_ratio`); restore_cap: there where A < 0;
    restore_floor: lifted to it where A > 0, in value and gradient. None of these bounds takes the
    gradient away; beyond MAX_LOG_RATIO, where the ratio is constant, there is none."""

    edge: Edge
    cap: float = math.inf
    restore_cap: float = math.inf
    restore_floor: float = 0.0

    def __call__(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        weight = _restoring(truncated_ratio(ratio, self.cap), advantages, self.restore_cap)
        if self.restore_floor > 0:
            lifted = weight * (self.restore_floor / weight.detach()).clamp(min=1.0)
            weight = torch.where(advantages > 0, lifted, weight)
        return weight * advantages, torch.zeros_like(ratio, dtype=torch.bool)


def truncated_ratio(ratio: Tensor, cap: float) -> Tensor:
    """min(r, cap), with the gradient min(r, cap) grad log pi: a truncated importance weight in
    front of the score function, not a clip, which would end the gradient."""
    if math.isinf(cap):
        return ratio
    return ratio * (cap / ratio.detach()).clamp(max=1.0)


def _restoring(ratio: Tensor, advantages: Tensor, cap: float) -> Tensor:
    if math.isinf(cap):
        return ratio
    return torch.where(advantages < 0, truncated_ratio(ratio, cap), ratio)
