"""Asynchronous work from ordinary code, wherever that runs.

    blocking.run(lambda: work())          what `await work()` gives

In a script that is asyncio.run. Where this thread runs an event loop already (a notebook, an
asynchronous program), the work gets a thread and a loop of its own, and the caller waits for it; to
go on meanwhile, an asynchronous program says `await asyncio.to_thread(estr.train, recipe)`.

    with blocking.interrupts_go_to(handler):    SIGNALS call it, on the work's loop

Without a handler Ctrl-C cancels the work, in either case. A terminal that hangs up says so once,
and its shell once more: a hangup counts only as the first of all signals. Where a program handles
or ignores it already (nohup), it stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[[], object]

SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

_handlers: ContextVar[list[Handler] | None] = ContextVar("handlers", default=None)
"""Of work whose signals arrive in another thread, the last one is called. None: they come here."""


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine comes to. Raises what it raises; KeyboardInterrupt if Ctrl-C ended it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    handlers: list[Handler] = []
    interrupted = False

    async def supervised() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        handlers.append(lambda: _call_soon(loop, task.cancel))
        _handlers.set(handlers)
        return await work()

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        if handlers:
            handlers[-1]()

    on_signal = _but_late_hangups(interrupt)
    with ThreadPoolExecutor(1, thread_name_prefix="estr") as thread, _calling(on_signal):
        try:
            return thread.submit(lambda: asyncio.run(supervised())).result()
        except asyncio.CancelledError as error:
            if not interrupted:
                raise
            raise KeyboardInterrupt from error


@contextlib.contextmanager
def interrupts_go_to(handler: Handler) -> Iterator[None]:
    """Inside, the signals call `handler` on the running loop. Where none can be caught (a thread
    that nobody forwards them to), Python's own handling stays."""
    loop = asyncio.get_running_loop()
    elsewhere = _handlers.get()
    if elsewhere is not None:
        elsewhere.append(lambda: _call_soon(loop, handler))
        try:
            yield
        finally:
            elsewhere.pop()
        return
    on_signal = _but_late_hangups(handler)
    before: dict[signal.Signals, Any] = {}
    for number in _caught():
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            own = signal.getsignal(number)
            loop.add_signal_handler(number, on_signal, number)
            before[number] = own
    try:
        yield
    finally:
        for number, own in before.items():
            loop.remove_signal_handler(number)
            _put_back(number, own)


def _caught() -> list[signal.Signals]:
    return [n for n in SIGNALS if not _is_hangup(n) or signal.getsignal(n) is signal.SIG_DFL]


def _but_late_hangups(handler: Handler) -> Callable[..., None]:
    """What a signal calls, with its number first: `handler`, unless it is a hangup after others."""
    came = False

    def on_signal(number: int, *_: object) -> None:
        nonlocal came
        late, came = came and _is_hangup(number), True
        if not late:
            handler()

    return on_signal


def _is_hangup(number: int) -> bool:
    return number == getattr(signal, "SIGHUP", None)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(callback)


@contextlib.contextmanager
def _calling(on_signal: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals call it while this thread waits; only the main thread is ever sent any."""
    before: dict[signal.Signals, Any] = {}
    for number in _caught():
        with contextlib.suppress(ValueError):  # not the main thread
            before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            _put_back(number, handler)


def _put_back(number: signal.Signals, handler: Any) -> None:
    """What a program had for a signal; None: something that is not of Python, and is lost."""
    if handler is not None:
        signal.signal(number, handler)
