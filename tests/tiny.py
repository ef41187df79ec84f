"""A tiny decoder and trajectories that it drew, for tests of trainer, checkpoint and engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from estr.buffer import TrainingGroup
from estr.config import Recipe, recipe_from_table
from estr.logprobs import token_statistics
from estr.types import RolloutId, SamplingSettings, Segment, Trajectory, Turn

VOCAB = 24


def tiny_model(seed: int = 0, **overrides: Any) -> Any:
    """Two Llama layers of width 32, float32, random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def tiny_recipe(**table: Any) -> Recipe:
    base = {
        "steps": 10,
        "groups_per_step": 2,
        "group_size": 2,
        "trainer": {"lr": 1e-2, **table.pop("trainer", {})},
    }
    return recipe_from_table({**base, **table})


@torch.no_grad()
def draw_trajectory(
    model: Any, rng: np.random.Generator, rid: RolloutId, reward: float, *, version: int = 0
) -> Trajectory:
    """Prompt, turn, tool output, turn: random ids, scored by the model itself, so that they are
    on-policy by construction."""
    lengths = [int(n) for n in rng.integers(2, 6, size=4)]
    ids = torch.from_numpy(rng.integers(0, VOCAB, size=sum(lengths)))
    statistics = token_statistics(model(ids[None]).logits[0, :-1], ids[1:])
    parts, turns, start = [], [], 0
    for number, length in enumerate(lengths):
        stop = start + length
        piece = ids[start:stop].numpy()
        if number % 2 == 0:
            parts.append(Segment.context(piece))
        else:
            here = slice(start - 1, stop - 1)
            parts.append(
                Segment.drawn(
                    piece,
                    statistics.logprobs[here].numpy(),
                    statistics.entropies[here].numpy(),
                    np.full(length, version),
                )
            )
            turns.append(Turn(0, start, stop, "stop"))
        start = stop
    return Trajectory(
        id=rid,
        task="tiny",
        problem=rid.group,
        segments=(Segment.join(parts),),
        turns=tuple(turns),
        sampling=SamplingSettings(),
        status="ok",
        dispatch_version=version,
        outcome=reward,
        reward=reward,
    )


def draw_groups(model: Any, num_groups: int = 2, size: int = 4, seed: int = 0) -> list[Any]:
    """Groups in which every other member is right."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        members = tuple(
            draw_trajectory(model, rng, RolloutId(seed, g, i), float(i % 2)) for i in range(size)
        )
        spread = np.sqrt(size / (4 * (size - 1)))
        advantages = tuple((m.reward - 0.5) / spread for m in members)
        groups.append(TrainingGroup(g, 0, members, advantages))
    return groups
