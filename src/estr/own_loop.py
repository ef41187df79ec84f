"""Coroutines that a user wrote: on an event loop in a thread of their own, and watched.

    value = await running_loop().call(lambda: judge("24"), "judge")     there; this loop stays free
    reply = await Watch().run(environment.step(action), "My.step")      here, but told if it holds

An async function that blocks (time.sleep, requests, long sums) holds the loop that it runs on, and
with it everything else there, time limits included. On their own loop such functions hold up only
their like; a loop that is held when a call on it is given up is left behind for a new one, and the
other calls on it go on where they are.
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
"""A step of a coroutine that takes longer than this is told, once of each function; a loop that is
not heard of for longer is held."""

_START_S = 10.0
"""How long a new loop may take until it runs."""

_LINGER_S = 600.0
"""How long a loop that was left behind waits for its calls. Each has a limit of its own; this is
for those that do not end when they are cancelled."""

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
    """An event loop in a daemon thread. Raises RuntimeError where it cannot be started."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._calls: set[asyncio.Task[Any]] = set()
        self._linger_s = _LINGER_S
        self._heard = time.monotonic()
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._main, daemon=True, name="estr coroutines")
        self.thread.start()
        if not self._ready.wait(_START_S) or self._failure is not None:
            why = self._failure or f"it does not run after {_START_S:g} s"
            raise RuntimeError(f"no event loop for async functions: {why}") from self._failure

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - a task of a user's raised it, or the start
            self._failure = error
            if self._ready.is_set():
                _log.error("the event loop of async functions ended: %r", error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._beat()
        self._ready.set()
        await self._stop.wait()
        until = time.monotonic() + self._linger_s
        while self._calls and (left := until - time.monotonic()) > 0:
            await asyncio.wait(self._calls, timeout=left)

    def _beat(self) -> None:
        self._heard = time.monotonic()
        self._loop.call_later(HOLD_S / 4, self._beat)

    async def call(self, begin: Callable[[], Awaitable[T]], name: str) -> T:
        """What the awaitable that `begin` gives comes to, made and awaited there. Whatever it
        raises is raised; what would end a loop, as a RuntimeError that names it. RuntimeError, too,
        where the loop ends before it."""
        work = asyncio.run_coroutine_threadsafe(self._run(begin, name), self._loop)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            leave_behind(self)
            raise RuntimeError(f"the event loop of {name} ended under it") from None

    async def _run(self, begin: Callable[[], Awaitable[T]], name: str) -> T:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)
        self._calls.add(task)
        try:
            return await self._watch.run(_contained(begin), name)
        finally:
            self._calls.discard(task)

    def is_held(self) -> bool:
        """Is the loop held for long at this moment, by whatever runs on it? From any thread."""
        return self.thread.is_alive() and time.monotonic() - self._heard > HOLD_S

    def holder(self, since: float) -> tuple[str, float] | None:
        """As Watch.holder. What is no step of a called function, but of a task that one started, is
        told by the names of all that are under way."""
        known = self._watch.holder(since)
        if not self.is_held() or (known is not None and self._watch.is_held()):
            return known
        names = sorted({task.get_name() for task in list(self._calls)})
        who = f"a task of {' or of '.join(names)}" if names else "a task that outlived its call"
        return who, time.monotonic() - self._heard

    def stop(self, linger_s: float = _LINGER_S) -> None:
        """End it, once nothing holds it and its calls have ended; those that have not after
        linger_s seconds are cancelled."""
        self._linger_s = linger_s
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _contained(begin: Callable[[], Awaitable[T]]) -> T:
    try:
        return await begin()
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        told = RuntimeError("CancelledError, although nobody cancelled it")
        raise told.with_traceback(error.__traceback__) from error
    except Exception:
        raise
    except BaseException as error:
        told = RuntimeError(f"{type(error).__name__}: {error}")
        raise told.with_traceback(error.__traceback__) from error  # where, in the user's own code


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
    """Make no further call on this one; it ends when it is free and its calls have ended."""
    global _loop
    loop.stop()
    with _lock:
        if _loop is loop:
            _loop = None


@atexit.register
def _at_exit() -> None:
    if _loop is not None:
        _loop.stop(linger_s=0.0)
        _loop.thread.join(timeout=1.0)
