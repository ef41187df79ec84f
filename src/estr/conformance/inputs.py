"""What a loss that is to be checked is called with: its inputs, and small made-up ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_GIVEN = 64
"""The token count that is handed in: more than any batch here holds, so that a loss that divides
by it can be told from one that counts its own tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """One micro-batch as a policy loss sees it; tensors [rows, T], float32 unless a check says so.

    policy_logprobs carries the gradient. loss_mask: bool. behavior_entropies: nats.
    num_sampled_tokens: of the whole optimizer step, of which these rows may be a part.
    """

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    behavior_entropies: Tensor
    num_sampled_tokens: int = NUM_GIVEN

    def changed(self, change: Callable[[Tensor], Tensor]) -> LossInputs:
        """With `change` applied to every tensor."""
        columns = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensors: dict[str, Any] = {
            name: change(column.detach())
            for name, column in columns.items()
            if isinstance(column, Tensor)
        }
        return dataclasses.replace(self, **tensors)


LossFunction = Callable[[LossInputs], Tensor]


def example(seed: int = 0) -> LossInputs:
    """Four rows of 6, 4, 3 and 1 eligible tokens of 6, with ratios near 1 and high entropies, so
    that a trust region keeps them all."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 6)
    behavior = -0.5 - 2.0 * torch.rand(shape, generator=generator)
    lengths = torch.tensor([6, 4, 3, 1])
    advantages = torch.tensor([[1.0], [-0.5], [0.75], [-1.25]]).expand(shape).clone()
    return LossInputs(
        policy_logprobs=behavior + 0.05 * torch.randn(shape, generator=generator),
        behavior_logprobs=behavior,
        advantages=advantages,
        loss_mask=torch.arange(6) < lengths[:, None],
        behavior_entropies=torch.full(shape, 3.0),
    )


def at_ratio(ratio: float, advantage: float) -> LossInputs:
    """One token, of this ratio policy / behavior, in a step of its own."""
    behavior = torch.full((1, 1), -3.0)
    return LossInputs(
        policy_logprobs=behavior + math.log(ratio),
        behavior_logprobs=behavior,
        advantages=torch.full((1, 1), advantage),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
        behavior_entropies=torch.full((1, 1), 3.0),
        num_sampled_tokens=1,
    )


def spoiled(inputs: LossInputs, name: str, value: float, where: Tensor) -> LossInputs:
    """With `value` in one column wherever `where` holds."""
    column: dict[str, Any] = {name: torch.where(where, value, getattr(inputs, name).detach())}
    return dataclasses.replace(inputs, **column)
