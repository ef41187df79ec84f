"""`kpop`: a bound on the divergence of "this token against the rest"."""

from __future__ import annotations

import torch
from torch import Tensor

from ..options.corrections import KpopOptions
from .base import TokenColumns, Verdict, region_verdict

_LEAST_REST = 2.0**-24
"""What float32 leaves to the other tokens where it rounds a probability to 1."""


class Kpop:
    """Keep a token iff D(p || m) <= phi and D(m || p) <= phi (KPop, Guo et al. 2026).

    m is the token's probability under mu, p under pi (edge E) or q (edge B), and D the
    Kullback-Leibler divergence of "this token or another one":
    D(p || m) = p log(p/m) + (1-p) log((1-p)/(1-m)). What stands under the mask is as for `icepop`:
    edge E the clipped surrogate on pi/mu, edge B the weight q/mu and the surrogate on pi/q.
    """

    Options = KpopOptions

    def __init__(self, options: KpopOptions) -> None:
        self.needs = frozenset({"proximal_logprobs"} if options.edge == "B" else ())
        self._options = options

    def __call__(self, columns: TokenColumns) -> Verdict:
        options = self._options
        on_policy = (
            columns.policy_logprobs.detach() if options.edge == "E" else columns.log_proximal
        )
        forward, backward = bernoulli_divergences(
            on_policy, columns.behavior_logprobs, saturate=options.saturate
        )
        # A NaN of the saturated form compares as False: rejected, which is what it reproduces.
        inside = (forward <= options.phi) & (backward <= options.phi)
        return region_verdict(columns, inside, options.edge, (options.clip_low, options.clip_high))


def bernoulli_divergences(
    log_p: Tensor, log_m: Tensor, *, saturate: bool = False
) -> tuple[Tensor, Tensor]:
    """(D(p || m), D(m || p)) of the Bernoulli distributions with log-probs of success log_p, log_m.

    1-p is taken as -expm1(log p), at least 2^-24. saturate takes it as 1 - exp(log p) in float32
    instead: where either probability rounds to 1 a result is NaN or inf.
    """
    if saturate:
        log_p, log_m = log_p.float(), log_m.float()
    p, m = log_p.exp(), log_m.exp()
    rest_p, rest_m = (1.0 - p, 1.0 - m) if saturate else (_rest(log_p), _rest(log_m))
    log_odds, log_rest_odds = log_p - log_m, torch.log(rest_p) - torch.log(rest_m)
    forward = p * log_odds + rest_p * log_rest_odds
    backward = -(m * log_odds + rest_m * log_rest_odds)
    return forward, backward


def _rest(log_prob: Tensor) -> Tensor:
    return (-torch.expm1(log_prob)).clamp(min=_LEAST_REST)
