"""Weights through Ray's object store: as one flat buffer, and tensor by tensor.

    flat       pack, put one object    | get it, unpack
    single     digest, put each tensor | get all, copy and verify each

Both keep the same promises: what arrives is verified by SHA-256 and is the receiver's own memory.
The receiver is an actor of the same node. Tensors have the shapes of SmolLM2-135M (538 MB) and no
two of them are tied. The sides take turns; seconds are medians over the rounds, `digest_s` is what
one SHA-256 of all the bytes takes, of which either side computes two, and `ratio` is the time of
`single` over that of `flat`.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cluster.flat import Flat, Manifest, pack, unpack
from ..cluster.session import Session
from ..errors import WeightsError
from ..options.run import RayOptions

_LIMIT_S = 600.0

Seconds = dict[str, float]


def measure(quick: bool = False) -> dict[str, Any]:
    """Five rounds (quick: one, of two layers and a small vocabulary) on a local Ray."""
    import ray

    state = _state(layers=2, vocabulary=1024) if quick else _state(layers=30, vocabulary=49152)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    rounds: dict[str, list[Seconds]] = {"flat": [], "single": []}
    # Objects of the last round may still be on their way out.
    session = Session(RayOptions(), num_cpus=1, weights_bytes=3 * num_bytes)
    try:
        receiver = ray.remote(_Receiver).options(num_cpus=1).remote()
        for number in range(1 + (1 if quick else 5)):
            for kind, send in (("flat", _send_flat), ("single", _send_single)):
                seconds = send(state, receiver)
                if number:  # the first of each warms up
                    rounds[kind].append(seconds)
        digest_s = statistics.median(_timed(_digests, state)[1] for _ in range(3))
        ray.kill(receiver)
        del receiver
    finally:
        session.close()
    sides = {kind: _medians(found, num_bytes) for kind, found in rounds.items()}
    return {
        "ratio": sides["single"]["total_s"] / sides["flat"]["total_s"],
        "digest_s": digest_s,
        "tensors": len(state),
        "bytes": num_bytes,
        **sides,
    }


def _state(layers: int, vocabulary: int) -> dict[str, Tensor]:
    """Random float32 tensors of a Llama with the widths of SmolLM2-135M."""
    width, narrow, inner = 576, 192, 1536
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "norm": (width,)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.q": (width, width),
            f"{layer}.k": (narrow, width),
            f"{layer}.v": (narrow, width),
            f"{layer}.o": (width, width),
            f"{layer}.gate": (inner, width),
            f"{layer}.up": (inner, width),
            f"{layer}.down": (width, inner),
            f"{layer}.norm_1": (width,),
            f"{layer}.norm_2": (width,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class _Receiver:
    """What runs inside the actor. References come in lists, so that Ray does not fetch them."""

    def take_flat(self, manifest: Manifest, boxed: list[Any]) -> Seconds:
        """get_s and unpack_s."""
        import ray

        flat, get_s = _timed(ray.get, boxed[0], timeout=_LIMIT_S)
        _, unpack_s = _timed(unpack, manifest, manifest.version, flat)
        return {"get_s": get_s, "unpack_s": unpack_s}

    def take_single(self, digests: dict[str, str], boxed: list[Any]) -> Seconds:
        """get_s and unpack_s."""
        import ray

        arrays, get_s = _timed(ray.get, boxed, timeout=_LIMIT_S)
        _, unpack_s = _timed(_own, digests, arrays)
        return {"get_s": get_s, "unpack_s": unpack_s}


def _send_flat(state: dict[str, Tensor], receiver: Any) -> Seconds:
    import ray

    packed: tuple[tuple[Manifest, Flat], float] = _timed(pack, 1, state)
    (manifest, flat), pack_s = packed
    reference, put_s = _timed(ray.put, flat)
    taken: Seconds = ray.get(receiver.take_flat.remote(manifest, [reference]), timeout=_LIMIT_S)
    return {"pack_s": pack_s, "put_s": put_s, **taken}


def _send_single(state: dict[str, Tensor], receiver: Any) -> Seconds:
    import ray

    digests, pack_s = _timed(_digests, state)
    references, put_s = _timed(lambda: [ray.put(tensor.numpy()) for tensor in state.values()])
    taken: Seconds = ray.get(receiver.take_single.remote(digests, references), timeout=_LIMIT_S)
    return {"pack_s": pack_s, "put_s": put_s, **taken}


def _digests(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: _digest(tensor.numpy()) for name, tensor in state.items()}


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(array.data).hexdigest()


def _own(digests: dict[str, str], arrays: list[NDArray[Any]]) -> dict[str, Tensor]:
    """Copies of the arrays. Raises WeightsError where one is not what was sent."""
    copies = {name: np.array(each) for name, each in zip(digests, arrays, strict=True)}
    for name, copy in copies.items():
        if _digest(copy) != digests[name]:
            raise WeightsError(f"{name} is not what was sent")
    return {name: torch.from_numpy(copy) for name, copy in copies.items()}


def _timed(work: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    clock = time.perf_counter()
    result = work(*args, **kwargs)
    return result, time.perf_counter() - clock


def _medians(rounds: list[Seconds], num_bytes: int) -> Seconds:
    """Seconds of each part and of all, and GB/s of all of it and of each part."""
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    medians["total_s"] = statistics.median(sum(found.values()) for found in rounds)
    rates = {
        key.removesuffix("_s") + "_gb_per_s": num_bytes / 1e9 / seconds
        for key, seconds in medians.items()
    }
    return medians | rates
