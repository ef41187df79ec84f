"""Measurements that `estr bench NAME` runs: each module has run(quick) -> a dict with `ratio`, both
sides and the machine."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError

_log = logging.getLogger(__name__)


def bench_model() -> tuple[Any, str]:
    """(model, name): SmolLM2-135M-Instruct in float32, or random weights of its shape where it
    cannot be had."""
    from ..models import SMOLLM2, load_model, resolve_model

    try:
        return load_model(resolve_model(SMOLLM2)), SMOLLM2
    except DataError as error:
        _log.info("random weights instead: %s", error)
    import torch
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


def peer_python(folder: Path, package: str) -> Path:
    """The interpreter of a package's own environment, as conformance/install.py makes it. Raises
    ConfigError where there is none."""
    python = folder / package / "bin" / "python"
    if not python.exists():
        raise ConfigError(
            f"{python} is not there: make it with python conformance/install.py {package}"
        )
    return python


def machine() -> str:
    """The machine that a figure belongs to: processor, cores, torch, system."""
    import torch

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if "model name" in line]
        name = names[0] if names else name
    except OSError:
        _log.debug("no /proc/cpuinfo here")
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, {platform.system()}"


@contextmanager
def timed_calls(*places: tuple[Any, str]) -> Iterator[dict[str, float]]:
    """CPU seconds spent in each of these functions while the context lasts, by name."""
    spent_s = dict.fromkeys((name for _, name in places), 0.0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            spent_s[name] += time.process_time() - start
            return result

        return wrapper

    originals = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, timed(name, original))
        yield spent_s
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
