"""How a log-ratio scatters: pure functions of numbers, no torch.

    token_scale    the noise model's second moment given the token drawn
    divergences    exact KL beside half the second moment, of whole distributions
    binned_sums    tokens -> sums by bin, which add up over runs

delta is log pi - log mu of the token drawn; z = delta / sqrt(H + eps). The noise model: with logits
that carry independent errors of variance sigma^2,

    E[delta^2 | distribution] = sigma^2 * gini,                gini = sum p (1 - p)
    E[delta^2 | token drawn]  = sigma^2 * (2 (1 - p_y) - gini)

to first order, since delta_y = e_y - sum_i p_i e_i has variance sigma^2 ((1 - p_y)^2 + the sum of
the other p_i^2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def token_scale(log_probs: Floats, gini: Floats) -> Floats:
    """2 (1 - p_y) - gini of drawn tokens with log-prob log p_y [n], at least 0: the noise model's
    second moment given the token, in units of sigma^2."""
    scale: Floats = np.maximum(0.0, -2.0 * np.expm1(log_probs) - gini)
    return scale


def binned_sums(
    key: Floats, edges: Sequence[float], columns: Mapping[str, Floats]
) -> dict[str, Floats]:
    """ "tokens" and the sum of every column [n] in each of the len(edges) + 1 bins of key [n]; bin
    i holds edges[i - 1] <= key < edges[i]."""
    bins = np.searchsorted(np.asarray(edges), key, side="right")
    size = len(edges) + 1
    sums = {name: np.bincount(bins, values, size) for name, values in columns.items()}
    return {"tokens": np.bincount(bins, minlength=size).astype(np.float64), **sums}  # type: ignore[dict-item]


def divergences(log_mu: Floats, log_pi: Floats) -> tuple[Floats, Floats]:
    """(KL(mu || pi), half of E_mu[delta^2]) of whole distributions [n, V], each [n]. To second
    order in delta the two are equal."""
    mu, delta = np.exp(log_mu), log_pi - log_mu
    # expm1(delta) - delta >= 0 termwise, and sum mu * expm1(delta) = 0: nothing cancels.
    divergence = (mu * (np.expm1(delta) - delta)).sum(axis=1)
    return divergence, 0.5 * (mu * delta**2).sum(axis=1)
