"""Folders that end with the process that has made them, at the latest when the next one comes.

A process that is killed cannot tidy up, so its number stands in the name:
estr-KIND-NAMESPACE-PID-...
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def own_folder(kind: str, place: Path) -> Path:
    """A fresh folder of this process in `place`."""
    return Path(tempfile.mkdtemp(prefix=f"{_prefix(kind)}{os.getpid()}-", dir=place))


def remove_abandoned(kind: str, place: Path) -> None:
    """Remove from `place` the folders of processes that no longer live: of this namespace of
    process ids only, since containers may share the place and not the ids."""
    prefix = _prefix(kind)
    for old in place.glob(f"{prefix}*"):
        pid = old.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(old, ignore_errors=True)


def _prefix(kind: str) -> str:
    return f"estr-{kind}-{_pid_namespace()}-"


def _pid_namespace() -> int:
    """Within which a process id means something; 0 where the system has but one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
