"""The data sets of `reasoning-gym` by name: problems without end, each made from its index.

    [task]
    name = "reasoning_gym"
    dataset = "chain_sum"
    config = { min_terms = 2, max_terms = 3 }

    user       State the final answer to the following arithmetic problem: 4 + 3 = ...
    model      4 and 3 are 7. <answer>7</answer>           outcome 1.0

Problems and scores come from a process of their own that can be killed (`estr.killable`): some
generators take seconds, and some scorers compute with what the model wrote.
docs/reasoning-gym.md tells which data sets are not what they seem.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from ..environment import Action, Environment, Message, Prompt, Reply
from ..errors import ConfigError, EnvError, GraderError
from ..killable import NoAnswer, Pool
from ..options.corrections import require
from ..options.run import require_seconds
from ..options.tasks import PROBLEM_TIMEOUT_S, SCORE_TIMEOUT_S
from . import check_split, stable_hash

_FRAME = """\
{question}

Think step by step, then give the final answer alone between <answer> and </answer>."""
_OPEN, _CLOSE = "<answer>", "</answer>"
_LONGEST = 10_000
"""Characters beyond which a text is no answer."""


@dataclass(frozen=True, slots=True)
class ReasoningGymOptions:
    """Generated problems of one data set of reasoning-gym."""

    dataset: str = "chain_sum"
    """Its name there, such as chain_sum, countdown or knights_knaves."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of that data set."""
    credit: Literal["full", "partial"] = "full"
    """full: outcome 1 for a right answer, else 0. partial: what the data set's scorer gives beyond
    what a lazy answer gets; only 1 counts as solved."""
    problem_timeout_s: float = PROBLEM_TIMEOUT_S
    """Time that making one problem may take, seconds."""
    score_timeout_s: float = SCORE_TIMEOUT_S
    """Time that scoring one answer may take, seconds; longer: grader_error, not wrong."""
    unfinished_outcome: float = 0.0
    """Outcome of a rollout that ran out of tokens or time."""
    seed: int = 0
    """Of the training problems; those for testing stay the same."""

    def __post_init__(self) -> None:
        require(bool(self.dataset), "dataset must name a data set of reasoning-gym")
        require_seconds("problem_timeout_s", self.problem_timeout_s)
        require_seconds("score_timeout_s", self.score_timeout_s)


class ReasoningGymTask:
    """The problems of one data set, endless in both splits."""

    Options = ReasoningGymOptions
    name = "reasoning_gym"
    stop: tuple[str, ...] = ()
    max_turns = 1
    eval_settings: Mapping[str, Any] = {
        "sampling.max_new_tokens": 512,
        "sampling.max_tokens": 2048,
    }

    def __init__(self, options: ReasoningGymOptions) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(
                "task reasoning_gym needs reasoning-gym; pip install 'estr[reasoning]'"
            )
        self.options = options
        self.unfinished_outcome: float | None = options.unfinished_outcome
        self._dataset = {"dataset": options.dataset, "config": dict(options.config)}
        fault = self._ask({"ask": "check", **self._dataset}, options.problem_timeout_s)
        if fault is not None:
            raise ConfigError(f"task.dataset = {options.dataset!r}: {fault}")
        self.fingerprint = json.dumps(
            [importlib.metadata.version("reasoning-gym"), self._dataset, options.seed]
        )

    def size(self, split: str) -> int | None:
        check_split(split)
        return None

    def make(self, split: str, index: int) -> Environment:
        check_split(split)
        return _Problem(self, split, index)

    def gold(self, split: str, index: int) -> Sequence[str]:
        """The data set's answer, if it has one and its own scorer finds it right."""
        gold = self.problem(split, index)["gold"]
        return [] if gold is None else [f"<answer>{gold}</answer>"]

    def answer(self, text: str) -> str | None:
        said = extract_answer(text)
        return None if said is None else " ".join(said.split()).casefold()

    def problem(self, split: str, index: int) -> Mapping[str, Any]:
        """{"question": ..., "gold": ...}. Raises EnvError where it cannot be made."""
        try:
            found: Mapping[str, Any] = self._ask(
                self._question("problem", split, index), self.options.problem_timeout_s
            )
        except NoAnswer as error:
            raise EnvError(f"{self.options.dataset}, {split} problem {index}: {error}") from error
        return found

    def score(self, split: str, index: int, reply: str) -> float:
        """In [0, 1]. Raises GraderError where it cannot be told."""
        question = {**self._question("score", split, index), "reply": reply}
        try:
            # The problem may have to be made again first, in a process that is new.
            limit_s = self.options.problem_timeout_s + self.options.score_timeout_s
            found = float(self._ask(question, limit_s))
        except NoAnswer as error:
            raise GraderError(
                f"{self.options.dataset} cannot score {reply[:80]!r}: {error}"
            ) from error
        return found if self.options.credit == "partial" else float(found == 1.0)

    def _question(self, ask: str, split: str, index: int) -> dict[str, Any]:
        check_split(split)
        seed = stable_hash("reasoning_gym", self.options.seed) % (1 << 29)
        return {"ask": ask, **self._dataset, "split": split, "seed": seed, "index": int(index)}

    def _ask(self, question: Mapping[str, Any], timeout_s: float) -> Any:
        return _shared_pool().ask(question, timeout_s)


@lru_cache(maxsize=1)
def _shared_pool() -> Pool:
    """One for all tasks of this process."""
    return Pool("estr.environments.reasoning_gym_process")


class _Problem:
    """One problem: one turn, one answer."""

    restorable = True

    def __init__(self, task: ReasoningGymTask, split: str, index: int) -> None:
        self._task = task
        self._split = split
        self._index = index

    async def start(self) -> Prompt:
        problem = await asyncio.to_thread(self._task.problem, self._split, self._index)
        asked: Message = {"role": "user", "content": _FRAME.format(question=problem["question"])}
        return [asked]

    async def step(self, action: Action) -> Reply:
        said = extract_answer(action.text)
        if action.finish_reason != "stop" or not said or len(said) > _LONGEST:
            return Reply(outcome=0.0)
        score = await asyncio.to_thread(self._task.score, self._split, self._index, said)
        return Reply(outcome=score)

    async def close(self) -> None:
        pass


def extract_answer(text: str) -> str | None:
    """What stands between the last <answer> that is closed and its </answer>; None: nothing."""
    end = len(text)
    while (start := text.rfind(_OPEN, 0, end)) >= 0:
        close = text.find(_CLOSE, start, end)
        if close >= 0:
            return text[start + len(_OPEN) : close].strip()
        end = start
    return None
