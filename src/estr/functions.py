"""Functions that a user wrote: found by name, called with a time limit.

    reward = import_object("my_pkg.rewards:score", "task.reward")
    value = await call_limited(reward, ("24",), {}, timeout_s=10.0)

An ordinary function runs in a thread of its own, so that neither a slow one nor a hung one stops
the rollouts of others; a coroutine function on a loop that it shares with its like (`own_loop`).
Threads cannot be killed: a call that is given up goes on in its thread until it returns, and no
further call is made while too many do.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from . import own_loop
from .errors import ConfigError
from .own_loop import OwnLoop

T = TypeVar("T")

MAX_HUNG_CALLS = 64
"""Calls given up that may still be running, in this process."""

_MAX_TOLD = 1000
"""Characters of a user's error that are told."""

_hung: set[threading.Thread] = set()


class CallTimeout(Exception):
    """A call did not return in time, or was not made because too many others hang."""


def import_object(target: str, key: str) -> Any:
    """What "package.module:name" names; modules in the current folder are found, too.

    Raises ConfigError naming the recipe's key and the remedy.
    """
    module, colon, attribute = target.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(f'{key} = {target!r} cannot be imported: write "package.module:name"')
    if module == "__main__":
        raise ConfigError(
            f"{key} = {target!r}: the processes of a run cannot import what a script or a notebook "
            "defines; put it into a file beside it, and name that file's module"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key} = {target!r} cannot be imported: {told(error)}; "
            "the module must be importable from where estr is started (see PYTHONPATH)"
        ) from error
    return found


def told(error: BaseException) -> str:
    """What was raised and, of the user's own code, where: "KeyError: 'x' (my_reward.py, line 7)".
    Without a place where only libraries are in the traceback; cut where it is very long. Half a
    character, as in the name of a file that is no text, becomes its escape, for others write it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a user's exception may be one that cannot be shown
        text = f"{type(error).__name__}, which cannot be shown"
    if len(text) > _MAX_TOLD:
        text = f"{text[:_MAX_TOLD]}... ({len(text)} characters)"
    folders = [str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib"))]
    own = [
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *folders))
    ]
    said = f"{text}{own[-1] if own else ''}"
    return said.encode("utf-8", "backslashreplace").decode()


async def call_limited(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout_s: float,
) -> Any:
    """What the function, or the coroutine that it returns, comes to within timeout_s seconds.

    Raises CallTimeout when it does not, and whatever the function itself raises.
    """
    named = dict(kwargs or {})
    call = asyncio.timeout(timeout_s)
    loop: OwnLoop | None = None
    began = time.monotonic()
    try:
        async with call:
            begin = partial(function, *args, **named)
            if not inspect.iscoroutinefunction(function):
                result = await _in_thread(begin, _name(function))
                if not inspect.isawaitable(result):
                    return result
                begin = partial(_itself, result)
            _require_few_hung()
            loop = own_loop.running_loop()
            return await loop.call(begin, _name(function))
    except TimeoutError as error:
        if not call.expired():  # the function's own
            raise
        blame = _blame(loop, began)
        raise CallTimeout(f"no answer within {timeout_s:g} s{blame}") from error
    except asyncio.CancelledError:  # a limit of the caller's may be the shorter one
        _leave_held(loop)
        raise


def _itself(value: T) -> T:
    return value


def _blame(loop: OwnLoop | None, since: float) -> str:
    """Who held the loop of a call that was given up; one that is held still is left behind."""
    holder = None if loop is None else loop.holder(since)
    _leave_held(loop)
    return "" if holder is None else f"; {own_loop.held(*holder)}"


def _leave_held(loop: OwnLoop | None) -> None:
    if loop is not None and loop.is_held():
        own_loop.leave_behind(loop)
        _hung.add(loop.thread)


def _require_few_hung() -> None:
    _hung.difference_update([thread for thread in _hung if not thread.is_alive()])
    if len(_hung) >= MAX_HUNG_CALLS:
        raise CallTimeout(f"{len(_hung)} earlier calls of one's own functions never returned")


async def _in_thread(work_of: Callable[[], Any], name: str) -> Any:
    """In a daemon thread: a pool would be used up by calls that hang, and joined at exit."""
    _require_few_hung()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def report(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = work_of()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failure = error
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                # A future cannot hold the first; the others would end the loop, not the call.
                failure = RuntimeError(told(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(report, result, failure)

    thread = threading.Thread(target=work, daemon=True, name=f"estr {name}")
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        _hung.add(thread)
        raise


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
