"""`kpop`: a bound on the divergence of "this token against the rest"."""

from __future__ import annotations

from ..options.corrections import KpopOptions
from .base import TokenColumns, Verdict, region_verdict
from .bernoulli import bernoulli_divergences


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
