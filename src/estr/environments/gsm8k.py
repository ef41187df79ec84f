"""GSM8K: word problems of grade school in several turns, with a calculator over the chat template.

    user       Natalia sold clips to 48 of her friends ...
    model      <tool_call>{"name": "calculator", "arguments": {"expression": "48/2"}}</tool_call>
    tool       24
    model      She sold 48 + 24 = 72 clips. #### 72        outcome 1.0, reward 1.0 + 0.1

The outcome is the answer alone; a well-formed call earns `tool_reward` more, once. What is asked
for and what is graded belong together: `mode` sets both. Data: Cobbe et al., arXiv 2110.14168, MIT
license; a slice ships with estr, `folder` names the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ..environment import Environment, Message, Reply
from ..errors import DataError, GraderError
from ..grading import GRADERS
from ..options.corrections import require
from ..records import file_digests, read_records
from ..tools import Toolbox, write_call
from . import check_split, stable_hash
from .conversation import Conversation, Ending, ToolRole
from .expressions import calculator

SLICE = Path(__file__).parents[1] / "data" / "gsm8k"
"""The slice that ships with estr, with its license."""

Mode = Literal["marked", "boxed"]

_MARK = re.compile(r"<<(.+?)=([^=<>]*)>>")
_ENDING: dict[Mode, str] = {
    "marked": "end with a line of the form: #### 42",
    "boxed": "end with: \\boxed{42}",
}
_EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "A baker fills 15 trays with 12 rolls each and sells 37 rolls. How many rolls are left?",
        "15*12-37",
    ),
    (
        "Ann buys 4 pens for $3 each and pays with $20. How much change does she get?",
        "20-4*3",
    ),
    (
        "A train goes 60 miles an hour for 3 hours, then 40 for 2 hours. How far does it go?",
        "60*3+40*2",
    ),
)
"""Made up for the prompt; none is a record of GSM8K."""


@dataclass(frozen=True, slots=True)
class Gsm8kOptions:
    """Grade school word problems with a calculator, in several turns."""

    folder: str = ""
    """Folder with train.jsonl and test.jsonl of GSM8K; "": the slice that ships with estr."""
    mode: Mode = "marked"
    """What is asked for and graded: marked: "#### 42"; boxed: \\boxed{42}."""
    tool: bool = True
    """Is there a calculator?"""
    num_examples: int = 2
    """Worked examples before the problem, at most 3. They show how to call the calculator; without
    any, its signature is described."""
    max_turns: int = 4
    """Turns of a rollout, at most."""
    tool_reward: float = 0.1
    """Reward beside the outcome for at least one well-formed call of the calculator."""
    tool_role: ToolRole = "tool"
    """Role in whose name the calculator answers."""
    seed: int = 0
    """Of the order of training problems."""

    def __post_init__(self) -> None:
        require(self.max_turns >= 1, f"max_turns must be at least 1, not {self.max_turns}")
        require(
            0 <= self.num_examples <= len(_EXAMPLES),
            f"num_examples must be in [0, {len(_EXAMPLES)}], not {self.num_examples}",
        )
        require(
            math.isfinite(self.tool_reward) and self.tool_reward >= 0,
            f"tool_reward must be finite and at least 0, not {self.tool_reward}",
        )


@dataclass(frozen=True, slots=True)
class WordProblem:
    """One record: calls are the expressions of the worked answer's calculator marks."""

    question: str
    answer: str
    calls: tuple[str, ...]


class Gsm8kTask:
    """The records of one folder, both splits as published."""

    Options = Gsm8kOptions
    name = "gsm8k"
    stop: tuple[str, ...] = ()
    unfinished_outcome: float | None = 0.0

    def __init__(self, options: Gsm8kOptions) -> None:
        self.options = options
        self.max_turns = options.max_turns
        self._grader = GRADERS[options.mode]
        self._toolbox = Toolbox({"calculator": calculator}, limit_key="") if options.tool else None
        folder = Path(options.folder) if options.folder else SLICE
        files = [folder / f"{split}.jsonl" for split in ("train", "test")]
        train, test = map(read_problems, files)
        self.fingerprint = file_digests(files)
        order = [stable_hash(options.seed, "train", i) for i in range(len(train))]
        self._problems = {
            "train": [train[i] for i in sorted(range(len(train)), key=order.__getitem__)],
            "test": test,
        }

    def size(self, split: str) -> int | None:
        check_split(split)
        return len(self._problems[split])

    def problem(self, split: str, index: int) -> WordProblem:
        """Raises DataError beyond the end of the split."""
        check_split(split)
        problems = self._problems[split]
        if not 0 <= index < len(problems):
            raise DataError(f"gsm8k has {len(problems)} {split} problems, there is no {index}")
        return problems[index]

    def make(self, split: str, index: int) -> Environment:
        problem = self.problem(split, index)
        return Conversation(
            self.prompt(problem.question),
            partial(self._grade, problem.answer),
            toolbox=self._toolbox,
            max_turns=self.max_turns,
            tool_role=self.options.tool_role,
        )

    def gold(self, split: str, index: int) -> Sequence[str]:
        """The first call of the worked answer, then the answer."""
        problem = self.problem(split, index)
        answer = self._grader.reply(problem.answer)
        if self._toolbox is None or self.max_turns < 2 or not problem.calls:
            return [answer]
        return [write_call("calculator", {"expression": problem.calls[0]}), answer]

    def prompt(self, question: str) -> list[Message]:
        """The messages before the first turn."""
        ending = _ENDING[self.options.mode]
        rules = f"Solve the problem step by step and {ending}"
        if self._toolbox is not None:
            rules = f"First call the calculator, then say the result and {ending}"
            if not self.options.num_examples:
                rules += "\n\n" + self._toolbox.instructions()
        messages: list[Message] = [{"role": "system", "content": rules}]
        for example in _EXAMPLES[: self.options.num_examples]:
            messages += self._worked(*example)
        return [*messages, {"role": "user", "content": question}]

    def _worked(self, question: str, expression: str) -> list[Message]:
        result = calculator(expression)
        asked: Message = {"role": "user", "content": question}
        answered: Message = {"role": "assistant", "content": self._grader.reply(result)}
        if self._toolbox is None:
            return [asked, answered]
        call = write_call("calculator", {"expression": expression})
        return [
            asked,
            {"role": "assistant", "content": call},
            {"role": self.options.tool_role, "content": result},
            answered,
        ]

    async def _grade(self, answer: str, ending: Ending) -> Reply:
        finished = ending.finish_reason == "stop"
        outcome = self._grader.grade(ending.reply, answer) if finished else 0.0
        rewards = {"answer": outcome}
        if ending.num_well_formed:
            rewards["tool_call"] = self.options.tool_reward
        return Reply(outcome=outcome, rewards=rewards)


def read_problems(path: Path) -> list[WordProblem]:
    """The records of a GSM8K file, in order. Raises DataError naming file and record where one is
    not a question with a worked answer that ends in "#### " and a number."""
    problems = []
    for number, record in enumerate(read_records(path), start=1):
        question, worked = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not isinstance(worked, str):
            raise DataError(f'{path}, record {number}: no "question" and "answer" as text')
        answer = worked.rpartition("####")[2].strip()
        try:
            right = GRADERS["marked"].grade(worked, answer) == 1.0
        except GraderError:
            right = False
        if not right:
            raise DataError(f"{path}, record {number}: no number behind ####: {worked[-60:]!r}")
        calls = tuple(expression for expression, _ in _MARK.findall(worked))
        problems.append(WordProblem(question, answer, calls))
    return problems
