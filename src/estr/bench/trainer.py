"""The trainer against a bare loop on the same batches, and what the correction costs.

bare: forward, log-softmax of all logits, gather, mean, backward, clipped norm, fused AdamW, on the
same padded micro-batches and nothing else. Both sides use the same model on one thread, in turn.
`ratio` is the trainer's sampled tokens per second over the bare loop's; `correction_share` is the
CPU time of the correction and the loss over its verdict, as a part of the trainer's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..batch import Batch, make_batches
from ..buffer import TrainingGroup
from ..config import recipe_from_table
from ..losses import policy_loss
from ..models import load_model, resolve_model
from ..token_results import token_columns
from ..trainer import Trainer
from ..types import RolloutId, SamplingSettings, Segment, Trajectory
from ..weights import MemoryWeightStore
from . import bench_model, machine

_PROMPT_TOKENS = 48


def run(quick: bool = False) -> dict[str, Any]:
    """Measure on SmolLM2's shape and on the built-in model; `ratio` is the lower of the two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        large, name = bench_model()
        sides = {
            name: _compare(large, num_groups=1 if quick else 2, repeats=1 if quick else 3),
            "builtin": _compare(
                load_model(resolve_model("builtin")), num_groups=16, repeats=3 if quick else 15
            ),
        }
    finally:
        torch.set_num_threads(threads)
    return {
        "name": "trainer",
        "ratio": min(side["ratio"] for side in sides.values()),
        "correction_share": sides[name]["correction_share"],
        "sides": sides,
        "quick": quick,
        "machine": machine(),
    }


def _compare(model: Any, *, num_groups: int, repeats: int) -> dict[str, float]:
    recipe = recipe_from_table(
        {"groups_per_step": num_groups, "steps": 1000, "trainer": {"lr": 1e-9}, "publish_every": 1}
    )
    ours = Trainer(model, recipe, MemoryWeightStore(keep=1))
    ours.publish = lambda: 0  # type: ignore[method-assign]  # the bare loop publishes nothing
    groups = _groups(num_groups, recipe.group_size, int(model.config.vocab_size))
    batches = make_batches(
        [t for g in groups for t in g.trajectories],
        [a for g in groups for a in g.advantages],
        [g.id for g in groups for _ in g.trajectories],
        aggregation="batch",
        token_budget=recipe.trainer.token_budget,
    )
    bare = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    ours_s, bare_s, cpu_s = [], [], 0.0
    for repeat in range(repeats + 1):
        start, cpu = time.perf_counter(), time.process_time()
        ours.train([groups])
        taken, used = time.perf_counter() - start, time.process_time() - cpu
        bare_taken = _timed(lambda: _bare_step(model, bare, batches))
        if repeat:  # the first pair warms up
            ours_s.append(taken)
            bare_s.append(bare_taken)
            cpu_s += used
    tokens = batches[0].num_sampled_tokens
    return {
        "trainer_tokens_per_s": tokens / statistics.median(ours_s),
        "bare_tokens_per_s": tokens / statistics.median(bare_s),
        "ratio": statistics.median(b / o for b, o in zip(bare_s, ours_s, strict=True)),
        "correction_share": _correction_cpu_s(ours, batches) * repeats / cpu_s,
        "padded_tokens": sum(b.token_ids.numel() for b in batches),
        "sampled_tokens": tokens,
    }


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _bare_step(model: Any, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    for batch in batches:
        logits = model(input_ids=batch.token_ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
        terms = logprobs[batch.loss_mask[:, 1:]] * batch.advantages[batch.loss_mask]
        torch.autograd.backward([-terms.sum() / batch.num_sampled_tokens])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _groups(num_groups: int, size: int, vocab_size: int) -> list[TrainingGroup]:
    """Prompts of 48 tokens and answers of 16 to 48 of them, random ids."""
    rng = np.random.default_rng(0)
    groups = []
    for g in range(num_groups):
        members = []
        for i in range(size):
            length = int(rng.integers(16, 49))
            ids = rng.integers(0, vocab_size, _PROMPT_TOKENS + length, dtype=np.int32)
            drawn = Segment.drawn(
                ids[_PROMPT_TOKENS:],
                np.full(length, -1.0),
                np.full(length, 100.0),  # a radius so wide that no token is masked
                np.zeros(length, dtype=np.int32),
            )
            members.append(
                Trajectory(
                    id=RolloutId(0, g, i),
                    task="bench",
                    problem=g,
                    segments=(Segment.join([Segment.context(ids[:_PROMPT_TOKENS]), drawn]),),
                    turns=(),
                    sampling=SamplingSettings(),
                    status="ok",
                    dispatch_version=0,
                    outcome=float(i % 2),
                    reward=float(i % 2),
                )
            )
        advantages = tuple(1.0 if i % 2 else -1.0 for i in range(size))
        groups.append(TrainingGroup(g, 0, tuple(members), advantages))
    return groups


def _correction_cpu_s(trainer: Trainer, batches: list[Batch], repeats: int = 5) -> float:
    """CPU time of the corrected loss, forward and backward, over given policy log-probs."""
    start = time.process_time()
    for _ in range(repeats):
        for batch in batches:
            policy = batch.behavior_logprobs[batch.loss_mask].requires_grad_()
            columns = token_columns(batch, policy, None)
            loss = policy_loss(columns, trainer.correction, denominators=batch.denominators).loss
            torch.autograd.backward([loss])
    return (time.process_time() - start) / repeats
