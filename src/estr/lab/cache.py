"""Finished runs, one file each, DIGEST.json: function, configuration, seconds, rows.

A file is written aside and renamed, so it is whole or not there; what is torn or of another job
does not count, and is written anew. Several sweeps may share a folder: who runs a job holds a lock
that ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..own_folders import own_folder, remove_abandoned
from .job import Job
from .table import Row

_LOGS = "lab-logs"


class Cache:
    """The finished runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: Job) -> Path:
        return self.folder / f"{job.digest}.json"

    def read(self, job: Job) -> list[Row] | None:
        """The rows of a finished job; None where there is none. Raises DataError where what is
        there is torn or foreign."""
        path = self.path(job)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["function"] != job.function or kept["config"] != as_json(job.config):
                raise ValueError("of another job")
            return checked(kept["rows"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path} is torn or foreign ({error})") from error

    def keep(self, job: Job, rows: list[Row], seconds: float) -> None:
        """Raises DataError naming the file where it cannot be written."""
        kept = {"function": job.function, "config": job.config, "seconds": seconds, "rows": rows}
        path = self.path(job)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                aside.write_text(json.dumps(kept), encoding="utf-8")
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written: {error.strerror}; look at the space and the rights "
                "there, or choose another place with --out"
            ) from error

    @contextlib.contextmanager
    def logs(self) -> Iterator[Path]:
        """A fresh folder for the logs of worker processes; it stays when something is raised, until
        the next one is made. Raises ConfigError where nothing can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(_LOGS, self.folder)
            folder = own_folder(_LOGS, self.folder)
            (folder / "lab.log").write_text("written before any run\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"nothing can be written in {self.folder}: {error.strerror}; choose another place "
                "with --out"
            ) from error
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def claim(self, job: Job) -> Iterator[bool]:
        """Whether this job is ours to run: False while another process has it."""
        path = self.path(job).with_suffix(".lock")
        with path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass  # a file system without locks: at worst a job is run twice
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)


def checked(rows: Any) -> list[Row]:
    """The rows themselves. Raises ValueError unless they are a list of at least one mapping with
    measure, step and value, the value a number or None."""
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"rows must be a list of at least one, not {_short(rows)}")
    for row in rows:
        if not isinstance(row, dict) or not row.keys() >= {"measure", "step", "value"}:
            raise ValueError(f"a row needs measure, step and value, unlike {_short(row)}")
        if not isinstance(row["measure"], str) or not isinstance(row["step"], int):
            raise ValueError(f"measure must be a text and step a whole number in {_short(row)}")
        if not isinstance(row["value"], int | float | None):
            raise ValueError(f"a value must be a number or None, not {_short(row['value'])}")
    return rows


def _short(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


def as_json(value: Any) -> Any:
    """As it comes back from a file. Raises TypeError or ValueError where it cannot be in one."""
    return json.loads(json.dumps(value))
