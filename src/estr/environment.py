"""The Environment seam: what the model acts in, and the Task that makes environments.

    task.make("train", 17) -> environment          one problem, used once
    environment.start()    -> prompt               text, chat messages or token ids
    environment.step(act)  -> Reply(observation)   the model goes on reading
                           -> Reply(outcome=1.0)   the end; graded

A tool call that is malformed is an observation that says so, never an exception: the model learns
from it. An exception is a failure of the environment: the trajectory gets the status `env_error`
(or `grader_error` for GraderError) and no reward. `ScriptedEnvironment` is the shipped fake.
"""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from .errors import EnvError, GraderError
from .types import FinishReason

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""str: encoded by the model's tokenizer as it stands; ints: token ids; messages: rendered through
the model's chat template."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the model wrote in one turn. `text` leaves stop tokens out; `token_ids` has them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to a turn: something to read on, or the graded end.

    observation None ends the rollout; then outcome is the raw result of the task (None: it could
    not be graded, the trajectory stays unscored) and rewards its named components. The trained
    reward is their sum, or the outcome where there are none.
    """

    observation: Prompt | None = None
    outcome: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


def finite_number(value: Any) -> float | None:
    """What Python, NumPy or a tensor without dimensions states as a finite number; None: it states
    none."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    try:
        if isinstance(number, numbers.Real) and math.isfinite(number):
            return float(number)
    except OverflowError:  # an integer beyond all floats
        pass
    return None


def plain_reply(reply: object) -> Reply:
    """The same answer in plain floats, dicts and lists, so that a checkpoint can hold it.

    Raises EnvError for what is no Reply or an observation that is none, GraderError where outcome,
    a component or their sum is no finite number.
    """
    if not isinstance(reply, Reply):
        raise EnvError(f"environment.step() must return a Reply, not {reply!r:.80}")
    if not isinstance(reply.rewards, Mapping):
        raise GraderError(f"Reply.rewards must be a mapping of numbers, not {reply.rewards!r:.80}")
    rewards = {str(name): _number(str(name), part) for name, part in reply.rewards.items()}
    _number("the sum of Reply.rewards", sum(rewards.values()))
    outcome = None if reply.outcome is None else _number("outcome", reply.outcome)
    return Reply(_plain_observation(reply.observation), outcome, rewards)


def _number(name: str, value: Any) -> float:
    number = finite_number(value)
    if number is None:
        raise GraderError(f"{name} must be a finite number, not {value!r:.80}")
    return number


def _plain_observation(observation: Any) -> Any:
    if observation is None or isinstance(observation, str):
        return observation
    try:
        return msgspec.json.decode(msgspec.json.encode(observation, enc_hook=_builtin))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvError(
            f"an observation is text, token ids or chat messages, not {observation!r:.80}: {error}"
        ) from error


def _builtin(value: Any) -> Any:
    """What msgspec does not know: arrays and tensors, mappings and sequences of other kinds."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON data")


class Environment(Protocol):
    """One problem, used once. Methods are awaited with a time limit."""

    restorable: bool
    """Does a fresh object, played the same turns, give the same answers? A resume does that to
    bring it to where a rollout stood; where False, the rollout begins anew."""

    async def start(self) -> Prompt:
        """The first thing that the model reads."""
        ...

    async def step(self, action: Action) -> Reply:
        """Answer one turn."""
        ...

    async def close(self) -> None:
        """Free what the environment holds. Called exactly once, on every path."""
        ...


class Task(Protocol):
    """A named set of problems. `stop` are texts of one token each that end a turn, besides the
    model's own end-of-text; `max_turns` bounds the number of turns; `unfinished_outcome` is the
    task's rule for a rollout that ran out of tokens, turns or time (None: left unscored)."""

    name: str
    stop: tuple[str, ...]
    max_turns: int
    unfinished_outcome: float | None

    def size(self, split: str) -> int | None:
        """Number of problems in "train" or "test"; None: endless (drawn from the index)."""
        ...

    def make(self, split: str, index: int) -> Environment:
        """A fresh environment for one problem; the same index always gives the same problem."""
        ...

    def gold(self, split: str, index: int) -> Sequence[str]:
        """The turns (texts) that a perfect model would write; the self-check plays them and
        expects the full outcome. Empty: this task has no such answer."""
        ...


class ScriptedEnvironment:
    """The shipped fake: plays `replies` one after the other, each after `delay_s` seconds.

    An entry may be an exception, which is raised in its place. The last reply must end it.
    """

    def __init__(
        self,
        prompt: Prompt,
        replies: Sequence[Reply | Exception],
        *,
        delay_s: float = 0.0,
        restorable: bool = True,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._prompt = prompt
        self._replies = list(replies)
        self._delay_s = delay_s
        self._on_close = on_close
        self.restorable = restorable
        self.actions: list[Action] = []

    async def start(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> Reply:
        self.actions.append(action)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        reply = self._replies[len(self.actions) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        if self._on_close is not None:
            self._on_close()
