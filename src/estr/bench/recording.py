"""What it costs the engine to record entropy, gini and version beside each token.

CPU time inside the recording over that of the whole engine, in the same run: `entropy_and_gini`,
which nothing but the record needs, and the keeping of all columns of a token (token and log-prob
included, so the figure is a little too high).
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..engines import sampler
from ..engines.local import LocalEngine
from . import bench_model, machine, timed_calls
from .engine import make_loads, serve


def run(quick: bool = False) -> dict[str, Any]:
    """Measure on requests of equal length; `ratio` is the recording's share of the engine's CPU
    time on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, name = bench_model()
        load = make_loads(int(model.config.vocab_size), quick)["equal"]
        engine = LocalEngine(model, max_batch=load.max_batch, prefix_bytes=0)
        with timed_calls((sampler, "entropy_and_gini"), (LocalEngine, "_record")) as spent_s:
            start = time.process_time()
            serve(engine, load)
            engine_s = time.process_time() - start
    finally:
        torch.set_num_threads(threads)
    return {
        "name": "recording",
        "ratio": sum(spent_s.values()) / engine_s,
        "sides": {"recording_cpu_s": spent_s, "engine_cpu_s": engine_s},
        "tokens": load.num_useful_tokens,
        "model": name,
        "quick": quick,
        "machine": machine(),
    }
