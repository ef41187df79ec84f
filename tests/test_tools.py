"""Functions as tools: schema, calls as models write them, answers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import ConfigError, EnvError
from estr.tools import Call, Toolbox, cut_text, named_functions, parse_calls, write_call


def add(a: float, b: float = 1.0) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def look_up(key: str, kind: Literal["word", "name"] = "word") -> dict[str, str]:
    """Look something up.

    Args:
        key: What to look up.
        kind: Which list to look in.
    """
    if key == "nothing":
        raise KeyError(key)
    if key == "broken":
        raise OSError("disk on fire")
    return {key: kind}


def sleep(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def odd() -> object:
    """Give something strange."""
    return {1, 2}


BOX = Toolbox(named_functions([add, look_up, sleep, odd]), timeout_s=0.2, max_chars=40)


def call(text: str) -> Call:
    (found,) = parse_calls(text)
    return found


def ask(name: str, **arguments: Any) -> str:
    return asyncio.run(BOX.answer(call(write_call(name, arguments))))


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert BOX.schemas()[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "The first number."},
                    "b": {"type": "number", "description": "The second number."},
                },
                "required": ["a"],
            },
        },
    }
    assert json.dumps(BOX.schemas()[1]) in BOX.instructions()
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in BOX.instructions()


def untyped(x):  # type: ignore[no-untyped-def]
    """Do it.

    Args:
        x: What.
    """


def undocumented(x: int) -> int:
    return x


def unfillable(x: threading_lock) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do it.

    Args:
        x: What.
    """


@pytest.mark.parametrize("function", [untyped, undocumented, unfillable])
def test_a_function_without_a_schema_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"task\.tools: \w+ cannot be a tool"):
        Toolbox({function.__name__: function}).instructions()


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="share a name"):
        named_functions([add, add])


def test_calls_are_found_wherever_they_stand() -> None:
    text = f"I need {write_call('add', {'a': 1})} and\n{write_call('look_up', {'key': '<x>'})} ok"
    assert parse_calls(text) == [Call("add", {"a": 1}), Call("look_up", {"key": "<x>"})]
    assert parse_calls("no call; </tool_call> tool_call") == []
    assert parse_calls('<tool_call>{"name": "add", "arguments": {}}') == [Call("add", {})]
    assert call('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>').arguments == {
        "x": 1
    }


@pytest.mark.parametrize(
    "body",
    [
        '{"expression": "2+3"',
        '{"name": "add", "arguments": {"a": 1}',
        "",
        "[]",
        '{"name": 3}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "subtract", "arguments": {}}',
        '{"name": "add"}',
        '{"name": "add", "arguments": {"a": "one"}}',
        '{"name": "add", "arguments": {"a": 1, "c": 2}}',
        "{" * 5000,
        "[" * 100_000,
    ],
)
def test_a_malformed_call_is_answered_check_105(body: str) -> None:
    found = call(f"<tool_call>{body}</tool_call>")
    assert BOX.check(found) is not None
    assert asyncio.run(BOX.answer(found)).startswith("error: ")


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_without_an_error(text: str) -> None:
    for found in parse_calls(f"<tool_call>{text}"):
        BOX.check(found)


def test_answers_are_text_or_json() -> None:
    assert ask("add", a=2, b=3) == "5.0"
    assert ask("add", a=2) == "3.0"
    assert ask("add", a="2", b="3") == "5.0"  # models often quote numbers
    assert ask("look_up", key="é", kind="name") == '{"é": "name"}'


def test_what_the_model_can_learn_from_is_an_answer_anything_else_a_failure() -> None:
    assert ask("look_up", key="nothing") == "error: KeyError: 'nothing'"
    assert BOX.check(call(write_call("look_up", {"key": "nothing"}))) is None
    for name, arguments, match in [
        ("look_up", {"key": "broken"}, "OSError: disk on fire"),
        ("sleep", {"seconds": 2}, r"no answer within 0\.2 s"),
        ("odd", {}, "neither text nor JSON"),
    ]:
        with pytest.raises(EnvError, match=f"tool {name}.*{match}"):
            ask(name, **arguments)


def test_a_long_answer_is_cut_on_the_side_that_is_named_check_81() -> None:
    assert cut_text("abcdef", 2, "left", mark="") == "ef"
    assert cut_text("abcdef", 2, "right", mark="") == "ab"
    assert cut_text("abcdef", 2, "middle", mark="") == "af"
    assert cut_text("abcdef", 1, "middle", mark="") == "a"
    assert cut_text("abcdef", 6, "left") == "abcdef"
    assert cut_text("abcdef", 5, "left") == "...bcdef"
    assert ask("look_up", key="x" * 100) == '{"' + "x" * 38 + "..."


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"a": 1, "\\ud800": 2}',
        '{"\\udfff": 1}',
        '{"a": [[["\\ud800"]]]}',
        '{"a": 1' + "0" * 400 + "}",
        '{"a": 1' + "0" * 5000 + "}",
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_arguments_that_no_type_can_hold_are_answered(arguments: str) -> None:
    written = call(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>')
    assert BOX.check(written) is not None
    assert asyncio.run(BOX.answer(written)).startswith("error: ")
