"""GSM8K and its calculator: every shipped gold solution and every calculator mark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.environment import Action, Reply
from estr.environments import build_task
from estr.environments.expressions import calculator, evaluate
from estr.environments.gsm8k import SLICE, Gsm8kOptions, Gsm8kTask, read_problems
from estr.errors import DataError
from estr.grading import GRADERS
from estr.records import read_records
from estr.tools import write_call

SPLITS = ("train", "test")
MARK = re.compile(r"<<(.+?)=([^=<>]*)>>")


@pytest.mark.parametrize("split", SPLITS)
def test_every_gold_solution_is_graded_right_in_both_modes_check_101(split: str) -> None:
    solutions = [record["answer"] for record in read_records(SLICE / f"{split}.jsonl")]
    problems = read_problems(SLICE / f"{split}.jsonl")
    assert len(problems) == {"train": 200, "test": 100}[split]
    for solution, problem in zip(solutions, problems, strict=True):
        boxed = solution.replace(f"#### {problem.answer}", f"\\boxed{{{problem.answer}}}")
        assert boxed != solution
        assert GRADERS["marked"].grade(solution, problem.answer) == 1.0
        assert GRADERS["boxed"].grade(boxed, problem.answer) == 1.0
        assert GRADERS["boxed"].grade(solution, problem.answer) == 0.0
        assert GRADERS["marked"].grade(boxed, problem.answer) == 0.0


@pytest.mark.parametrize("split", SPLITS)
def test_every_calculator_mark_evaluates_to_what_it_states(split: str) -> None:
    marks = [
        mark
        for record in read_records(SLICE / f"{split}.jsonl")
        for mark in MARK.findall(record["answer"])
    ]
    assert len(marks) == {"train": 675, "test": 304}[split]
    for expression, stated in marks:
        value = evaluate(stated)
        assert abs(evaluate(expression) - value) <= Fraction(11, 1000) * max(abs(value), 1)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("(12 + 3) * 0.2", "3"),
        ("1/3", "0.333333"),
        ("-2/3", "-0.666667"),
        ("2-3-4", "-5"),
        ("100/10/2", "5"),
        ("2+3*4", "14"),
        ("-(2+3)*-2", "10"),
        ("560//10", "56"),
        ("1,080 * 2", "2160"),
        ("$5 \N{MULTIPLICATION SIGN} .5 =", "2.5"),
        ("0.1+0.2", "0.3"),
        ("0.0000001*-1", "0"),
        ("3.*2", "6"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["", "=", "2+", "(2", "2)", "2 3", "1,08", "2**3", "abc", "__import__('os')", "9" * 201,
     "(" * 60 + "1" + ")" * 60, "-" * 90 + "1"],
)  # fmt: skip
def test_what_is_no_expression_is_an_error_for_the_model(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculator(expression)


def test_division_by_zero_is_an_error_for_the_model() -> None:
    for expression in ("1/0", "1//(2-2)"):
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            calculator(expression)


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda t: f"({t[0]}{t[1]}{t[2]})"
        ),
        max_leaves=8,
    )
)
@settings(max_examples=80, deadline=None)  # fmt: skip
def test_the_calculator_agrees_with_python(expression: str) -> None:
    assert calculator(expression) == str(eval(expression))


@given(st.text(alphabet="0123456789+-*/(). ,$=x", max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_expression_has_a_value_or_an_error_for_the_model(expression: str) -> None:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        assert re.fullmatch(r"-?\d+(\.\d+)?", calculator(expression))


# -- the task ------------------------------------------------------------------------------------


def play(task: Gsm8kTask, *turns: str, finish: str = "stop", index: int = 0) -> list[Reply]:
    async def run() -> list[Reply]:
        environment = task.make("test", index)
        await environment.start()
        ends = ["stop"] * (len(turns) - 1) + [finish]
        return [
            await environment.step(Action(text, (), end))  # type: ignore[arg-type]
            for text, end in zip(turns, ends, strict=True)
        ]

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["marked", "boxed"])
@pytest.mark.parametrize("tool", [True, False])
def test_gold_turns_have_the_full_outcome_check_101(mode: str, tool: bool) -> None:
    task = build_task({"name": "gsm8k", "mode": mode, "tool": tool})
    assert isinstance(task, Gsm8kTask)
    assert (task.size("train"), task.size("test")) == (200, 100)
    for index in range(100):
        turns = task.gold("test", index)
        assert len(turns) == 1 + (tool and bool(task.problem("test", index).calls))
        last = play(task, *turns, index=index)[-1]
        assert last.outcome == 1.0
        assert sum(last.rewards.values()) == pytest.approx(1.1 if len(turns) == 2 else 1.0)


def test_the_outcome_is_the_answer_alone_and_a_call_earns_its_part_once() -> None:
    task = Gsm8kTask(Gsm8kOptions())
    answer = task.problem("test", 0).answer
    call = write_call("calculator", {"expression": "6*7"})
    first, again, end = play(task, call, call, f"so\n#### {answer}")
    assert first.observation == again.observation == [{"role": "tool", "content": "42"}]
    assert (end.outcome, end.rewards) == (1.0, {"answer": 1.0, "tool_call": 0.1})
    (_, wrong) = play(task, call, "#### -1")
    assert (wrong.outcome, wrong.rewards) == (0.0, {"answer": 0.0, "tool_call": 0.1})
    (bare,) = play(task, f"#### {answer}")
    assert (bare.outcome, bare.rewards) == (1.0, {"answer": 1.0})
    (cut,) = play(task, f"#### {answer}", finish="length")
    assert (cut.outcome, cut.rewards) == (0.0, {"answer": 0.0})
    last = play(task, *[call] * 4)[-1]
    assert (last.outcome, last.rewards) == (0.0, {"answer": 0.0, "tool_call": 0.1})


def test_a_malformed_call_is_answered_and_earns_nothing_check_105() -> None:
    task = Gsm8kTask(Gsm8kOptions())
    replies = play(task, '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"', "1")
    (answer,) = replies[0].observation  # type: ignore[misc]
    assert answer["content"].startswith("error: the call is not JSON")  # type: ignore[call-overload,index]
    assert replies[1].rewards == {"answer": 0.0}
    malformed = write_call("calculator", {"expression": "2 plus 3"})
    replies = play(task, malformed, "1")
    (answer,) = replies[0].observation  # type: ignore[misc]
    assert answer["content"].startswith("error: ValueError: cannot read 'plus 3'")  # type: ignore[call-overload,index]


def test_prompt_and_grader_belong_together() -> None:
    for mode, mark in (("marked", "#### 143"), ("boxed", "\\boxed{143}")):
        task = Gsm8kTask(Gsm8kOptions(mode=mode))  # type: ignore[arg-type]
        messages = task.prompt("why?")
        assert mark.replace("143", "42") in messages[0]["content"]
        assert [messages[i]["content"] for i in (3, 4)] == ["143", mark]
        assert [m["role"] for m in messages] == [
            "system", *["user", "assistant", "tool", "assistant"] * 2, "user",
        ]  # fmt: skip
    described = Gsm8kTask(Gsm8kOptions(num_examples=0)).prompt("why?")
    assert [m["role"] for m in described] == ["system", "user"]
    assert '"name": "calculator"' in described[0]["content"]
    plain = Gsm8kTask(Gsm8kOptions(tool=False, num_examples=1)).prompt("why?")
    assert [m["role"] for m in plain] == ["system", "user", "assistant", "user"]
    assert "calculator" not in str(plain)
    with pytest.raises(ValueError, match="num_examples"):
        Gsm8kOptions(num_examples=4)


def test_a_folder_of_ones_own_and_what_is_refused_in_it(tmp_path: Path) -> None:
    good = {"question": "?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(good) + "\n")
    task = Gsm8kTask(Gsm8kOptions(folder=str(tmp_path)))
    assert task.problem("train", 0).calls == ("1+1",)
    with pytest.raises(DataError, match="has 1 train problems"):
        task.make("train", 1)
    for wrong in ({"question": "?"}, {**good, "answer": "2"}, {**good, "answer": "#### two"}):
        (tmp_path / "test.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(wrong) + "\n")
        with pytest.raises(DataError, match=r"test\.jsonl, record 2"):
            Gsm8kTask(Gsm8kOptions(folder=str(tmp_path)))
    with pytest.raises(DataError, match="No such file"):
        Gsm8kTask(Gsm8kOptions(folder=str(tmp_path / "none")))
