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

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..environment import Action, Environment, Reply
from ..grading import exact_integer
from ..options.corrections import require
from . import check_split, stable_hash
from .demonstrations import Span, heavy_tailed, is_held_out, wrong_digit
from .latency import Latency, LatencyOptions

CALL_ERROR = "!"
"""What the tool answers to a call that it cannot read."""


@dataclass(frozen=True, slots=True)
class CalculatorOptions(LatencyOptions):
    """Size of the problems, how they are demonstrated, and how long the tool takes (a sleeping tool
    stands for a real one)."""

    num_terms: int = 4
    """Numbers to add up; with max_terms the least."""
    max_terms: int = 0
    """Numbers in the longest problems: P(terms >= n) is about num_terms / n up to there. 0: all
    problems have num_terms."""
    digits: int = 2
    """Digits of each number; results are taken modulo 10**digits."""
    order: Literal["fixed", "random"] = "fixed"
    """Order in which demonstrations and gold answers take the terms. Any order is right; "random"
    makes the next term a real choice of the model's."""
    error_rate: float = 0.22
    """Share of demonstrated turns that are wrong."""
    seed: int = 0
    """Which problems the indices stand for. What is held out for testing does not depend on it."""

    def __post_init__(self) -> None:
        require(2 <= self.num_terms <= 16, f"num_terms must be in [2, 16], not {self.num_terms}")
        require(
            self.max_terms == 0 or self.num_terms <= self.max_terms <= 16,
            f"max_terms must be 0 or in [num_terms, 16], not {self.max_terms}",
        )
        require(1 <= self.digits <= 4, f"digits must be in [1, 4], not {self.digits}")
        require(0 <= self.error_rate < 1, f"error_rate must be in [0, 1), not {self.error_rate}")
        self.check_latency()


class CalculatorTask:
    """Endless problems in both splits, drawn from the index; no sum is in both."""

    Options = CalculatorOptions
    name = "calculator"
    stop: tuple[str, ...] = ("]", ".")
    unfinished_outcome: float | None = 0.0

    def __init__(self, options: CalculatorOptions) -> None:
        self.options = options
        self.max_turns = 2 * max(options.num_terms, options.max_terms)
        self.warm_start_steps = 300 if options.order == "fixed" else 800
        self._latency = Latency(options)

    def size(self, split: str) -> int | None:
        check_split(split)
        return None

    def terms(self, split: str, index: int) -> tuple[int, ...]:
        """The numbers of one problem, in order.

        Problems are dealt out by a hash of their sorted terms, so that no test sum is ever met in
        training, in no order of its terms and under no seed.
        """
        check_split(split)
        options = self.options
        lowest, count = 10 ** (options.digits - 1), 9 * 10 ** (options.digits - 1)
        num_terms = heavy_tailed(options.num_terms, options.max_terms, options.seed, split, index)
        tries = 0
        while True:
            drawn = stable_hash(options.seed, split, index, tries)
            terms = []
            for _ in range(num_terms):
                drawn, rest = divmod(drawn, count)
                terms.append(lowest + rest)
            if is_held_out(*sorted(terms)) == (split == "test"):
                return tuple(terms)
            tries += 1

    def make(self, split: str, index: int) -> Environment:
        return CalculatorEnvironment(self, split, index)

    def gold(self, split: str, index: int) -> Sequence[str]:
        turns = []
        rng = random.Random(stable_hash("gold", self.options.seed, split, index))
        first, *others = self._taken(self.terms(split, index), rng)
        total = first
        for term in others:
            turns.append(f"[{total}+{term}")
            total = self.call(turns[-1])
        return [*turns, total]

    def answer(self, text: str) -> str | None:
        return None if text.startswith("[") else text.strip().lstrip("0") or "0"

    def demonstrate(self, index: int, rng: random.Random) -> Iterator[Span]:
        """A player who, at a rate of error_rate a turn, copies a digit wrongly, takes a wrong
        number, or forgets the plus sign of a call (and then tries again)."""
        terms = self.terms("train", index)
        yield self.prompt(terms), False
        first, *others = self._taken(terms, rng)
        total = first
        for term in others:
            answer = CALL_ERROR
            while answer == CALL_ERROR:
                call = f"[{total}+{term}"
                if rng.random() < self.options.error_rate:
                    call = _spoilt(call, [first, *others], rng)
                answer = self.call(call)
                yield call + "]", True
                yield answer, False
            total = answer
        spoilt = rng.random() < self.options.error_rate
        yield (wrong_digit(total, rng) if spoilt else total) + ".", True

    def _taken(self, terms: Sequence[int], rng: random.Random) -> list[str]:
        """The terms as written, in the order in which a player takes them."""
        taken = list(map(self.written, terms))
        if self.options.order == "random":
            rng.shuffle(taken)
        return taken

    def prompt(self, terms: Sequence[int]) -> str:
        return "+".join(map(self.written, terms)) + "="

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
        await self._latency.wait(self.options.seed, split, index, call)


class CalculatorEnvironment:
    """One row of numbers."""

    restorable = True

    def __init__(self, task: CalculatorTask, split: str, index: int) -> None:
        self._task = task
        self._problem = (split, index)
        self._terms = task.terms(split, index)
        self._num_calls = 0

    async def start(self) -> str:
        return self._task.prompt(self._terms)

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


def _spoilt(call: str, numbers: list[str], rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return call.replace("+", "")
    if kind == 1:
        left, _, right = call.partition("+")
        other = rng.choice([n for n in numbers if n != right] or numbers)
        return f"{left}+{other}"
    return wrong_digit(call, rng)
