"""Where what is shown goes."""

from __future__ import annotations

import contextlib
from typing import IO, Any, cast


class _Careless:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def careless(stream: IO[str]) -> IO[str]:
    """The same stream, which takes text even where nobody reads it any more: a pipe that is closed,
    a terminal that hung up. Work does not end with its display."""
    return cast(IO[str], _Careless(stream))
