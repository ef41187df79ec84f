"""The local engine against transformers `generate`.

Both sides run the same float32 model on one thread with the same maximum batch, sample at
temperature 1 and share no prefixes; a request's output length is imposed. `generate` gets its best
form: static batches in arrival order, prompts of one length (no padding), each batch as long as its
longest request. Only requested tokens count as useful.

    heavy   lengths between 1/32 and 1 of the maximum, their mean a quarter of it
    equal   the same total, every request alike: nothing to gain from continuous batching
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine import Request
from ..engines.local import LocalEngine
from ..types import Int32Array, RolloutId, SamplingSettings
from . import bench_model, machine

_TAIL_INDEX = 0.63
_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival: prompts [n, 32] and how many tokens each must draw."""

    max_batch: int
    prompts: Int32Array
    lengths: list[int]

    @property
    def num_useful_tokens(self) -> int:
        return sum(self.lengths)

    def batches(self) -> list[Load]:
        """The same requests, max_batch at a time."""
        starts = range(0, len(self.lengths), self.max_batch)
        return [
            Load(
                self.max_batch,
                self.prompts[i : i + self.max_batch],
                self.lengths[i : i + self.max_batch],
            )
            for i in starts
        ]


def heavy_tailed_lengths(count: int, longest: int) -> list[int]:
    """Quantiles of a Pareto law from longest / 32, cut at `longest`, in a fixed shuffled order;
    their mean is about a quarter of the longest."""
    quantiles = (np.arange(count) + 0.5) / count
    lengths = np.minimum(longest / 32 * (1 - quantiles) ** (-1 / _TAIL_INDEX), longest)
    return [round(float(n)) for n in np.random.default_rng(0).permutation(lengths)]


def make_loads(vocab_size: int, quick: bool) -> dict[str, Load]:
    """The two loads: 64 requests of 8 to 256 tokens, at most 16 at once (quick: 16, 2 to 64, 8)."""
    count, longest, max_batch = (16, 64, 8) if quick else (64, 256, 16)
    prompts = np.random.default_rng(1).integers(0, vocab_size, (count, _PROMPT_TOKENS), np.int32)
    heavy = heavy_tailed_lengths(count, longest)
    return {
        "heavy": Load(max_batch, prompts, heavy),
        "equal": Load(max_batch, prompts, [round(sum(heavy) / count)] * count),
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Measure. `ratio` is useful tokens per second of the engine over those of `generate` with
    heavy-tailed lengths, `ratio_equal` the same with equal ones.

    Rates are of wall time; `cpu_ratio` and `cpu_ratio_equal` compare CPU times, for a machine that
    does something else as well.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, name = bench_model()
        loads = make_loads(int(model.config.vocab_size), quick)
        sides: dict[str, dict[str, float]] = {}
        engine = LocalEngine(model, max_batch=loads["heavy"].max_batch, prefix_bytes=0)
        for kind, load in loads.items():
            # With equal lengths batches do not overlap, so the sides take turns, batch by batch,
            # and a machine whose speed wanders treats them alike.
            parts = load.batches() if kind == "equal" else [load]
            sides[f"engine_{kind}"], sides[f"generate_{kind}"] = {}, {}
            for part in parts:
                _add(sides[f"engine_{kind}"], _timed(serve, engine, part))
                _add(sides[f"generate_{kind}"], _timed(_run_generate, model, part))
        for side in sides.values():
            side["tokens_per_s"] = side["tokens"] / side["wall_s"]
    finally:
        torch.set_num_threads(threads)
    return {
        "name": "engine",
        "ratio": _ratio(sides, "tokens_per_s", "heavy"),
        "ratio_equal": _ratio(sides, "tokens_per_s", "equal"),
        "cpu_ratio": 1 / _ratio(sides, "cpu_s", "heavy"),
        "cpu_ratio_equal": 1 / _ratio(sides, "cpu_s", "equal"),
        "sides": sides,
        "model": name,
        "quick": quick,
        "machine": machine(),
    }


def _ratio(sides: dict[str, dict[str, float]], key: str, kind: str) -> float:
    return sides[f"engine_{kind}"][key] / sides[f"generate_{kind}"][key]


def _timed(work: Callable[[Any, Load], None], subject: Any, load: Load) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work(subject, load)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {"tokens": float(load.num_useful_tokens), "wall_s": wall_s, "cpu_s": cpu_s}


def _add(totals: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        totals[name] = totals.get(name, 0.0) + value


def serve(engine: LocalEngine, load: Load) -> None:
    """Draw every requested token of the load."""
    before = engine.statistics()["tokens"]
    for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
        engine.submit(
            Request(RolloutId(0, i, 0), prompt, SamplingSettings(), length, _PROMPT_TOKENS)
        )
    while engine.num_running or engine.num_waiting:
        engine.step()
    assert engine.statistics()["tokens"] - before == load.num_useful_tokens


def _run_generate(model: Any, load: Load) -> None:
    from transformers import GenerationConfig

    # Without end-of-text every row of a batch runs to max_new_tokens.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    for start in range(0, len(load.lengths), load.max_batch):
        rows = slice(start, start + load.max_batch)
        prompts = torch.from_numpy(load.prompts[rows]).long()
        longest = max(load.lengths[rows])
        whole = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=longest
        )
        assert whole.shape[1] == _PROMPT_TOKENS + longest
