"""Are two mathematical answers equal? Told by `math-verify`, in processes that can be killed.

    verifier = shared_verifier(timeout_s=5.0)
    verifier.equal("0.5", "\\frac{1}{2}")      True; from any thread

    any thread --equal--> a free process (JSON lines over a socket) --> right, or an error
                               |
                               +-- no verdict in time: killed; the next question starts another one

Comparing can take forever (9^{9^9}) or all memory, and what limits it from inside works in main
threads only. So it is done elsewhere, under a limit of time and of memory. Running into one of
them, or any exception there, is the grader's failure (GraderError: the rollout stays unscored and
is counted), never a wrong answer.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from functools import lru_cache

from .errors import ConfigError, GraderError

NUM_PROCESSES = 2
_MAX_BYTES = 4 << 30
"""Address space of a process."""
_START_S = 120.0
_WAIT_S = 50.0
"""For a free process."""


class MathVerifier:
    """At most num_processes of them, started when they are needed. timeout_s: of one comparison.

    Raises ConfigError where math-verify is not installed.
    """

    def __init__(self, timeout_s: float = 5.0, num_processes: int = NUM_PROCESSES) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("grading mathematics needs math-verify; pip install 'estr[math]'")
        self._timeout_s = timeout_s
        # Last in, first out: a second process is started only if the first one is at work.
        self._free: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._processes = [_Process() for _ in range(num_processes)]
        for process in self._processes:
            self._free.put(process)

    def equal(self, answer: str, gold: str) -> bool:
        """Does `answer` say the same as `gold`? Both as they would stand in a \\boxed{}.

        Raises GraderError when that cannot be told in time.
        """
        try:
            process = self._free.get(timeout=_WAIT_S)
        except queue.Empty as error:
            raise GraderError(f"no math grading process was free within {_WAIT_S:g} s") from error
        try:
            return process.ask(answer, gold, self._timeout_s)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes; a later question starts them anew."""
        for process in self._processes:
            process.kill()


@lru_cache(maxsize=8)
def shared_verifier(timeout_s: float) -> MathVerifier:
    """One for all tasks of this process, closed at its exit."""
    verifier = MathVerifier(timeout_s)
    atexit.register(verifier.close)
    return verifier


class _Process:
    """One process, asked by one thread at a time."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def ask(self, answer: str, gold: str, timeout_s: float) -> bool:
        try:
            channel = self._channel()
            channel.settimeout(timeout_s)
            channel.sendall(json.dumps([answer, gold]).encode() + b"\n")
            verdict = json.loads(_line(channel, timeout_s))
        except TimeoutError as error:
            self.kill()
            raise GraderError(
                f"math-verify did not compare {answer[:80]!r} with {gold[:80]!r} "
                f"within {timeout_s:g} s"
            ) from error
        except (OSError, EOFError) as error:
            self.kill()
            raise GraderError(f"math-verify died of {answer[:80]!r} and {gold[:80]!r}") from error
        except BaseException:  # whatever it answers now belongs to no question
            self.kill()
            raise
        if isinstance(verdict, str):
            raise GraderError(
                f"math-verify cannot compare {answer[:80]!r} with {gold[:80]!r}: {verdict}"
            )
        return bool(verdict)

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
                    [sys.executable, "-m", "estr.math_grading", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            self._running = process, ours
            try:
                _line(ours, _START_S)
            except (TimeoutError, OSError, EOFError) as error:
                raise GraderError("the process of math-verify does not come up") from error
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


def main(fd: int) -> None:
    """Answer questions until the other side has ended."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_BYTES if hard == resource.RLIM_INFINITY else min(_MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    compare("1", "1")  # imports what it needs
    with socket.socket(fileno=fd) as channel, contextlib.suppress(OSError):
        channel.sendall(b"\n")
        for line in channel.makefile("rb"):
            verdict: bool | str
            try:
                verdict = compare(*json.loads(line))
            except Exception as error:  # noqa: BLE001 - the border where errors become data
                verdict = f"{type(error).__name__}: {error}"[:300]
            channel.sendall(json.dumps(verdict).encode() + b"\n")


def compare(answer: str, gold: str) -> bool:
    """math-verify's verdict, without any limit."""
    from math_verify import parse, verify

    read = [
        parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)
        for text in (gold, answer)
    ]
    return bool(verify(*read, timeout_seconds=None, raise_on_error=True))


def _end_with_parent(parent: int) -> None:
    """Leave when the caller is gone, even in the middle of a comparison."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


if __name__ == "__main__":
    main(int(sys.argv[1]))
