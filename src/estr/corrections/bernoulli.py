"""Divergences of "this token or another one": what one drawn token tells of two distributions."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_REST = 2.0**-24
"""What float32 leaves to the other tokens where it rounds a probability to 1."""


def bernoulli_divergences(
    log_p: Tensor, log_m: Tensor, *, saturate: bool = False
) -> tuple[Tensor, Tensor]:
    """(D(p || m), D(m || p)) of the Bernoulli distributions with log-probs of success log_p, log_m.

    D(p || m) = p log(p/m) + (1-p) log((1-p)/(1-m)). 1-p is taken as -expm1(log p), at least 2^-24.
    saturate takes it as 1 - exp(log p) in float32 instead: where either probability rounds to 1 a
    result is NaN or inf.
    """
    if saturate:
        log_p, log_m = log_p.float(), log_m.float()
    p, m = log_p.exp(), log_m.exp()
    rest_p, rest_m = (1.0 - p, 1.0 - m) if saturate else (rest(log_p), rest(log_m))
    log_odds, log_rest_odds = log_p - log_m, torch.log(rest_p) - torch.log(rest_m)
    forward = p * log_odds + rest_p * log_rest_odds
    backward = -(m * log_odds + rest_m * log_rest_odds)
    return forward, backward


def rest(log_prob: Tensor) -> Tensor:
    """1 - p, at least 2^-24."""
    return (-torch.expm1(log_prob)).clamp(min=_LEAST_REST)
