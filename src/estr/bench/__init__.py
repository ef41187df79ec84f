"""Measurements that `estr bench NAME` runs: each module has run(quick) -> a dict with `ratio`, both
sides and the machine."""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

from ..errors import DataError

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
