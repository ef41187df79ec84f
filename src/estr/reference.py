"""The frozen reference: the weights that a run started from, and what is asked of them.

batch --score--> log-probs of the reference --+--> Batch.ref_logprobs --> kl_loss
                                              `--> reward - coefficient * sum of estimates
                                                   --> advantages, once more
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from .adapters import without_adapters
from .advantages import group_advantages
from .batch import Batch, scatter_back
from .buffer import TrainingGroup
from .config import Recipe
from .kl import kl_estimates
from .scorer import Scorer
from .types import Trajectory


class Reference:
    """The weights that the model of `scorer` holds now, for good. With adapters, which are all that
    changes, it is that model itself without them; otherwise a copy in the model's own types."""

    def __init__(self, scorer: Scorer, *, has_adapters: bool) -> None:
        self._has_adapters = has_adapters
        self.scorer = scorer
        if not has_adapters:
            self.scorer = Scorer(copy.deepcopy(scorer.model).eval().requires_grad_(False))

    def in_force(self) -> AbstractContextManager[None]:
        """While this lasts, `scorer` speaks for the reference."""
        if self._has_adapters:
            return without_adapters(self.scorer.model)
        return contextlib.nullcontext()


def with_reference(batch: Batch, ref_logprobs: torch.Tensor) -> Batch:
    """The batch with its column of the reference; ref_logprobs: of its eligible tokens, flat."""
    column = torch.full_like(batch.behavior_logprobs, math.nan)
    column[batch.loss_mask] = ref_logprobs.to(column.dtype)
    return dataclasses.replace(batch, ref_logprobs=column)


def price_in_reward(
    groups: Sequence[TrainingGroup], batches: Sequence[Batch], recipe: Recipe
) -> tuple[list[TrainingGroup], list[Batch]]:
    """Groups and batches whose rewards are less coefficient * (sum over the rollout's tokens of the
    estimate), with the advantages that follow. The policy of the estimate is the one that drew the
    token, so a rollout's price does not depend on when it is trained on. Outcomes stay, and what
    has no advantage still has none."""
    trajectories = [t for g in groups for t in g.trajectories]
    estimates = [
        kl_estimates(b.behavior_logprobs[b.loss_mask], _eligible(b), recipe.kl.estimator)
        for b in batches
    ]
    columns = scatter_back(batches, estimates, trajectories) if batches else []
    prices = iter([recipe.kl.coefficient * float(np.nansum(c, dtype=np.float64)) for c in columns])
    priced = [_priced(group, [next(prices, 0.0) for _ in group.trajectories]) for group in groups]
    priced = [dataclasses.replace(g, advantages=_advantages_anew(g, recipe)) for g in priced]
    advantages = [a for g in priced for a in g.advantages]
    return priced, [_with_advantages(batch, advantages) for batch in batches]


def _eligible(batch: Batch) -> torch.Tensor:
    assert batch.ref_logprobs is not None
    return batch.ref_logprobs[batch.loss_mask]


def _priced(group: TrainingGroup, prices: Sequence[float]) -> TrainingGroup:
    members: list[Trajectory] = []
    for member, price in zip(group.trajectories, prices, strict=True):
        if member.reward is not None:
            parts = {**(member.rewards or {"outcome": member.reward}), "kl": -price}
            member = dataclasses.replace(member, rewards=parts, reward=member.reward - price)
        members.append(member)
    return dataclasses.replace(group, trajectories=tuple(members))


def _advantages_anew(group: TrainingGroup, recipe: Recipe) -> tuple[float | None, ...]:
    anew = group_advantages(
        [t.reward for t in group.trajectories],
        [t.outcome for t in group.trajectories],
        kind=recipe.loss.advantage,
        variance_of=recipe.loss.variance_of,
    )
    return tuple(None if b is None else a for a, b in zip(anew, group.advantages, strict=True))


def _with_advantages(batch: Batch, advantages: Sequence[float | None]) -> Batch:
    values = torch.tensor(
        [[advantages[row.trajectory]] for row in batch.rows],
        dtype=torch.float32,
        device=batch.advantages.device,
    )
    return dataclasses.replace(batch, advantages=values.expand_as(batch.advantages))
