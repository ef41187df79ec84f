"""A spawned process that hosts one object, spoken to over a socket pair.

    controller (asyncio)                               worker process
    Worker.start("module:callable", kwargs)  ------>   host = callable(**kwargs)
    await worker.call("train", batch)        ------>   host.train(batch)
              result or error                <------
    worker.notify("cancel", id)              ------>   host.cancel(id)          (no answer)

A host is an ordinary object whose public methods are called one at a time. A host that works on
many calls at once (an engine) lists their names in `deferred`; such a method gets the call's number
first and returns nothing; the host then offers `busy() -> bool` and `pump() -> [(number, result)]`,
and `pump` is called again and again while it is busy, with new messages taken in between. A result
that is an exception is raised in the caller.

The process is started as a fresh interpreter, so a caller needs no `if __name__ == "__main__"`, and
its thread count is set before torch is imported. It ends when it is told to, when the controller is
gone, or when it is killed; the controller learns of its end at once (`WorkerDied`), with the last
lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .calls import NO_ANSWER, Calls, Message, portable

_HEADER = struct.Struct("!Q")
_IDLE_POLL_S = 1.0
_LOG_TAIL_BYTES = 4096


def torch_settings(threads: int) -> dict[str, str]:
    """Environment variables that torch reads when it is imported."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # oneDNN keeps up to 1024 compiled products of bfloat16 matrices, one for each shape, and
        # batches have ever new shapes: that is gigabytes after some hours, and no faster.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "LRU_CACHE_CAPACITY": "64",
    }
    if threads > 1 and not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        # Threads that wait for each other spin for milliseconds before they sleep; where those of
        # all processes outnumber the cores they would do little else.
        settings["GOMP_SPINCOUNT"] = "1000"
    return settings


class Worker(Calls):
    """The controller's end. All methods are called from one event loop."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path | None) -> None:
        super().__init__(name)
        self._process = process
        self._log = log
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(
        cls,
        name: str,
        factory: str,
        kwargs: Mapping[str, Any],
        *,
        threads: int = 1,
        nice: int = 0,
        log: Path | None = None,
        timeout_s: float = 600.0,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> Worker:
        """Spawn the process and wait until its host is built.

        factory: "module:callable". log: file to which its output is appended (None: discarded).
        python: another interpreter, which goes by its own search path and must find estr there.
        env: what is added to the environment.
        Raises WorkerError (or the EstrError that the factory raised) when it does not come up.
        """
        ours, theirs = socket.socketpair()
        own = {**torch_settings(threads), **(env or {})}
        command = [python, "-m", "estr.worker", str(theirs.fileno()), str(nice)]
        output = open(log, "ab") if log else None  # noqa: SIM115 - closed right below
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            theirs.close()
            if output:
                output.close()
        worker = cls(name, process, log)
        try:
            reader, worker._writer = await asyncio.open_connection(sock=ours)
            worker._reading = asyncio.create_task(worker._read(reader), name=f"read {name}")
            path = search_path() if python == sys.executable else None
            await worker.call("", factory, dict(kwargs), threads, path, timeout_s=timeout_s)
        except BaseException:
            worker._kill()
            if worker._reading is not None:  # else nothing is open yet
                await worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def place(self) -> str:
        return f"the {self.name} process (pid {self.pid})"

    async def close(self, timeout_s: float = 5.0) -> None:
        self._closing = True
        try:
            if self._process.poll() is None:
                if not self.died.done():
                    self._send(NO_ANSWER, "close", ())
                deadline = time.monotonic() + timeout_s
                while self._process.poll() is None and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
        finally:  # an interrupt ends the wait, and no process outlives it
            self._kill()
            self._writer.close()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=5.0)
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def _kill(self) -> None:
        self._closing = True
        if self._process.poll() is None:
            self._process.kill()
        # A kernel that is slow to reap it is no reason to fail: it was killed, and will be gone.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _transmit(self, frame: list[Message]) -> None:
        data = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(len(data)))
            self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                self._deliver(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail_calls(await self._describe_end())
        except Exception as error:  # noqa: BLE001 - unpickling raises anything
            self._fail_calls(
                f"{self.place} was given up: an answer of it cannot be read: "
                f"{type(error).__name__}: {error}{last_lines(self._log)}"
            )
            self._process.kill()  # it knows nothing of it, and would go on

    async def _describe_end(self) -> str:
        for _ in range(500):  # an interpreter takes a while to end after its last word
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        code = self._process.poll()
        how = f"exit status {code}"
        if code is not None and code < 0:
            names = {known.value: known.name for known in signal.Signals}  # few real-time ones
            how = f"killed by {names.get(-code, f'signal {-code}')}"
        return f"{self.place} ended: {how}{last_lines(self._log)}"


def last_lines(log: Path | None) -> str:
    """The end of a log, however long it is, as the last paragraph of a message; nothing where
    it is empty, or no file (a device has no end)."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read(_LOG_TAIL_BYTES).decode(errors="replace").split("\n")[-6:]
    if not any(lines):
        return ""
    return "\n".join(["", f"last lines of {log}:", *lines]).rstrip()


def busy_share(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Share of the wall time between two `statistics` of a host that it spent at work."""
    wall_s = after["wall_s"] - before["wall_s"]
    return (after["busy_s"] - before["busy_s"]) / wall_s if wall_s > 0 else 0.0


class CpuBudget:
    """A share of CPU time, for work that may be left out: of this process's since this was made,
    and of others', as far as their `statistics` were given to `share_with`. The first time it is
    never left out, and never more than twice in a row, whatever it costs."""

    def __init__(self, share: float = 0.01) -> None:
        self.share = share
        self.spent_s = 0.0
        self._since_s = time.process_time()
        self._left_out = 2
        self._others: Mapping[str, float] = {"cpu_s": 0.0, "guard_s": 0.0}

    def share_with(self, others: Mapping[str, float]) -> None:
        """Another process's latest statistics."""
        self._others = others

    def allows(self) -> bool:
        """May the work be done now? To be asked once for each time that it is due."""
        cpu_s = time.process_time() - self._since_s + self._others["cpu_s"]
        within = self.spent_s + self._others["guard_s"] <= self.share * cpu_s
        self._left_out = 0 if within or self._left_out == 2 else self._left_out + 1
        return self._left_out == 0

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """What is done inside counts."""
        clock = time.process_time()
        try:
            yield
        finally:
            self.spent_s += time.process_time() - clock

    def statistics(self) -> dict[str, float]:
        """cpu_s of this process and guard_s, what was spent of it, since the start."""
        return {"cpu_s": time.process_time(), "guard_s": self.spent_s}


def guard_share(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]
) -> float:
    """Share of the CPU time between two `statistics` of several hosts that the guard took."""
    spent, cpu = (
        sum(b[key] - a[key] for a, b in zip(before, after, strict=True))
        for key in ("guard_s", "cpu_s")
    )
    return spent / cpu if cpu > 0 else 0.0


def search_path() -> list[str]:
    """What is importable here is importable there, wherever a script keeps its modules."""
    return [os.path.abspath(entry) for entry in sys.path]


def require_determinism() -> None:
    """In this process: refuse every operation of torch that two runs may round differently."""
    import torch

    torch.use_deterministic_algorithms(True)


class Channel(Protocol):
    """The host's end: blocking frames."""

    def receive(self, timeout_s: float | None) -> list[Message]:
        """One frame of messages; [] when none came in time. Raises EOFError at the end."""
        ...

    def send(self, answers: list[tuple[int, Any]]) -> None:
        """One frame of answers."""
        ...


class _SocketChannel:
    """Blocking frames over the inherited socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self, timeout_s: float | None) -> list[Message]:
        self._sock.settimeout(timeout_s)
        try:
            head = self._sock.recv(_HEADER.size)
        except (TimeoutError, BlockingIOError):
            return []
        self._sock.settimeout(None)
        head += self._exactly(_HEADER.size - len(head)) if head else b""
        if not head:
            raise EOFError
        messages: list[Message]
        messages = pickle.loads(self._exactly(_HEADER.unpack(head)[0]))
        return messages

    def _exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            got = self._sock.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return bytes(buffer)

    def send(self, answers: list[tuple[int, Any]]) -> None:
        data = pickle.dumps(answers, protocol=pickle.HIGHEST_PROTOCOL)
        self._sock.settimeout(None)
        self._sock.sendall(_HEADER.pack(len(data)) + data)


def _log_traceback() -> None:
    """Into the log; on a full disk only the error itself is told, over the channel."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def host_and_serve(channel: Channel) -> None:
    """The whole life of a host: the first message says how to build it; the others are calls, until
    it is told to close or the messages end."""
    ((number, _, (factory, kwargs, threads, path)),) = channel.receive(None)
    try:
        if path is not None:
            sys.path[:] = path
        module, _, name = factory.partition(":")
        host = getattr(importlib.import_module(module), name)(**kwargs)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(threads)
    except Exception as error:  # noqa: BLE001 - the border where errors become data
        _log_traceback()
        channel.send([(number, portable(error))])
        return
    channel.send([(number, None)])
    with contextlib.suppress(EOFError):
        _serve(channel, host)
        close = getattr(host, "close", None)
        if close is not None:
            close()


def _serve(channel: Channel, host: Any) -> None:
    deferred = frozenset(getattr(host, "deferred", ()))
    busy = getattr(host, "busy", lambda: False)
    while True:
        # A busy host takes everything that has come before it goes on.
        while messages := channel.receive(0.0 if busy() else _IDLE_POLL_S):
            answers: list[tuple[int, Any]] = []
            for number, method, args in messages:
                if method == "close":
                    return
                try:
                    if method in deferred:
                        getattr(host, method)(number, *args)
                        continue
                    result = getattr(host, method)(*args)
                except Exception as error:  # noqa: BLE001 - the border where errors become data
                    _log_traceback()
                    result = portable(error)
                if number != NO_ANSWER:
                    answers.append((number, result))
            if answers:
                channel.send(answers)
        if busy():
            results = host.pump()
            if results:
                channel.send(results)


def _end_with_parent(parent: int) -> None:
    """Leave at once when the controller is gone, even in the middle of a long computation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def lower_priority(nice: int) -> None:
    """Below the others, also where Linux weighs whole sessions against each other (autogroup):
    this process has a session of its own, within which its own niceness counts for nothing."""
    os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def main(argv: list[str]) -> None:
    """Entry of the spawned process: `python -m estr.worker FD NICE`."""
    fd, nice = int(argv[0]), int(argv[1])
    if nice:
        lower_priority(nice)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(ConnectionError):  # the controller is gone or has closed its end
        host_and_serve(_SocketChannel(socket.socket(fileno=fd)))


if __name__ == "__main__":
    main(sys.argv[1:])
