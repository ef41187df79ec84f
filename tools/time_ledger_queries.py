"""Times every shipped query on a synthetic ledger.

python tools/time_ledger_queries.py FOLDER --tokens 100000000

Makes the ledger in FOLDER unless one is there: steps of 100,000 tokens in trajectories of 200, a
quarter of them read, the rest drawn at lags 0 to 4. Prints one JSON object; seconds of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from estr.ledger import open_ledger, shipped_queries
from estr.ledger.parts import write_tables
from estr.ledger.schema import TOKENS, TRAJECTORIES, described

LENGTH, PROMPT, PER_STEP, GROUP_SIZE = 200, 50, 500, 10


def tokens_of_a_step(step: int, rng: np.random.Generator) -> pa.Table:
    total = LENGTH * PER_STEP
    position = np.tile(np.arange(LENGTH, dtype=np.int32), PER_STEP)
    read = position < PROMPT
    entropies = rng.gamma(0.5, 1.0, total).astype(np.float32)
    behavior = -rng.exponential(1.0, total).astype(np.float32) * entropies
    noise = rng.normal(0, 0.3, total).astype(np.float32) * np.sqrt(entropies)
    kept = noise**2 <= entropies + 0.01
    oldest = rng.integers(0, 5, PER_STEP)
    lag = np.repeat(oldest, LENGTH) * (position < LENGTH // 2)
    drawn = {
        "versions": np.maximum(step - 1 - lag, 0).astype(np.int32),
        "behavior_logprobs": behavior,
        "behavior_entropies": entropies,
        "behavior_gini": rng.random(total, dtype=np.float32),
        "policy_logprobs": behavior + noise,
        "kept": kept,
        "clipped": kept & (noise > 0.18),
    }
    columns = {
        "step": np.full(total, step, np.int32),
        "trajectory": np.repeat(np.arange(PER_STEP, dtype=np.int32), LENGTH),
        "segment": np.zeros(total, np.int32),
        "position": position,
        "token_ids": (rng.zipf(1.3, total) % 50_000).astype(np.int32),
        "sampled": ~read,
    }
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
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    if not (options.folder / "ledger").exists():
        for step in range(1, options.tokens // (LENGTH * PER_STEP) + 1):
            tables = {
                "tokens": tokens_of_a_step(step, rng),
                "trajectories": trajectories_of_a_step(step),
            }
            write_tables(options.folder, step, tables)
    start = time.perf_counter()
    ledger = open_ledger(options.folder)
    figures = {"open": time.perf_counter() - start}
    ((tokens,),) = ledger.query("select count(*) from tokens").rows
    for name, query in shipped_queries().items():
        start = time.perf_counter()
        ledger.query(query.sql)
        figures[name] = time.perf_counter() - start
    rounded = {name: round(seconds, 2) for name, seconds in figures.items()}
    print(json.dumps({"tokens": tokens, "cores": os.cpu_count(), "seconds": rounded}))


if __name__ == "__main__":
    main()
