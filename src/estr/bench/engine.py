"""The local engine against transformers `generate`, and what recording costs.

Both sides run the same float32 model on one thread with the same maximum batch, sample at
temperature 1 and share no prefixes; a request's output length is imposed. `generate` gets its best
form: static batches in arrival order, prompts of one length (no padding), each batch as long as its
longest request. Only requested tokens count as useful.

    heavy   lengths between 1/32 and 1 of the maximum, their mean a quarter of it
    equal   the same total, every request alike: nothing to gain from continuous batching
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine import Request
from ..engines import sampler
from ..engines.local import LocalEngine
from ..errors import DataError
from ..models import SMOLLM2, load_model, resolve_model
from ..types import Int32Array, RolloutId, SamplingSettings

_TAIL_INDEX = 0.63
_PROMPT_TOKENS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival: prompts [n, 32] and how many tokens each must draw."""

    max_batch: int
    prompts: Int32Array
    lengths: list[int]

    @property
    def num_useful_tokens(self) -> int:
        return sum(self.lengths)


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
    heavy-tailed lengths, `ratio_equal` the same with equal ones; `recording_share` is the part of
    the engine's CPU time that goes into entropy, gini and the columns kept of each token.

    Rates are of wall time; `cpu_ratio` and `cpu_ratio_equal` compare CPU times, for a machine that
    does something else as well.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, name = _model()
        loads = make_loads(int(model.config.vocab_size), quick)
        sides: dict[str, dict[str, float]] = {}
        recorded = [0.0]
        engine = LocalEngine(model, max_batch=loads["heavy"].max_batch, prefix_bytes=0)
        for kind, load in loads.items():
            with _timed_recording(recorded):
                sides[f"engine_{kind}"] = _timed(_run_engine, engine, load)
            sides[f"generate_{kind}"] = _timed(_run_generate, model, load)
    finally:
        torch.set_num_threads(threads)
    engine_cpu_s = sides["engine_heavy"]["cpu_s"] + sides["engine_equal"]["cpu_s"]
    return {
        "name": "engine",
        "ratio": _ratio(sides, "tokens_per_s", "heavy"),
        "ratio_equal": _ratio(sides, "tokens_per_s", "equal"),
        "cpu_ratio": 1 / _ratio(sides, "cpu_s", "heavy"),
        "cpu_ratio_equal": 1 / _ratio(sides, "cpu_s", "equal"),
        "recording_share": recorded[0] / engine_cpu_s,
        "sides": sides,
        "model": name,
        "quick": quick,
        "machine": _machine(),
    }


def _ratio(sides: dict[str, dict[str, float]], key: str, kind: str) -> float:
    return sides[f"engine_{kind}"][key] / sides[f"generate_{kind}"][key]


def _timed(work: Callable[[Any, Load], None], subject: Any, load: Load) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work(subject, load)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {"tokens_per_s": load.num_useful_tokens / wall_s, "wall_s": wall_s, "cpu_s": cpu_s}


def _run_engine(engine: LocalEngine, load: Load) -> None:
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


@contextmanager
def _timed_recording(total_s: list[float]) -> Iterator[None]:
    """Add the CPU time spent on entropy, gini and the kept columns to total_s[0]."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            total_s[0] += time.process_time() - start
            return result

        return wrapper

    places: list[tuple[Any, str]] = [(sampler, "entropy_and_gini"), (LocalEngine, "_record")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, timed(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _model() -> tuple[Any, str]:
    """SmolLM2-135M-Instruct, or random weights of its shape where it cannot be had."""
    try:
        return load_model(resolve_model(SMOLLM2)), SMOLLM2
    except DataError as error:
        _log.info("random weights instead: %s", error)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), "random weights of the shape of SmolLM2-135M"


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if "model name" in line]
        cpu = names[0] if names else cpu
    except OSError:
        pass
    return f"{cpu}, one thread, torch {torch.__version__}, {platform.system()}"
