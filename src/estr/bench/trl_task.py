"""What both sides of `estr bench trl` play: sums in one turn, behind a grader that takes its time.

The grader stands for a sandbox or a judge: its time is a pure function of the problem, and any
number of answers may wait at once. No torch and no part of TRL is needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..environment import Action, Environment, Reply
from ..environments.arithmetic import ArithmeticOptions, ArithmeticTask
from ..environments.latency import Latency, LatencyOptions
from ..grading import exact_integer

Rule = Literal["sum", "parity"]


@dataclass(frozen=True, slots=True)
class GradedOptions(LatencyOptions):
    """How prompts look and answers are judged."""

    num_examples: int = 6
    """Worked examples before the question."""
    rule: Rule = "sum"
    """sum: the answer is the sum. parity: it has an even number of characters, so that random
    weights earn something, too."""

    def __post_init__(self) -> None:
        self.check_latency()


def grade(text: str, gold: str, rule: Rule) -> float:
    """The outcome of an answer, with or without the line break behind it."""
    text = text.removesuffix("\n")
    if rule == "parity":
        return float(len(text) % 2 == 0)
    return exact_integer(text, int(gold))


class GradedTask:
    """The sums of the task `arithmetic`, one turn each."""

    Options = GradedOptions
    name = "graded"
    stop: tuple[str, ...] = ("\n",)
    max_turns = 1
    unfinished_outcome: float | None = 0.0

    def __init__(self, options: GradedOptions) -> None:
        self.options = options
        self._sums = ArithmeticTask(ArithmeticOptions(num_examples=options.num_examples))
        self._latency = Latency(options)

    def size(self, split: str) -> int | None:
        return self._sums.size(split)

    def make(self, split: str, index: int) -> Environment:
        return GradedEnvironment(self, split, index)

    def gold(self, split: str, index: int) -> Sequence[str]:
        return self._sums.gold(split, index)

    def answer(self, text: str) -> str | None:
        return self._sums.answer(text)

    async def prompt(self, split: str, index: int) -> str:
        return str(await self._sums.make(split, index).start())

    async def outcome(self, index: int, text: str, gold: str) -> float:
        """After the time that the grader takes for this problem."""
        await self._latency.wait(index)
        return grade(text, gold, self.options.rule)


class GradedEnvironment:
    """One sum."""

    restorable = True

    def __init__(self, task: GradedTask, split: str, index: int) -> None:
        self._task = task
        self._problem = (split, index)

    async def start(self) -> str:
        return await self._task.prompt(*self._problem)

    async def step(self, action: Action) -> Reply:
        (gold,) = self._task.gold(*self._problem)
        return Reply(outcome=await self._task.outcome(self._problem[1], action.text, gold))

    async def close(self) -> None:
        pass
