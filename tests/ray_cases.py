"""What the tests of the Ray placement share. Without the extra `ray` they are skipped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

MARKS = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    # Of Ray's own processes; see processes_of_ray_left_alone.
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed; `make test-ray` installs it",
    ),
]

SMALL = [
    "placement=ray",
    "groups_per_step=2",
    "group_size=2",
    "eval.every=0",
    "eval.final_problems=4",
    "checkpoint.every_steps=2",
]


@contextlib.contextmanager
def processes_of_ray_left_alone() -> Iterator[None]:
    """Ray forgets the Popen of each process that it has started, whether it has ended or not, and
    Python warns when it collects one. After the block they are collected."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def command_of(pid: int) -> list[str]:
    """The command line of a living process; [] of one that is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def descendants(pid: int) -> Iterator[int]:
    """The living processes below this one, whoever started them in between."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    below = list(children.get(pid, []))
    for each in below:
        below += children.get(each, [])
    return iter([each for each in below if command_of(each)])


async def gone(pid: int, within_s: float = 60.0) -> bool:
    """Has the process ended, or does it end in time?"""
    deadline = time.monotonic() + within_s
    while command_of(pid):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True
