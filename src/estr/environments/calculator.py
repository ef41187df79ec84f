"""The built-in multi-turn task: add up a row of numbers with a tool that adds two at a time.

    prompt       23+45+67+89=
    model        [23+45]          a tool call; "]" ends the turn
    observation  68               the sum, modulo 10**digits
    model        [68+67]
    observation  35
    model        [35+89]
    observation  24
    model        24.              the answer; "." ends the turn: outcome 1.0

A turn that opens with "[" is a call, any other is the answer. A call that the tool cannot read is
answered by "!" and the rollout goes on, up to max_turns; a turn cut short by its token budget ends
it with outcome 0. The outcome is 1.0 iff the answer, whole and alone, is the true sum.

There is no way around the sum: the tool adds exactly two numbers of at most `digits` digits each,
so it cannot do the whole row at once; the outcome looks only at the final answer, so calls earn
nothing by themselves. Answering without a call is allowed, and right when it is right.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ..environment import Action, Environment, Reply
from ..grading import exact_integer
from ..options.corrections import require
from . import check_split, stable_hash

CALL_ERROR = "!"
"""What the tool answers to a call that it cannot read."""

_TEST_SHARE = 8
"""One problem in this many is held out, whatever the seed."""


@dataclass(frozen=True, slots=True)
class CalculatorOptions:
    """Size of the problems, and how long the tool takes (a sleeping tool stands for a real one)."""

    num_terms: int = 4
    """Numbers to add up."""
    digits: int = 2
    """Digits of each number; results are taken modulo 10**digits."""
    seed: int = 0
    """Which problems the indices stand for. What is held out for testing does not depend on it."""
    latency_mean_s: float = 0.0
    """Mean time of a tool call, lognormal with shape 1, cut off below and above; 0: at once."""
    latency_min_s: float = 0.01
    """Shortest tool call, seconds."""
    latency_max_s: float = 0.2
    """Longest tool call, seconds."""

    def __post_init__(self) -> None:
        require(2 <= self.num_terms <= 16, f"num_terms must be in [2, 16], not {self.num_terms}")
        require(1 <= self.digits <= 4, f"digits must be in [1, 4], not {self.digits}")
        low, mean, high = self.latency_min_s, self.latency_mean_s, self.latency_max_s
        require(
            mean == 0 or (0 < low < mean < high and math.isfinite(high)),
            f"latency_mean_s must be 0 or lie between latency_min_s and latency_max_s, both "
            f"finite and above 0; they are {mean}, {low} and {high}",
        )


class CalculatorTask:
    """Endless problems in both splits, drawn from the index; no sum is in both."""

    Options = CalculatorOptions
    name = "calculator"
    stop: tuple[str, ...] = ("]", ".")
    unfinished_outcome: float | None = 0.0

    def __init__(self, options: CalculatorOptions) -> None:
        self.options = options
        self.max_turns = 2 * options.num_terms
        self._latency = Latency(options) if options.latency_mean_s else None

    def size(self, split: str) -> int | None:
        check_split(split)
        return None

    def terms(self, split: str, index: int) -> tuple[int, ...]:
        """The numbers of one problem, in order.

        Problems are dealt out by a hash of their sorted terms, so that no test sum is ever met in
        training, in no order of its terms and under no seed.
        """
        check_split(split)
        lowest, count = 10 ** (self.options.digits - 1), 9 * 10 ** (self.options.digits - 1)
        tries = 0
        while True:
            drawn = stable_hash(self.options.seed, split, index, tries)
            terms = []
            for _ in range(self.options.num_terms):
                drawn, rest = divmod(drawn, count)
                terms.append(lowest + rest)
            if (stable_hash("held out", *sorted(terms)) % _TEST_SHARE == 0) == (split == "test"):
                return tuple(terms)
            tries += 1

    def make(self, split: str, index: int) -> Environment:
        return CalculatorEnvironment(self, split, index)

    def gold(self, split: str, index: int) -> Sequence[str]:
        turns = []
        first, *others = self.terms(split, index)
        total = self.written(first)
        for term in others:
            turns.append(f"[{total}+{self.written(term)}")
            total = self.call(turns[-1])
        return [*turns, total]

    def call(self, text: str) -> str:
        """What the tool answers to the call `text` ("[23+45", without its stop token)."""
        number = f"([0-9]{{1,{self.options.digits}}})"
        found = re.fullmatch(rf"\[{number}\+{number}", text)
        return self.written(int(found[1]) + int(found[2])) if found else CALL_ERROR

    def written(self, number: int) -> str:
        """A number as prompt and tool write it: modulo 10**digits, with all its digits."""
        return f"{number % 10**self.options.digits:0{self.options.digits}d}"

    async def wait(self, split: str, index: int, call: int) -> None:
        """The time that call number `call` of this problem takes."""
        if self._latency is not None:
            await asyncio.sleep(self._latency.seconds(self.options.seed, split, index, call))


class CalculatorEnvironment:
    """One row of numbers."""

    restorable = True

    def __init__(self, task: CalculatorTask, split: str, index: int) -> None:
        self._task = task
        self._problem = (split, index)
        self._terms = task.terms(split, index)
        self._num_calls = 0

    async def start(self) -> str:
        return "+".join(map(self._task.written, self._terms)) + "="

    async def step(self, action: Action) -> Reply:
        if action.finish_reason != "stop":
            return Reply(outcome=0.0)
        if not action.text.startswith("["):
            gold = int(self._task.written(sum(self._terms)))
            return Reply(outcome=exact_integer(action.text, gold))
        result = self._task.call(action.text)
        if result != CALL_ERROR:
            self._num_calls += 1
            await self._task.wait(*self._problem, self._num_calls)
        return Reply(observation=result)

    async def close(self) -> None:
        pass


class Latency:
    """exp(mu + z), z standard normal, cut off at latency_min_s and latency_max_s; mu is chosen so
    that the mean after the cut is latency_mean_s. A pure function of problem and call."""

    def __init__(self, options: CalculatorOptions) -> None:
        self._low, self._high = math.log(options.latency_min_s), math.log(options.latency_max_s)
        # The mean grows with mu, from the lower cut to the upper one: bisection.
        below, above = self._low - 8, self._high + 8
        for _ in range(60):
            self._mu = (below + above) / 2
            if self.mean_s() < options.latency_mean_s:
                below = self._mu
            else:
                above = self._mu

    def mean_s(self) -> float:
        """E[min(max(exp(mu + z), low), high)] in closed form, seconds."""
        below = NormalDist().cdf(self._low - self._mu)
        above = 1 - NormalDist().cdf(self._high - self._mu)
        within = NormalDist(self._mu + 1)
        inside = within.cdf(self._high) - within.cdf(self._low)
        return (
            math.exp(self._low) * below
            + math.exp(self._mu + 0.5) * inside
            + math.exp(self._high) * above
        )

    def seconds(self, *key: str | int) -> float:
        """The time that the call named by `key` takes."""
        uniform = (stable_hash("latency", *key) % 2**52 + 0.5) / 2**52
        time = self._mu + NormalDist().inv_cdf(uniform)
        return math.exp(min(max(time, self._low), self._high))
