"""A run whose tau stands above the engine's own noise.

    tau = max(tau0, k * q99 of S over the first batch, drawn and scored at the same weights)

At no lag delta is what the engine's arithmetic alone makes of it: a radius below that drops tokens
for a noise that no trainer can take away. Measured once, before the first step, then frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import correction_options
from ..corrections.base import TokenColumns
from ..corrections.estr import Estr
from ..options.corrections import EstrOptions
from ..types import Trajectory
from .archive import sampled_column
from .scoring import score
from .staleness import Staleness
from .table import Row
from .training import LabRun, RunConfig, train_once

QUANTILE = 0.99


def train_above_noise(table: Mapping[str, Any]) -> list[Row]:
    """table: run (a RunConfig whose corrections hold one `estr`), factor (k). The rows of
    `train_once`, and the measure tau at step 0."""
    config = RunConfig.read(table["run"])
    raised, tau = raise_tau(config.correction, table["factor"] * engine_noise(config))
    rows = train_once(replace(config, correction=raised).table())
    return [{"measure": "tau", "step": 0, "value": tau}, *rows]


def raise_tau(
    entries: Sequence[Mapping[str, Any]], floor: float
) -> tuple[tuple[dict[str, Any], ...], float]:
    """(the entries with the tau of their `estr` at least floor, that tau)."""
    tau = max(_estr_options(entries).tau, floor)
    return tuple({**e, "tau": tau} if e["name"] == "estr" else dict(e) for e in entries), tau


def engine_noise(config: RunConfig) -> float:
    """q99 of S over the first batch of the run, drawn without lag in the sampler's arithmetic."""
    run = LabRun(replace(config, staleness=Staleness()))
    drawn = run.roll_out(first_group=0, num_groups=config.prompts)
    policy = score(run.decoder, run.history.weights(run.trainer.version, "float32"), drawn).logprobs
    scores = region_scores(_columns(drawn, policy), _estr_options(config.correction))
    return float(torch.quantile(scores, QUANTILE))


def region_scores(columns: TokenColumns, options: EstrOptions) -> Tensor:
    """S = delta^2 / (scale + eps) of each token, detached: what `estr` compares with tau."""
    distance = columns.log_ratio("E").detach().square()
    return distance / (Estr(options).scale(columns) + options.eps)


def _estr_options(entries: Sequence[Mapping[str, Any]]) -> EstrOptions:
    (entry,) = (e for e in entries if e["name"] == "estr")
    options: EstrOptions = correction_options(entry)
    return options


def _columns(drawn: Sequence[Trajectory], policy: Tensor) -> TokenColumns:
    def column(name: str) -> Tensor:
        return torch.from_numpy(sampled_column(drawn, name)).float()

    return TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=column("behavior_logprobs"),
        advantages=torch.zeros_like(policy),
        loss_mask=torch.ones_like(policy, dtype=torch.bool),
        behavior_entropies=column("behavior_entropies"),
        behavior_gini=column("behavior_gini"),
    )
