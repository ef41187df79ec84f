"""What every optimizer step reports about its tokens and its trajectories.

Each function speaks of one part of a step and returns `Metrics` that merge into those of the whole.
"Eligible" tokens are those of the loss mask: sampled by the model, in a scored trajectory. Numbers
are taken over eligible tokens only: padding, prompts and tool output are in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from .advantages import is_zero_variance
from .corrections.base import TokenColumns
from .corrections.surrogates import MAX_LOG_RATIO
from .errors import StalenessError
from .losses import Judged
from .metrics import Metrics
from .types import Status, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
"""Borders, in nats, of the entropy bins of rho_mask; a value on a border belongs above it."""

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def token_diagnostics(
    columns: TokenColumns,
    loss: Judged,
    *,
    target_version: int,
    policy_entropies: Tensor | None = None,
    eps: float = 0.01,
) -> Metrics:
    """The metrics of one micro-batch's eligible tokens.

    columns: any shape; policy_entropies: the same shape, nats; loss: what `policy_loss` made of
    them; target_version: that of the weights that the loss was taken at; eps: where entropy counts
    as low, nats. Nothing here enters the gradient. With delta = policy - behavior log-prob and
    r = exp(delta):

    - rho_mask: rejected / eligible; rho_mask/advantage_S_log_ratio_S: the same in each of the four
      cells of (sign of the advantage, sign of delta), zeros belonging to none; rho_mask/entropy_*:
      by behavior entropy (ENTROPY_EDGES); low_entropy_share: share with behavior entropy < eps
    - ratio_deviation (mean |r - 1|) and log_ratio_variance, each also _kept: of kept tokens
    - kl_k1 (mean -delta), kl_k3 (mean r - 1 - delta): estimates of KL(behavior || policy)
      (Schulman 2020, "Approximating KL divergence"); effective_sample_size: (sum r)^2 / (n sum r^2)
    - policy_entropy, behavior_entropy: means, nats; clip_fraction: clipped / eligible
    - lag_*: target_version - the token's version
    - eligible_tokens; nonfinite_log_ratios (left out of everything after rho_mask) and
      clamped_log_ratios (|delta| > 20); missing_entropies (in no bin and no mean)

    Raises StalenessError when a token is newer than target_version.
    """
    mask = columns.loss_mask
    metrics = Metrics()
    delta = _gather(columns.policy_logprobs.detach() - columns.behavior_logprobs, mask)
    kept = _gather(loss.kept, mask) > 0
    advantages = _gather(columns.advantages, mask)
    num_tokens = len(delta)
    metrics.add_sum("eligible_tokens", num_tokens)
    metrics.add_mean("clip_fraction", _gather(loss.clipped, mask).sum(), num_tokens)
    metrics.add_mean("rho_mask", num_tokens - kept.sum(), num_tokens)
    _add_cells(metrics, advantages, delta, kept)
    _add_ratios(metrics, delta, kept)
    if columns.behavior_entropies is not None:
        _add_entropies(metrics, _gather(columns.behavior_entropies, mask), kept, eps)
    if policy_entropies is not None:
        metrics.add_mean("policy_entropy", _gather(policy_entropies, mask).sum(), num_tokens)
    if columns.versions is not None:
        lags = target_version - _gather(columns.versions, mask)
        if num_tokens and lags.min() < 0:
            raise StalenessError(
                f"a token of version {target_version - int(lags.min())} is newer than the weights "
                f"that it is trained at, version {target_version}"
            )
        metrics.add_quantiles("lag", lags)
    return metrics


def trajectory_diagnostics(
    trajectories: Sequence[Trajectory], *, target_version: int, max_staleness: int
) -> Metrics:
    """The metrics of the trajectories of one optimizer step (or of any part of it that holds
    whole groups).

    - intra_*, inter_*, staleness_* (v_target - v_first): of the scored trajectories that hold a
      sampled token; staleness_allowed: the bound that staleness_max is held to
    - length_*: sampled tokens of each trajectory; length_trained_*: of the scored ones;
      length_failed_*: of the others
    - reward_mean: of the reward that is trained on; outcome_mean: of the raw outcome; both over
      scored trajectories, num_unscored counts the rest; num_trajectories: all
    - status/NAME: how many ended so, for every status
    - num_groups: groups with a scored member; num_zero_variance_groups: those whose scored members'
      raw outcomes do not differ

    Raises StalenessError when a trajectory is newer than target_version.
    """
    metrics = Metrics()
    scored = [t for t in trajectories if t.reward is not None and t.outcome is not None]
    failed = [t for t in trajectories if t.reward is None or t.outcome is None]
    metrics.add_sum("num_trajectories", len(trajectories))
    metrics.add_sum("num_unscored", len(failed))
    for name, value in (
        ("reward_mean", [t.reward for t in scored if t.reward is not None]),
        ("outcome_mean", [t.outcome for t in scored if t.outcome is not None]),
    ):
        metrics.add_mean(name, sum(value), len(value))
    for status in get_args(Status):
        metrics.add_sum(f"status/{status}", sum(t.status == status for t in trajectories))
    for name, which in (
        ("length", trajectories),
        ("length_trained", scored),
        ("length_failed", failed),
    ):
        metrics.add_quantiles(name, [t.num_sampled_tokens for t in which])

    outcomes: dict[int, list[float | None]] = {}
    for trajectory in scored:
        outcomes.setdefault(trajectory.id.group, []).append(trajectory.outcome)
    metrics.add_sum("num_groups", len(outcomes))
    metrics.add_sum(
        "num_zero_variance_groups", sum(is_zero_variance(values) for values in outcomes.values())
    )
    _add_staleness(metrics, scored, target_version)
    metrics.add_max("staleness_allowed", max_staleness)
    return metrics


def task_diagnostics(trajectories: Sequence[Trajectory]) -> Metrics:
    """What each task of a step with several of them had: task/NAME/outcome_mean and
    task/NAME/reward_mean over its scored trajectories, task/NAME/length_mean over sampled tokens of
    all of its trajectories, task/NAME/num_trajectories."""
    metrics = Metrics()
    for t in trajectories:
        metrics.add_sum(f"task/{t.task}/num_trajectories", 1)
        metrics.add_mean(f"task/{t.task}/length_mean", t.num_sampled_tokens)
        if t.reward is not None and t.outcome is not None:
            metrics.add_mean(f"task/{t.task}/reward_mean", t.reward)
            metrics.add_mean(f"task/{t.task}/outcome_mean", t.outcome)
    return metrics


def _add_staleness(
    metrics: Metrics, trajectories: Sequence[Trajectory], target_version: int
) -> None:
    sampled = [t for t in trajectories if t.num_sampled_tokens]
    intra = [t.intra for t in sampled]
    inter = [t.inter(target_version) for t in sampled]
    for trajectory, value in zip(sampled, inter, strict=True):
        if value < 0:
            raise StalenessError(
                f"{trajectory.id} holds tokens of version {target_version - value}, newer than the "
                f"weights that it is trained at, version {target_version}"
            )
    metrics.add_quantiles("intra", intra)
    metrics.add_quantiles("inter", inter)
    metrics.add_quantiles("staleness", [a + b for a, b in zip(intra, inter, strict=True)])


def _gather(column: Tensor, mask: Tensor) -> FloatArray:
    """The eligible entries of a column, flat, as float64 (sums of squares want the digits)."""
    values: Any = column.detach()[mask].float().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _add_cells(
    metrics: Metrics, advantages: FloatArray, delta: FloatArray, kept: BoolArray
) -> None:
    in_cell = (advantages != 0) & (delta != 0) & ~np.isnan(delta)
    cell = 2 * (advantages > 0) + (delta > 0)
    names = [
        f"rho_mask/advantage_{a}_log_ratio_{d}" for a in ("neg", "pos") for d in ("neg", "pos")
    ]
    _add_shares(metrics, names, cell[in_cell], ~kept[in_cell])


def _add_entropies(metrics: Metrics, entropies: FloatArray, kept: BoolArray, eps: float) -> None:
    known = np.isfinite(entropies)
    values = np.maximum(entropies[known], 0.0)
    metrics.add_sum("missing_entropies", len(entropies) - len(values))
    metrics.add_mean("behavior_entropy", values.sum(), len(values))
    # Entropies are recorded in float32, so that is where a value can lie on a border.
    metrics.add_mean("low_entropy_share", (values < np.float32(eps)).sum(), len(values))
    names = [
        f"rho_mask/entropy_below_{ENTROPY_EDGES[0]:g}",
        *(f"rho_mask/entropy_{low:g}_to_{high:g}" for low, high in pairwise(ENTROPY_EDGES)),
        f"rho_mask/entropy_from_{ENTROPY_EDGES[-1]:g}",
    ]
    edges = np.asarray(ENTROPY_EDGES, dtype=np.float32)
    _add_shares(metrics, names, np.digitize(values, edges), ~kept[known])


def _add_shares(
    metrics: Metrics, names: Sequence[str], part: npt.NDArray[Any], rejected: BoolArray
) -> None:
    """Share of rejected tokens in each part; part holds indices into names."""
    totals = np.bincount(part, minlength=len(names))
    hits = np.bincount(part[rejected], minlength=len(names))
    for name, hit, total in zip(names, hits, totals, strict=True):
        metrics.add_mean(name, hit, total)


def _add_ratios(metrics: Metrics, delta: FloatArray, kept: BoolArray) -> None:
    finite = np.isfinite(delta)
    metrics.add_sum("nonfinite_log_ratios", len(delta) - finite.sum())
    delta, kept = delta[finite], kept[finite]
    clamped = np.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics.add_sum("clamped_log_ratios", (clamped != delta).sum())
    excess = np.expm1(clamped)  # r - 1, exact where r is close to 1
    ratio = excess + 1.0
    num_tokens = len(delta)
    metrics.add_mean("kl_k1", -delta.sum(), num_tokens)
    metrics.add_mean("kl_k3", (excess - clamped).sum(), num_tokens)
    metrics.add_ess("effective_sample_size", ratio.sum(), np.square(ratio).sum(), num_tokens)
    for suffix, which in (("", slice(None)), ("_kept", kept)):
        here = delta[which]
        metrics.add_mean(f"ratio_deviation{suffix}", np.abs(excess[which]).sum(), len(here))
        metrics.add_variance(
            f"log_ratio_variance{suffix}", here.sum(), np.square(here).sum(), len(here)
        )
