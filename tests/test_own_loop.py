"""Coroutines of users: on a loop of their own, which they may hold, end, or be cancelled on."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from estr import functions, own_loop
from estr.environment import Action, Reply
from estr.functions import CallTimeout, call_limited, import_object, told
from estr.own_loop import Watch
from estr.reward import Attempt, Reward
from estr.rollout import RolloutSetting, run_rollout
from estr.types import RolloutId
from test_evaluation import setting


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(own_loop, "HOLD_S", 0.02)
    monkeypatch.setattr(own_loop, "_told", set())
    monkeypatch.setattr(functions, "_hung", set())
    monkeypatch.setattr(own_loop, "_loop", None)
    yield
    if own_loop._loop is not None:
        own_loop.leave_behind(own_loop._loop)


async def where() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


async def test_coroutines_share_one_loop_apart_from_the_callers() -> None:
    first = await call_limited(where, timeout_s=10)
    second = await call_limited(partial(where), timeout_s=10)
    assert first is second
    assert first is not threading.current_thread()


async def test_a_function_that_blocks_holds_neither_the_caller_nor_its_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()

    async def blocks() -> None:
        released.wait()

    with pytest.raises(CallTimeout, match=r"within 1 s; .*blocks is async but blocks: it held"):
        await call_limited(blocks, timeout_s=1.0)
    # The loop that is held is left behind, so others are answered.
    assert await call_limited(where, timeout_s=10) is not None
    (hung,) = functions._hung
    released.set()
    await asyncio.to_thread(hung.join, 10)
    assert not hung.is_alive(), "it ends once nothing holds it"
    assert caplog.text.count("blocks is async but blocks") == 1


async def test_each_function_that_holds_the_loop_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def slow(seconds: float) -> float:
        await asyncio.sleep(0)
        time.sleep(seconds)
        return seconds

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert await call_limited(slow, (0.1,), timeout_s=10) == 0.1
    (told,) = [line for line in caplog.messages if "slow is async but blocks: it held" in line]
    assert "asyncio.to_thread" in told


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_nothing_that_a_coroutine_raises_ends_the_loop(error: type[BaseException]) -> None:
    async def leave() -> None:
        raise error("now")

    with pytest.raises(RuntimeError, match=error.__name__):
        await call_limited(leave, timeout_s=10)
    assert await call_limited(where, timeout_s=10)


async def test_the_line_at_which_a_coroutine_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaver.py").write_text("import sys\n\nasync def score(reply):\n    sys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) as found:
        await call_limited(import_object("leaver:score", "task.reward"), ("x",), timeout_s=10)
    assert told(found.value) == "RuntimeError: SystemExit: 3 (leaver.py, line 4)"


async def test_a_call_that_is_cancelled_is_cancelled_there() -> None:
    began, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def waits() -> None:
        loop.call_soon_threadsafe(began.set)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    call = asyncio.create_task(call_limited(waits, timeout_s=3600))
    await asyncio.wait_for(began.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(ended.wait, 10)


async def test_what_is_watched_is_otherwise_as_it_was() -> None:
    async def double(x: int) -> int:
        try:
            await asyncio.sleep(3600 if x < 0 else 0)
        except asyncio.CancelledError:
            return -1
        return 2 * x

    watch = Watch()
    assert await watch.run(double(3), "double") == 6
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done.set_result(5)
    assert await watch.run(done, "future") == 5
    task = asyncio.create_task(watch.run(double(-1), "double"))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == -1, "the cancellation reached it"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await watch.run(asyncio.sleep(3600), "sleep")


def test_a_reward_that_blocks_is_a_grader_error_which_names_it() -> None:
    released = threading.Event()

    async def judge(reply: str) -> float:
        released.wait()
        return 1.0

    reward = Reward(judge, "task.reward", timeout_s=1.0)
    attempt = Attempt("7", "7", {}, [], "stop")
    with pytest.raises(Exception, match=r"task\.reward: no answer within 1 s; .*judge is async"):
        asyncio.run(reward(attempt))
    released.set()


async def test_an_environment_that_holds_the_loop_of_all_rollouts_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sleepy:
        restorable = True

        async def start(self) -> str:
            return "12"

        async def step(self, action: Action) -> Reply:
            time.sleep(0.1)
            return Reply(outcome=1.0)

        async def close(self) -> None:
            pass

    class Task(type(setting([[1]]).task)):  # type: ignore[misc]
        def make(self, split: str, index: int) -> Sleepy:
            return Sleepy()

    base = setting([[1]])
    made = RolloutSetting(base.engine, Task([[1]]), base.codec, base.sampling, base.limits)
    with caplog.at_level(logging.WARNING):
        ended = await run_rollout(
            made, RolloutId(0, 0, 0), 0, dispatch_version=7, deadline_version=7
        )
    assert ended.reward == 1.0
    assert caplog.text.count("Sleepy.step is async but blocks") == 1


async def _waited_for(blocks: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wait_for(blocks(), 0.1)


async def _gathered(blocks: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(blocks(), asyncio.sleep(0))


async def _grouped(blocks: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(blocks())


@pytest.mark.parametrize("outer", [_waited_for, _gathered, _grouped])
async def test_a_task_that_a_function_started_holds_the_loop_as_itself_would(
    outer: Callable[..., Awaitable[None]],
) -> None:
    released = threading.Event()

    async def blocks() -> None:
        await asyncio.sleep(0)
        released.wait()

    try:
        with pytest.raises(CallTimeout, match=rf"{outer.__name__} is async but blocks: it held"):
            await call_limited(outer, (blocks,), timeout_s=1.0)
        assert await call_limited(where, timeout_s=10) not in functions._hung
        assert len(functions._hung) == 1
    finally:
        released.set()


@pytest.mark.parametrize("by", ["a limit", "cancel"])
async def test_a_held_loop_is_left_behind_whoever_gives_the_call_up(by: str) -> None:
    released = threading.Event()

    async def blocks() -> None:
        released.wait()

    call = asyncio.create_task(call_limited(blocks, timeout_s=60))
    try:
        if by == "a limit":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 1.0)
        else:
            await asyncio.sleep(1.0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await call_limited(where, timeout_s=10) not in functions._hung
        assert len(functions._hung) == 1
    finally:
        released.set()


async def test_calls_that_still_have_time_go_on_in_a_loop_that_was_left_behind() -> None:
    began, released, go_on = asyncio.Event(), threading.Event(), threading.Event()
    caller = asyncio.get_running_loop()

    async def patient() -> str:
        caller.call_soon_threadsafe(began.set)
        await asyncio.to_thread(go_on.wait, 10)
        return "done"

    async def blocks() -> None:
        released.wait()

    call = asyncio.create_task(call_limited(patient, timeout_s=60))
    await asyncio.wait_for(began.wait(), 10)
    with pytest.raises(CallTimeout):
        await call_limited(blocks, timeout_s=1.0)
    (hung,) = functions._hung
    released.set()
    await asyncio.to_thread(hung.join, 0.2)
    go_on.set()
    assert await call == "done"
    await asyncio.to_thread(hung.join, 10)
    assert not hung.is_alive()


async def test_a_call_whose_loop_ends_is_not_a_cancellation() -> None:
    async def leave() -> None:
        raise SystemExit

    async def starts_one() -> None:
        task = asyncio.create_task(leave())
        await asyncio.sleep(3600)
        await task

    with pytest.raises(RuntimeError, match=r"the event loop of .*starts_one ended under it"):
        await call_limited(starts_one, timeout_s=60)
    assert await call_limited(where, timeout_s=10)


def test_a_loop_that_cannot_start_says_so() -> None:
    script = """
import asyncio, os, resource
from estr import own_loop

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    files = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        own_loop.running_loop()
    except RuntimeError as error:
        print(error)
    for file in files:
        os.close(file)
    print(own_loop.running_loop().is_held())

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    first, second = done.stdout.splitlines()
    assert "no event loop for async functions: [Errno 24]" in first
    assert second == "False"
