"""A single-turn twin of mathematics: reach a target from given numbers, by trying aloud.

    prompt       8 7 3=12\\n       combine 8, 7 and 3, each once, into 12
    model        8-7=1+3=4 8+7=15-3=12.

The model may write as many attempts as it likes, a space between them; "." ends the turn and the
last attempt counts. Signs are taken from left to right, as a pocket calculator does. The values
that an attempt states on the way ("=15") are the model's own notes: nobody reads them. The outcome
is 1.0 iff the last attempt uses every number exactly once and makes the target.

Which signs to try first is a real choice; how many attempts are needed is a matter of luck and of
reckoning, so lengths differ widely within a group.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..environment import Action, Environment, Reply
from ..options.corrections import require
from . import check_split, stable_hash
from .demonstrations import Span, heavy_tailed, is_held_out, wrong_digit

Attempt = tuple[tuple[int, ...], tuple[str, ...]]
"""The numbers in the order in which they are taken, and the signs between them."""

_ATTEMPT = re.compile(r"[0-9]+(?:[-+*][0-9]+(?:=-?[0-9]+)?)+")
_STATED = re.compile(r"=-?[0-9]+")
_NUMBER = re.compile(r"([-+*]?)([0-9]+)")
_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class CountdownOptions:
    """Size of the problems, and how they are demonstrated."""

    num_numbers: int = 3
    """Numbers to combine; with max_numbers the least."""
    max_numbers: int = 0
    """Numbers in the longest problems: P(numbers >= n) is about num_numbers / n up to there.
    0: all problems have num_numbers."""
    digits: int = 1
    """Digits of the given numbers."""
    signs: Literal["+-", "+-*"] = "+-"
    """What may stand between two numbers."""
    order: Literal["fixed", "random"] = "fixed"
    """"fixed": the target can be made with the numbers in their order, and demonstrations keep to
    it; "random": in some order, and demonstrations try all. Any order is right."""
    error_rate: float = 0.22
    """Share of demonstrated attempts with a slip in them."""
    seed: int = 0
    """Which problems the indices stand for. What is held out for testing does not depend on it."""

    def __post_init__(self) -> None:
        require(
            2 <= self.num_numbers <= 6, f"num_numbers must be in [2, 6], not {self.num_numbers}"
        )
        require(
            self.max_numbers == 0 or self.num_numbers <= self.max_numbers <= 6,
            f"max_numbers must be 0 or in [num_numbers, 6], not {self.max_numbers}",
        )
        require(1 <= self.digits <= 3, f"digits must be in [1, 3], not {self.digits}")
        require(0 <= self.error_rate < 1, f"error_rate must be in [0, 1), not {self.error_rate}")


@dataclass(frozen=True, slots=True)
class Countdown:
    """One problem."""

    numbers: tuple[int, ...]
    target: int


class CountdownTask:
    """Endless problems in both splits, drawn from the index; no set of numbers and target is in
    both."""

    Options = CountdownOptions
    name = "countdown"
    stop: tuple[str, ...] = (".",)
    max_turns = 1
    unfinished_outcome: float | None = 0.0
    warm_start_steps = 300

    def __init__(self, options: CountdownOptions) -> None:
        self.options = options

    def size(self, split: str) -> int | None:
        check_split(split)
        return None

    def problem(self, split: str, index: int) -> Countdown:
        """One problem, solvable, with a target of at least 0."""
        check_split(split)
        options = self.options
        size = heavy_tailed(options.num_numbers, options.max_numbers, options.seed, split, index)
        tries = 0
        while True:
            rng = random.Random(stable_hash("countdown", options.seed, split, index, tries))
            numbers = tuple(rng.randint(1, 10**options.digits - 1) for _ in range(size))
            taken = tuple(self._taken(numbers, rng))
            target = value(taken, tuple(rng.choice(options.signs) for _ in numbers[1:]))
            held_out = is_held_out(*sorted(numbers), "target", target)
            if target >= 0 and held_out == (split == "test"):
                return Countdown(numbers, target)
            tries += 1

    def make(self, split: str, index: int) -> Environment:
        return CountdownEnvironment(self.problem(split, index), self.options.signs)

    def gold(self, split: str, index: int) -> Sequence[str]:
        problem = self.problem(split, index)
        return [next(written(a) for a in self._attempts(problem) if value(*a) == problem.target)]

    def demonstrate(self, index: int, rng: random.Random) -> Iterator[Span]:
        """A player who tries signs in a random order, none twice, and stops at what looks right to
        him; at a rate of error_rate an attempt has a wrong digit in it, or is taken for right."""
        problem = self.problem("train", index)
        yield prompt(problem), False
        attempts = list(self._attempts(problem))
        rng.shuffle(attempts)
        said = []
        for attempt in attempts:
            said.append(written(attempt))
            content = value(*attempt) == problem.target
            if rng.random() < self.options.error_rate:
                content = rng.random() < 0.5
                if not content:
                    said[-1] = wrong_digit(said[-1], rng)
            if content:
                break
        yield " ".join(said) + ".", True

    def _attempts(self, problem: Countdown) -> Iterator[Attempt]:
        """Everything that may be tried, each once."""
        orders: Sequence[tuple[int, ...]] = [problem.numbers]
        if self.options.order == "random":
            orders = sorted(set(itertools.permutations(problem.numbers)))
        for taken in orders:
            for signs in itertools.product(self.options.signs, repeat=len(taken) - 1):
                yield taken, signs

    def _taken(self, numbers: Sequence[int], rng: random.Random) -> list[int]:
        taken = list(numbers)
        if self.options.order == "random":
            rng.shuffle(taken)
        return taken


class CountdownEnvironment:
    """One set of numbers and its target."""

    restorable = True

    def __init__(self, problem: Countdown, signs: str) -> None:
        self._problem = problem
        self._signs = signs

    async def start(self) -> str:
        return prompt(self._problem)

    async def step(self, action: Action) -> Reply:
        if action.finish_reason != "stop":
            return Reply(outcome=0.0)
        attempt = last_attempt(action.text)
        return Reply(outcome=float(attempt is not None and self._is_right(*attempt)))

    def _is_right(self, numbers: Sequence[int], signs: Sequence[str]) -> bool:
        uses_each = sorted(numbers) == sorted(self._problem.numbers)
        return (
            uses_each
            and set(signs) <= set(self._signs)
            and value(numbers, signs) == self._problem.target
        )

    async def close(self) -> None:
        pass


def prompt(problem: Countdown) -> str:
    return " ".join(map(str, problem.numbers)) + f"={problem.target}\n"


def value(numbers: Sequence[int], signs: Sequence[str]) -> int:
    """What the numbers make, signs taken from left to right."""
    total, *others = numbers
    for sign, number in zip(signs, others, strict=True):
        total = {"+": total + number, "-": total - number, "*": total * number}[sign]
    return total


def written(attempt: Attempt) -> str:
    """An attempt with the value after every sign: "8+7=15-3=12"."""
    numbers, signs = attempt
    text = str(numbers[0])
    for i, sign in enumerate(signs, 1):
        text += f"{sign}{numbers[i]}={value(numbers[: i + 1], signs[:i])}"
    return text


def last_attempt(text: str) -> Attempt | None:
    """What stands behind the last space; None: it cannot be read as an attempt. The stated values
    are passed over."""
    tail = text.rpartition(" ")[2]
    if len(tail) > _MAX_CHARS or not _ATTEMPT.fullmatch(tail):
        return None
    first, *others = _NUMBER.findall(_STATED.sub("", tail))
    return (int(first[1]), *(int(n) for _, n in others)), tuple(sign for sign, _ in others)
