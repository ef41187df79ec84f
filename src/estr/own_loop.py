"""Coroutines that a user wrote: on an event loop in a thread of their own, and watched.

    value = await running_loop().call(lambda: judge("24"), "judge")     there; this loop stays free
    reply = await Watch().run(environment.step(action), "My.step")      here, but told if it holds

An async function that blocks (time.sleep, requests, long sums) holds the loop that it runs on, and
with it everything else there, time limits included. On their own loop such functions hold up only
their like; a loop that is held when a call on it is given up is left behind for a new one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")

HOLD_S = 1.0
"""A step of a coroutine that takes longer than this is told, once of each function."""

_log = logging.getLogger(__name__)
_told: set[str] = set()


class Watch:
    """Of one event loop: whose step holds it."""

    def __init__(self) -> None:
        self._now: tuple[str, float] | None = None
        self._last = ("", 0.0, 0.0)

    async def run(self, made: Awaitable[T], name: str) -> T:
        """What `made` comes to. A step of it that holds the loop for long is told by `name`."""
        value: T = await _Steps(self, made, name)
        return value

    def holder(self, since: float) -> tuple[str, float] | None:
        """(name, seconds) of what holds the loop for long now, or did after the monotonic time
        `since`; None: nothing. May be asked from any thread."""
        now = self._now
        if now is not None and (held := time.monotonic() - now[1]) > HOLD_S:
            return now[0], held
        name, held, ended = self._last
        return (name, held) if name and ended >= since else None

    def is_held(self) -> bool:
        """Is the loop held for long at this moment?"""
        now = self._now
        return now is not None and time.monotonic() - now[1] > HOLD_S

    def begin(self, name: str) -> float:
        began = time.monotonic()
        self._now = (name, began)
        return began

    def end(self, name: str, began: float) -> None:
        ended = time.monotonic()
        self._now = None
        if ended - began > HOLD_S:
            self._last = (name, ended - began, ended)
            if name not in _told:
                _told.add(name)
                _log.warning("%s", held(name, ended - began))


def held(name: str, seconds: float) -> str:
    """What to say of a function that held an event loop for so long."""
    return (
        f"{name} is async but blocks: it held its event loop for {seconds:.1f} s, and everything "
        "else there waited; await what takes time (asyncio.to_thread calls what cannot be "
        "awaited), or write a reward or a tool with def, which runs in a thread of its own"
    )


class _Steps:
    """An awaitable, step by step."""

    def __init__(self, watch: Watch, made: Awaitable[Any], name: str) -> None:
        self._watch, self._made, self._name = watch, made, name

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = _coroutine(self._made)
        go_on: Callable[[Any], Any] = steps.send
        given: Any = None
        while True:
            began = self._watch.begin(self._name)
            try:
                waits_for = go_on(given)
            except StopIteration as end:
                return end.value
            finally:
                self._watch.end(self._name, began)
            try:
                go_on, given = steps.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001 - the coroutine's, as any other
                go_on, given = steps.throw, error


async def _coroutine(made: Awaitable[T]) -> T:
    return await made


class OwnLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.watch = Watch()
        self._ready = threading.Event()
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), daemon=True, name="estr coroutines"
        )
        self.thread.start()
        self._ready.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()

    async def call(self, begin: Callable[[], Awaitable[T]], name: str) -> T:
        """What the awaitable that `begin` gives comes to, made and awaited there. Whatever it
        raises is raised; what would end a loop, as a RuntimeError that names it."""
        work = self.watch.run(_contained(begin), name)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """End it, once nothing holds it; what is under way is cancelled."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)


async def _contained(begin: Callable[[], Awaitable[T]]) -> T:
    try:
        return await begin()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("CancelledError, although nobody cancelled it") from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


_lock = threading.Lock()
_loop: OwnLoop | None = None


def running_loop() -> OwnLoop:
    """The one that calls are made on."""
    global _loop
    with _lock:
        if _loop is None or not _loop.thread.is_alive():
            _loop = OwnLoop()
        return _loop


def leave_behind(loop: OwnLoop) -> None:
    """Make no further call on this one; it ends when it is free."""
    global _loop
    loop.stop()
    with _lock:
        if _loop is loop:
            _loop = None


@atexit.register
def _at_exit() -> None:
    if _loop is not None:
        _loop.stop()
        _loop.thread.join(timeout=1.0)
