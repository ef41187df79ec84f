"""Keys and values of all running requests, in place.

            capacity (doubles)
    row 0   [k k k k k k k . . . . .]      one row for each running request, rows [0, n) in use;
    row 1   [k k k . . . . . . . . .]      a leaving row is filled by moving the last one into it
    row 2   [k k k k k . . . . . . .]
    ...     (rows double too)

Each layer holds keys and values [rows, heads, capacity, head size]. A transformers model reads and
writes them through `RowCache`, in one of two ways: `prefilling` (whole contexts, each from its
position 0, right-padded) and `decoding` (one token for each of the first n rows, each at its own
position). What lies beyond a row's length is finite garbage that a mask or causality hides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

KeyValues = tuple[Tensor, Tensor]


@dataclass(slots=True)
class _Plan:
    """What the next forward pass does with the cache; shared by all layers."""

    num_rows: int = 1
    capacity: int = 1
    rows: Tensor | None = None
    """The cache rows [batch] that the batch belongs to."""
    positions: Tensor | None = None
    """Decode: where each of them writes, [batch]. None: prefill."""
    length: int = 0
    """Decode: positions [0, length) are read."""


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer: keys and values [rows, heads, capacity, head size]."""

    keys: Tensor
    values: Tensor

    def __init__(self, plan: _Plan) -> None:
        super().__init__()
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._room(key_states)
        self.values = self._room(value_states)
        self.is_initialized = True

    def _room(self, states: Tensor) -> Tensor:
        # Zeros: what is masked out is still multiplied, and 0 * NaN would be NaN.
        shape = (self.plan.num_rows, states.shape[1], self.plan.capacity, states.shape[3])
        return states.new_zeros(shape)

    def grow(self) -> None:
        """Take the plan's size, keeping what is held."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            room = self._room(old)
            room[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeyValues:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        if plan.positions is None:
            length = key_states.shape[2]
            self.keys[plan.rows, :, :length] = key_states
            self.values[plan.rows, :, :length] = value_states
            return key_states, value_states
        n = key_states.shape[0]
        self.keys[plan.rows, :, plan.positions] = key_states[:, :, 0]
        self.values[plan.rows, :, plan.positions] = value_states[:, :, 0]
        return self.keys[:n, :, : plan.length], self.values[:n, :, : plan.length]

    def get_seq_length(self) -> int:
        return 0 if self.plan.positions is None else self.plan.length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The cache of all layers, handed to the model as past_key_values. Layers appear when the
    model first writes to them."""

    def __init__(self) -> None:
        self._plan = _Plan()
        super().__init__(layer_class_to_replicate=lambda: _RowLayer(self._plan))

    def reserve(self, num_rows: int, capacity: int) -> None:
        """Have room for at least num_rows rows of capacity positions."""
        plan = self._plan
        if num_rows <= plan.num_rows and capacity <= plan.capacity:
            return
        plan.num_rows = _doubled(plan.num_rows, num_rows)
        plan.capacity = _doubled(plan.capacity, capacity)
        for layer in self.layers:
            layer.grow()

    def clear(self) -> None:
        """Forget everything held, the memory included."""
        self.layers.clear()
        self._plan.num_rows = self._plan.capacity = 1

    def prefilling(self, rows: Tensor) -> RowCache:
        """The next pass writes whole contexts [len(rows), length] into these rows."""
        self._plan.rows, self._plan.positions = rows, None
        return self

    def decoding(self, positions: Tensor, length: int) -> RowCache:
        """The next pass writes one token of each of the first len(positions) rows at its position
        and reads positions [0, length)."""
        self._plan.rows = torch.arange(len(positions), device=positions.device)
        self._plan.positions, self._plan.length = positions, length
        return self

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy positions [0, length) of rows to other rows."""
        source, target = torch.tensor(sources), torch.tensor(targets)
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def read(self, row: int, length: int) -> list[KeyValues]:
        """A copy of positions [0, length) of a row, layer by layer."""
        return [
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            for layer in self.layers
        ]

    @torch.inference_mode()
    def write(self, row: int, held: Sequence[KeyValues]) -> None:
        """Put back what `read` gave, into any row."""
        for layer, (keys, values) in zip(self.layers, held, strict=True):
            layer.keys[row, :, : keys.shape[1]] = keys
            layer.values[row, :, : values.shape[1]] = values


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


class PrefixStore:
    """Keys and values of recent prompts, least recently used first to go.

    Entries are named by (version, token ids) and put in only right after a prefill under that
    version, so nothing crosses versions and no hybrid ever enters.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_hits = 0
        self._num_bytes = 0
        self._held: OrderedDict[tuple[int, bytes], list[KeyValues]] = OrderedDict()

    def get(self, version: int, tokens: bytes) -> list[KeyValues] | None:
        """What is held of these tokens under this version."""
        held = self._held.get((version, tokens))
        if held is not None:
            self._held.move_to_end((version, tokens))
            self.num_hits += 1
        return held

    def put(self, version: int, tokens: bytes, held: list[KeyValues]) -> None:
        """Keep it, dropping the oldest entries beyond max_bytes."""
        self._held[version, tokens] = held
        self._num_bytes += _num_bytes(held)
        while self._num_bytes > self.max_bytes:
            _, dropped = self._held.popitem(last=False)
            self._num_bytes -= _num_bytes(dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._num_bytes = 0


def _num_bytes(held: list[KeyValues]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in held)
