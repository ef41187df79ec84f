"""A small Llama-style decoder as a function of its weights.

In a model of 0.1M parameters a pass of transformers is nearly all overhead, and it holds one
version of the weights. Here a pass takes flat tokens, each of some row at some position, and each
row may be served by another version:

    tokens, rows, positions, versions --> extend --> logits of every token, keys and values kept

The tests hold it to transformers' own logits. Trained is the transformers model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ConfigError
from .arithmetic import Arithmetic, activation_dtype, as_computed


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; query, key and value stacked, gate and up stacked."""

    norm_in: Tensor
    qkv: Tensor
    out: Tensor
    norm_mid: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One version of the weights, as a sampler of some arithmetic has them."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


class Cache:
    """Keys and values [rows, capacity, heads, head size] of every layer."""

    def __init__(self, decoder: Decoder, num_rows: int, capacity: int, dtype: torch.dtype) -> None:
        shape = (num_rows, capacity, decoder.num_heads, decoder.head_size)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(decoder.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(decoder.num_layers)]

    def select(self, rows: Tensor) -> None:
        """Keep these rows only, in this order."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one pass reads: flat tokens [n] with their rows, positions and places in a row's chunk,
    sorted so that the tokens of one version are neighbors; parts: (weights, their slice)."""

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    offsets: Tensor
    parts: Sequence[tuple[Weights, slice]]


class Decoder:
    """The shape of a transformers Llama without biases, as many key heads as heads.

    Raises ConfigError for any other configuration.
    """

    def __init__(self, config: Any) -> None:
        wrong = {
            "model_type": config.model_type != "llama",
            "num_key_value_heads": config.num_key_value_heads != config.num_attention_heads,
            "attention_bias": bool(config.attention_bias),
            "mlp_bias": bool(config.mlp_bias),
            "hidden_act": config.hidden_act != "silu",
            "rope_parameters": config.rope_parameters["rope_type"] != "default",
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(
                    f"the laboratory's decoder has no {name} = {getattr(config, name)!r}; "
                    'take the built-in model or a warm start (`model = "warmstart"`)'
                )
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.max_positions: int = config.max_position_embeddings
        self._eps: float = config.rms_norm_eps
        theta: float = config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        angles = torch.arange(self.max_positions)[:, None] * theta**-exponents
        # transformers rotates (-second half, first half); the sign goes into the sine here.
        self._rotation = torch.stack(
            [torch.cat([angles, angles], 1).cos(), torch.cat([-angles, angles], 1).sin()]
        )

    def prepare(self, state: Mapping[str, Tensor], arithmetic: Arithmetic) -> Weights:
        """The weights of a transformers state dict in this arithmetic."""
        dtype = activation_dtype(arithmetic)

        def linear(*names: str) -> Tensor:
            return torch.cat([as_computed(state[f"{name}.weight"], arithmetic) for name in names])

        def vector(name: str) -> Tensor:
            return state[f"{name}.weight"].detach().to(dtype, copy=True)

        layers = []
        for i in range(self.num_layers):
            at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            layers.append(
                Layer(
                    norm_in=vector(f"model.layers.{i}.input_layernorm"),
                    qkv=linear(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
                    out=linear(f"{at}.o_proj"),
                    norm_mid=vector(f"model.layers.{i}.post_attention_layernorm"),
                    gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    down=linear(f"{mlp}.down_proj"),
                )
            )
        tied = "lm_head.weight" not in state
        head = linear("model.embed_tokens" if tied else "lm_head")
        return Weights(vector("model.embed_tokens"), tuple(layers), vector("model.norm"), head)

    @torch.inference_mode()
    def extend(self, cache: Cache, step: Pass, num_rows: int) -> Tensor:
        """Logits [n, vocabulary] of what follows each token. Keys and values enter the cache; a
        token attends to what its row holds up to its own position. num_rows: the pass speaks of the
        first so many rows of the cache."""
        hidden = self._each(step, step.tokens, lambda w, tokens: w.embedding[tokens])
        rotation = self._rotation[:, step.positions, None].to(hidden.dtype)
        attention = _Attention(step, num_rows)
        for i in range(self.num_layers):
            hidden = self._layer(i, hidden, rotation, cache, step, attention)
        return self._each(step, hidden, lambda w, x: F.linear(self._norm(x, w.norm), w.head))

    def _layer(
        self,
        i: int,
        hidden: Tensor,
        rotation: Tensor,
        cache: Cache,
        step: Pass,
        attention: _Attention,
    ) -> Tensor:
        def project(weights: Weights, x: Tensor) -> Tensor:
            layer = weights.layers[i]
            return F.linear(self._norm(x, layer.norm_in), layer.qkv)

        qkv = self._each(step, hidden, project)
        query, key, value = qkv.view(len(qkv), 3, self.num_heads, self.head_size).unbind(1)
        cos, sin = rotation
        query, key = (x * cos + x.roll(self.head_size // 2, -1) * sin for x in (query, key))
        cache.keys[i][step.rows, step.positions] = key
        cache.values[i][step.rows, step.positions] = value
        read = attention(query, cache.keys[i], cache.values[i])
        hidden = hidden + self._each(step, read, lambda w, x: F.linear(x, w.layers[i].out))
        return hidden + self._each(step, hidden, lambda w, x: self._mlp(x, w.layers[i]))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._eps)

    def _mlp(self, hidden: Tensor, layer: Layer) -> Tensor:
        gate, up = F.linear(self._norm(hidden, layer.norm_mid), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    @staticmethod
    def _each(step: Pass, x: Tensor, function: Callable[[Weights, Tensor], Tensor]) -> Tensor:
        """`function` of every version's weights and its tokens' rows of x, joined."""
        if len(step.parts) == 1:
            return function(step.parts[0][0], x)
        return torch.cat([function(weights, x[part]) for weights, part in step.parts])


class _Attention:
    """Causal attention of flat queries to their rows' keys."""

    def __init__(self, step: Pass, num_rows: int) -> None:
        self._rows, self._offsets = step.rows, step.offsets
        self._num_rows = num_rows
        self._chunk = int(step.offsets.max()) + 1
        self._length = int(step.positions.max()) + 1
        last = torch.zeros(num_rows, self._chunk, dtype=torch.int64)
        last[step.rows, step.offsets] = step.positions
        self._mask = torch.arange(self._length) <= last[:, None, :, None]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query: [n, heads, size]. keys, values: [rows, capacity, heads, size]. -> [n, width]"""
        n, length = self._num_rows, self._length
        padded = query.new_zeros(n, self._chunk, *query.shape[1:])
        padded[self._rows, self._offsets] = query
        read = F.scaled_dot_product_attention(
            padded.transpose(1, 2),
            keys[:n, :length].transpose(1, 2),
            values[:n, :length].transpose(1, 2),
            attn_mask=self._mask,
        )
        return read.transpose(1, 2)[self._rows, self._offsets].flatten(1)


def make_pass(
    tokens: Tensor,
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    versions: Tensor,
    *,
    weights_of: Callable[[int], Weights],
) -> tuple[Pass, Tensor]:
    """(the pass, order): flat tensors [n] of one length; entry k of the pass is entry order[k]."""
    distinct, counts = torch.unique(versions, return_counts=True)
    if len(distinct) == 1:
        order = torch.arange(len(tokens))
    else:
        order = versions.argsort(stable=True)
        tokens, rows, positions, offsets = (x[order] for x in (tokens, rows, positions, offsets))
    borders = [0, *counts.cumsum(0).tolist()]
    parts = [
        (weights_of(version), slice(begin, end))
        for version, (begin, end) in zip(distinct.tolist(), pairwise(borders), strict=True)
    ]
    return Pass(tokens, rows, positions, offsets, parts), order
