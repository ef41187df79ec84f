"""Grading: what counts as the number that was asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import GraderError
from estr.grading import exact_integer, grade_number, last_number, marked_number


@pytest.mark.parametrize(
    ("text", "gold", "outcome"),
    [
        ("24", 24, 1.0),
        (" 24\n", 24, 1.0),
        ("05", 5, 1.0),
        ("00", 0, 1.0),
        ("-12", -12, 1.0),
        ("12", -12, 0.0),
        ("-12", 12, 0.0),
        ("24 ", 25, 0.0),
        ("24 25", 24, 0.0),
        ("24.0", 24, 0.0),
        ("", 0, 0.0),
        ("-", 0, 0.0),
        ("+24", 24, 0.0),
        ("2_4", 24, 0.0),
        ("٢٤", 24, 0.0),
        ("²", 2, 0.0),
    ],
)
def test_exact_integer_wants_the_number_and_nothing_else(
    text: str, gold: int, outcome: float
) -> None:
    assert exact_integer(text, gold) == outcome


def test_a_very_long_number_is_graded_and_not_an_error() -> None:
    assert exact_integer("9" * 100_000, 9) == 0.0
    assert grade_number(last_number("9" * 100_000), "9") == 0.0


@given(st.integers(-(10**30), 10**30), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_integer_is_itself_whatever_zeros_lead_it(number: int, zeros: int) -> None:
    written = f"{'-' if number < 0 else ''}{'0' * zeros}{abs(number)}"
    assert exact_integer(written, number) == 1.0
    assert exact_integer(written, number + 1) == 0.0
    assert last_number(f"so it is {number}.") == Decimal(number)


@pytest.mark.parametrize(
    ("text", "gold", "outcome"),
    [
        ("The change is -12", "-12", 1.0),
        ("The change is -12", "12", 0.0),
        ("The change is \N{MINUS SIGN}12", "-12", 1.0),
        ("The change is - 12", "-12", 1.0),
        ("It is -$12.50", "-12.5", 1.0),
        ("x = -0.5", "-0.5", 1.0),
        ("30-12", "12", 1.0),
        ("(30)-12", "12", 1.0),
    ],
)
def test_minus_sign_kept_check_83(text: str, gold: str, outcome: float) -> None:
    assert grade_number(last_number(text), gold) == outcome


@pytest.mark.parametrize("mark", ["**", "*", "_", "`", "__"])
def test_markdown_around_the_answer_check_86(mark: str) -> None:
    text = f"... 234. Final Answer: {mark}73{mark}"
    assert grade_number(last_number(text), "73") == 1.0
    assert grade_number(last_number(text), "234") == 0.0
    assert last_number(f"{mark}-73{mark}.") == Decimal(-73)


@pytest.mark.parametrize(
    ("text", "gold", "outcome"),
    [
        ("$29.00", "29", 1.0),
        ("29.50", "29", 0.0),
        ("1,080", "1080", 1.0),
        ("$1,080", "1080", 1.0),
        ("1,234,567.80", "1234567.8", 1.0),
        ("1,08", "108", 0.0),
        ("1,08", "8", 0.0),
        ("1,0800", "10800", 0.0),
        ("12,34,567", "1234567", 0.0),
        ("29", "$29.00", 1.0),
        ("it costs 29, not more", "29", 1.0),
        ("it costs 29.", "29", 1.0),
        (".5", "0.5", 1.0),
    ],
)
def test_trailing_zeros_currency_and_commas_check_98(text: str, gold: str, outcome: float) -> None:
    assert grade_number(last_number(text), gold) == outcome


@pytest.mark.parametrize("text", ["", "no number here", "v2x is x2", "1,08"])
def test_no_number_is_no_answer(text: str) -> None:
    assert last_number(text) is None
    assert grade_number(last_number(text), "2") == 0.0


def test_marked_number_reads_behind_the_last_marker_only() -> None:
    assert marked_number("5*3 = 15\n#### 7\nno:\n#### $1,080 in 3 years") == Decimal(1080)
    assert marked_number("the answer is 42") is None
    assert marked_number("#### none, or 42 perhaps", marker="####") == Decimal(42)
    assert marked_number("42 ####") is None
    assert marked_number("A: 5 B: 6", marker="B:") == Decimal(6)


@pytest.mark.parametrize("gold", ["", "see figure", "1,08", "3 or 4", "12 apples"])
def test_a_gold_answer_that_is_no_number_is_never_a_reward_check_94(gold: str) -> None:
    for answer in (None, Decimal(3)):
        with pytest.raises(GraderError, match="is not a number"):
            grade_number(answer, gold)


def test_grading_works_in_worker_threads_check_92() -> None:
    with ThreadPoolExecutor(4) as pool:
        graded = pool.map(lambda n: grade_number(last_number(f"= {n}"), str(n)), range(40))
        assert list(graded) == [1.0] * 40


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_graded_without_an_error(text: str) -> None:
    assert exact_integer(text, 7) in (0.0, 1.0)
    assert grade_number(last_number(text), "7") in (0.0, 1.0)
    assert grade_number(marked_number(text), "7") in (0.0, 1.0)
