"""Mathematics: math-verify in processes that can be killed, the shipped slices, the layouts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from estr.environment import Action
from estr.environments import build_task
from estr.environments.math_problems import MathOptions, MathTask
from estr.errors import ConfigError, DataError, GraderError
from estr.math_grading import MathVerifier, shared_verifier

ENDLESS = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(timeout_s=60.0, num_processes=1)
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def task() -> MathTask:
    return MathTask(MathOptions(timeout_s=30.0))


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("0.5", "\\frac{1}{2}", True),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
        ("016", "16", True),
        ("-12", "12", False),
        ("\\text{Evelyn}", "\\text{Evelyn}", True),
        ("(3, \\pi/2)", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("", "4", False),
        ("5.", "5", True),
        ("0.5.", "\\frac12", True),
        ("(1,2).", "(1,2)", True),
        ("x+1.", "x+1", True),
        ("\\text{Evelyn}.", "\\text{Evelyn}", True),
        ("10\\,000", "10000", True),
        ("1\\;234\\;567", "1,234,567", True),
        ("10\\,00", "1000", False),
        ("1\\,0000", "10000", False),
        (".5", "5", False),
    ],
)
def test_answers_are_compared_by_their_meaning(
    answer: str, gold: str, equal: bool, verifier: MathVerifier
) -> None:
    assert verifier.equal(answer, gold) is equal


def test_any_thread_may_ask_check_92(verifier: MathVerifier) -> None:
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(verifier.equal("4", str(n))))
        for n in (4, 4, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == [False, True, True]


def test_an_endless_comparison_is_killed_and_is_no_wrong_answer(verifier: MathVerifier) -> None:
    assert verifier.equal("1", "1")  # it is up
    hasty = MathVerifier(timeout_s=1e-4, num_processes=1)
    clock = time.monotonic()
    try:
        with pytest.raises(GraderError, match="within"):
            hasty.equal(ENDLESS, "5")
    finally:
        hasty.close()
    assert time.monotonic() - clock < 100


def test_a_process_that_died_is_told_and_replaced(verifier: MathVerifier) -> None:
    assert verifier.equal("1", "1")
    (process,) = verifier._pool._processes
    assert process._running is not None
    process._running[0].kill()
    process._running[0].wait()
    assert verifier.equal("1", "1")


def graded(task: MathTask, text: str, split: str = "test", index: int = 0) -> float | None:
    async def play() -> float | None:
        environment = task.make(split, index)
        await environment.start()
        return (await environment.step(Action(text, (), "stop"))).outcome

    return asyncio.run(play())


def test_every_gold_answer_of_the_shipped_slices_verifies(task: MathTask) -> None:
    assert (task.size("train"), task.size("test")) == (200, 100)  # unreadable ones are refused
    other = MathTask(MathOptions(train="deepmath", timeout_s=30.0))
    assert other.size("train") == 200
    for index in (0, 50, 99):
        (text,) = task.gold("test", index)
        assert graded(task, text, index=index) == 1.0
        assert graded(task, "\\boxed{-987654321}", index=index) == 0.0
        assert graded(task, text.replace("boxed", "text"), index=index) == 0.0


def test_an_answer_that_was_cut_short_is_not_looked_at(task: MathTask) -> None:
    (text,) = task.gold("test", 0)
    environment = task.make("test", 0)
    assert asyncio.run(environment.step(Action(text, (), "length"))).outcome == 0.0
    assert graded(task, f"\\boxed{{{'1' * 3000}}}") == 0.0


def write(path: Path, *records: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def test_file(tmp_path: Path) -> str:
    return write(tmp_path / "aime.jsonl", {"id": "a1", "problem": "Add 7 and 9 {x}.", "answer": 16})


DAPO = "Solve. The last line should be Answer: \\boxed{$Answer}."


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [{"role": "user", "content": DAPO}], "label": "-3"},
        {"prompt": DAPO, "answer": -3},
        {"prompt": [{"role": "user", "content": DAPO}], "reward_model": {"ground_truth": "-3"}},
    ],
)
def test_the_layouts_in_use_are_read(
    record: dict[str, object], test_file: str, tmp_path: Path
) -> None:
    train = write(tmp_path / "dapo.jsonl", record)
    task = MathTask(MathOptions(train=train, test=test_file, mode="answer_line", timeout_s=30))
    assert task.problem("train", 0).prompt == ({"role": "user", "content": DAPO},)
    assert "Add 7 and 9 {x}." in str(task.problem("test", 0).prompt)
    for reply, outcome in [
        ("so\nAnswer: \\boxed{-3}", 1.0),
        ("Answer: 5\nAnswer: **-3**", 1.0),
        ("Answer: 3", 0.0),
        ("it is -3", 0.0),
    ]:
        assert graded(task, reply, "train") == outcome


@pytest.mark.parametrize(
    "bad",
    [
        {"problem": "?", "answer": ""},
        {"problem": "?", "answer": "see figure"},
        {"problem": "?"},
        {"problem": "", "answer": "1"},
        {"prompt": [{"content": "no role"}], "label": "1"},
    ],
)
def test_records_that_cannot_be_graded_are_refused_or_dropped_check_94(
    bad: dict[str, object], test_file: str, tmp_path: Path
) -> None:
    train = write(tmp_path / "train.jsonl", {"problem": "1+1?", "answer": "2"}, bad)
    with pytest.raises(DataError, match="record 2"):
        MathTask(MathOptions(train=train, test=test_file, timeout_s=30))
    task = MathTask(MathOptions(train=train, test=test_file, bad_records="drop", timeout_s=30))
    assert task.size("train") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": float("inf")},
        {"timeout_s": 0.0},
        {"train": "math500"},
        {"test": "nowhere.jsonl"},
    ],
)
def test_bad_options_are_refused_check_106(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        build_task({"name": "math", **options})


def test_one_verifier_serves_all_tasks() -> None:
    assert shared_verifier(30.0) is shared_verifier(30.0)


def test_null_is_no_answer_and_no_name(test_file: str, tmp_path: Path) -> None:
    rows = [{"id": None, "problem": f"{i}?", "answer": None, "label": str(i)} for i in range(3)]
    train = write(tmp_path / "train.jsonl", *rows)
    task = MathTask(MathOptions(train=train, test=test_file, seed=0, timeout_s=30))
    found = [task.problem("train", i) for i in range(3)]
    assert sorted(problem.answer for problem in found) == ["0", "1", "2"]
    assert sorted(problem.name for problem in found) == ["train-1", "train-2", "train-3"]
    write(tmp_path / "train.jsonl", {"problem": "?", "answer": None})
    with pytest.raises(DataError, match="no answer"):
        MathTask(MathOptions(train=train, test=test_file, timeout_s=30))


def test_problems_that_share_an_id_have_names_of_their_own(test_file: str, tmp_path: Path) -> None:
    rows = [{"id": i % 2, "problem": f"{i}?", "answer": i} for i in range(3)]
    test = write(tmp_path / "both.jsonl", *rows)
    task = MathTask(MathOptions(train=test_file, test=test, timeout_s=30))
    names = [task.example_id("test", i) for i in range(3)]
    assert names == ["0 (both-1)", "1", "0 (both-3)"]


def test_what_is_tested_is_not_trained_on(test_file: str, tmp_path: Path) -> None:
    tested = {"problem": "Add 7 and 9 {x}.", "answer": 16}
    train = write(tmp_path / "train.jsonl", tested, {"problem": "1+1?", "answer": "2"})
    with pytest.raises(DataError, match="1 of 2 training problems"):
        MathTask(MathOptions(train=train, test=test_file, timeout_s=30))
    task = MathTask(MathOptions(train=train, test=test_file, bad_records="drop", timeout_s=30))
    assert task.size("train") == 1
