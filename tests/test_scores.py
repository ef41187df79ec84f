"""pass@k, majority@k, intervals and paired comparisons: literal values and laws."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.scores import bootstrap_intervals, bounded_intervals, compare_paired, majority, pass_at_k

# -- pass@k --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 1, 4, 1.0),
        (4, 2, 2, 0.8333333333333334),
        (4, 0, 4, 0.0),
    ],
)
def test_pass_at_k_check_135(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == value


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
@settings(deadline=None, max_examples=60)
def test_pass_at_k_is_the_share_of_subsets_check_135(case: tuple[int, int]) -> None:
    n, c = case
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_exact_where_binomials_are_huge() -> None:
    assert pass_at_k(20_000, 1, 5_000) == 0.25
    assert pass_at_k(20_000, 20_000, 1) == 1.0
    assert 0.0 < 1.0 - pass_at_k(1000, 10, 900) < 1e-9


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_at_k(n, c, k)


# -- majority ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "solved", "value"),
    [
        (["7", "7", "9"], [True, True, False], 1.0),
        (["7", "9", "9"], [True, False, False], 0.0),
        (["7", None, None], [True, False, False], 1.0),
        ([None, None], [False, False], 0.0),
        (["7", "9"], [True, False], 0.5),
        (["7", "9", "8"], [False, True, False], 1 / 3),
        (["7", "7", "9", "9", "8"], [True, True, False, False, False], 0.5),
        (["7"], [True], 1.0),
    ],
)
def test_majority(answers: list[str | None], solved: list[bool], value: float) -> None:
    assert majority(answers, solved) == pytest.approx(value)


# -- intervals -----------------------------------------------------------------------------------


def test_bootstrap_intervals_are_those_of_a_binomial() -> None:
    half = np.repeat([0.0, 1.0], 200)[:, None]
    ((low, high),) = bootstrap_intervals(half, seed=0)
    spread = 1.959964 * np.sqrt(0.25 / 400)
    assert low == pytest.approx(0.5 - spread, abs=0.006)
    assert high == pytest.approx(0.5 + spread, abs=0.006)


def test_bootstrap_draws_whole_problems_and_repeats_itself() -> None:
    values = np.random.default_rng(0).random((30, 1))
    both = np.hstack([values, 2 * values])
    first, second = bootstrap_intervals(both, seed=5)
    assert second == pytest.approx([2 * v for v in first])
    assert bootstrap_intervals(both, seed=5) == [first, second]
    assert bootstrap_intervals(both, seed=6) != [first, second]
    assert bootstrap_intervals(np.ones((10, 1)), seed=0) == [(1.0, 1.0)]


def test_equal_problems_leave_room_for_what_was_not_seen() -> None:
    values = np.stack([np.zeros(100), np.ones(100), np.full(100, 0.5)], axis=1)
    none, all_, half = bounded_intervals(values, lowest=0.0, highest=1.0, seed=0)
    assert none == (0.0, pytest.approx(0.036217, abs=1e-6))  # Clopper-Pearson, 0 of 100
    assert all_ == (pytest.approx(0.963783, abs=1e-6), 1.0)
    assert half == pytest.approx((0.481892, 0.518108), abs=1e-6)
    ((low, high),) = bounded_intervals(np.zeros((1, 1)), lowest=-1.0, highest=1.0, seed=0)
    assert (low, high) == pytest.approx((-0.975, 0.975))


def test_problems_that_differ_have_the_bootstrap_s_interval() -> None:
    values = np.random.default_rng(0).random((30, 2))
    expected = bootstrap_intervals(values, seed=3)
    assert bounded_intervals(values, lowest=0.0, highest=1.0, seed=3) == expected


# -- paired comparison ---------------------------------------------------------------------------


def test_a_comparison_by_hand() -> None:
    # Six problems differ, all one way: 2 of the 2^6 sign patterns are as extreme.
    found = compare_paired(np.ones(8), np.array([0.0] * 6 + [1.0] * 2), seed=0)
    assert (found.num_problems, found.better, found.worse) == (8, 6, 0)
    assert found.difference == 0.75
    assert found.p_value == 2 / 64
    # sd of six 1 and two 0 with n-1: sqrt(1.5 / 7) = 0.46291; (2.801585 * 0.46291 / 0.01)^2
    assert found.problems_for_one_point == 16820
    low, high = found.interval
    assert low < 0.75 < high <= 1.0


def test_what_does_not_differ_cannot_be_told_apart() -> None:
    same = np.array([1.0, 0.0, 0.5])
    found = compare_paired(same, same.copy(), seed=0)
    assert (found.difference, found.p_value) == (0.0, 1.0)
    assert found.interval == pytest.approx((-0.707598, 0.707598), abs=1e-6)
    assert found.problems_for_one_point is None
    assert compare_paired(np.ones(1), np.zeros(1), seed=0).p_value == 1.0


def test_pairing_sees_what_separate_intervals_do_not() -> None:
    rng = np.random.default_rng(0)
    second = (rng.random(400) < 0.5).astype(float)
    first = second.copy()
    first[np.flatnonzero(second == 0)[:16]] = 1.0
    found = compare_paired(first, second, seed=0)
    ((_, high),) = bootstrap_intervals(second[:, None], seed=0)
    assert first.mean() < high, "apart, the two are within noise"
    assert found.p_value < 0.001
    assert found.interval[0] > 0.0
    assert found.difference == pytest.approx(0.04)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=20)
def test_exchanging_the_two_only_turns_the_sign(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 5, size=(2, 40)) / 4
    there, back = compare_paired(one, other, seed=1), compare_paired(other, one, seed=1)
    assert there.difference == pytest.approx(-back.difference)
    assert there.p_value == pytest.approx(back.p_value)
    assert (there.better, there.worse) == (back.worse, back.better)
    assert there.problems_for_one_point == back.problems_for_one_point


def test_the_test_holds_its_level() -> None:
    rng = np.random.default_rng(1)
    rejected = sum(
        compare_paired(*rng.integers(0, 2, size=(2, 30)).astype(float), seed=i).p_value < 0.05
        for i in range(100)
    )
    assert rejected <= 12


@pytest.mark.parametrize(("first", "second"), [((2,), (3,)), ((0,), (0,)), ((2, 1), (2, 1))])
def test_scores_that_are_not_paired_are_refused(first: tuple[int], second: tuple[int]) -> None:
    with pytest.raises(ValueError, match="two scores of each problem"):
        compare_paired(np.zeros(first), np.zeros(second), seed=0)


def test_the_test_of_many_problems_draws_its_signs_in_parts() -> None:
    """Drawn at once, 5000 problems took half a gigabyte, and more in proportion."""
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 5000))
    tracemalloc.start()
    try:
        same, other = (compare_paired(first + shift, second, seed=0) for shift in (0.0, 0.1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 150e6
    assert same.p_value > 0.05
    assert other.p_value == 1 / 10_001
