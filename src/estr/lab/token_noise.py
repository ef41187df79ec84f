"""The job of `scaling`: sums over tokens, by bin, of how log pi - log mu scatters.

The weights are those of one synchronous run; the sampler differs from the trainer either in its
arithmetic, at the same version, or in its version, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..types import Trajectory
from .archive import Archive, policy_logprobs, sampled_column
from .arithmetic import ARITHMETICS, Arithmetic
from .moments import Floats, binned_sums, divergences, token_scale
from .staleness import Staleness
from .table import Row
from .training import RunConfig

EPS = 0.01
ENTROPY_EDGES = (1e-4, 1e-3, 3e-3, EPS, 0.03, 0.06, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.4, 2.0)
SCALE_EDGES = (1e-4, 1e-3, 3e-3, EPS, 0.03, 0.06, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.4)
PROBABILITY_EDGES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999)
TAIL_EDGES = tuple(np.arange(1.0, 12.01, 0.5).tolist())
"""Of |z| over its root mean square."""

SPLIT = 0.1
"""Nats: tails are taken below and above it."""


def sources(lags: Sequence[int]) -> dict[str, tuple[Arithmetic, int]]:
    """name -> (arithmetic of the sampler, lag)."""
    mismatch: dict[str, tuple[Arithmetic, int]] = {a: (a, 0) for a in ARITHMETICS[1:]}
    return mismatch | {f"lag {lag}": ("float32", lag) for lag in lags}


def measure(table: Mapping[str, Any]) -> list[Row]:
    """table: run (a RunConfig), lags, rollouts (of each source, of as many problems). Rows carry
    source, axis (what is binned by) and bin; measures are sums over the tokens of the bin."""
    lags = table["lags"]
    archive = Archive(RunConfig.read(table["run"]), keep=max(lags) + 1)
    rows: list[Row] = []
    for name, (arithmetic, lag) in sources(lags).items():
        drawn = archive.draw(Staleness(inter=lag), arithmetic, table["rollouts"], size=1)
        log_pi = archive.log_distributions(archive.newest, drawn)
        log_mu = archive.log_distributions(archive.newest - lag, drawn, arithmetic=arithmetic)
        exact = divergences(log_mu.double().numpy(), log_pi.double().numpy())
        rows += [
            {"source": name, **row}
            for row in token_rows(
                drawn, policy_logprobs(log_pi, drawn), policy_logprobs(log_mu, drawn), exact
            )
        ]
    return rows


def token_rows(
    trajectories: Sequence[Trajectory],
    policy: Floats,
    rescored: Floats,
    exact: tuple[Floats, Floats],
) -> list[Row]:
    """policy, rescored [n]: log-probs under pi, and under mu once more in one pass (bfloat16 then
    rounds differently); exact: KL(mu || pi) and half E_mu[delta^2] of whole distributions."""
    behavior = sampled_column(trajectories, "behavior_logprobs")
    entropy = sampled_column(trajectories, "behavior_entropies")
    gini = sampled_column(trajectories, "behavior_gini")
    delta2 = (policy - behavior) ** 2
    z = (policy - behavior) / np.sqrt(entropy + EPS)
    token = token_scale(behavior, gini)
    by_entropy = {
        "entropy": entropy,
        "delta2": delta2,
        "z": z,
        "z2": z**2,
        "gini_over": gini / (entropy + EPS),
        "token_over": token / (entropy + EPS),
        "outside": (z**2 > 1.0).astype(np.float64),
        "kl": exact[0],
        "half": exact[1],
    }
    probability = np.exp(behavior)
    binned = {
        "entropy": binned_sums(entropy, ENTROPY_EDGES, by_entropy),
        "gini": binned_sums(gini, SCALE_EDGES, {"gini": gini, "delta2": delta2}),
        "token": binned_sums(token, SCALE_EDGES, {"token": token, "delta2": delta2}),
        "probability": binned_sums(
            probability,
            PROBABILITY_EDGES,
            {"probability": probability, "delta2": delta2, "token": token},
        ),
        "all": binned_sums(
            entropy,
            (),
            _likelihood_sums(delta2, {"entropy": entropy, "gini": gini, "token": token})
            | {"delta2": delta2, "rescored2": (rescored - behavior) ** 2},
        ),
        **_tail_sums(z, entropy),
    }
    return [
        {"axis": axis, "bin": i, "measure": measure, "step": 0, "value": float(value)}
        for axis, sums in binned.items()
        for measure, values in sums.items()
        for i, value in enumerate(values)
        if value or measure == "tokens"
    ]


def _likelihood_sums(delta2: Floats, scales: Mapping[str, Floats]) -> dict[str, Floats]:
    """What the Gaussian likelihood of delta with variance sigma^2 * (scale + eps) hangs on, for
    any sigma; scale "constant" has one variance for all tokens."""
    sums = {"ratio_constant": delta2, "log_constant": np.zeros_like(delta2)}
    for name, scale in scales.items():
        sums[f"ratio_{name}"] = delta2 / (scale + EPS)
        sums[f"log_{name}"] = np.log(scale + EPS)
    return sums


def _tail_sums(z: Floats, entropy: Floats) -> dict[str, dict[str, Floats]]:
    """|z| over its root mean square, left (delta < 0) and right, at low and at high entropy."""
    found = {}
    for name, chosen in (("low", entropy < SPLIT), ("high", entropy >= SPLIT)):
        own = z[chosen]
        scale = float(np.sqrt(np.mean(own**2))) if len(own) else 1.0
        for side, sign in (("left", -1.0), ("right", 1.0)):
            values = sign * own[sign * own > 0] / max(scale, 1e-30)
            found[f"{side} {name}"] = binned_sums(values, TAIL_EDGES, {})
    return found
