"""Questions to processes that can be killed: for code that may take forever, or all memory.

    pool = Pool("my_module")                 `python -m my_module FD` runs serve(FD, answer)
    pool.ask(["x", "y"], timeout_s=5.0)      answer(["x", "y"]), as JSON; from any thread

    any thread --ask--> a free process (JSON lines over a socket) --> its answer, or NoAnswer
                              |
                              +-- none in time: killed; the next question starts another one

What limits such code from inside its own process works in main threads only, or not at all.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_START_S = 120.0
_WAIT_S = 50.0
"""For a free process."""


class NoAnswer(Exception):
    """There is no answer to a question; the message says why."""


class Pool:
    """At most num_processes of them, started when they are needed, ended when this one exits."""

    def __init__(self, module: str, num_processes: int = 2) -> None:
        # Last in, first out: a second process is started only if the first one is at work.
        self._free: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._processes = [_Process(module) for _ in range(num_processes)]
        for process in self._processes:
            self._free.put(process)
        atexit.register(self.close)

    def ask(self, question: Any, timeout_s: float) -> Any:
        """The answer of the process. Raises NoAnswer: not in time, died of it, or raised there."""
        try:
            process = self._free.get(timeout=_WAIT_S)
        except queue.Empty as error:
            raise NoAnswer(f"no process was free within {_WAIT_S:g} s") from error
        try:
            return process.ask(question, timeout_s)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes; a later question starts them anew."""
        for process in self._processes:
            process.kill()


class _Process:
    """One process, asked by one thread at a time."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def ask(self, question: Any, timeout_s: float) -> Any:
        try:
            channel = self._channel()
            channel.settimeout(timeout_s)
            channel.sendall(json.dumps(question).encode() + b"\n")
            found = json.loads(_line(channel, timeout_s))
        except TimeoutError as error:
            self.kill()
            raise NoAnswer(f"no answer within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            self.kill()
            raise NoAnswer("the process died of it") from error
        except BaseException:  # whatever it answers now belongs to no question
            self.kill()
            raise
        if "error" in found:
            raise NoAnswer(found["error"])
        return found["answer"]

    def kill(self) -> None:
        if self._running is not None:
            process, channel = self._running
            self._running = None
            channel.close()
            process.kill()
            process.wait(timeout=10)

    def _channel(self) -> socket.socket:
        """To the process, which is started if none is running."""
        if self._running is not None and self._running[0].poll() is not None:
            self.kill()
        if self._running is None:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    # The hash seed: what a process makes of a set of texts must not differ.
                    env=os.environ
                    | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # one Ctrl-C lets a run end its step, graders included
                )
            self._running = process, ours
            try:
                _line(ours, _START_S)
            except (TimeoutError, OSError, EOFError) as error:
                self.kill()
                raise NoAnswer(f"the process of {self._module} does not come up") from error
        return self._running[1]


def _line(channel: socket.socket, timeout_s: float) -> bytes:
    """Raises TimeoutError after timeout_s in all, EOFError where the other side has ended."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
        part = channel.recv(1 << 16)
        if not part:
            raise EOFError
        line += part
    return line


# -- in the process ------------------------------------------------------------------------------


def serve(
    fd: int,
    answer: Callable[[Any], Any],
    *,
    warm_up: Callable[[], object],
    max_bytes: int = 4 << 30,
) -> None:
    """Answer questions until the other side has ended. warm_up: imports what is needed, before the
    first question's time runs. max_bytes: address space of the process."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS knows no such limit; the time is limited
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    warm_up()
    with socket.socket(fileno=fd) as channel, contextlib.suppress(OSError):
        channel.sendall(b"\n")
        for line in channel.makefile("rb"):
            try:
                reply = json.dumps({"answer": answer(json.loads(line))})
            except Exception as error:  # noqa: BLE001 - the border where errors become data
                reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})
            channel.sendall(reply.encode() + b"\n")


def _end_with_parent(parent: int) -> None:
    """Leave when the caller is gone, even in the middle of an answer."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)
