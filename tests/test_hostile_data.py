"""Data, rewards and tools that were made to do harm: named with their place, never a traceback, a
hang or a free reward."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr.environments.math_problems import MathOptions
from estr.environments.own_data import DataOptions, DataTask
from estr.environments.search_data import read_set
from estr.errors import ConfigError, DataError, EnvError, GraderError
from estr.functions import call_limited
from estr.records import choose_rows, read_records
from estr.reward import Attempt, Reward, to_reply
from estr.tools import Call, Toolbox, parse_calls

ATTEMPT = Attempt("24", "24", {}, [], "stop")


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "\\ud800 alone"}',
        '{"\\udfff": "as a name"}',
        '{"prompt": ["within", {"a": "\\ud83d"}]}',
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"prompt": "1"}\n' + line)
    with pytest.raises(DataError, match=r"my.jsonl:2 is not JSON"):
        read_records(path)


def test_both_halves_of_a_character_are_one(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert read_records(path) == [{"prompt": "\N{GRINNING FACE}"}]


def test_a_name_that_no_file_can_have_is_named() -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_records(Path("a\0b"))


def test_a_slice_of_more_digits_than_python_reads_is_no_slice() -> None:
    with pytest.raises(ConfigError, match="rows must be a slice"):
        choose_rows([{}], "[" + "9" * 5000 + ":]")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": ["a"]}, {"role": "user", "content": "b"}],
        [{"role": "system", "content": None}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": {"text": "b"}}],
        [{"role": 7, "content": "b"}],
    ],
)
def test_messages_that_are_no_text_are_named(tmp_path: Path, messages: Any) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": "1"}))
    with pytest.raises(DataError, match=r"record 1: (role|content) of message 1 is .*, not text"):
        DataTask(DataOptions(path=str(path), system="Be brief."))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_outcome_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="unfinished_outcome must be finite"):
        DataOptions(path="my.jsonl", unfinished_outcome=value)
    with pytest.raises(ValueError, match="unfinished_outcome must be finite"):
        MathOptions(unfinished_outcome=value)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"answer_aliases": "abc"}, "answer_aliases must be a list of str or int or float"),
        ({"answer_aliases": 5}, "answer_aliases must be"),
        ({"answer_aliases": [["a"]]}, "answer_aliases must be"),
        ({"gold_docids": 5}, "gold_docids must be"),
        ({"gold_docids": "d1"}, "gold_docids must be"),
        ({"evidence_docs": ["d1"]}, "evidence_docs must be a list of dict"),
        ({"evidence_docs": {"docid": "d1"}}, "evidence_docs must be"),
        ({"gold_docs": [None]}, "gold_docs must be"),
        ({"note": "\ud800"}, "half a character"),
    ],
)
def test_fields_of_a_query_are_what_they_must_be(
    tmp_path: Path, fields: dict[str, Any], match: str
) -> None:
    """The letters of "abc" as aliases would make "a" a right answer."""
    query = {"query_id": "1", "query": "Who?", "answer": "Ann", **fields}
    (tmp_path / "queries.jsonl").write_text(json.dumps(query))
    (tmp_path / "corpus.jsonl").write_text('{"docid": "d1", "title": "t", "text": "x"}')
    with pytest.raises(DataError, match=match):
        read_set(str(tmp_path), "")


# -- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        np.bool_(True),
        np.array(1.0),
        torch.tensor(1),
        torch.tensor(1.0, requires_grad=True),
        {"outcome": torch.tensor(True)},
    ],
)
def test_what_is_a_number_to_whoever_gave_it_is_one(given: Any) -> None:
    assert to_reply(given, "mine").outcome == 1.0


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def wordless(reply: str) -> float:
    raise Wordless


async def leaves(reply: str) -> float:
    raise SystemExit(3)


async def gives_up(reply: str) -> float:
    raise asyncio.CancelledError


async def all_leave(replies: list[str]) -> list[float]:
    raise SystemExit(3)


async def all_give_up(replies: list[str]) -> list[float]:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "function",
    [
        lambda reply: Unspeakable(),
        lambda reply: 10**400,
        lambda reply: torch.tensor([1.0]),
        wordless,
        leaves,
        gives_up,
        all_leave,
        all_give_up,
        lambda replies: torch.tensor(1.0),
        lambda replies: Unspeakable(),
        lambda replies: (1.0 for _ in replies),
        lambda replies: [Unspeakable()] * len(replies),
    ],
)
def test_every_attempt_ends_as_a_grader_error(function: Any) -> None:
    async def play() -> list[Any]:
        reward = Reward(function, "mine", timeout_s=60)
        both = asyncio.gather(reward(ATTEMPT), reward(ATTEMPT), return_exceptions=True)
        return await asyncio.wait_for(both, timeout=60)

    assert [type(error) for error in asyncio.run(play())] == [GraderError, GraderError]


def test_tensors_of_many_rewards_are_read() -> None:
    reward = Reward(lambda replies: torch.ones(len(replies)), "mine")
    assert asyncio.run(reward(ATTEMPT)).outcome == 1.0


async def test_a_cancelled_caller_stays_cancelled() -> None:
    task = asyncio.ensure_future(call_limited(asyncio.sleep, (3600,), timeout_s=3600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- tools ---------------------------------------------------------------------------------------


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return text


def nested(text: str) -> list[Any]:
    """Much too deep.

    Args:
        text: Ignored.
    """
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def test_half_a_character_that_a_model_wrote_comes_back_as_one_that_can_be_read() -> None:
    """Else its rollout would fail, which is not the outcome of what it wrote."""
    text = '<tool_call>{"name": "echo", "arguments": {"text": "a\\ud800b"}}</tool_call>'
    (call,) = parse_calls(text)
    answer = asyncio.run(Toolbox({"echo": echo}).answer(call))
    assert answer == "a\N{REPLACEMENT CHARACTER}b"


def test_a_result_too_deep_for_json_is_the_environments_failure() -> None:
    with pytest.raises(EnvError, match="tool nested returned a list"):
        asyncio.run(Toolbox({"nested": nested}).answer(Call("nested", {"text": ""})))
