"""Competition mathematics, graded by math-verify: one turn, one answer.

    user       Find the least nonnegative residue of 31!/22! modulo 11. ... within \\boxed{}.
    model      ... so it is \\boxed{1}.                     outcome 1.0

Slices of DeepScaleR and DeepMath (training) and MATH-500 (testing) ship with estr; files of one's
own, such as DAPO-Math-17k or AIME, are named by their paths. What is asked for and what is graded
belong together: `mode` sets both. A gold answer that math-verify cannot read is refused when the
task is built. Comparing is done in another process with a time limit (estr.math_grading).
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..environment import Environment, Message, Reply
from ..errors import ConfigError, DataError, GraderError
from ..grading import check_gold_answer, last_answer_line, last_box
from ..math_grading import MathVerifier, shared_verifier
from ..options.corrections import require
from ..options.run import require_seconds
from ..records import as_text, file_digests, read_records
from . import check_split, stable_hash, without_tested
from .conversation import Conversation, Ending

SHIPPED = ("deepmath", "deepscaler", "math500")
"""The files that ship with estr."""

Mode = Literal["boxed", "answer_line"]

_SLICES = Path(__file__).parents[1] / "data" / "math"
_FRAMES: dict[Mode, str] = {
    "boxed": (
        "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    ),
    "answer_line": (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        '\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    ),
}
"""The second is that of DAPO-Math (arXiv 2503.14476)."""
_GOLD_FIELDS = ("answer", "label", "ground_truth")
_LONGEST = 2000
"""Characters beyond which a text is no answer."""
_NAMED_FAULTS = 3
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class MathOptions:
    """Competition mathematics with short answers, graded by math-verify."""

    train: str = "deepscaler"
    """"deepscaler" or "deepmath", which ship with estr, or a JSONL file with problem and answer (or
    prompt and label) in each record."""
    test: str = "math500"
    """"math500", which ships with estr, or a JSONL file, such as one of AIME."""
    mode: Mode = "boxed"
    """What is asked for and graded: boxed: \\boxed{}; answer_line: a last line "Answer: ...", as in
    DAPO. A record's own `prompt` is shown as it stands and must ask for the same."""
    timeout_s: float = 5.0
    """Time that comparing one answer may take, seconds; longer: grader_error, not wrong."""
    bad_records: Literal["refuse", "drop"] = "refuse"
    """What becomes of records without a problem, with an answer that cannot be graded, or that
    would be both trained and tested on."""
    unfinished_outcome: float = 0.0
    """Outcome of a rollout that ran out of tokens or time."""
    seed: int = 0
    """Of the order of training problems."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.unfinished_outcome),
            f"unfinished_outcome must be finite, not {self.unfinished_outcome}",
        )
        require_seconds("timeout_s", self.timeout_s)
        require(self.timeout_s <= 30, f"timeout_s must be at most 30, not {self.timeout_s}")
        require(
            self.train != self.test,
            f"train and test are both {self.train!r}; what is tested must not be trained on",
        )


@dataclass(frozen=True, slots=True)
class MathProblem:
    """name: for people and for kept rollouts."""

    name: str
    prompt: tuple[Message, ...]
    answer: str


class MathTask:
    """The problems of two files."""

    Options = MathOptions
    name = "math"
    stop: tuple[str, ...] = ()
    max_turns = 1
    eval_settings: Mapping[str, Any] = {
        "sampling.max_new_tokens": 1024,
        "sampling.max_tokens": 2048,
    }

    def __init__(self, options: MathOptions) -> None:
        self.options = options
        self.unfinished_outcome: float | None = options.unfinished_outcome
        self._verifier = shared_verifier(options.timeout_s)
        files = {"train": _file(options.train), "test": _file(options.test)}
        problems = {split: self._read(path) for split, path in files.items()}
        problems["train"] = without_tested(
            problems["train"],
            problems["test"],
            lambda problem: problem.prompt,
            drop=options.bad_records == "drop",
        )
        order = [stable_hash(options.seed, "train", i) for i in range(len(problems["train"]))]
        problems["train"] = [
            problems["train"][i] for i in sorted(range(len(order)), key=order.__getitem__)
        ]
        self._problems = problems
        self.fingerprint = file_digests(files.values())

    def size(self, split: str) -> int | None:
        check_split(split)
        return len(self._problems[split])

    def problem(self, split: str, index: int) -> MathProblem:
        """Raises DataError beyond the end of the split."""
        check_split(split)
        problems = self._problems[split]
        if not 0 <= index < len(problems):
            raise DataError(f"math has {len(problems)} {split} problems, there is no {index}")
        return problems[index]

    def make(self, split: str, index: int) -> Environment:
        problem = self.problem(split, index)
        return Conversation(problem.prompt, partial(self._grade, problem))

    def gold(self, split: str, index: int) -> Sequence[str]:
        answer = self.problem(split, index).answer
        return [f"\\boxed{{{answer}}}" if self.options.mode == "boxed" else f"Answer: {answer}"]

    def answer(self, text: str) -> str | None:
        """As written: two spellings of one value are two votes."""
        said = _extract(text, self.options.mode)
        return said if said is None or not _INTEGER.fullmatch(said) else str(int(said))

    def example_id(self, split: str, index: int) -> str:
        return self.problem(split, index).name

    async def _grade(self, problem: MathProblem, ending: Ending) -> Reply:
        said = _extract(ending.reply, self.options.mode)
        if ending.finish_reason != "stop" or said is None or len(said) > _LONGEST:
            return Reply(outcome=0.0)
        right = await asyncio.to_thread(self._verifier.equal, said, problem.answer)
        return Reply(outcome=float(right))

    # -- reading ------------------------------------------------------------------------------

    def _read(self, path: Path) -> list[MathProblem]:
        """In the order of the file. Raises DataError naming the bad records, unless they are to be
        dropped and some are left."""
        records = read_records(path)
        problems, faults = [], []
        for number, record in enumerate(records, start=1):
            try:
                problem = _problem(record, f"{path.stem}-{number}", self.options.mode)
                _check_gold(problem.answer, self._verifier)
                problems.append(problem)
            except (DataError, GraderError) as error:
                faults.append(f"record {number}: {error}")
        if faults and (self.options.bad_records == "refuse" or not problems):
            raise DataError(
                f"{len(faults)} of {len(records)} records of {path} cannot be used: "
                f"{'; '.join(faults[:_NAMED_FAULTS])}. Mend them, or leave them out with "
                'task.bad_records = "drop"'
            )
        return _named_apart(problems, path.stem)


def _extract(text: str, mode: Mode) -> str | None:
    return last_box(text) if mode == "boxed" else last_answer_line(text)


def _problem(record: Mapping[str, Any], name: str, mode: Mode) -> MathProblem:
    """Of any of the layouts in use: problem and answer; prompt (text or messages) and label; verl's
    prompt and reward_model.ground_truth."""
    nested = record.get("reward_model")
    places = [record, nested] if isinstance(nested, Mapping) else [record]
    golds = [place[key] for place in places for key in _GOLD_FIELDS if place.get(key) is not None]
    if not golds:
        raise DataError(f"no answer; one of {', '.join(_GOLD_FIELDS)} is needed")
    problem, prompt = record.get("problem"), record.get("prompt")
    if isinstance(problem, str) and problem.strip():
        prompt = [{"role": "user", "content": _FRAMES[mode].format(problem=problem)}]
    elif isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    elif not (prompt and isinstance(prompt, list) and all(map(_is_message, prompt))):
        raise DataError("no problem as text, and no prompt as text or chat messages")
    own = record.get("id")
    return MathProblem(name if own is None else str(own), tuple(prompt), as_text(golds[0]).strip())


def _named_apart(problems: list[MathProblem], stem: str) -> list[MathProblem]:
    """Names that several problems of a file share, told apart by their places: a kept rollout is
    found again by its problem's name."""
    times = Counter(problem.name for problem in problems)
    return [
        problem
        if times[problem.name] == 1
        else replace(problem, name=f"{problem.name} ({stem}-{number})")
        for number, problem in enumerate(problems, start=1)
    ]


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value and isinstance(value.get("content"), str)


def _check_gold(gold: str, verifier: MathVerifier) -> None:
    """Raises GraderError unless an answer can be compared with it."""
    if _INTEGER.fullmatch(gold):  # nothing to ask
        return
    check_gold_answer(gold)
    if not verifier.equal(gold, gold):
        raise GraderError(f"math-verify cannot read the gold answer {gold[:80]!r}")


def _file(name: str) -> Path:
    path = _SLICES / f"{name}.jsonl" if name in SHIPPED else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"{name!r} is neither one of {', '.join(SHIPPED)} nor a JSONL file "
            "(task.train, task.test)"
        )
    return path
