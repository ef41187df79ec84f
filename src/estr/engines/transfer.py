"""Weights from the trainer's memory into vLLM, by vLLM's weight-transfer engines.

    trainer -- publish(version) --> file                    evaluator, guard, a resumed run
                                \\-> Sender, a thread <--socket--> Offer -- vLLM's worker
                                      (holds the newest)   JSON     |
                                      transport  ===== tensors ====/

vLLM would have the trainer drive a transfer. Here the engine takes a version when it can pause for
it, and the trainer is in the middle of the next one by then; so a thread of its process keeps a
copy of the newest version and sends it when the engine asks. A version that it has no longer is
read from the file. The socket stands in the store's folder, which is the run's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import WeightsError
from ..weights import FileWeightStore, State, bit_sum
from .transports import Json, Transport, decode_update_info, metadata, transport

if TYPE_CHECKING:
    from torch import Tensor

_IDLE_S = 600.0
"""How long an engine may hold a version: a load may wait for running requests."""

_LAST_WORD_S = 1.0

_SOCKET = "sender"


class TransferStore(FileWeightStore):
    """A FileWeightStore whose publisher also offers its newest version to the engine.

    backend: "gloo", "nccl" or "ipc". device: where the publisher keeps its copy. timeout_s: of
    every wait of one side for the other.
    """

    def __init__(
        self, folder: str | Path, keep: int = 6, *, backend: str, device: str, timeout_s: float
    ) -> None:
        super().__init__(folder, keep)
        self._backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._sender: Sender | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sender": None}  # a thread stays where it is

    def publish(self, version: int, state: State) -> str:
        if self._sender is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            means = transport(self._backend, self.folder, self._device, self._timeout_s)
            self._sender = Sender(self.folder, means, self._device)
        self._sender.hold(version, state)  # first: who finds the file finds this, too
        return super().publish(version, state)

    def offer(self, version: int) -> Offer | None:
        """The publisher's own copy of `version`, for the engine; None: it has gone on, and only the
        file is there. Raises WeightsError where it does not answer."""
        return connect(self.folder, version, self._timeout_s)


@dataclass(frozen=True, slots=True)
class _Held:
    """digest: `bit_sum` over all tensors. not_finite: a tensor with NaN or infinity, or ""."""

    version: int
    tensors: dict[str, Tensor]
    digest: int
    not_finite: str

    def described(self) -> Json:
        return {
            "held": self.version,
            **metadata(self.tensors),
            "digest": self.digest,
            "not_finite": self.not_finite,
        }


class Sender:
    """In the publisher's process: keeps the newest version and serves one engine at a time."""

    def __init__(self, folder: Path, means: Transport, device: str) -> None:
        self._means = means
        self._device = device
        self._held: _Held | None = None
        self._name = uuid.uuid4().hex
        self._listener = socket.socket(socket.AF_UNIX)
        with _address(folder) as address:
            self._listener.bind(address)
        self._listener.listen()
        threading.Thread(target=self._run, name="weights sender", daemon=True).start()

    def hold(self, version: int, state: State) -> None:
        """Copy the tensors. The version before is let go of first; one that is on its way lives
        until it has arrived. An engine that asks in between reads the file."""
        import torch

        self._held = None
        tensors = {
            name: tensor.detach().to(self._device, copy=True).contiguous()
            for name, tensor in state.items()
        }
        bad = (
            name
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and not bool(tensor.isfinite().all())
        )
        digest = sum(map(bit_sum, tensors.values())) % 2**64
        if torch.device(self._device).type == "cuda":
            # The thread sends on another stream. That one is not waited for: what it sends may be
            # on its way for as long as the engine likes.
            torch.cuda.current_stream(self._device).synchronize()
        self._held = _Held(version, tensors, digest, next(bad, ""))

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(_IDLE_S)
            # It has gone, says nothing, or something else than an engine would.
            with connection, contextlib.suppress(OSError, ValueError, KeyError):
                self._serve(_Lines(connection))

    def _serve(self, engine: _Lines) -> None:
        asked, held = engine.read(), self._held
        if asked is None or held is None or held.version != asked["version"]:
            engine.write({"held": None if held is None else held.version})
            return
        engine.write({"sender": self._name, **held.described()})
        while (message := engine.read()) is not None:
            try:
                info, act = self._part(message["do"], held.tensors)
                engine.write({"info": info})
                act()
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - the border where errors become data
                traceback.print_exc()
                engine.write({"error": f"{type(error).__name__}: {error}"})
            else:
                engine.write({"done": True})

    def _part(self, what: str, state: State) -> tuple[Json, Callable[[], None]]:
        if what == "join":
            return self._means.init_info(), self._means.join
        return self._means.update_info(state), lambda: self._means.send(state)


class Offer:
    """The engine's end of one transfer: the sender holds the version until this is closed."""

    def __init__(self, connection: socket.socket, lines: _Lines, described: Json) -> None:
        self._connection = connection
        self._lines = lines
        self.sender: str = described["sender"]
        """Whom an engine joins once."""
        self.version: int = described["held"]
        self.digest: int = described["digest"]
        names = described["names"]
        shapes = described["shapes"]
        self.shapes = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
        self._dtypes = dict(zip(names, described["dtype_names"], strict=True))
        self._not_finite: str = described["not_finite"]

    def check(self, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        """Raise WeightsError unless these are all tensors of a model with these shapes, finite, and
        floating ones in `dtype`."""
        missing, surplus = sorted(set(shapes) - set(self.shapes)), set(self.shapes) - set(shapes)
        if missing or surplus:
            raise WeightsError(
                f"the weights do not fit the engine's model: {len(missing)} missing {missing[:3]}, "
                f"{len(surplus)} unknown {sorted(surplus)[:3]}"
            )
        for name, shape in self.shapes.items():
            own = self._dtypes[name]
            if shape != shapes[name] or ("float" in own and own != dtype):
                raise WeightsError(
                    f"weight {name} has shape {shape} and dtype {own}, the engine's model wants "
                    f"{shapes[name]} and {dtype}"
                )
        if self._not_finite:
            raise WeightsError(f"weight {self._not_finite} holds NaN or infinity")

    @contextlib.contextmanager
    def during(self, what: Literal["join", "send"]) -> Iterator[Json]:
        """The sender does its part while the body does the engine's, by what this gives; both are
        done at the end. Raises WeightsError with what either side says."""
        info = self._answer({"do": what})["info"]
        try:
            yield decode_update_info(info)
        except Exception as error:
            raise WeightsError(f"{error}{self._last_word()}") from error
        self._answer()

    def close(self) -> None:
        """The sender may forget the version. May be called twice."""
        self._connection.close()
        self._lines.close()

    def _answer(self, question: Json | None = None) -> Json:
        try:
            if question is not None:
                self._lines.write(question)
            answer = self._lines.read()
        except TimeoutError as error:
            limit = self._connection.gettimeout()
            raise WeightsError(f"the trainer's sender did not answer in {limit:g} s") from error
        except OSError as error:
            raise WeightsError(f"the trainer's sender has gone: {error}") from error
        if answer is None:
            raise WeightsError("the trainer's sender has gone")
        if "error" in answer:
            raise WeightsError(f"the trainer's sender failed: {answer['error']}")
        return answer

    def _last_word(self) -> str:
        """The other side often knows better why."""
        self._connection.settimeout(_LAST_WORD_S)
        try:
            answer = self._lines.read()
        except OSError:
            return ""
        if answer is None:
            return "; the trainer's sender has gone"
        return f"; the trainer's sender: {answer['error']}" if "error" in answer else ""


def connect(folder: Path, version: int, timeout_s: float) -> Offer | None:
    """Ask the sender at `folder` for `version`; None where it holds another one."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        with _address(folder) as address:
            connection.connect(address)
        lines = _Lines(connection)
        lines.write({"version": version})
        described = lines.read()
        if described is None:
            raise ConnectionError("it closed the connection")
    except OSError as error:
        connection.close()
        raise WeightsError(
            f"version {version}: the trainer's sender at {folder / _SOCKET} does not answer within "
            f"{timeout_s:g} s: {error}"
        ) from error
    if described["held"] != version:
        connection.close()
        return None
    return Offer(connection, lines, described)


class _Lines:
    """JSON, one object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw", encoding="utf-8", newline="\n")

    def write(self, message: Json) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def read(self) -> Json | None:
        """None at the end."""
        line = self._file.readline()
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Of the socket in `folder`. A path in its place may be longer than a socket's can be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)
