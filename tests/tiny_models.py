"""Random causal LMs of several families, small enough to build in a test."""

from __future__ import annotations

import torch
import transformers
from torch import nn

VOCAB_SIZE = 40
CONTEXT = 48

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # far from uniform, so that a wrong context is seen at once
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_GPT2_SIZES = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", _SIZES),
    "llama-grouped": ("Llama", _SIZES | _GROUPED),
    "llama-tied": ("Llama", _SIZES | _GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _SIZES | _GROUPED),
    "gpt-neox": ("GPTNeoX", _SIZES),
    "gpt2": ("GPT2", _GPT2_SIZES),
    "phi": ("Phi", _SIZES),
    "mistral-window": ("Mistral", _SIZES | _GROUPED | {"sliding_window": 24}),
    "cohere-scaled": ("Cohere", _SIZES | _GROUPED),
    "gemma2-capped": (
        "Gemma2",
        _SIZES | _GROUPED | {"head_dim": 16, "sliding_window": 32, "pad_token_id": 0},
    ),
    "mixtral": (
        "Mixtral",
        _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}),
}


def tiny_model(family: str = "llama-grouped", *, seed: int = 0, **changes: object) -> nn.Module:
    """A model with random weights; the same family and seed give the same weights."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
    torch.manual_seed(seed)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{head}")(config).eval()
