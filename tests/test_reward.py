"""Rewards by one's own function: what it may ask for, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from estr.environment import Reply
from estr.errors import ConfigError, GraderError
from estr.reward import Attempt, Reward

MESSAGES = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "it is 24"})


def attempt(reply: str = "it is 24", answer: str | None = "24") -> Attempt:
    return Attempt(reply, answer, {"answer": answer, "level": 3}, MESSAGES, "stop")


def graded(function: Callable[..., Any], **options: Any) -> Reply:
    return asyncio.run(Reward(function, "task.reward", **options)(attempt()))


def one(reply: str, answer: str) -> float:
    return float(answer in reply)


async def one_later(record: dict[str, Any], reply: str) -> float:
    await asyncio.sleep(0)
    return float(record["level"])


def shown(conversation: Any, finish_reason: str, extra: int = 7) -> float:
    return float(len(conversation) + len(finish_reason) + extra)


@pytest.mark.parametrize(("function", "outcome"), [(one, 1.0), (one_later, 3.0), (shown, 13.0)])
def test_a_function_gets_what_its_parameters_are_named_after(
    function: Callable[..., Any], outcome: float
) -> None:
    assert graded(function) == Reply(outcome=outcome)


@pytest.mark.parametrize(
    ("given", "reply"),
    [
        (True, Reply(outcome=1.0)),
        (0, Reply(outcome=0.0)),
        (np.float32(0.5), Reply(outcome=0.5)),
        (None, Reply()),
        (
            {"outcome": 1, "short": -0.25},
            Reply(outcome=1.0, rewards={"outcome": 1.0, "short": -0.25}),
        ),
    ],
)
def test_a_number_a_table_or_none(given: Any, reply: Reply) -> None:
    assert graded(lambda reply: given) == reply


@pytest.mark.parametrize(
    "given", ["1", float("nan"), float("inf"), [1.0], {}, {"short": 1.0}, {"outcome": None}, 1j]
)
def test_anything_else_is_a_grader_error_and_not_a_zero(given: Any) -> None:
    with pytest.raises(GraderError, match=r"task\.reward gave"):
        graded(lambda reply: given)


def test_what_it_raises_and_what_takes_too_long_are_grader_errors() -> None:
    with pytest.raises(GraderError, match=r"ZeroDivisionError: .* \(test_reward\.py, line \d+\)$"):
        graded(lambda reply: 1 / 0)
    with pytest.raises(GraderError, match=r"within 0\.05 s \(task\.reward_timeout_s\)"):
        graded(lambda reply: time.sleep(1), timeout_s=0.05)
    with pytest.raises(GraderError, match=r"within 0\.05 s"):
        graded(lambda replies: time.sleep(1), timeout_s=0.05)
    with pytest.raises(GraderError, match="not a finite number"):
        graded(lambda reply: Decimal(1))


def test_a_function_of_many_is_called_for_all_that_wait() -> None:
    sizes: list[int] = []

    async def many(replies: list[str], answers: list[str]) -> list[float]:
        sizes.append(len(replies))
        return [float(a in r) for r, a in zip(replies, answers, strict=True)]

    reward = Reward(many, "task.reward", batch=4)

    async def play() -> list[Reply]:
        return list(await asyncio.gather(*(reward(attempt(str(i), "1")) for i in range(10))))

    for _ in range(2):  # one loop after the other, as evaluations do it
        outcomes = [reply.outcome for reply in asyncio.run(play())]
        assert outcomes == [float(i == 1) for i in range(10)]
    assert sizes == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize("given", [[1.0], [1.0] * 3, 1.0, "11", {"outcome": 1.0}, None])
def test_a_function_of_many_answers_for_each(given: Any) -> None:
    reward = Reward(lambda replies: given, "task.reward", batch=2)

    async def play() -> list[Any]:
        return await asyncio.gather(reward(attempt()), reward(attempt()), return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, GraderError)


def test_an_attempt_that_was_given_up_does_not_spoil_the_others() -> None:
    reward = Reward(lambda replies: [1.0] * len(replies), "task.reward")

    async def play() -> Reply:
        lost = asyncio.create_task(reward(attempt()))
        await asyncio.sleep(0)
        lost.cancel()
        return await reward(attempt())

    assert asyncio.run(play()).outcome == 1.0


def test_nobody_waits_for_a_call_of_many_that_was_cancelled() -> None:
    async def many(replies: list[str]) -> list[float]:
        await asyncio.sleep(3600)
        return []

    reward = Reward(many, "task.reward", timeout_s=3600, batch=2)

    async def play() -> list[Any]:
        both = [asyncio.create_task(reward(attempt())) for _ in range(2)]
        await asyncio.sleep(0)
        (call,) = reward._calls
        await asyncio.sleep(0.1)
        call.cancel()
        async with asyncio.timeout(10):
            return await asyncio.gather(*both, return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, GraderError)
        assert "its call was cancelled" in str(error)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda completion: 1.0, "asks for 'completion'"),
        (lambda reply, answers: 1.0, "some for one reply, some for many"),
        (lambda: 1.0, "asks for nothing"),
        (7, "not a function"),
    ],
)
def test_a_function_that_cannot_be_served_is_refused(function: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Reward(function, "task.reward")


def by_place(reply: str, /) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "match"), [(max, "does not say what it asks for"), (by_place, "leave out the /")]
)
def test_a_function_that_cannot_be_asked_by_name_is_refused(function: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Reward(function, "task.reward")
