"""The token-level twins beside the calculator: problems, tools, grading, choices and tails."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.environment import Action, Environment, Reply
from estr.environments.calculator import CalculatorOptions, CalculatorTask
from estr.environments.countdown import (
    Countdown,
    CountdownEnvironment,
    CountdownOptions,
    CountdownTask,
    last_attempt,
    value,
    written,
)
from estr.environments.lookup import UNKNOWN, LookupOptions, LookupTask

SPLITS = ("train", "test")


def act(text: str) -> Action:
    return Action(text=text, token_ids=(), finish_reason="stop")


async def play(environment: Environment, turns: Sequence[str]) -> list[Reply]:
    await environment.start()
    return [await environment.step(act(turn)) for turn in turns]


def lookup(**options: Any) -> LookupTask:
    return LookupTask(LookupOptions(**options))


def countdown(**options: Any) -> CountdownTask:
    return CountdownTask(CountdownOptions(**options))


# -- the calculator's further knobs --------------------------------------------------------------


async def test_in_random_order_any_term_may_come_next() -> None:
    task = CalculatorTask(CalculatorOptions(order="random", error_rate=0.0))
    firsts = Counter()
    for index in range(400):
        terms = [task.written(term) for term in task.terms("train", index)]
        _, (call, _), *_ = task.demonstrate(index, random.Random(index))
        firsts[terms.index(call[1:3])] += 1
        replies = await play(task.make("train", index), task.gold("train", index))
        assert replies[-1].outcome == 1.0
    assert all(70 < firsts[place] < 140 for place in range(4)), firsts


def test_random_order_changes_no_problem() -> None:
    fixed, free = (CalculatorTask(CalculatorOptions(order=o)) for o in ("fixed", "random"))
    assert [fixed.terms("test", i) for i in range(20)] == [free.terms("test", i) for i in range(20)]
    assert fixed.gold("test", 0) != free.gold("test", 0)
    assert free.gold("test", 0) == free.gold("test", 0)


def test_heavy_tailed_problems_fit_their_turns() -> None:
    task = CalculatorTask(CalculatorOptions(num_terms=3, max_terms=12))
    sizes = [len(task.terms("train", i)) for i in range(1000)]
    assert (min(sizes), max(sizes), task.max_turns) == (3, 12, 24)
    assert sizes.count(3) > 250
    assert sum(size > 6 for size in sizes) > 150


# -- look-up -------------------------------------------------------------------------------------


async def test_a_look_up_as_its_docstring_tells_it() -> None:
    task = lookup()
    chain = task.chain("train", 0)
    first, second = chain.links
    environment = task.make("train", 0)
    assert await environment.start() == f"{chain.start:02d}/{first}/{second}="
    answers = {
        source: (await environment.step(act(f"[{source}*{chain.start:02d}/{first}"))).observation
        for source in range(4)
    }
    known = set(answers.values()) - {UNKNOWN}
    assert len(known) == 1, "those who know agree"
    (here,) = known
    replies = [await environment.step(act(f"[{s}*{here}/{second}")) for s in range(4)]
    (there,) = {reply.observation for reply in replies} - {UNKNOWN}
    assert await environment.step(act(str(there))) == Reply(outcome=1.0)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 10), st.floats(0, 0.99), st.integers())
@settings(max_examples=40, deadline=None)
def test_every_chain_can_be_followed(
    num_hops: int, digits: int, num_sources: int, missing: float, index: int
) -> None:
    task = lookup(num_hops=num_hops, digits=digits, num_sources=num_sources, missing=missing)
    for split in SPLITS:
        turns = task.gold(split, index)
        assert len(turns) <= task.max_turns
        assert asyncio.run(play(task.make(split, index), turns))[-1].outcome == 1.0


def test_sources_know_their_share_and_at_least_one_knows() -> None:
    task = lookup(num_sources=5, missing=0.6)
    known = [
        [task.call("train", i, f"[{s}*11/3") != UNKNOWN for s in range(5)] for i in range(1000)
    ]
    assert all(any(row) for row in known)
    # One source knows for certain, each of the others with probability 0.4.
    assert sum(map(sum, known)) / 1000 == pytest.approx(1 + 4 * 0.4, abs=0.12)
    everyone = lookup(missing=0.0)
    assert all(everyone.call("train", i, f"[{s}*11/3") != UNKNOWN for i in range(50) for s in "012")


def test_nothing_can_be_learned_by_heart() -> None:
    task = lookup(missing=0.0)
    answers = {task.call("train", i, "[0*11/3") for i in range(400)}
    assert len(answers) > 90
    held_out = {task.chain("test", i) for i in range(400)}
    assert not held_out & {task.chain("train", i) for i in range(4000)}
    assert not held_out & {lookup(seed=1).chain("train", i) for i in range(4000)}


@pytest.mark.parametrize(
    "call",
    ["[", "[0*11", "[0*11/", "[0*11/33", "[0*1/3", "[0*111/3", "[11/3", "[0/11*3", "[4*11/3",
     "[0*11/3 ", "[ 0*11/3", "[0*11/3]", "[٣*11/3", "[" + "9" * 10_000],
)  # fmt: skip
async def test_a_call_that_cannot_be_read_is_answered_check_105(call: str) -> None:
    task = lookup()
    replies = await play(task.make("train", 0), [call, *task.gold("train", 0)])
    assert replies[0] == Reply(observation="!")
    assert replies[-1] == Reply(outcome=1.0)


async def test_a_slow_source_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", nap)
    task = lookup(latency_mean_s=0.05)
    await play(task.make("train", 5), ["[1", *task.gold("train", 5)])
    assert len(naps) == len(task.gold("train", 5)) - 1
    await play(lookup().make("train", 5), lookup().gold("train", 5))
    assert len(naps) == len(task.gold("train", 5)) - 1


# -- countdown -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "attempt"),
    [
        ("8+7=15-3=12", ((8, 7, 3), ("+", "-"))),
        ("8-7=1+3=4 8+7=15-3=12", ((8, 7, 3), ("+", "-"))),
        ("8+7-3", ((8, 7, 3), ("+", "-"))),
        ("8+7=99-3=-5", ((8, 7, 3), ("+", "-"))),
        ("3-8=-5*2=-10", ((3, 8, 2), ("-", "*"))),
        ("8+7=15-3=12 ", None),
        ("12", None),
        ("8=8+7", None),
        ("8++7", None),
        ("8+7=", None),
        ("8+7=15=15", None),
        ("-8+7", None),
        ("8+7.", None),
        ("8/7", None),
        ("", None),
        ("1" + "+1" * 120, None),
        ("٨+7", None),
    ],
)
def test_attempts_are_read_check_83(text: str, attempt: object) -> None:
    assert last_attempt(text) == attempt


@given(st.lists(st.integers(1, 99), min_size=2, max_size=6), st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back(numbers: list[int], data: st.DataObject) -> None:
    signs = tuple(data.draw(st.sampled_from("+-*")) for _ in numbers[1:])
    text = written((tuple(numbers), signs))
    assert last_attempt(text) == (tuple(numbers), signs)
    assert text.endswith(f"={value(numbers, signs)}")


async def test_only_every_number_once_and_the_target_earn_anything() -> None:
    problem = Countdown(numbers=(8, 7, 3), target=12)
    outcomes = {}
    for text in ("8+7-3", "3+7=9 8+7=15-3=0", "7-3+8", "8+7-3-3", "8+4", "12", "8+7", "3*4",
                 "8+7+3", "8+7-3 8+7+3", "80+7-75"):  # fmt: skip
        (reply,) = await play(CountdownEnvironment(problem, "+-"), [text])
        outcomes[text] = reply.outcome
    right = {"8+7-3", "3+7=9 8+7=15-3=0", "7-3+8"}
    assert outcomes == {text: float(text in right) for text in outcomes}
    product = Countdown(numbers=(3, 4), target=12)
    for signs, outcome in (("+-", 0.0), ("+-*", 1.0)):
        assert await play(CountdownEnvironment(product, signs), ["3*4"]) == [Reply(outcome=outcome)]


@given(
    st.integers(2, 5), st.integers(1, 2), st.sampled_from(["+-", "+-*"]),
    st.sampled_from(["fixed", "random"]), st.sampled_from(SPLITS), st.integers(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_every_countdown_can_be_solved(
    num_numbers: int, digits: int, signs: str, order: str, split: str, index: int
) -> None:
    task = countdown(num_numbers=num_numbers, digits=digits, signs=signs, order=order)
    problem = task.problem(split, index)
    assert problem.target >= 0
    (turn,) = task.gold(split, index)
    assert asyncio.run(play(task.make(split, index), [turn])) == [Reply(outcome=1.0)]


def test_no_countdown_is_in_both_splits() -> None:
    key = [
        {(tuple(sorted(p.numbers)), p.target) for p in (countdown(seed=s).problem(split, i)
         for i in range(1500))}
        for split, s in (("train", 0), ("test", 0), ("test", 1))
    ]  # fmt: skip
    assert not key[0] & (key[1] | key[2])


def test_the_first_sign_is_a_real_choice() -> None:
    task = countdown(error_rate=0.0)
    signs = Counter()
    for index in range(600):
        _, (turn, _) = task.demonstrate(index, random.Random(index))
        signs[turn[1]] += 1
    assert math.isclose(signs["+"] / 600, 0.5, abs_tol=0.07), "before the target is looked at"
    lengths = [
        len("".join(s for s, _ in task.demonstrate(i, random.Random(i)))) for i in range(300)
    ]
    assert max(lengths) > 2 * min(lengths)
