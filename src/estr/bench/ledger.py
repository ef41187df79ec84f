"""What the ledger costs: beside the trainer, for each token, and on disk.

`ratio` is the CPU time of everything that the ledger needs (the columns that the trainer hands
back, and the writing) over that of the trainer's steps on the same groups, one thread each, for the
built-in model, the smallest and so the worst case. `tokens_per_s`: tokens, read and written, from
Trajectory objects to renamed files, at two sizes of step. Steps are written in bursts, as
`estr.ledger.LedgerWriter` does, and no two steps hold the same tokens.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import trainer as trainer_module
from ..buffer import StepResult, TrainingGroup
from ..config import recipe_from_table
from ..ledger.parts import write_steps
from ..ledger.schema import StepRecord, described
from ..ledger.writer import BURST_TOKENS
from ..models import load_model, resolve_model
from ..trainer import Trainer
from ..types import Consumption, RolloutId, SamplingSettings, Segment, Trajectory
from ..weights import MemoryWeightStore
from . import machine, timed_calls

_GROUPS, _SIZE = 16, 8
_COLUMNS = "consumptions_of"


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; `ratio` is the ledger's CPU time over the trainer's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        beside = _beside_the_trainer(bursts=1 if quick else 5)
    finally:
        torch.set_num_threads(threads)
    sizes = {"small_steps": 64, "large_steps": 256 if quick else 2048}
    return {
        "name": "ledger",
        "ratio": (beside["columns_cpu_s"] + beside["writing_cpu_s"]) / beside["trainer_cpu_s"],
        "sides": {"beside_the_trainer": beside}
        | {name: _alone(length, bursts=2 if quick else 8) for name, length in sizes.items()},
        "quick": quick,
        "machine": machine(),
    }


def _beside_the_trainer(bursts: int) -> dict[str, float]:
    """CPU seconds of a burst of steps, medians, on 128 trajectories of about 45 tokens, 25 of them
    drawn, as in a step of the calculator."""
    recipe = recipe_from_table({"groups_per_step": _GROUPS, "trainer": {"lr": 1e-9}})
    trainer = Trainer(load_model(resolve_model("builtin")), recipe, MemoryWeightStore(keep=1))
    rng = np.random.default_rng(0)
    steps = list(_until_burst(lambda: _groups(rng, prompt=20, longest=40, vocab_size=24)))
    correction = described(recipe.correction)
    seconds: dict[str, list[float]] = {"trainer": [], "columns": [], "writing": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        timed_calls((trainer_module, _COLUMNS)) as spent_s,
    ):
        for number in range(bursts + 1):
            spent_s[_COLUMNS] = 0.0
            start = time.process_time()
            results = [trainer.train([groups])[0] for groups in steps]
            trained = time.process_time()
            write_steps(
                Path(folder),
                [_record(g, r, correction) for g, r in zip(steps, results, strict=True)],
            )
            if number:  # the first one warms up
                seconds["writing"].append(time.process_time() - trained)
                seconds["columns"].append(spent_s[_COLUMNS])
                seconds["trainer"].append(trained - start - spent_s[_COLUMNS])
    medians = {f"{name}_cpu_s": statistics.median(values) for name, values in seconds.items()}
    num_tokens = sum(map(_num_tokens, steps))
    return {
        **medians,
        "tokens_of_a_step": num_tokens / len(steps),
        "steps": len(steps),
        "bursts": bursts,
    }


def _until_burst(make: Callable[[], list[TrainingGroup]]) -> Iterator[list[TrainingGroup]]:
    """The groups of steps, as many as make a burst."""
    num_tokens = 0
    while num_tokens < BURST_TOKENS:
        groups = make()
        num_tokens += _num_tokens(groups)
        yield groups


def _members(groups: Sequence[TrainingGroup]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


def _num_tokens(groups: Sequence[TrainingGroup]) -> int:
    return sum(t.num_tokens for t in _members(groups))


def _record(groups: Sequence[TrainingGroup], result: StepResult, correction: str) -> StepRecord:
    return StepRecord(
        result.step,
        result.target_version,
        result.version,
        _members(groups),
        result.consumptions,
        correction,
    )


def _alone(longest: int, bursts: int) -> dict[str, float]:
    """Writing alone: tokens/s of one core and bytes on disk for each token."""
    rng = np.random.default_rng(0)
    correction = described([{"name": "estr"}])

    def groups() -> list[TrainingGroup]:
        return _groups(rng, prompt=longest // 4, longest=longest, vocab_size=50_000)

    spent_s, num_tokens, num_sampled, size, step = 0.0, 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for burst in range(bursts + 1):
            records = []
            for members in map(_members, _until_burst(groups)):
                step += 1
                made = [_consumption(t, 1.0 if t.reward else -1.0, rng) for t in members]
                records.append(StepRecord(step, step - 1, step, members, made, correction))
            start = time.process_time()
            paths = write_steps(Path(folder), records)
            if burst:  # the first one warms up
                spent_s += time.process_time() - start
                size += sum(path.stat().st_size for path in paths)
                num_tokens += sum(t.num_tokens for r in records for t in r.trajectories)
                num_sampled += sum(t.num_sampled_tokens for r in records for t in r.trajectories)
    return {
        "tokens_per_s": num_tokens / spent_s,
        "sampled_tokens_per_s": num_sampled / spent_s,
        "bytes_a_token": size / num_tokens,
        "bytes_a_sampled_token": size / num_sampled,
    }


def _consumption(trajectory: Trajectory, advantage: float, rng: np.random.Generator) -> Consumption:
    (segment,) = trajectory.segments
    noise = rng.normal(0, 0.1, len(segment)).astype(np.float32)
    kept = segment.sampled & (rng.random(len(segment)) < 0.99)
    return Consumption(advantage, segment.behavior_logprobs + noise, kept, kept & (noise > 0.2))


def _groups(
    rng: np.random.Generator, *, prompt: int, longest: int, vocab_size: int
) -> list[TrainingGroup]:
    """Prompts and answers of a quarter to the whole of `longest` tokens. Ids are drawn like words
    (Zipf), log-probs and entropies have all their digits, so nothing here compresses by chance."""
    groups = []
    for g in range(_GROUPS):
        members = []
        for i in range(_SIZE):
            length = int(rng.integers(longest // 4, longest + 1))
            entropies = rng.gamma(0.5, 1.0, length).astype(np.float32)
            ids = (rng.zipf(1.3, prompt + length) % vocab_size).astype(np.int32)
            drawn = Segment.drawn(
                ids[prompt:],
                -rng.exponential(1.0, length).astype(np.float32) * entropies,
                entropies,
                np.zeros(length, dtype=np.int32),
                gini=rng.random(length, dtype=np.float32),
                finish_reason="stop",
            )
            context = Segment.context(ids[:prompt])
            members.append(
                Trajectory(
                    id=RolloutId(0, g, i),
                    task="bench",
                    problem=g,
                    segments=(Segment.join([context, drawn]),),
                    turns=(),
                    sampling=SamplingSettings(),
                    status="ok",
                    dispatch_version=0,
                    outcome=float(i % 2),
                    reward=float(i % 2),
                )
            )
        advantages = tuple(1.0 if i % 2 else -1.0 for i in range(_SIZE))
        groups.append(TrainingGroup(g, 0, tuple(members), advantages))
    return groups
