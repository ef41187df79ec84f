"""`dppo`: drop what moves outward beyond a divergence of "this token against the rest"."""

from __future__ import annotations

from torch import Tensor

from ..options.corrections import DppoOptions
from .base import TokenColumns, Verdict
from .bernoulli import bernoulli_divergences
from .surrogates import ImportanceSurrogate


class Dppo:
    """Drop a token iff its gradient would carry it further out and it is already further out than
    the radius: A > 0 with p > m, or A < 0 with p < m (DPPO, Qi et al. 2026, "Rethinking the trust
    region in LLM reinforcement learning").

    p is the token's probability under pi, m under mu. divergence "tv": |p - m|; "kl": D(m || p) of
    "this token or another one". scale "entropy": the radius is radius * sqrt(H + eps), H the
    entropy (nats) of the distribution that mu drew it from; "gini": with its gini for H. Where
    kept, the surrogate is r A without a clip, r = pi/mu truncated at ratio_cap.
    """

    Options = DppoOptions

    def __init__(self, options: DppoOptions) -> None:
        self._column = {"entropy": "behavior_entropies", "gini": "behavior_gini"}.get(options.scale)
        self.needs = frozenset(() if self._column is None else {self._column})
        self._options = options
        self._surrogate = ImportanceSurrogate("E", cap=options.ratio_cap)

    def __call__(self, columns: TokenColumns) -> Verdict:
        inward = columns.log_ratio("E").detach() * columns.advantages <= 0
        inside = self._divergence(columns) <= self._radius(columns)
        return Verdict((inward | inside) & columns.loss_mask, surrogate=self._surrogate)

    def _divergence(self, columns: TokenColumns) -> Tensor:
        policy, behavior = columns.policy_logprobs.detach(), columns.behavior_logprobs
        if self._options.divergence == "tv":
            return (policy.exp() - behavior.exp()).abs()
        return bernoulli_divergences(policy, behavior)[1]

    def _radius(self, columns: TokenColumns) -> float | Tensor:
        options = self._options
        if self._column is None:
            return options.reach
        return options.reach * (columns.require(self._column).clamp(min=0.0) + options.eps).sqrt()
