"""One's own file as a task: reading, splits, prompts, grading, tools; and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.config import recipe_from_table
from estr.environment import Action, Environment, Reply
from estr.environments import build_task
from estr.environments.own_data import DataOptions, DataTask
from estr.errors import ConfigError, DataError, EnvError, GraderError
from estr.tools import write_call
from estr.types import FinishReason

Turn = str | tuple[str, FinishReason]


def records(count: int = 10) -> list[dict[str, Any]]:
    return [{"question": f"1+{i}?", "answer": 1 + i} for i in range(count)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "my.jsonl", records())


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task(path: Path, **options: Any) -> DataTask:
    return DataTask(DataOptions(**{"path": str(path), "prompt": "{question}", **options}))


async def _play(environment: Environment, turns: Sequence[Turn]) -> list[Reply]:
    await environment.start()
    replies = []
    for turn in turns:
        text, finish = (turn, "stop") if isinstance(turn, str) else turn
        replies.append(await environment.step(Action(text, (), finish)))
    await environment.close()
    return replies


def play(environment: Environment, *turns: Turn) -> list[Reply]:
    return asyncio.run(_play(environment, turns))


def prompt_of(of: DataTask, index: int = 0) -> Any:
    return asyncio.run(of.make("train", index).start())


# -- reading -------------------------------------------------------------------------------------


def test_a_path_is_all_that_a_recipe_needs(file: Path) -> None:
    recipe = recipe_from_table({"task": {"path": str(file), "prompt": "{question}"}})
    assert recipe.task["name"] == "data"
    built = build_task(recipe.task)
    assert (built.name, built.max_turns, built.stop) == ("data", 1, ())
    assert (built.size("train"), built.size("test")) == (9, 1)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=40), st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_no_prompt_is_in_both_splits_and_none_is_lost(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], share: float
) -> None:
    path = tmp_path_factory.mktemp("d") / "my.jsonl"
    write(path, [{"question": str(n), "answer": n, "row": i} for i, n in enumerate(numbers)])
    if len(set(numbers)) < 2:
        with pytest.raises(DataError, match="different prompts"):
            task(path, test_share=share)
        return
    made = task(path, test_share=share)
    rows, prompts = [], {}
    for split in ("train", "test"):
        problems = [made.problem(split, i) for i in range(made.size(split) or 0)]
        prompts[split] = {str(p.prompt) for p in problems}
        rows += [p.record["row"] for p in problems]
        assert problems
    assert sorted(rows) == list(range(len(numbers)))
    assert not prompts["train"] & prompts["test"]


def test_the_seed_moves_the_order_and_never_the_split(file: Path) -> None:
    def order(**options: Any) -> list[int]:
        made = task(file, **options)
        return [made.problem("train", i).record["answer"] for i in range(9)]

    assert order(seed=0) != order(seed=1)
    assert sorted(order(seed=0)) == sorted(order(seed=1))
    assert order(shuffle=False) == sorted(order())  # the order of the file, check 148


def test_a_file_of_its_own_for_testing_and_a_slice_for_training(file: Path, tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", records(3))
    made = task(file, test=str(test), rows="[-4:]", shuffle=False)
    assert [made.problem("train", i).answer for i in range(4)] == ["7", "8", "9", "10"]
    assert made.size("test") == 3
    with pytest.raises(DataError, match="has 4 train problems, no 4"):
        made.make("train", 4)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "?"}, "record 11: there is no field 'answer'"),
        ({"question": "?", "answer": ""}, "record 11: the gold answer '' is not a number"),
        ({"question": "?", "answer": "see figure"}, "'see figure' is not a number"),
        ({"answer": 3}, "record 11: there is no field 'question'"),
    ],
)
def test_a_record_that_cannot_be_graded_is_refused_or_dropped_check_94(
    tmp_path: Path, row: dict[str, Any], match: str
) -> None:
    path = write(tmp_path / "my.jsonl", [*records(), row])
    with pytest.raises(DataError, match=f"1 of 11 records .*{match}.*bad_records"):
        task(path)
    dropped = task(path, bad_records="drop")
    assert (dropped.size("train") or 0) + (dropped.size("test") or 0) == 10
    with pytest.raises(DataError, match="1 of 1 records"):
        task(write(path, [row]), bad_records="drop")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"path": ""}, "path must name"),
        ({"test_share": 0.0}, "test_share"),
        ({"reward_timeout_s": float("inf")}, "reward_timeout_s must be finite"),
        ({"reward_timeout_s": float("nan")}, "reward_timeout_s must be finite"),
        ({"tool_timeout_s": 0}, "tool_timeout_s must be finite and above 0"),
        ({"tool_timeout_s": -1}, "tool_timeout_s must be finite and above 0"),
        ({"max_turns": 0}, "max_turns"),
        ({"style": "text", "system": "be brief"}, "no system message"),
        ({"style": "text", "tools": ["json:dumps"]}, "knows no tools"),
        ({"reward": "boxes"}, "known: number .*; boxed"),
        ({"reward": "no.such:thing"}, "task.reward = 'no.such:thing' cannot be imported"),
        ({"tools": ["json:nothing"]}, "task.tools = 'json:nothing' cannot be imported"),
        ({"prompt": "{question} ({answer})"}, "task.prompt shows the model the answer"),
        ({"system": "it is {answer}"}, "task.system shows the model the answer"),
        ({"prompts": "{question}"}, r"unknown key task\.prompts of data.*task\.prompt"),
        ({"reward": 3}, "reward"),
    ],
)
def test_wrong_options_are_refused_checks_106_and_149(
    file: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        build_task({"name": "data", "path": str(file), "prompt": "{question}", **options})


# -- prompts -------------------------------------------------------------------------------------


def test_prompts_are_filled_and_carry_system_message_and_tools(file: Path) -> None:
    assert prompt_of(task(file, shuffle=False, style="text", prompt="Q: {question}\nA:")) == (
        f"Q: {records()[0]['question']}\nA:"
    )
    made = task(file, shuffle=False, system="Be {{brief}}.", tools=(f"{__name__}:double",))
    system, user = prompt_of(made)
    assert user == {"role": "user", "content": "1+0?"}
    assert system["role"] == "system"
    assert system["content"].startswith("Be {brief}.\n\n# Tools")
    assert '"name": "double"' in system["content"]


def test_a_field_of_chat_messages_may_stand_alone(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "{question}"}]
    rows = [
        {"prompt": [*messages, {"role": "user", "content": str(i)}], "meta": {"gold": i}}
        for i in range(3)
    ]
    path = write(tmp_path / "my.jsonl", rows)
    made = task(path, prompt="{prompt}", answer="meta.gold", system="first", shuffle=False)
    prompt = prompt_of(made)
    assert prompt[0] == {"role": "system", "content": "first\n\nS"}
    assert prompt[1] == {"role": "user", "content": "{question}"}
    assert made.problem("train", 0).answer in {"0", "1", "2"}
    with pytest.raises(DataError, match="the prompt is chat messages"):
        task(path, prompt="{prompt}", answer="meta.gold", style="text")


# -- grading -------------------------------------------------------------------------------------


def test_a_grader_by_name_and_its_gold_reply(file: Path) -> None:
    made = task(file, reward="boxed")
    for split in ("train", "test"):
        gold = made.gold(split, 0)
        assert gold == [f"\\boxed{{{made.problem(split, 0).answer}}}"]
        assert play(made.make(split, 0), *gold) == [Reply(outcome=1.0)]
        assert play(made.make(split, 0), "\\boxed{99}") == [Reply(outcome=0.0)]
        assert play(made.make(split, 0), (gold[0], "length")) == [Reply(outcome=0.0)]


def test_a_gold_reply_of_ones_own_is_tried_on_the_grader(file: Path) -> None:
    assert task(file, gold="so: {answer}.").gold("train", 0)[0].startswith("so: ")
    with pytest.raises(DataError, match="the reply 'so: 1 of 2' is not graded right"):
        task(file, gold="so: {answer} of 2", shuffle=False)


def exact(reply: str, answer: str) -> dict[str, float]:
    return {"outcome": float(reply == answer), "short": 0.5}


def blind(reply: str, record: dict[str, Any]) -> float:
    raise RuntimeError(f"no idea about {record['question']}")


def test_a_reward_function_of_ones_own(tmp_path: Path, file: Path) -> None:
    made = task(file, reward=f"{__name__}:exact", shuffle=False)
    (reply,) = play(made.make("train", 0), "1")
    assert reply == Reply(outcome=1.0, rewards={"outcome": 1.0, "short": 0.5})
    assert made.gold("train", 0) == []
    assert task(file, reward=f"{__name__}:exact", gold="{answer}").gold("test", 0) != []
    broken = task(
        write(tmp_path / "b.jsonl", [{"question": "a"}, {"question": "b"}]),
        reward=f"{__name__}:blind",
    )
    with pytest.raises(GraderError, match="RuntimeError: no idea about"):
        play(broken.make("train", 0), "1")


# -- tools ---------------------------------------------------------------------------------------


def maybe(reply: str, answer: str | None = None) -> float:
    return float(answer is None)


def test_a_function_that_asks_for_answers_that_nobody_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", [{"question": str(n), "gold": n} for n in range(10)])
    with pytest.raises(ConfigError, match=r"no record of .*my\.jsonl has the field 'answer'; name"):
        task(path, reward="test_own_data:exact")
    assert task(path, reward="test_own_data:exact", answer="gold").problem("train", 0).answer
    assert task(path, reward="test_own_data:maybe").problem("train", 0).answer is None


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    if x == 13:
        raise RuntimeError("unlucky")
    return 2 * x


def tooled(file: Path, **options: Any) -> DataTask:
    options = {"tools": (f"{__name__}:double",), "max_turns": 3, **options}
    return task(file, shuffle=False, **options)


def test_calls_are_answered_until_a_turn_without_one(file: Path) -> None:
    made = tooled(file)
    assert made.max_turns == 3
    two = write_call("double", {"x": 4}) + write_call("double", {"x": 5})
    replies = play(made.make("train", 0), two, write_call("half", {}), "1")
    assert replies[0].observation == [
        {"role": "tool", "content": "8"},
        {"role": "tool", "content": "10"},
    ]
    (answer,) = replies[1].observation  # type: ignore[misc]
    assert answer["content"] == "error: there is no tool 'half'; tools: double"  # type: ignore[call-overload,index]
    assert replies[2] == Reply(outcome=1.0)


def test_answers_in_the_name_of_the_user_come_as_one_message(file: Path) -> None:
    two = write_call("double", {"x": 4}) + write_call("double", {"x": 5})
    (reply,) = play(tooled(file, tool_role="user").make("train", 0), two)
    assert reply.observation == [{"role": "user", "content": "8\n10"}]


def test_the_last_turn_and_a_turn_cut_short_are_graded_as_they_stand(file: Path) -> None:
    call = write_call("double", {"x": 1})
    replies = play(tooled(file).make("train", 0), call, call, call)
    assert [reply.outcome for reply in replies] == [None, None, 1.0]  # its last number is 1
    assert play(tooled(file).make("train", 0), (call, "length")) == [Reply(outcome=0.0)]


def test_a_tool_that_fails_is_a_failure_of_the_environment(file: Path) -> None:
    with pytest.raises(EnvError, match="tool double: RuntimeError: unlucky"):
        play(tooled(file).make("train", 0), write_call("double", {"x": 13}))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"question": None, "answer": 1}, {}),
        ({"question": "  ", "answer": 1}, {}),
        ({"question": "", "answer": 1}, {"style": "text"}),
        ({"question": "what?", "answer": None}, {"reward": "exact"}),
        ({"question": "what?", "answer": None}, {"reward": "boxed"}),
    ],
)
def test_what_is_null_or_blank_is_no_problem(
    file: Path, row: dict[str, Any], options: dict[str, Any]
) -> None:
    write(file, [*records(4), row])
    with pytest.raises(DataError, match=r"record 5: .*(null|empty)"):
        task(file, **options)
    made = task(file, bad_records="drop", **options)
    assert [made.size(split) for split in ("train", "test")] == [3, 1]


def test_a_field_that_holds_the_answer_within_it_is_not_shown(file: Path) -> None:
    write(file, [{"question": f"{i}?", "gold": {"answer": i}} for i in range(4)])
    for prompt in ("{question} {gold}", "{question} {gold.answer}"):
        with pytest.raises(ConfigError, match="shows the model the answer"):
            task(file, prompt=prompt, answer="gold.answer")
    assert task(file, answer="gold.answer").size("train") == 3


def test_what_is_tested_is_not_trained_on(file: Path, tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", records(3))
    for same in (file, test):
        with pytest.raises(DataError, match="must not be trained on"):
            task(file, test=str(same))
    made = task(file, test=str(test), bad_records="drop")
    trained = {str(made.problem("train", i).prompt) for i in range(7)}
    assert not trained & {str(made.problem("test", i).prompt) for i in range(3)}
    with pytest.raises(DataError, match="10 of 10"):
        task(file, test=str(file), bad_records="drop")


def test_its_fingerprint_is_that_of_its_files(file: Path) -> None:
    before = task(file).fingerprint
    assert task(file, seed=1).fingerprint == before
    write(file, [*records(9), {"question": "1+9?", "answer": 11}])
    assert task(file).fingerprint != before
