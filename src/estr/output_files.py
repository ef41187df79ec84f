"""Files that a command is asked to write: refused before any compute, and written whole or not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ConfigError, DataError


def require_writable(path: Path, option: str = "--out") -> None:
    """Raises ConfigError naming option, path and reason if no file can be written at `path`.
    Nothing stays behind, and a file that is there is left alone."""
    there = os.path.exists(path)  # not so of a link to nowhere
    if there and not path.is_file() and not path.is_dir():
        return  # to open a pipe would wait for its reader
    try:
        path.open("ab").close()
        if not there:
            path.resolve().unlink()
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {error.strerror}; choose another place"
        ) from error


def write_whole(path: Path, text: str, option: str = "--out") -> None:
    """Write a file, through a second one beside it if it is a plain file, so that what was there
    stays until all of the new is on disk. Raises DataError naming path and reason."""
    try:
        if path.exists() and not path.is_file():  # a pipe, /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        # A name has 255 bytes at most, and a character up to four of them.
        aside = target.with_name(f".{target.name[:50]}.{os.getpid()}.writing")
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
    except (OSError, RuntimeError) as error:  # the second of a link to itself
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot write {path}: {reason}; choose a place with {option}") from error
