"""Rewards by a function of one's own, and what becomes of its answer.

    def reward(reply, answer): return float(answer in reply)               one
    async def reward(reply, record): ...                                   asynchronous
    def reward(replies, answers): return [a in r for r, a in ...]          many at once

A function gets what its parameters are named after: `reply` (text of the last turn), `answer` (the
record's answer, as text), `record` (the whole record), `conversation` (all messages) and
`finish_reason` ("stop", "length"); the plurals of these make it a function of many. It gives a
number, a table of components that has "outcome" (the raw result of the task), or None: this one
cannot be graded. Whatever it raises, an answer of another kind and a call that takes too long are
GraderErrors: the trajectory stays unscored, which is not a reward of zero.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .environment import Message, Reply, finite_number
from .errors import ConfigError, GraderError
from .functions import CallTimeout, call_limited, told
from .records import Record
from .types import FinishReason

_PLURALS = {
    "reply": "replies",
    "answer": "answers",
    "record": "records",
    "conversation": "conversations",
    "finish_reason": "finish_reasons",
}
_WAIT_S = 0.05
"""How long a function of many waits for more to come."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a reward function may ask for, by the names of its parameters."""

    reply: str
    answer: str | None
    record: Record
    conversation: Sequence[Message]
    finish_reason: FinishReason


class Reward:
    """A reward function behind its time limit, asked for one attempt at a time.

    timeout_s: of one call. batch: attempts given to a function of many at once, at most.
    Raises ConfigError when the function's parameters are not those it can be given.
    """

    def __init__(
        self, function: Callable[..., Any], key: str, *, timeout_s: float = 30.0, batch: int = 32
    ) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._batch = batch
        self._name = key
        self._asked, self._takes_many = _parameters(function, key)
        self._waiting: list[tuple[Attempt, asyncio.Future[Any]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    def requires(self, name: str) -> bool:
        """Does it ask for this field of an Attempt, with no default of its own?"""
        parameters = inspect.signature(self._function).parameters
        asked = parameters.get(name) or parameters.get(_PLURALS[name])
        return asked is not None and asked.default is asked.empty

    async def __call__(self, attempt: Attempt) -> Reply:
        """The graded end of a rollout. Raises GraderError."""
        try:
            if self._takes_many:
                return to_reply(await self._among_many(attempt), self._name)
            given = {name: getattr(attempt, name) for name in self._asked}
            return to_reply(await self._call(given), self._name)
        except GraderError:
            raise
        except Exception as error:  # what it gave or raised cannot even be shown
            raise GraderError(
                f"{self._name} gave or raised what cannot be read: {type(error).__name__}"
            ) from error

    async def _call(self, given: Mapping[str, Any]) -> Any:
        try:
            return await call_limited(self._function, (), given, timeout_s=self._timeout_s)
        except CallTimeout as error:
            raise GraderError(f"{self._name}: {error} (task.reward_timeout_s)") from error
        except GraderError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise GraderError(f"{self._name}: {told(error)}") from error

    async def _among_many(self, attempt: Attempt) -> Any:
        """The answer for one attempt out of a call for all that wait."""
        loop = asyncio.get_running_loop()
        # What an event loop left behind when it ended is nobody's any more.
        self._waiting = [entry for entry in self._waiting if entry[1].get_loop() is loop]
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((attempt, answer))
        if len(self._waiting) >= self._batch:
            self._flush()
        elif len(self._waiting) == 1:
            loop.call_later(_WAIT_S, self._flush)
        return await answer

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        if batch:
            call = asyncio.get_running_loop().create_task(self._call_many(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call_many(self, batch: Sequence[tuple[Attempt, asyncio.Future[Any]]]) -> None:
        given = {
            _PLURALS[name]: [getattr(attempt, name) for attempt, _ in batch] for name in self._asked
        }
        answers: list[Any] = [GraderError(f"{self._name}: its call was cancelled")] * len(batch)
        try:
            answers = _as_many(await self._call(given), len(batch), self._name)
        except Exception as error:  # noqa: BLE001 - told to those who wait
            answers = [error] * len(batch)
        finally:  # whatever ends it, or they would wait for ever
            _hand_out(answers, [future for _, future in batch])


def _hand_out(answers: Sequence[Any], futures: Sequence[asyncio.Future[Any]]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if future.done():  # its rollout was given up meanwhile
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def to_reply(value: Any, name: str) -> Reply:
    """What a reward function gave, as the end of a rollout. Raises GraderError where it is not a
    finite number, a table of them with "outcome", or None."""
    if value is None:
        return Reply()
    if isinstance(value, Mapping):
        if "outcome" not in value:
            raise GraderError(
                f'{name} gave {dict(value)!r:.200}; a table of components has "outcome", '
                "the raw result of the task"
            )
        rewards = {str(key): _finite(part, name) for key, part in value.items()}
        return Reply(outcome=rewards["outcome"], rewards=rewards)
    return Reply(outcome=_finite(value, name))


def _finite(value: Any, name: str) -> float:
    number = finite_number(value)
    if number is None:
        raise GraderError(f"{name} gave {value!r:.80}, which is not a finite number")
    return number


def _as_many(answers: Any, count: int, name: str) -> list[Any]:
    if isinstance(answers, str | Mapping) or not hasattr(answers, "__len__"):
        raise GraderError(f"{name} gave {answers!r:.80}, not one answer for each of {count}")
    if len(answers) != count:
        raise GraderError(f"{name} gave {len(answers)} answers for {count} replies")
    return list(answers)


def _parameters(function: Callable[..., Any], key: str) -> tuple[list[str], bool]:
    """(the fields of an Attempt that it asks for, does it take many?)"""
    if not callable(function):
        raise ConfigError(f"{key} is {function!r:.80}, not a function")
    singular = {plural: name for name, plural in _PLURALS.items()}
    asked: list[str] = []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} does not say what it asks for ({error}); name a function around it, with "
            f"parameters among {', '.join(_PLURALS)}"
        ) from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{key}: its parameter {parameter.name!r} cannot be given by name; leave out the /"
            )
        if parameter.name in _PLURALS or parameter.name in singular:
            asked.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ConfigError(
                f"{key}: it asks for {parameter.name!r}; a reward function can have "
                f"{', '.join(_PLURALS)}, or all of them in the plural ({', '.join(singular)})"
            )
    many = [name for name in asked if name in singular]
    if many and len(many) < len(asked):
        raise ConfigError(f"{key} asks for {', '.join(asked)}: some for one reply, some for many")
    if not asked:
        raise ConfigError(f"{key} asks for nothing; it can have {', '.join(_PLURALS)}")
    return [singular.get(name, name) for name in asked], bool(many)
