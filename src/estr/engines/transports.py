"""The trainer's side of the engines that vLLM offers for weight transfer, one class for each.

    init_info()    what the engine's init_weight_transfer_engine is given, once ...
    join()         ... and what the trainer does meanwhile
    update_info()  what the engine's update_weights is given, for every version ...
    send()         ... and what the trainer does meanwhile

    gloo    torch.distributed over sockets, `vllm_gloo` at the other end: needs no GPU
    nccl    vLLM's own engine, which is broadcast to; trainer and engine on two GPUs
    ipc     vLLM's own engine, which opens the trainer's memory; both on one GPU

The trainer has no vLLM, so it speaks NCCL by torch.cuda.nccl and joins by a unique id, as vLLM
provides for trainers without it. What is said travels as JSON: nothing is unpickled.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import WeightsError
from ..weights import State, as_bytes

if TYPE_CHECKING:
    from torch import Tensor

Json = dict[str, Any]

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.001


class Transport(Protocol):
    """All of it is called from one thread. Tensors are contiguous and in the engine's dtype."""

    def init_info(self) -> Json: ...

    def join(self) -> None: ...

    def update_info(self, state: State) -> Json: ...

    def send(self, state: State) -> None: ...


def transport(backend: str, folder: Path, device: str, timeout_s: float) -> Transport:
    """Of `engine.weight_transfer`. folder: both sides see it. device: where the tensors are.
    timeout_s: of every wait for the engine, as far as the library knows one."""
    if backend == "gloo":
        return Gloo(folder, timeout_s)
    if backend == "nccl":
        return Nccl(device, timeout_s)
    return Ipc(device)


def metadata(state: State) -> Json:
    """Names, dtypes and shapes, in the order in which the tensors are sent."""
    return {
        "names": list(state),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()],
        "shapes": [list(tensor.shape) for tensor in state.values()],
    }


class Gloo:
    """A group of two: the trainer is rank 0."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._meeting = ""
        self._group: Any = None

    def init_info(self) -> Json:
        self._meeting = str(self._folder / f"meeting-{next(self._numbers)}")
        return {"meeting": self._meeting, "timeout_s": self._timeout_s}

    def join(self) -> None:
        self._group = gloo_group(self._meeting, 0, self._timeout_s)

    def update_info(self, state: State) -> Json:
        return metadata(state)

    def send(self, state: State) -> None:
        for tensor in state.values():
            broadcast(self._group, tensor)


def gloo_group(meeting: str, rank: int, timeout_s: float) -> Any:
    """Meet the other of two at a file; apart from all other groups of the process. Both live on
    this machine: gloo would listen where its name points to, nowhere, or at a network."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    store = dist.FileStore(meeting, 2)  # type: ignore[attr-defined]
    store.set_timeout(limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def broadcast(group: Any, tensor: Tensor) -> None:
    """From rank 0, the bytes of a contiguous tensor on the CPU, whatever its dtype."""
    if tensor.numel():
        group.broadcast(as_bytes(tensor), root=0).wait()


class Nccl:
    """A communicator of two: the trainer is rank 0. Its own stream: training goes on beside it."""

    def __init__(self, device: str, timeout_s: float) -> None:
        import torch

        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._unique_id = b""
        self._communicator: Any = None

    def init_info(self) -> Json:
        from torch.cuda import nccl

        self._unique_id = nccl.unique_id()  # type: ignore[no-untyped-call]
        unique_id = base64.b64encode(self._unique_id).decode()
        own = {"nccl_unique_id_b64": unique_id, "rank_offset": 1, "world_size": 2}
        return {**own, "packed": False}

    def join(self) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._communicator = nccl.init_rank(2, self._unique_id, 0)  # type: ignore[no-untyped-call]
            # vLLM's side begins with this, and waits for ours.
            one = torch.zeros(1, device=self._device)
            nccl.all_reduce([one], comms=[self._communicator])  # type: ignore[no-untyped-call]
            self._wait()

    def update_info(self, state: State) -> Json:
        return metadata(state)

    def send(self, state: State) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for tensor in state.values():
                nccl.broadcast([tensor], comms=[self._communicator])
            self._wait()

    def _wait(self) -> None:
        """Until the stream is through; a peer that has gone leaves it waiting for ever."""
        deadline = time.monotonic() + self._timeout_s
        event = self._stream.record_event()
        while not event.query():
            if time.monotonic() > deadline:
                raise WeightsError(f"NCCL: the engine did not take part in {self._timeout_s:g} s")
            time.sleep(_POLL_S)


class Ipc:
    """Handles of the trainer's own memory. The tensors must live until the engine has loaded."""

    def __init__(self, device: str) -> None:
        import torch

        self._gpu = str(torch.cuda.get_device_properties(torch.device(device)).uuid)

    def init_info(self) -> Json:
        return {"packed": False}

    def join(self) -> None:
        """Nothing: a handle needs no meeting."""

    def update_info(self, state: State) -> Json:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call] # what was let go of since
        handles = [reduce_tensor(tensor)[1] for tensor in state.values()]  # type: ignore[no-untyped-call]
        return {
            **metadata(state),
            "ipc_handles": [{self._gpu: encode_handle(handle)} for handle in handles],
        }

    def send(self, state: State) -> None:
        """Nothing: the engine reads."""


def encode_handle(handle: tuple[Any, ...]) -> list[Any]:
    """What torch's `reduce_tensor` says of a CUDA tensor, as JSON."""
    return [_encoded(part) for part in handle]


def decode_handle(parts: list[Any]) -> tuple[Any, ...]:
    """The handle as vLLM takes it. Raises WeightsError where a part is of a kind that no handle
    has."""
    return tuple(_decoded(part) for part in parts)


def decode_update_info(info: Json) -> Json:
    """As it was said, with handles, where there are any, as vLLM takes them."""
    if "ipc_handles" not in info:
        return info
    handles = [
        {gpu: decode_handle(parts) for gpu, parts in handle.items()}
        for handle in info["ipc_handles"]
    ]
    return {**info, "ipc_handles": handles}


def _classes() -> Mapping[str, Any]:
    import torch

    classes = (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage)
    return {each.__name__: each for each in classes}


def _encoded(part: Any) -> Any:
    import torch

    if part is None or isinstance(part, bool | int):
        return part
    if isinstance(part, bytes):
        return {"bytes": part.hex()}
    if isinstance(part, torch.dtype):
        return {"dtype": str(part).removeprefix("torch.")}
    if isinstance(part, tuple):  # torch.Size is one
        return {"size": list(part)}
    if isinstance(part, type) and part.__name__ in _classes():
        return {"class": part.__name__}
    raise WeightsError(f"a CUDA handle of this torch has a part of an unknown kind: {part!r}")


def _decoded(part: Any) -> Any:
    import torch

    match part:
        case None | bool() | int():
            return part
        case {"bytes": str(text)}:
            return bytes.fromhex(text)
        case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"size": list(sizes)} if all(type(size) is int for size in sizes):
            return tuple(sizes)
        case {"class": str(name)} if name in _classes():
            return _classes()[name]
    raise WeightsError(f"a CUDA handle has a part of an unknown kind: {part!r}")
