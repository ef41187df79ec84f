"""A single-turn task on plain text: two-digit plus one-digit sums after a few worked examples.

    prompt    27+2=29
              42+2=44
              ...
              68+5=
    model     73              a line break ends the turn: outcome 1.0

It asks nothing of a model but to go on with a text, so language models without chat training have
a start signal too. The examples are the same in every prompt, so all prompts share their prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..environment import Action, Environment, Reply
from ..errors import DataError
from ..grading import exact_integer
from ..options.corrections import require
from . import check_split, stable_hash

Pair = tuple[int, int]

_EXAMPLES: tuple[Pair, ...] = (
    (27, 2),
    (42, 2),
    (73, 8),
    (70, 7),
    (36, 2),
    (72, 1),
    (59, 7),
    (87, 1),
)
_PAIRS: tuple[Pair, ...] = tuple((a, b) for a in range(10, 100) for b in range(1, 10))


@dataclass(frozen=True, slots=True)
class ArithmeticOptions:
    """What a prompt shows, and how the 810 sums are dealt out."""

    num_examples: int = 6
    """Worked examples before the question; they are neither trained nor tested on."""
    num_test: int = 200
    """Sums held out for testing: always the same ones, whatever the seed."""
    seed: int = 0
    """Order of the training problems."""

    def __post_init__(self) -> None:
        require(
            0 <= self.num_examples <= len(_EXAMPLES),
            f"num_examples must be in [0, {len(_EXAMPLES)}], not {self.num_examples}",
        )
        require(1 <= self.num_test <= 700, f"num_test must be in [1, 700], not {self.num_test}")


class ArithmeticTask:
    """All sums a+b of 10 <= a <= 99 and 1 <= b <= 9, in two disjoint splits."""

    Options = ArithmeticOptions
    name = "arithmetic"
    stop: tuple[str, ...] = ("\n",)
    max_turns = 1
    unfinished_outcome: float | None = 0.0

    def __init__(self, options: ArithmeticOptions) -> None:
        free = [pair for pair in _PAIRS if pair not in _EXAMPLES]
        free.sort(key=lambda pair: stable_hash("held out", *pair))
        train = sorted(
            free[options.num_test :], key=lambda pair: stable_hash(options.seed, "train", *pair)
        )
        self._problems: dict[str, list[Pair]] = {
            "train": train,
            "test": free[: options.num_test],
        }
        self._examples = "".join(f"{a}+{b}={a + b}\n" for a, b in _EXAMPLES[: options.num_examples])

    def size(self, split: str) -> int | None:
        check_split(split)
        return len(self._problems[split])

    def pair(self, split: str, index: int) -> Pair:
        """The two numbers of one problem. Raises DataError beyond the end of the split."""
        check_split(split)
        problems = self._problems[split]
        if not 0 <= index < len(problems):
            raise DataError(
                f"arithmetic has {len(problems)} {split} problems, there is no number {index}"
            )
        return problems[index]

    def make(self, split: str, index: int) -> Environment:
        return ArithmeticEnvironment(self._examples, *self.pair(split, index))

    def gold(self, split: str, index: int) -> Sequence[str]:
        return [str(sum(self.pair(split, index)))]

    def answer(self, text: str) -> str | None:
        return text.strip() or None


class ArithmeticEnvironment:
    """One sum. Right is the whole number, alone on its line, and a line break (or the model's own
    end of text) behind it."""

    restorable = True

    def __init__(self, examples: str, a: int, b: int) -> None:
        self._prompt = f"{examples}{a}+{b}="
        self._gold = a + b

    async def start(self) -> str:
        return self._prompt

    async def step(self, action: Action) -> Reply:
        finished = action.finish_reason == "stop"
        return Reply(outcome=exact_integer(action.text, self._gold) if finished else 0.0)

    async def close(self) -> None:
        pass
