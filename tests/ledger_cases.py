"""Small trajectories with numbers that can be followed by hand, and ledgers made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from estr.ledger.parts import write_steps
from estr.ledger.schema import StepRecord, described
from estr.types import Consumption, RolloutId, SamplingSettings, Segment, Trajectory, Turn

PROMPT = (7, 8)


def trajectory(
    rid: RolloutId,
    *,
    logprobs: Sequence[float],
    entropies: Sequence[float],
    versions: Sequence[int],
    outcome: float | None = 1.0,
    gini: Sequence[float] | None = None,
    token_ids: Sequence[int] | None = None,
    **fields: Any,
) -> Trajectory:
    """A prompt of two tokens and one turn."""
    ids = list(range(1, len(logprobs) + 1)) if token_ids is None else token_ids
    drawn = Segment.drawn(ids, logprobs, entropies, versions, gini=gini, finish_reason="stop")
    segment = Segment.join([Segment.context(PROMPT), drawn])
    given: dict[str, Any] = {
        "task": "coin",
        "problem": rid.group,
        "segments": (segment,),
        "turns": (Turn(0, len(PROMPT), len(segment), "stop"),),
        "sampling": SamplingSettings(stop_token_ids=(9,)),
        "status": "ok",
        "dispatch_version": min(versions, default=0),
        "outcome": outcome,
        "reward": outcome,
        "rewards": {} if outcome is None else {"right": outcome},
        "worker": "engine",
        "times_s": {"start": 1.0, "end": 2.5},
    }
    return Trajectory(id=rid, **{**given, **fields})


def consumption(
    of: Trajectory,
    log_ratios: Sequence[float],
    *,
    advantage: float | None = 1.0,
    kept: Sequence[bool] | None = None,
    clipped: Sequence[bool] | None = None,
    proximal: Sequence[float] | None = None,
) -> Consumption:
    """The policy's log-probs are the behavior's plus these log-ratios."""
    sampled = np.concatenate([s.sampled for s in of.segments])
    behavior = np.concatenate([s.behavior_logprobs for s in of.segments])

    def column(values: Sequence[Any], fill: Any, dtype: Any) -> Any:
        full = np.full(len(sampled), fill, dtype=dtype)
        if advantage is not None:
            full[sampled] = values
        return full

    drawn = int(sampled.sum())
    return Consumption(
        advantage,
        column(behavior[sampled] + np.float32(log_ratios), math.nan, np.float32),
        column([True] * drawn if kept is None else kept, False, np.bool_),
        column([False] * drawn if clipped is None else clipped, False, np.bool_),
        None if proximal is None else column(proximal, math.nan, np.float32),
    )


def record(step: int, pairs: Sequence[tuple[Trajectory, Consumption]], **fields: Any) -> StepRecord:
    """One optimizer step, from version step - 1 to version step."""
    trajectories, consumptions = zip(*pairs, strict=True)
    given: dict[str, Any] = {
        "target_version": step - 1,
        "version": step,
        "correction": described([{"name": "estr"}]),
        **fields,
    }
    return StepRecord(step, trajectories=trajectories, consumptions=consumptions, **given)


def random_record(
    step: int, *, num_groups: int = 2, size: int = 4, longest: int = 8, seed: int = 0, **fields: Any
) -> StepRecord:
    """A step of random numbers; kept and clipped as `estr` with its defaults judges them."""
    rng = np.random.default_rng([seed, step])
    pairs = []
    for group in range(num_groups):
        for index in range(size):
            length = int(rng.integers(2, longest + 1))
            entropies = rng.gamma(0.5, 1.0, length).astype(np.float32)
            own = trajectory(
                RolloutId(seed, step * num_groups + group, index),
                logprobs=-rng.exponential(1.0, length) * entropies,
                entropies=entropies,
                gini=rng.random(length),
                versions=np.sort(rng.integers(max(0, step - 3), step, length)),
                outcome=float(index % 2),
            )
            log_ratios = (rng.normal(0, 0.5, length) * np.sqrt(entropies)).astype(np.float32)
            advantage = 1.0 if index % 2 else -1.0
            kept = log_ratios**2 <= entropies + np.float32(0.01)
            clipped = kept & (log_ratios * advantage > math.log(1.2))
            pairs.append(
                (own, consumption(own, log_ratios, advantage=advantage, kept=kept, clipped=clipped))
            )
    return record(step, pairs, **fields)


def write_step(run_folder: Path, one: StepRecord) -> list[Path]:
    """A part of its own for one step."""
    return write_steps(run_folder, [one])


def write_random_ledger(run_folder: Path, steps: int = 3, **fields: Any) -> list[StepRecord]:
    records = [random_record(step, **fields) for step in range(1, steps + 1)]
    for one in records:
        write_step(run_folder, one)
    return records
