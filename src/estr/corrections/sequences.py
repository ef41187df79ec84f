"""Ratios of whole turns and trajectories."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..options.corrections import Edge, Level
from .base import TokenColumns

_OWNER: dict[Level, str] = {
    "turn": "turn_ids",
    "sequence": "sequence_ids",
    "geometric": "sequence_ids",
}


def level_needs(level: Level) -> frozenset[str]:
    """The column that tells which tokens `level` takes together."""
    return frozenset() if level == "token" else frozenset({_OWNER[level]})


def level_log_ratio(columns: TokenColumns, edge: Edge, level: Level) -> Tensor:
    """The detached log-ratio along `edge` at that level, in the columns' shape.

    token: the token's own; turn, sequence: the sum over the eligible tokens of its turn or
    trajectory (the log of the product of their ratios); geometric: the mean over the trajectory. A
    token that mu could not have drawn (behavior log-prob -inf) is rejected anyway and stays out of
    sum and mean.
    """
    log_ratio = columns.log_ratio(edge).detach()
    if level == "token":
        return log_ratio
    owners = columns.require(_OWNER[level])
    return _over(owners, columns, log_ratio, "mean" if level == "geometric" else "sum")


def _over(
    owners: Tensor, columns: TokenColumns, log_ratio: Tensor, reduction: Literal["sum", "mean"]
) -> Tensor:
    """The sum or mean over the counted tokens with the same owner, at each of them."""
    _, of_token = torch.unique(owners, return_inverse=True)
    counted = columns.loss_mask & (columns.behavior_logprobs != -math.inf)
    size = int(of_token.max()) + 1 if of_token.numel() else 0
    flat, values = of_token.flatten(), torch.where(counted, log_ratio, 0.0)
    # float64: the rounding of a long sum must not depend on where a trajectory stands.
    totals = torch.zeros(size, dtype=torch.float64, device=log_ratio.device)
    totals.index_add_(0, flat, values.flatten().double())
    if reduction == "mean":
        counts = torch.zeros_like(totals).index_add_(0, flat, counted.flatten().double())
        totals = totals / counts.clamp(min=1.0)
    return totals[of_token].to(log_ratio.dtype)
