"""One's own problems from a JSONL file, graded by name or by one's own function; tools if wanted.

    [task]
    path = "my.jsonl"                            {"question": "...", "answer": "24"} a line
    prompt = "{question} Answer in \\boxed{}."    fields go in
    reward = "boxed"                             or "my_pkg:score"
    tools = ["my_pkg:search"]                    Python functions

docs/own-data.md walks through it. Every record is read, its prompt filled and its answer tried on
the grader when the task is built, so that nothing of it can fail later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..environment import Environment, Message, Prompt, Reply
from ..errors import ConfigError, DataError, GraderError
from ..functions import import_object
from ..grading import GRADERS
from ..options.corrections import require
from ..options.run import require_seconds
from ..options.tasks import REWARD_TIMEOUT_S, TOOL_TIMEOUT_S
from ..records import (
    Record,
    as_text,
    choose_rows,
    field,
    file_digests,
    fill,
    known_field,
    names_in,
    read_records,
)
from ..reward import Attempt, Reward
from ..tools import CutSide, Toolbox, named_functions
from . import check_split, stable_hash, without_tested
from .conversation import Conversation, Ending, ToolRole

_NAMED_FAULTS = 3
"""Bad records that an error names; the others are counted."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Problems from a JSONL file. A task table with a `path` and no name is this one."""

    path: str = ""
    """JSONL file with one problem a line."""
    test: str = ""
    """JSONL file of the held-out problems; without one, test_share of `path` is held out."""
    test_share: float = 0.1
    """Share of `path` that is held out for testing, the same problems whatever the seed."""
    rows: str = ""
    """A slice of `path` as Python writes it, such as "[:5000]" or "[-100:]"; "": all."""
    shuffle: bool = True
    """Train in an order drawn from `seed`, not in that of the file."""
    seed: int = 0
    """Of the order of training problems."""
    prompt: str = "{prompt}"
    """What the model reads. {name} stands for that field of the record (a dot goes one level down),
    {{name}} for the text {name}; a field that holds chat messages may stand alone."""
    system: str = ""
    """System message, filled in the same way; with tools, they are described behind it."""
    style: Literal["chat", "text"] = "chat"
    """chat: messages through the model's chat template. text: the prompt as it stands."""
    stop: tuple[str, ...] = ()
    """Texts, one token each, that end a turn besides the model's own end of text."""
    answer: str = "answer"
    """The field with the right answer."""
    reward: str = "number"
    """A grader by name (number, marked, boxed, answer_line, exact), or "module:function"."""
    gold: str = ""
    """Reply that has outcome 1, for the self-check, filled like the prompt; "": what the grader
    wants to see, for one's own function none."""
    bad_records: Literal["refuse", "drop"] = "refuse"
    """What becomes of records that lack a field, have an answer that cannot be graded, or would be
    both trained and tested on."""
    reward_timeout_s: float = REWARD_TIMEOUT_S
    """Time that one call of one's own reward function may take, seconds; less than
    rollout.step_timeout_s."""
    reward_batch: int = 32
    """Replies given at once to a reward function of many, at most."""
    unfinished_outcome: float = 0.0
    """Outcome of a rollout that ran out of tokens or time."""
    tools: tuple[str, ...] = ()
    """Tools as "module:function"; signature and docstring tell the model how to call them."""
    max_turns: int = 4
    """Turns of a rollout with tools, at most; without tools there is one."""
    tool_role: ToolRole = "tool"
    """Role in whose name tools answer; templates that know no "tool" get "user" in any case."""
    tool_timeout_s: float = TOOL_TIMEOUT_S
    """Time that one call of a tool may take, seconds; less than rollout.step_timeout_s."""
    max_tool_chars: int = 2000
    """Longer answers of tools are cut."""
    tool_cut: CutSide = "right"
    """The part of a too long answer that is dropped."""
    restorable: bool = True
    """Do the tools always answer the same call in the same way?"""

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a JSONL file")
        require(
            math.isfinite(self.unfinished_outcome),
            f"unfinished_outcome must be finite, not {self.unfinished_outcome}",
        )
        require(0 < self.test_share < 1, f"test_share must be in (0, 1), not {self.test_share}")
        require_seconds("reward_timeout_s", self.reward_timeout_s)
        require_seconds("tool_timeout_s", self.tool_timeout_s)
        for name in ("reward_batch", "max_turns", "max_tool_chars"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        require(
            self.style == "chat" or not (self.tools or self.system),
            'style = "text" knows no tools and no system message; put them into the prompt',
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """A record with its prompt filled. answer: None where the record has no such field."""

    record: Record
    prompt: Prompt
    answer: str | None
    gold: str | None


class DataTask:
    """Problems of one's own."""

    Options = DataOptions
    name = "data"

    def __init__(self, options: DataOptions) -> None:
        self.options = options
        self.stop = options.stop
        self.max_turns = options.max_turns if options.tools else 1
        self.unfinished_outcome: float | None = options.unfinished_outcome
        self._grader = None if ":" in options.reward else _grader(options.reward)
        self._reward = None if self._grader else _reward(options)
        self._toolbox = _toolbox(options)
        self._refuse_shown_answer()
        self._problems = self._read()
        files = [Path(name) for name in (options.path, options.test) if name]
        self.fingerprint = file_digests(files)
        self._refuse_absent_answers()

    def size(self, split: str) -> int | None:
        check_split(split)
        return len(self._problems[split])

    def problem(self, split: str, index: int) -> Problem:
        """Raises DataError beyond the end of the split."""
        check_split(split)
        problems = self._problems[split]
        if not 0 <= index < len(problems):
            raise DataError(f"{self.options.path} has {len(problems)} {split} problems, no {index}")
        return problems[index]

    def make(self, split: str, index: int) -> Environment:
        problem = self.problem(split, index)
        return Conversation(
            problem.prompt,
            partial(self._grade, problem),
            toolbox=self._toolbox,
            max_turns=self.max_turns,
            tool_role=self.options.tool_role,
            restorable=self.options.restorable,
        )

    def gold(self, split: str, index: int) -> Sequence[str]:
        gold = self.problem(split, index).gold
        return [] if gold is None else [gold]

    async def _grade(self, problem: Problem, ending: Ending) -> Reply:
        if self._reward is not None:
            return await self._reward(
                Attempt(
                    ending.reply,
                    problem.answer,
                    problem.record,
                    ending.messages,
                    ending.finish_reason,
                )
            )
        assert self._grader is not None
        assert problem.answer is not None  # or the record would have been refused
        if ending.finish_reason != "stop":  # half an answer may read like another one
            return Reply(outcome=0.0)
        return Reply(outcome=self._grader.grade(ending.reply, problem.answer))

    # -- reading ------------------------------------------------------------------------------

    def _read(self) -> dict[str, list[Problem]]:
        """Both splits, disjoint in their prompts where one file serves for both."""
        options = self.options
        records = choose_rows(read_records(Path(options.path)), options.rows)
        train = self._problems_of(records, options.path)
        if options.test:
            test = self._problems_of(read_records(Path(options.test)), options.test)
            drop = options.bad_records == "drop"
            train = without_tested(train, test, lambda problem: problem.prompt, drop=drop)
        else:
            train, test = _hold_out(train, options.test_share, options.path)
        if options.shuffle:
            order = [stable_hash(options.seed, "order", i) for i in range(len(train))]
            train = [train[i] for i in sorted(range(len(train)), key=order.__getitem__)]
        return {"train": train, "test": test}

    def _problems_of(self, records: list[dict[str, Any]], path: str) -> list[Problem]:
        """In the order of the file. Raises DataError naming the bad records, unless they are to be
        dropped and some are left."""
        problems, faults = [], []
        for number, record in enumerate(records, start=1):
            try:
                problems.append(self._problem(record))
            except (DataError, GraderError) as error:
                faults.append(f"record {number}: {error}")
        if faults and (self.options.bad_records == "refuse" or not problems):
            shown = "; ".join(faults[:_NAMED_FAULTS])
            raise DataError(
                f"{len(faults)} of {len(records)} records of {path} cannot be used: {shown}. "
                "Name fields as the file does ({{name}} is the text {name}), mend the records, or "
                'leave them out with task.bad_records = "drop"'
            )
        return problems

    def _problem(self, record: Record) -> Problem:
        prompt = self._prompt(record)
        if self._grader is not None:
            answer = as_text(known_field(record, self.options.answer))
            gold = fill(self.options.gold, record) or self._grader.reply(answer)
            if self._grader.grade(gold, answer) != 1.0:
                raise GraderError(
                    f"the reply {gold!r:.80} is not graded right for the answer {answer!r:.80}"
                )
            return Problem(record, prompt, answer, gold)
        gold = fill(self.options.gold, record) or None
        try:
            return Problem(record, prompt, as_text(known_field(record, self.options.answer)), gold)
        except DataError:  # one's own function may look elsewhere
            return Problem(record, prompt, None, gold)

    def _prompt(self, record: Record) -> Prompt:
        options = self.options
        filled: Any = fill(options.prompt, record)
        names = list(names_in(options.prompt))
        if len(names) == 1 and options.prompt.strip() == f"{{{names[0]}}}":
            value = field(record, names[0])
            if _is_messages(value):
                filled = value
                _check_messages(value)
        if isinstance(filled, str) and not filled.strip():
            raise DataError("the prompt is empty")
        if options.style == "text":
            if not isinstance(filled, str):
                raise DataError('the prompt is chat messages; say task.style = "chat"')
            return filled
        messages: list[Message] = (
            [{"role": "user", "content": filled}] if isinstance(filled, str) else list(filled)
        )
        system = fill(options.system, record)
        if messages[0]["role"] == "system":
            first = messages.pop(0)["content"]
            system = "\n\n".join(part for part in (system, first) if part)
        if self._toolbox is not None:
            system = "\n\n".join(part for part in (system, self._toolbox.instructions()) if part)
        return [{"role": "system", "content": system}, *messages] if system else messages

    def _refuse_absent_answers(self) -> None:
        """A function that asks for answers would be given None for every reply."""
        options = self.options
        problems = [*self._problems["train"], *self._problems["test"]]
        wanted = self._reward is not None and self._reward.requires("answer")
        if wanted and all(problem.answer is None for problem in problems):
            raise ConfigError(
                f"task.reward = {options.reward!r} asks for the answer, but no record of "
                f"{options.path} has the field {options.answer!r}; name the right field as "
                'task.answer, or ask for the whole "record"'
            )

    def _refuse_shown_answer(self) -> None:
        answer = self.options.answer
        for key in ("prompt", "system"):
            for name in names_in(getattr(self.options, key)):
                # A field shows all that lies within it.
                if f"{answer}.".startswith(f"{name}.") or f"{name}.".startswith(f"{answer}."):
                    raise ConfigError(
                        f"task.{key} shows the model the answer, {answer}, in {{{name}}}; write "
                        f"{{{{{name}}}}} for that text itself, or name another field as task.answer"
                    )


def _grader(name: str) -> Any:
    if name not in GRADERS:
        known = "; ".join(f"{known} ({grader.says})" for known, grader in GRADERS.items())
        raise ConfigError(
            f'task.reward = {name!r} is unknown; known: {known}; or "module:function" of your own'
        )
    return GRADERS[name]


def _reward(options: DataOptions) -> Reward:
    key = f"task.reward = {options.reward!r}"
    return Reward(
        import_object(options.reward, "task.reward"),
        key,
        timeout_s=options.reward_timeout_s,
        batch=options.reward_batch,
    )


def _toolbox(options: DataOptions) -> Toolbox | None:
    if not options.tools:
        return None
    return Toolbox(
        named_functions([import_object(tool, "task.tools") for tool in options.tools]),
        timeout_s=options.tool_timeout_s,
        max_chars=options.max_tool_chars,
        cut=options.tool_cut,
    )


def _hold_out(
    problems: list[Problem], share: float, path: str
) -> tuple[list[Problem], list[Problem]]:
    """(train, test): of the distinct prompts a share, at least one, chosen by a hash."""
    keys = [json.dumps(problem.prompt, ensure_ascii=False) for problem in problems]
    distinct = sorted(set(keys), key=lambda key: stable_hash("held out", key))
    if len(distinct) < 2:
        raise DataError(
            f"{path} holds {len(distinct)} different prompts; one for training and one for testing "
            "are needed"
        )
    count = min(max(1, round(share * len(distinct))), len(distinct) - 1)
    held_out = set(distinct[:count])
    train = [p for p, key in zip(problems, keys, strict=True) if key not in held_out]
    test = [p for p, key in zip(problems, keys, strict=True) if key in held_out]
    return train, test


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError on what no chat template renders as it is meant."""
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise DataError(f"{key} of message {number} is {message[key]!r:.60}, not text")


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    )
