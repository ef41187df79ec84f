"""Times every shipped query on a synthetic ledger.

python tools/time_ledger_queries.py FOLDER --tokens 100000000

Makes the ledger in FOLDER unless one is there: steps of 100,000 tokens in trajectories of 200, a
quarter of them read, the rest drawn at lags 0 to 4 (eight steps are drawn, and then repeat). Prints
one JSON object: seconds of wall time and of CPU time, all threads together. --make only makes the
ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from estr.ledger import open_ledger, shipped_queries
from estr.ledger.parts import Part, write_tables
from estr.ledger.schema import TOKENS, TRAJECTORIES, described

LENGTH, PROMPT, PER_STEP, GROUP_SIZE = 200, 50, 500, 10


def draws(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The random columns of a step, and `lag`."""
    total = LENGTH * PER_STEP
    entropies = rng.gamma(0.5, 1.0, total).astype(np.float32)
    behavior = -rng.exponential(1.0, total).astype(np.float32) * entropies
    noise = rng.normal(0, 0.3, total).astype(np.float32) * np.sqrt(entropies)
    kept = noise**2 <= entropies + 0.01
    oldest = np.repeat(rng.integers(0, 5, PER_STEP), LENGTH)
    return {
        "token_ids": (rng.zipf(1.3, total) % 50_000).astype(np.int32),
        "lag": oldest * (np.arange(total) % LENGTH < LENGTH // 2),
        "behavior_logprobs": behavior,
        "behavior_entropies": entropies,
        "behavior_gini": rng.random(total, dtype=np.float32),
        "policy_logprobs": behavior + noise,
        "kept": kept,
        "clipped": kept & (noise > 0.18),
    }


def tokens_of_a_step(step: int, drawn: dict[str, np.ndarray]) -> pa.Table:
    drawn = dict(drawn)
    total = LENGTH * PER_STEP
    position = np.tile(np.arange(LENGTH, dtype=np.int32), PER_STEP)
    read = position < PROMPT
    columns = {
        "step": np.full(total, step, np.int32),
        "trajectory": np.repeat(np.arange(PER_STEP, dtype=np.int32), LENGTH),
        "segment": np.zeros(total, np.int32),
        "position": position,
        "token_ids": drawn.pop("token_ids"),
        "sampled": ~read,
    }
    drawn["versions"] = np.maximum(step - 1 - drawn.pop("lag"), 0).astype(np.int32)
    arrays = {name: pa.array(values) for name, values in columns.items()}
    arrays |= {name: pa.array(values, mask=read) for name, values in drawn.items()}
    nothing = {f.name: pa.nulls(total, f.type) for f in TOKENS if f.name not in arrays}
    return pa.table(arrays | nothing, schema=TOKENS)


def trajectories_of_a_step(step: int) -> pa.Table:
    rows = [
        {
            "step": step,
            "trajectory": i,
            "target_version": step - 1,
            "version": step,
            "run": 0,
            "group_id": step * PER_STEP // GROUP_SIZE + i // GROUP_SIZE,
            "index": i % GROUP_SIZE,
            "outcome": float(i % 2),
            "reward": float(i % 2),
            "advantage": 1.0 if i % 2 else -1.0,
            "correction": described([{"name": "estr"}]),
            "aggregation": "batch",
        }
        for i in range(PER_STEP)
    ]
    return pa.Table.from_pylist(rows, schema=TRAJECTORIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--make", action="store_true")
    options = parser.parse_args()
    drawn = [draws(np.random.default_rng(seed)) for seed in range(8)]
    if not (options.folder / "ledger").exists():
        for step in range(1, options.tokens // (LENGTH * PER_STEP) + 1):
            tables = {
                "tokens": tokens_of_a_step(step, drawn[step % len(drawn)]),
                "trajectories": trajectories_of_a_step(step),
            }
            write_tables(options.folder, Part(step, step), tables)
    if options.make:
        return
    spent: dict[str, tuple[float, float]] = {}
    with timed("open", spent):
        ledger = open_ledger(options.folder, threads=options.threads)
    ((tokens,),) = ledger.query("select count(*) from tokens").rows
    for name, query in shipped_queries().items():
        with timed(name, spent):
            ledger.query(query.sql)
    figures = {
        "tokens": tokens,
        "cores": os.cpu_count(),
        "threads": options.threads,
        "wall_s": {name: round(wall_s, 2) for name, (wall_s, _) in spent.items()},
        "cpu_s": {name: round(cpu_s, 2) for name, (_, cpu_s) in spent.items()},
    }
    print(json.dumps(figures))


@contextmanager
def timed(name: str, spent: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Note wall and CPU seconds of what is done in the context."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    spent[name] = (time.perf_counter() - wall_s, time.process_time() - cpu_s)


if __name__ == "__main__":
    main()
