"""Weights as one flat buffer and its manifest: a single object to send, whatever the model.

    {name: tensor} --pack--> Manifest(version, entries, digest), uint8 [num_bytes]
                  <--unpack-- (verified)

The digest is the SHA-256 of version, entries and buffer, so neither can be exchanged for another's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import WeightsError
from ..weights import State, as_bytes

if TYPE_CHECKING:
    from torch import Tensor

Flat = NDArray[np.uint8]

_ALIGNMENT = 64
"""Bytes: of a cache line, and a multiple of every element size."""
_PIECE = 1 << 20
"""Bytes that are copied and then hashed while a core's caches still hold them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies. dtype: torch's name of it, "float32". offset: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a flat buffer holds."""

    version: int
    entries: tuple[Entry, ...]
    num_bytes: int
    sha256: str


def pack(version: int, state: State) -> tuple[Manifest, Flat]:
    """All tensors, from whatever device, in one buffer; each is copied once."""
    entries, num_bytes = [], 0
    for name, tensor in state.items():
        entries.append(_entry(name, tensor, num_bytes))
        num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    flat = np.zeros(num_bytes, dtype=np.uint8)
    digest, hashed = _digest(version, entries), 0
    for entry, tensor in zip(entries, state.values(), strict=True):
        data = as_bytes(tensor.detach().contiguous()).cpu().numpy()
        stop = entry.offset + data.nbytes
        for low in range(entry.offset, stop, _PIECE):
            high = min(low + _PIECE, stop)
            flat[low:high] = data[low - entry.offset : high - entry.offset]
            digest.update(flat.data[hashed:high])
            hashed = high
    digest.update(flat.data[hashed:])
    return Manifest(version, tuple(entries), num_bytes, digest.hexdigest()), flat


def unpack(manifest: Manifest, version: int, flat: Flat) -> dict[str, Tensor]:
    """The tensors, as views of one copy of the buffer. Raises WeightsError unless they are those of
    `version` as packed."""
    import torch

    data = np.empty_like(flat)  # an object store's memory is read-only, and not ours to keep
    digest = _digest(manifest.version, manifest.entries)
    for low in range(0, flat.nbytes, _PIECE):
        data[low : low + _PIECE] = flat[low : low + _PIECE]
        digest.update(data.data[low : low + _PIECE])
    found = digest.hexdigest()
    if (manifest.version, manifest.num_bytes, manifest.sha256) != (version, data.nbytes, found):
        raise WeightsError(
            f"the flat buffer is not version {version} as published: its manifest says version "
            f"{manifest.version}, {manifest.num_bytes} bytes, SHA-256 {manifest.sha256[:16]}; "
            f"found {data.nbytes} bytes with {found[:16]}"
        )
    buffer = torch.from_numpy(data)
    tensors = {}
    for entry in manifest.entries:
        dtype = getattr(torch, entry.dtype)
        stop = entry.offset + math.prod(entry.shape) * dtype.itemsize
        tensors[entry.name] = buffer[entry.offset : stop].view(dtype).reshape(entry.shape)
    return tensors


def _entry(name: str, tensor: Tensor, offset: int) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(name, dtype, tuple(tensor.shape), offset)


def _digest(version: int, entries: Sequence[Entry]) -> hashlib._Hash:
    """SHA-256 so far, before the buffer's bytes."""
    return hashlib.sha256(repr((version, tuple(entries))).encode())
