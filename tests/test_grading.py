"""Grading: what counts as the number that was asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.errors import GraderError
from estr.grading import (
    GRADERS,
    exact_integer,
    grade_answer,
    grade_number,
    grade_text,
    last_answer_line,
    last_box,
    last_number,
    marked_number,
)


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
        ("The change is \N{EN DASH}12", "-12", 1.0),
        ("The change is \N{EN DASH}12", "12", 0.0),
        ("It is \N{NON-BREAKING HYPHEN}$12", "-12", 1.0),
        ("30\N{EN DASH}12", "12", 1.0),
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


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\fbox{42}", "42"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\fbox{4}}", "4"),
        (r"\boxed {7}", "7"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"}} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_whole_box_braces_balanced_checks_88_and_90(text: str, content: str) -> None:
    assert last_box(text) == content


def test_many_open_boxes_take_no_long_time() -> None:
    assert last_box("\\boxed{" * 20_000 + "1" + "}" * 20_000) == "1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("so\nAnswer: 42", "42"),
        ("**Answer:** 42", "42"),
        ("Final Answer: **73**", "73"),
        (r"Answer: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("answer : -3\nAnswer: 5", "5"),
        ("Answer:", None),
        ("The answer is 42", None),
        ("my reanswer: 3", None),
        ("Answer: 5.", "5"),
        ("Answer: **5**.", "5"),
        ("**Answer: 5.**", "5"),
        ("Answer: .5", ".5"),
        ("Answer: 0.333...", "0.333..."),
        ("The final answer:\nFinal answer is: 7", "7"),
        ("Answer is **: 7", "7"),
    ],
)
def test_the_last_answer_line(text: str, said: str | None) -> None:
    assert last_answer_line(text) == said


@pytest.mark.parametrize("gap", [" ", "*", " *"])
def test_a_line_that_never_ends_takes_no_long_time(gap: str) -> None:
    """Quadratic, it would be minutes."""
    assert last_answer_line("answer" + gap * 200_000) is None
    assert last_answer_line("answer" + gap * 200_000 + ": 5") == "5"


@pytest.mark.parametrize(
    ("answer", "gold", "outcome"),
    [
        (r"\frac1{2}", "0.5", 1.0),
        (r"\frac{1}2", r"\frac{1}{2}", 1.0),
        (r"-\frac 12", "-1/2", 1.0),
        (r"\frac 1 2", "1/2", 1.0),
        (r"\frac{11}2", "1/12", 0.0),
        (r"\frac 1 23", "1/23", 0.0),
        (r"\(5\)", "5", 1.0),
        (r"\[ \frac{1}{2} \].", "0.5", 1.0),
        (r"\(1\)2", "12", 0.0),
        (r"\frac{1}{2}", r"\frac{1}{3}", 0.0),
        (r"\frac{1}{2}", r"\frac{1}{2}", 1.0),
        (r"\dfrac12", "1/2", 1.0),
        (r"-\frac{1}{2}", "-0.5", 1.0),
        (r"\frac{2}{4}", "0.5", 1.0),
        (r"\frac{1}{0}", "0", 0.0),
        (r"\$29.00", "29", 1.0),
        ("29.50", "29", 0.0),
        ("1,080", "1080", 1.0),
        ("1{,}080", "1080", 1.0),
        (r"10\,000", "10000", 1.0),
        ("1,08", "108", 0.0),
        ("016", "16", 1.0),
        ("-3", "3", 0.0),
        ("\N{MINUS SIGN}3", "-3", 1.0),
        (r"72 \text{ dollars}", "72", 1.0),
        (r"336^\circ", "336", 1.0),
        (r"50\%", "50", 1.0),
        (r"$\left( 1, 2 \right)$", "(1,2)", 1.0),
        (r"\text{Evelyn}", "Evelyn", 1.0),
        ("**73**", "73", 1.0),
        ("72 or 73", "73", 0.0),
        ("2*3", "23", 0.0),
        ("1 2", "12", 0.0),
        ("x + 1", "x+1", 1.0),
        ("x+1", "x-1", 0.0),
        ("", "1", 0.0),
        ("1" * 3000, "1", 0.0),
    ],
)
def test_an_answer_is_compared_whole(answer: str, gold: str, outcome: float) -> None:
    assert grade_answer(answer, gold) == outcome
    assert grade_answer(None, gold) == 0.0


@pytest.mark.parametrize("gold", ["", "  ", "$$", "see figure"])
def test_a_gold_answer_that_says_nothing_is_never_a_reward_check_94(gold: str) -> None:
    for answer in (None, gold, "1"):
        with pytest.raises(GraderError, match="not a mathematical answer"):
            grade_answer(answer, gold)


def test_text_is_compared_but_for_case_and_spaces() -> None:
    assert grade_text(" New  York.\n", "new york") == 1.0
    assert grade_text("York", "new york") == 0.0
    with pytest.raises(GraderError, match="is empty"):
        grade_text("x", " ")


@pytest.mark.parametrize("name", sorted(GRADERS))
@pytest.mark.parametrize("gold", ["72", "-3", "1,080", "0.5"])
def test_every_grader_grades_its_own_reply_and_no_other_check_101(name: str, gold: str) -> None:
    grader = GRADERS[name]
    assert grader.grade(grader.reply(gold), gold) == 1.0
    assert grader.grade(grader.reply("7"), gold) == 0.0
    assert grader.grade("", gold) == 0.0


@given(st.text(max_size=60), st.sampled_from(sorted(GRADERS)))
@settings(max_examples=200, deadline=None)
def test_any_text_is_graded_by_any_grader(text: str, name: str) -> None:
    assert GRADERS[name].grade(text, "7") in (0.0, 1.0)


@pytest.mark.parametrize("layer", ["\\ ", "\\,", "\\)", "\\(", "\\%", "$", "^{\\circ}", " "])
def test_long_decoration_takes_no_longer_than_other_text(layer: str) -> None:
    """Each of these took seconds when the time grew with the square of the length."""
    text = "7" + layer * (1990 // len(layer))
    assert GRADERS["boxed"].grade(f"\\boxed{{{text}x}}", "24") == 0.0
    assert GRADERS["boxed"].grade(f"\\boxed{{{text}}}", "24") == 0.0


@pytest.mark.parametrize("unit", ["\\ \\text{cm}", "\\,\\mathrm{m}", " \\; \\mbox{kg}^2", "\\%"])
def test_space_before_a_unit_goes_with_it(unit: str) -> None:
    assert GRADERS["boxed"].grade(f"\\boxed{{7{unit}}}", "7") == 1.0
