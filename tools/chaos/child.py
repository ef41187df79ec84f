"""One life of a run, which kills itself where it is told to.

    CHAOS_KILL=fsync:7:after   SIGKILL after the 7th fsync of this process (before: in its place)
    CHAOS_FAULT=full:3         the 3rd fsync finds the disk full
    CHAOS_FAULT=slow           every fsync takes 50 ms
    CHAOS_FAULT=clock          the wall clock jumps by an hour, back and forth

Points: fsync, rename (rename and replace), event (a line of the schedule), metrics (a row),
message (a frame to a worker process). Arguments are those of `estr`, or `scripted FOLDER` for the
run of fakes in tools/chaos/scripted.py.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _armed(call: Callable[..., Any], at: int, when: str) -> Callable[..., Any]:
    count = itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        number = next(count)
        if number == at and when == "before":
            _die()
        result = call(*args, **kwargs)
        if number == at:
            _die()
        return result

    return wrapped


def arm_kill(text: str) -> None:
    """Set the trap that CHAOS_KILL describes."""
    point, at, when = text.split(":")
    if point == "fsync":
        os.fsync = _armed(os.fsync, int(at), when)
    elif point == "rename":
        armed = _armed(lambda call, *args: call(*args), int(at), when)
        rename, replace = os.rename, os.replace
        os.rename = lambda *args, **kwargs: armed(rename, *args)  # type: ignore[assignment]
        os.replace = lambda *args, **kwargs: armed(replace, *args)  # type: ignore[assignment]
    elif point == "event":
        from estr.schedule import EventLog

        EventLog.write = _armed(EventLog.write, int(at), when)  # type: ignore[method-assign]
    elif point == "metrics":
        from estr.metrics import MetricsWriter

        MetricsWriter.write = _armed(MetricsWriter.write, int(at), when)  # type: ignore[method-assign]
    elif point == "message":
        from estr.worker import Worker

        Worker._flush = _armed(Worker._flush, int(at), when)  # type: ignore[method-assign]
    else:
        raise SystemExit(f"unknown point {point}")


def arm_fault(text: str) -> None:
    """Set the fault that CHAOS_FAULT describes."""
    kind, _, at = text.partition(":")
    fsync, count = os.fsync, itertools.count(1)
    if kind == "full":

        def full(descriptor: int) -> None:
            if next(count) == int(at):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        os.fsync = full
    elif kind == "slow":

        def slow(descriptor: int) -> None:
            time.sleep(0.05)
            fsync(descriptor)

        os.fsync = slow
    elif kind == "clock":
        clock = time.time
        time.time = lambda: clock() + 3600.0 * (next(count) % 3 - 1)
    else:
        raise SystemExit(f"unknown fault {kind}")


def main() -> None:
    if text := os.environ.get("CHAOS_KILL"):
        arm_kill(text)
    if text := os.environ.get("CHAOS_FAULT"):
        arm_fault(text)
    if sys.argv[1] == "scripted":
        sys.path.insert(0, str(Path(__file__).parent))
        from scripted import run

        run(Path(sys.argv[2]))
        return
    from estr.cli import main as estr_main

    estr_main()


if __name__ == "__main__":
    main()
