"""What a step finds of its tokens: the columns of a micro-batch that a loss reads, what came of
them, and what became of each trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, scatter_back, token_places, turn_ids
from .buffer import TrainingGroup
from .corrections.base import TokenColumns
from .types import Consumption


@dataclass(frozen=True, slots=True, eq=False)
class TokenResults:
    """What a step made of the N eligible tokens of a micro-batch, in row order, without gradient:
    policy log-probs and entropies (nats) float32 [N], kept and clipped as in `PolicyLoss`; and its
    parts of the loss and of the reference's price in it."""

    policy: Tensor
    entropies: Tensor
    kept: Tensor
    clipped: Tensor
    loss: float
    kl_loss: float

    def packed(self) -> Tensor:
        """float32 [4 N + 2]."""
        scalars = self.policy.new_tensor([self.loss, self.kl_loss])
        columns = (self.policy, self.entropies, self.kept, self.clipped, scalars)
        return torch.cat([column.float() for column in columns])

    @classmethod
    def unpacked(cls, packed: Tensor) -> TokenResults:
        policy, entropies, kept, clipped = packed[:-2].view(4, -1)
        loss, kl_loss = packed[-2:].tolist()
        return cls(policy, entropies, kept > 0, clipped > 0, loss, kl_loss)


def num_eligible(batches: Sequence[Batch]) -> list[int]:
    """Number of eligible tokens of each micro-batch."""
    return [int(batch.loss_mask.sum()) for batch in batches]


def token_columns(batch: Batch, policy_logprobs: Tensor, proximal: Tensor | None) -> TokenColumns:
    """The eligible tokens of a micro-batch as flat columns [N], in row order."""
    mask = batch.loss_mask
    gini = batch.behavior_gini
    return TokenColumns(
        policy_logprobs=policy_logprobs,
        behavior_logprobs=batch.behavior_logprobs[mask],
        advantages=batch.advantages[mask],
        loss_mask=torch.ones_like(policy_logprobs, dtype=torch.bool),
        proximal_logprobs=proximal,
        behavior_entropies=batch.behavior_entropies[mask],
        behavior_gini=None if gini is None else gini[mask],
        versions=batch.versions[mask],
        sequence_ids=batch.sequence_ids[mask],
        turn_ids=turn_ids(mask)[mask],
    )


def consumptions_of(
    groups: Sequence[TrainingGroup],
    batches: Sequence[Batch],
    parts: Sequence[TokenResults],
    proximal: Sequence[Tensor | None],
) -> tuple[Consumption, ...]:
    """What a step made of each trajectory. parts[b]: of batches[b]'s eligible tokens;
    proximal[b]: their proximal log-probs, None for all where no pass was made."""
    trajectories = [t for g in groups for t in g.trajectories]
    places = token_places(batches, trajectories)

    def columns(tensors: Sequence[Tensor], nothing: Any) -> Sequence[Any]:
        if not tensors:  # nothing to learn: there are no batches
            return [np.full(t.num_tokens, nothing) for t in trajectories]
        return scatter_back(batches, tensors, trajectories, places=places)

    passes = [tensor for tensor in proximal if tensor is not None]
    references = [b.ref_logprobs for b in batches if b.ref_logprobs is not None]
    return tuple(
        Consumption(*values)
        for values in zip(
            [a for g in groups for a in g.advantages],
            columns([part.policy for part in parts], np.float32(math.nan)),
            columns([part.kept for part in parts], False),
            columns([part.clipped for part in parts], False),
            columns(passes, None) if passes else [None] * len(trajectories),
            columns(references, None) if references else [None] * len(trajectories),
            strict=True,
        )
    )
