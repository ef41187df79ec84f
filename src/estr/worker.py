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
import itertools
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
from typing import Any

from . import errors
from .errors import EstrError, WorkerDied, WorkerError

_HEADER = struct.Struct("!Q")
_NO_ANSWER = -1
_IDLE_POLL_S = 1.0
_LOG_TAIL_BYTES = 4096


class Worker:
    """The controller's end. All methods are called from one event loop."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path | None) -> None:
        self.name = name
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set, with the reason, when the process ends without having been asked to."""
        self._process = process
        self._log = log
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[tuple[int, str, tuple[Any, ...]]] = []
        self._closing = False
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
        own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **(env or {})}
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
            path = _search_path() if python == sys.executable else None
            await worker.call("", factory, dict(kwargs), threads, path, timeout_s=timeout_s)
        except BaseException:
            worker._kill()
            await worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        """The result of host.method(*args). Raises what the host raised (an EstrError keeps its
        class, anything else becomes WorkerError), WorkerError after timeout_s, WorkerDied."""
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(number, method, args)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            what = f"answer {method!r}" if method else "come up"
            raise WorkerError(
                f"the {self.name} process (pid {self.pid}) did not {what} within {timeout_s:g} s"
            ) from error
        finally:
            self._calls.pop(number, None)

    def notify(self, method: str, *args: Any) -> None:
        """Call host.method(*args) without waiting for anything."""
        if not self.died.done():
            self._send(_NO_ANSWER, method, args)

    async def alive(self, for_s: float | None = None) -> None:
        """Returns after for_s (None: never) unless the process ends before: WorkerDied."""
        done, _ = await asyncio.wait([self.died], timeout=for_s)
        if done:
            raise WorkerDied(self.died.result())

    async def close(self, timeout_s: float = 5.0) -> None:
        """Ask the process to end; kill it after timeout_s. May be called twice."""
        self._closing = True
        if self._process.poll() is None:
            if not self.died.done():
                self._send(_NO_ANSWER, "close", ())
            deadline = time.monotonic() + timeout_s
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        self._kill()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=5.0)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def _kill(self) -> None:
        self._closing = True
        if self._process.poll() is None:
            self._process.kill()
        # A kernel that is slow to reap it is no reason to fail: it was killed, and will be gone.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _send(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        if self.died.done():
            raise WorkerDied(self.died.result())
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((number, method, args))

    def _flush(self) -> None:
        frame, self._outbox = self._outbox, []
        data = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(len(data)))
            self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                for number, result in pickle.loads(await reader.readexactly(size)):
                    future = self._calls.get(number)
                    if future is None or future.done():
                        continue
                    if isinstance(result, BaseException):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail_calls(await self._describe_end())

    async def _describe_end(self) -> str:
        for _ in range(500):  # an interpreter takes a while to end after its last word
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        code = self._process.poll()
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        lines = [] if self._log is None else _last_lines(self._log)
        tail = "\n".join(["", f"last lines of {self._log}:", *lines]).rstrip() if lines else ""
        return f"the {self.name} process (pid {self.pid}) ended: {how}{tail}"

    def _fail_calls(self, reason: str) -> None:
        if not self._closing and not self.died.done():
            self.died.set_result(reason)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerDied(reason))


def _last_lines(log: Path) -> list[str]:
    """The end of a log, however long it is; [] of what is no file (a device has no end)."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read(_LOG_TAIL_BYTES).decode(errors="replace").split("\n")[-6:]


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


def _search_path() -> list[str]:
    """What is importable here is importable there, wherever a script keeps its modules."""
    return [os.path.abspath(entry) for entry in sys.path]


def require_determinism() -> None:
    """In this process: refuse every operation of torch that two runs may round differently."""
    import torch

    torch.use_deterministic_algorithms(True)


class _Channel:
    """The worker's end: blocking frames over the inherited socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self, timeout_s: float | None) -> list[tuple[int, str, tuple[Any, ...]]]:
        """One frame of messages; [] when none came in time. Raises EOFError at the end."""
        self._sock.settimeout(timeout_s)
        try:
            head = self._sock.recv(_HEADER.size)
        except (TimeoutError, BlockingIOError):
            return []
        self._sock.settimeout(None)
        head += self._exactly(_HEADER.size - len(head)) if head else b""
        if not head:
            raise EOFError
        messages: list[tuple[int, str, tuple[Any, ...]]]
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

    def send(self, results: list[tuple[int, Any]]) -> None:
        data = pickle.dumps(results, protocol=pickle.HIGHEST_PROTOCOL)
        self._sock.settimeout(None)
        self._sock.sendall(_HEADER.pack(len(data)) + data)


def portable(error: BaseException) -> EstrError:
    """An error that can cross the process border: an EstrError as it is, others described, of a
    group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EstrError) and getattr(errors, type(error).__name__, None) is type(error):
        return type(error)(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return WorkerError(f"{type(error).__name__}: {error}{place}")


def _log_traceback() -> None:
    """Into the log; on a full disk only the error itself is told, over the channel."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _serve(channel: _Channel, host: Any) -> None:
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
                if number != _NO_ANSWER:
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


def _lower_priority(nice: int) -> None:
    """Below the others, also where Linux weighs whole sessions against each other (autogroup):
    this process has a session of its own, within which its own niceness counts for nothing."""
    os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def main(argv: list[str]) -> None:
    """Entry of the spawned process: `python -m estr.worker FD NICE`."""
    fd, nice = int(argv[0]), int(argv[1])
    if nice:
        _lower_priority(nice)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    channel = _Channel(socket.socket(fileno=fd))
    try:
        ((number, _, (factory, kwargs, threads, search_path)),) = channel.receive(None)
        try:
            if search_path is not None:
                sys.path[:] = search_path
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
        _serve(channel, host)
        close = getattr(host, "close", None)
        if close is not None:
            close()
    except (EOFError, ConnectionError):
        pass  # the controller is gone or has closed its end


if __name__ == "__main__":
    main(sys.argv[1:])
