"""The shipped tasks: problems, splits, tools, grading; and how a recipe's table becomes a task."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.config import recipe_from_table
from estr.environment import Action, Environment, Reply
from estr.environments import TASKS, build_task, stable_hash
from estr.environments.arithmetic import ArithmeticOptions, ArithmeticTask
from estr.environments.calculator import CalculatorOptions, CalculatorTask
from estr.environments.latency import Latency
from estr.errors import ConfigError, DataError
from estr.types import FinishReason

SPLITS = ("train", "test")

OWN_FILE = Path(__file__).parents[1] / "examples" / "own-data" / "my.jsonl"
TABLES: dict[str, dict[str, Any]] = {name: {"name": name} for name in TASKS}
TABLES["data"] |= {"path": str(OWN_FILE), "prompt": "{row}=", "reward": "exact"}


@dataclass(frozen=True)
class OwnOptions:
    speed: int = 1


class OwnTask:
    Options = OwnOptions
    name = "own"

    def __init__(self, options: OwnOptions) -> None:
        self.options = options


class TaskWithoutOptions:
    pass


def act(text: str, finish: FinishReason = "stop") -> Action:
    return Action(text=text, token_ids=(), finish_reason=finish)


async def play(environment: Environment, turns: Sequence[str]) -> list[Reply]:
    await environment.start()
    return [await environment.step(act(turn)) for turn in turns]


def calculator(**options: Any) -> CalculatorTask:
    return CalculatorTask(CalculatorOptions(**options))


# -- the registry --------------------------------------------------------------------------------


def test_a_name_and_its_options_become_a_task() -> None:
    task = build_task({"name": "calculator", "num_terms": 3})
    assert isinstance(task, CalculatorTask)
    assert (task.options.num_terms, task.max_turns, task.stop) == (3, 6, ("]", "."))
    assert isinstance(build_task({"name": "arithmetic"}), ArithmeticTask)


def test_the_default_recipe_names_a_shipped_task() -> None:
    assert isinstance(build_task(recipe_from_table({}).task), CalculatorTask)


def test_a_class_of_ones_own_is_named_by_module_and_class() -> None:
    task = build_task({"name": f"{__name__}:OwnTask", "speed": 3})
    assert isinstance(task, OwnTask)
    assert task.options == OwnOptions(speed=3)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"name": "calculater"},
            "known: arithmetic, calculator, countdown, data, deep_search, gsm8k, lookup, math",
        ),
        ({"num_terms": 3}, "has no name"),
        (
            {"name": "calculator", "nam": "lookup"},
            r"unknown key task\.nam of calculator; did you mean task\.name\?",
        ),
        ({"name": "no_such_module:Task"}, "cannot be imported"),
        ({"name": f"{__name__}:NoSuchTask"}, "cannot be imported"),
        ({"name": f"{__name__}:TaskWithoutOptions"}, "has no attribute Options"),
        ({"name": ":Task"}, "cannot be imported"),
        ({"name": "calculator", "num_term": 3}, r"task\.num_term of calculator.*task\.num_terms"),
        ({"name": "calculator", "num_terms": "3"}, r"task\.num_terms = '3'"),
        ({"name": "calculator", "num_terms": 1}, "num_terms must be in"),
        ({"name": "calculator", "digits": 0}, "digits must be in"),
        ({"name": "calculator", "max_terms": 3}, "max_terms must be 0 or in"),
        ({"name": "calculator", "order": "sorted"}, "must be one of fixed, random"),
        ({"name": "calculator", "error_rate": 1.0}, "error_rate must be in"),
        ({"name": "lookup", "num_hops": 0}, "num_hops must be in"),
        ({"name": "lookup", "max_hops": 10}, "max_hops must be 0 or in"),
        ({"name": "lookup", "num_sources": 11}, "num_sources must be in"),
        ({"name": "lookup", "missing": 1.0}, "missing must be in"),
        ({"name": "lookup", "error_rate": -0.1}, "error_rate must be in"),
        ({"name": "countdown", "num_numbers": 1}, "num_numbers must be in"),
        ({"name": "countdown", "max_numbers": 2}, "max_numbers must be 0 or in"),
        ({"name": "countdown", "digits": 4}, "digits must be in"),
        ({"name": "countdown", "signs": "+/"}, "must be one of"),
        ({"name": "countdown", "error_rate": float("nan")}, "error_rate must be in"),
        ({"name": "arithmetic", "num_examples": 9}, "num_examples must be in"),
        ({"name": "arithmetic", "num_test": 0}, "num_test must be in"),
        ({"name": f"{__name__}:OwnTask", "sped": 3}, "speed"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place_check_149(
    table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(table)


@pytest.mark.parametrize(
    "latency",
    [
        {"latency_mean_s": 0.005},
        {"latency_mean_s": 0.2},
        {"latency_mean_s": -1.0},
        {"latency_mean_s": float("nan")},
        {"latency_mean_s": 0.05, "latency_min_s": 0.0},
        {"latency_mean_s": 0.05, "latency_max_s": float("inf")},
        {"latency_mean_s": 0.05, "latency_max_s": float("nan")},
    ],
)
def test_a_latency_that_is_no_law_is_refused_check_106(latency: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="latency_mean_s must be 0 or lie between"):
        build_task({"name": "calculator", **latency})
    with pytest.raises(ConfigError, match="latency_mean_s must be 0 or lie between"):
        build_task({"name": "lookup", **latency})


def test_tasks_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom estr.environments import TASKS, build_task\n"
        "assert not any(m in sys.modules for m in ('estr.environments.calculator',))\n"
        f"for table in {list(TABLES.values())!r}: build_task(table)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_stable_hash_never_changes() -> None:
    # SHA-256 of the bytes ('held out', 1, 2)
    assert stable_hash("held out", 1, 2) % 10**12 == 996081454312
    assert stable_hash("held out", np.int32(1), np.uint64(2)) % 10**12 == 996081454312
    assert stable_hash("a", 1) != stable_hash("a", "1")


def test_the_document_is_true(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = Path(__file__).parents[1] / "docs" / "adding-an-environment.md"
    module, use = re.findall(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    (table,) = re.findall(r"```toml\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    (tmp_path / "guess.py").write_text(module, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    task: Any = build_task(recipe_from_table(tomllib.loads(table)).task)
    assert task.max_turns == 10
    exec(use, {})
    numbers = {split: {task.number(split, i) for i in range(task.size(split))} for split in SPLITS}
    assert numbers["train"] | numbers["test"] == set(range(100))
    number = task.number("test", 0)
    replies = asyncio.run(play(task.make("test", 0), ["?", str(number - 1), "100", str(number)]))
    assert [r.observation for r in replies] == ["a number, please\n", "more\n", "less\n", None]


# -- gold answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", SPLITS)
async def test_gold_answers_earn_the_full_outcome_check_101(name: str, split: str) -> None:
    task = build_task(TABLES[name])
    for index in range(min(100, task.size(split) or 100)):
        replies = await play(task.make(split, index), task.gold(split, index))
        assert [r.outcome for r in replies] == [None] * (len(replies) - 1) + [1.0]
        assert len(replies) <= task.max_turns


@given(
    st.integers(2, 16), st.integers(1, 4), st.integers(0, 3), st.sampled_from(SPLITS), st.integers()
)
@settings(max_examples=60, deadline=None)
def test_gold_is_right_for_all_sizes(
    num_terms: int, digits: int, seed: int, split: str, index: int
) -> None:
    task = calculator(num_terms=num_terms, digits=digits, seed=seed)
    turns = task.gold(split, index)
    assert len(turns) == num_terms
    assert int(turns[-1]) == sum(task.terms(split, index)) % 10**digits
    assert asyncio.run(play(task.make(split, index), turns))[-1].outcome == 1.0


# -- the calculator ------------------------------------------------------------------------------


async def test_the_calculator_as_its_docstring_tells_it() -> None:
    task = calculator()
    index = next(i for i in range(10_000) if sum(task.terms("train", i)[:2]) == 105)
    first, second, third, fourth = task.terms("train", index)
    environment = task.make("train", index)
    assert await environment.start() == f"{first}+{second}+{third}+{fourth}="
    reply = await environment.step(act(f"[{first}+{second}"))
    assert reply == Reply(observation="05")
    reply = await environment.step(act(f"[05+{third}"))
    assert reply.observation == f"{5 + third:02d}"
    reply = await environment.step(act(f"[{5 + third}+{fourth}"))
    total = (105 + third + fourth) % 100
    assert reply.observation == f"{total:02d}"
    assert await environment.step(act(f"{total:02d}")) == Reply(outcome=1.0)


@pytest.mark.parametrize(
    "call",
    [
        "[",
        "[+",
        "[23",
        "[23+",
        "[+45",
        "[23+45+67",
        "[23+45+67+89",
        "[123+45",
        "[23-45",
        "[23+45\n",
        "[ 23+45",
        "[[23+45",
        "[23+45]",
        "[2 3+45",
        "[٢+٣",
        "[23+45<eos>",
        "[" + "9" * 10_000,
    ],
)
async def test_a_call_that_cannot_be_read_is_answered_and_play_goes_on_check_105(
    call: str,
) -> None:
    task = calculator()
    replies = await play(task.make("train", 0), [call, *task.gold("train", 0)])
    assert replies[0] == Reply(observation="!")
    assert replies[-1] == Reply(outcome=1.0)


async def test_only_the_whole_true_sum_earns_anything() -> None:
    task = calculator()
    total = sum(task.terms("test", 3)) % 100
    outcomes = {}
    for text in (
        f"{total:02d}",
        f" {total}",
        f"{(total + 1) % 100:02d}",
        "",
        f"{total} {total}",
        f"{total + 100}",
        f"={total}",
        f"{total}.0",
        "+".join(map(str, range(100))),
    ):
        (reply,) = await play(task.make("test", 3), [text])
        outcomes[text] = reply.outcome
    right = {f"{total:02d}", f" {total}"}
    assert outcomes == {text: float(text in right) for text in outcomes}


@pytest.mark.parametrize("split", SPLITS)
async def test_a_turn_cut_short_is_not_an_answer(split: str) -> None:
    for task in (calculator(), ArithmeticTask(ArithmeticOptions())):
        right = task.gold(split, 0)[-1]
        environment = task.make(split, 0)
        await environment.start()
        assert await environment.step(act(right, "length")) == Reply(outcome=0.0)
        assert task.unfinished_outcome == 0.0


@pytest.mark.parametrize(("num_terms", "digits"), [(2, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_no_sum_of_the_test_split_is_met_in_training(
    num_terms: int, digits: int, seeds: tuple[int, int]
) -> None:
    train = calculator(num_terms=num_terms, digits=digits, seed=seeds[0])
    test = calculator(num_terms=num_terms, digits=digits, seed=seeds[1])
    met = {tuple(sorted(train.terms("train", i))) for i in range(2000)}
    held_out = {tuple(sorted(test.terms("test", i))) for i in range(500)}
    assert not met & held_out


def test_an_index_always_means_the_same_problem_and_seeds_differ() -> None:
    assert calculator().terms("train", 0) == calculator().terms("train", 0)
    streams = {
        (split, seed): tuple(calculator(seed=seed).terms(split, i) for i in range(20))
        for split in SPLITS
        for seed in (0, 1)
    }
    assert len(set(streams.values())) == 4
    assert calculator().size("train") is None
    assert calculator().terms("train", 0) == (52, 44, 69, 43)
    assert calculator().terms("test", 0) == (99, 34, 72, 20)


def test_terms_have_all_their_digits_and_every_value_occurs() -> None:
    drawn = [term for i in range(2000) for term in calculator().terms("train", i)]
    assert set(drawn) == set(range(10, 100))


def test_another_split_is_refused() -> None:
    for task in (calculator(), ArithmeticTask(ArithmeticOptions())):
        with pytest.raises(ValueError, match="'train' or 'test', not 'dev'"):
            task.size("dev")
        with pytest.raises(ValueError, match="'train' or 'test', not 'dev'"):
            task.make("dev", 0)


# -- the sleeping tool ---------------------------------------------------------------------------


@given(st.floats(0.011, 0.19))
@settings(max_examples=40, deadline=None)
def test_the_mean_latency_is_what_was_asked_for(mean_s: float) -> None:
    latency = Latency(CalculatorOptions(latency_mean_s=mean_s))
    assert latency.mean_s() == pytest.approx(mean_s, rel=1e-6)
    drawn = [latency.seconds(0, "train", i, 1) for i in range(4000)]
    assert min(drawn) >= 0.01 * (1 - 1e-9)
    assert max(drawn) <= 0.2 * (1 + 1e-9)
    assert fmean(drawn) == pytest.approx(mean_s, abs=5 * 0.1 / 4000**0.5)


def test_latency_has_a_heavy_tail_and_belongs_to_problem_and_call() -> None:
    latency = Latency(
        CalculatorOptions(latency_mean_s=0.05, latency_min_s=0.001, latency_max_s=10.0)
    )
    drawn = sorted(latency.seconds(0, "train", i, 1) for i in range(4000))
    assert drawn[3960] > 5 * drawn[2000]
    keys = [
        (0, "train", 0, 1),
        (0, "train", 0, 2),
        (0, "train", 1, 1),
        (0, "test", 0, 1),
        (1, "train", 0, 1),
    ]
    assert len({latency.seconds(*key) for key in keys}) == len(keys)
    assert latency.seconds(*keys[0]) == latency.seconds(*keys[0])


async def test_calls_sleep_together_and_errors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", nap)
    task = calculator(latency_mean_s=0.05)
    first = await play(task.make("train", 5), ["[1", *task.gold("train", 5)])
    assert first[-1].outcome == 1.0
    assert len(naps) == 3
    await play(task.make("train", 5), task.gold("train", 5))
    assert naps[:3] == naps[3:]
    await play(calculator().make("train", 5), calculator().gold("train", 5))
    assert len(naps) == 6


# -- arithmetic ----------------------------------------------------------------------------------


async def test_an_arithmetic_prompt_and_its_answer() -> None:
    task = ArithmeticTask(ArithmeticOptions(num_examples=2))
    a, b = task.pair("train", 0)
    environment = task.make("train", 0)
    assert await environment.start() == f"27+2=29\n42+2=44\n{a}+{b}="
    assert await environment.step(act(str(a + b))) == Reply(outcome=1.0)
    for wrong in (str(a + b + 1), "", f"{a + b} or more", f"{a}+{b}", f"-{a + b}"):
        (reply,) = await play(task.make("train", 0), [wrong])
        assert reply == Reply(outcome=0.0)


@given(st.integers(0, 8), st.integers(1, 700), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_arithmetic_splits_cover_everything_once(
    num_examples: int, num_test: int, seed: int
) -> None:
    task = ArithmeticTask(ArithmeticOptions(num_examples, num_test, seed))
    sizes = {split: task.size(split) for split in SPLITS}
    assert sizes["test"] == num_test
    pairs = [task.pair(split, i) for split in SPLITS for i in range(sizes[split] or 0)]
    assert len(set(pairs)) == len(pairs) == 810 - 8
    assert not {(27, 2), (42, 2), (87, 1)} & set(pairs)
    for i in (-1, num_test):
        with pytest.raises(DataError, match=f"{num_test} test problems"):
            task.make("test", i)


async def test_arithmetic_prompts_share_their_prefix_and_seeds_only_shuffle() -> None:
    task = ArithmeticTask(ArithmeticOptions())
    other = ArithmeticTask(ArithmeticOptions(seed=1))
    prompts = [await task.make("train", i).start() for i in range(20)]
    heads = {str(prompt).rpartition("\n")[0] for prompt in prompts}
    assert len(heads) == 1
    assert next(iter(heads)).count("\n") == 5
    size = task.size("train") or 0
    order = [task.pair("train", i) for i in range(size)]
    assert order != [other.pair("train", i) for i in range(size)]
    assert set(order) == {other.pair("train", i) for i in range(size)}
    assert [task.pair("test", i) for i in range(200)] == [other.pair("test", i) for i in range(200)]
