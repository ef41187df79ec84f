"""The WeightStore seam: how versions of the weights travel from the trainer to the engines.

    trainer -- publish(version, state) --> store -- fetch(version) --> engine, evaluator

A version is the number of optimizer steps applied (0 = initial). A store keeps the newest `keep`
versions, so that whatever a bounded-staleness run can still ask for is there. Publishing a version
forgets those that are not older: they belong to a course of training that was given up, so nothing
left over from it can ever be fetched as newer. Receivers verify both the version and the digest
that travel with the tensors. `MemoryWeightStore` is the shipped
fake and the in-process form; `FileWeightStore` crosses processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]


class WeightStore(Protocol):
    """Keeps the newest versions of a model's weights."""

    def publish(self, version: int, state: State) -> str:
        """Make `version` available as a whole or not at all; returns its digest. Raises
        WeightsError where that cannot be done."""
        ...

    def fetch(self, version: int) -> dict[str, Tensor]:
        """The verified tensors of `version`. Raises WeightsError if absent, torn or mislabelled."""
        ...

    def latest(self) -> int | None:
        """The newest version available, None before the first publish."""
        ...


class MemoryWeightStore:
    """Copies inside one process."""

    def __init__(self, keep: int = 6) -> None:
        self._keep = _at_least_one(keep)
        self._states: dict[int, dict[str, Tensor]] = {}

    def publish(self, version: int, state: State) -> str:
        self._states = {v: kept for v, kept in self._states.items() if v < version}
        self._states[version] = _copies(state)
        for old in sorted(self._states)[: -self._keep]:
            del self._states[old]
        return f"memory-{version}"

    def fetch(self, version: int) -> dict[str, Tensor]:
        if version not in self._states:
            raise WeightsError(
                f"version {version} is not in the store, which holds {sorted(self._states)}"
            )
        return _copies(self._states[version])

    def latest(self) -> int | None:
        return max(self._states, default=None)


class FileWeightStore:
    """One safetensors file a version in a folder, written aside, then renamed.

    Beside each file stands a small JSON with version, byte count and SHA-256; it is renamed into
    place last, so a version exists exactly when its JSON does. A folder in memory (tmpfs) makes
    the exchange as fast as a copy. The object holds no open file and can be pickled.
    """

    def __init__(self, folder: str | Path, keep: int = 6) -> None:
        self.folder = Path(folder)
        self.keep = _at_least_one(keep)

    def _paths(self, version: int) -> tuple[Path, Path]:
        stem = f"v{version:08d}"
        return self.folder / f"{stem}.safetensors", self.folder / f"{stem}.json"

    def publish(self, version: int, state: State) -> str:
        from safetensors.torch import save

        self.folder.mkdir(parents=True, exist_ok=True)
        for other in self.versions():
            if other >= version:
                self._forget(other)
        data = save(_unshared(state), metadata={"version": str(version)})
        digest = hashlib.sha256(data).hexdigest()
        label = {"version": version, "bytes": len(data), "sha256": digest}
        file, manifest = self._paths(version)
        for path, content in ((file, data), (manifest, json.dumps(label).encode())):
            self._write(path, content)
        for old in self.versions()[: -self.keep]:
            self._forget(old)
        return digest

    def _write(self, path: Path, content: bytes) -> None:
        """Whole or not at all. Raises WeightsError where there is no room."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_bytes(content)
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()  # what was written of it would keep the room taken
            raise WeightsError(
                f"cannot write {path}, {len(content)} bytes: {error.strerror}; make room there"
            ) from error

    def _forget(self, version: int) -> None:
        """The label goes first: without it the version does not exist."""
        for path in reversed(self._paths(version)):
            path.unlink(missing_ok=True)

    def fetch(self, version: int) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        file, manifest = self._paths(version)
        try:
            label = json.loads(manifest.read_text())
            data = file.read_bytes()
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsError(
                f"version {version} is not readable in {self.folder}, "
                f"which holds {self.versions()}: {error}"
            ) from error
        digest = hashlib.sha256(data).hexdigest()
        if label != {"version": version, "bytes": len(data), "sha256": digest}:
            raise WeightsError(
                f"{file} is not version {version} as published: label {label}, "
                f"found {len(data)} bytes with SHA-256 {digest[:16]}"
            )
        try:
            return dict(load(data))
        except SafetensorError as error:
            raise WeightsError(f"{file} is not a safetensors file: {error}") from error

    def versions(self) -> list[int]:
        """The versions available, oldest first."""
        labels = self.folder.glob(f"v{'[0-9]' * 8}.json")
        return sorted(int(label.stem[1:]) for label in labels)

    def latest(self) -> int | None:
        versions = self.versions()
        return versions[-1] if versions else None


def bit_sum(tensor: Tensor) -> int:
    """The bit patterns of all elements, summed modulo 2^64: the same however the tensor is cut,
    joined with others or transposed, which is what engines do to weights, and zero for padding."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(kinds[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64)) % 2**64


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [nbytes], where it is."""
    import torch

    if not tensor.numel():  # torch gives it a stride of 0, through which no bytes are seen
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).view(torch.uint8)


def _at_least_one(keep: int) -> int:
    if keep < 1:
        raise ValueError(f"a weight store keeps at least 1 version, not {keep}")
    return keep


def _copies(state: State) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _unshared(state: State) -> dict[str, Tensor]:
    """The state on the CPU, every tensor with a storage of its own: safetensors refuses tied
    weights, of which each name gets its own copy."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return tensors
