"""Calls to a host that lives elsewhere: numbers, time limits, and their end when the host dies.

    await calls.call("train", batch)   numbered, kept until its result is delivered
    calls.notify("cancel", id)         not waited for

What is said within one turn of the event loop travels as one frame, [(number, method, args)]; the
answer is [(number, result)], where a result that is an exception is raised in the caller. How they
travel is left to the subclass: `estr.worker.Worker` has a socket, `estr.cluster` an actor of Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import errors
from .errors import EstrError, WorkerDied, WorkerError

Message = tuple[int, str, tuple[Any, ...]]

NO_ANSWER = -1
"""The number of a message that is not to be answered."""


class Calls(ABC):
    """The controller's end. All methods are called from one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set, with the reason, when the host ends without having been asked to."""
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Message] = []
        self._closing = False

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the host is, for messages: the engine process (pid 7)."""

    @abstractmethod
    def _transmit(self, frame: list[Message]) -> None:
        """Send one frame on its way."""

    @abstractmethod
    async def close(self, timeout_s: float = 5.0) -> None:
        """Ask the host to end; kill it after timeout_s. May be called twice."""

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
            raise WorkerError(f"{self.place} did not {what} within {timeout_s:g} s") from error
        finally:
            self._calls.pop(number, None)

    def notify(self, method: str, *args: Any) -> None:
        """Call host.method(*args) without waiting for anything."""
        if not self.died.done():
            self._send(NO_ANSWER, method, args)

    async def alive(self, for_s: float | None = None) -> None:
        """Returns after for_s (None: never) unless the host ends before: WorkerDied."""
        done, _ = await asyncio.wait([self.died], timeout=for_s)
        if done:
            raise WorkerDied(self.died.result())

    def _send(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        if self.died.done():
            raise WorkerDied(self.died.result())
        if self._closing and number != NO_ANSWER:
            raise WorkerDied(f"{self.place} was closed")
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((number, method, args))

    def _flush(self) -> None:
        frame, self._outbox = self._outbox, []
        self._transmit(frame)

    def _deliver(self, answers: Sequence[tuple[int, Any]]) -> None:
        for number, result in answers:
            future = self._calls.get(number)
            if future is None or future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _fail_calls(self, reason: str) -> None:
        """The host has ended: so have all calls."""
        if not self._closing and not self.died.done():
            self.died.set_result(reason)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerDied(reason))


def portable(error: BaseException) -> EstrError:
    """An error that can cross the border between processes: an EstrError as it is, others
    described, of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EstrError) and getattr(errors, type(error).__name__, None) is type(error):
        return type(error)(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return WorkerError(f"{type(error).__name__}: {error}{place}")


async def all_or_none(*starts: asyncio.Future[Any]) -> list[Any]:
    """What all of these starts give, in their order. As soon as one fails, the others are cancelled
    (which ends their processes), and those that are up already are closed by their `close()`."""
    try:
        return await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        ended = await asyncio.gather(*starts, return_exceptions=True)
        up = [process for process in ended if not isinstance(process, BaseException)]
        await asyncio.gather(*(process.close() for process in up))
        raise
