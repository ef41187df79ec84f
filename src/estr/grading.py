"""Grading: plain functions from what a model wrote to an outcome. Safe in any thread, no I/O.

    exact_integer("24", 24)                               1.0   the whole text is the number
    last_number("... so **-12** in all.")                 Decimal("-12")
    marked_number("so 5*3 = 15\\n#### $1,080")             Decimal("1080")
    last_box("hence \\boxed{\\frac{1}{2}}")                "\\frac{1}{2}"
    grade_number(last_number(text), gold="29")            1.0 or 0.0
    grade_answer(last_box(text), gold="\\frac{1}{2}")      1.0 or 0.0

`GRADERS` names whole rules: where the answer stands and how it is compared. Numbers are compared
exactly: "29.00" is 29, "29.50" is not. A gold answer that is none is the grader's failure
(GraderError, the trajectory stays unscored), never a free reward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

from .errors import GraderError

# A minus is a sign only where no operand stands before it: "-12" and "= -12", but not "30-12".
# Commas are taken along, so that a badly grouped "1,08" is seen as malformed and not as 8.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9.,])"
    r"(?:(?P<sign>(?<![A-Za-z0-9.)\]])-)\s?)?"
    r"[$€£]?\s?"
    r"(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)"
)
_MINUS = dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}"), "-")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*{)|\\.|(?P<open>{)|(?P<close>})", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[^A-Za-z0-9\n]*(?:final\s+)?answer(?:[^\S\n]*is)?(?:[^\S\n]|[*_`])*:(.*)$",
    re.IGNORECASE | re.MULTILINE,
)

# What LaTeX adds for the eye only.
_DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|[,;:!> ])(?![A-Za-z])|\\(?:mathrm|textbf|mathbf)(?={)|[$`]"
)
_SPACES = ("\\ ", "\\,", "\\;")
_MATH_MODE = re.compile(r"^\\[(\[]|\\[)\]]$")
_UNIT = re.compile(
    r"\\(?:text|mbox|mathrm)\s*{\s*[A-Za-z. ]+}(?:\^{?[0-9]}?)?$|"
    r"\^{?\\circ}?$|\\?%$|\\degree$"
)
_FRACTION = re.compile(
    r"(?P<sign>-?)(?:\\[dtc]?frac\s?(?:{(?P<above>-?[0-9]+)}|(?P<digit>[0-9]))"
    r"\s?(?:{(?P<below>-?[0-9]+)}|(?P<under>[0-9]))"
    r"|(?P<over>[0-9]+)/(?P<divisor>[0-9]+))"
)
_LONGEST = 2000
"""Characters beyond which a text is no answer."""
_MOST_LAYERS = 8
"""Of units and math mode around one answer; what has more is compared as it stands."""
_WORDS = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]+)+")


def exact_integer(text: str, gold: int) -> float:
    """1.0 iff the whole text, white space aside, is the integer `gold` (leading zeros allowed)."""
    written = text.strip()
    sign = "-" if written.startswith("-") else ""
    digits = written.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return 0.0
    return float(sign + (digits.lstrip("0") or "0") == str(gold))


def last_number(text: str) -> Decimal | None:
    """The last number in the text: signed, currency signs and thousands commas removed, whatever
    markdown stands around it. None: there is none, or it is malformed ("1,08")."""
    found = list(_NUMBER.finditer(_plain(text)))
    return _value(found[-1]) if found else None


def marked_number(text: str, marker: str = "####") -> Decimal | None:
    """The first number after the last `marker`. None: no marker, or no number behind it."""
    _, there, tail = text.rpartition(marker)
    found = _NUMBER.search(_plain(tail)) if there else None
    return None if found is None else _value(found)


def grade_number(answer: Decimal | None, gold: str) -> float:
    """1.0 iff `answer` is the number that `gold` states, 0.0 otherwise (None included).

    Raises GraderError when gold itself is not exactly one number.
    """
    stated = _NUMBER.fullmatch(_plain(gold.strip()))
    expected = None if stated is None else _value(stated)
    if expected is None:
        raise GraderError(f"the gold answer {gold!r} is not a number; correct or drop the problem")
    return float(answer is not None and answer == expected)


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{} or \\fbox{}, braces balanced. None: no box is whole."""
    open_at: list[int | None] = []  # where the content of each open box begins; None: mere braces
    last: tuple[int, int] | None = None
    for found in _BRACE.finditer(text):
        if found["box"] or found["open"]:
            open_at.append(found.end() if found["box"] else None)
        elif found["close"] and open_at:
            start = open_at.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, found.start()
    return None if last is None else text[slice(*last)].strip()


def last_answer_line(text: str) -> str | None:
    """What the last line "Answer: ..." says, markdown removed; the content of a box in it. None:
    there is no such line, or nothing behind the colon."""
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    said = last_box(lines[-1]) or without_full_stop(lines[-1].strip().strip("*_`").strip())
    return said or None


def without_full_stop(text: str) -> str:
    """The text without the full stop that ends it, and without markdown before that."""
    if not text.endswith(".") or text.endswith(".."):
        return text
    return text[:-1].rstrip().rstrip("*_`")


def grade_answer(answer: str | None, gold: str) -> float:
    """1.0 iff `answer`, the whole of it, says the same as `gold`: as a number or fraction where
    both are one, else letter by letter once decoration, units and spaces are gone.

    Raises GraderError when gold is empty or is running text ("see figure").
    """
    check_gold_answer(gold)
    if answer is None or len(answer) > _LONGEST:
        return 0.0
    values = _exact(answer), _exact(gold)
    if None not in values:
        return float(values[0] == values[1])
    return float(bool(_bare(answer)) and _bare(answer) == _bare(gold))


def grade_text(answer: str, gold: str) -> float:
    """1.0 iff both texts are equal but for case, white space and a full stop at the end."""
    if not _folded(gold):
        raise GraderError(f"the gold answer {gold!r} is empty; correct or drop the problem")
    return float(_folded(answer) == _folded(gold))


def check_gold_answer(gold: str) -> None:
    """Raises GraderError unless `gold` is something that `grade_answer` can compare with."""
    if not _bare(gold) or _WORDS.fullmatch(gold.strip()):
        raise GraderError(
            f"the gold answer {gold!r} is not a mathematical answer; correct or drop the problem"
        )


@dataclass(frozen=True, slots=True)
class Grader:
    """A rule by name. grade(text, gold) is the outcome; reply(gold) the shortest text that has
    outcome 1.0; both raise GraderError for a gold answer that cannot be graded."""

    grade: Callable[[str, str], float]
    reply: Callable[[str], str]
    says: str
    """What it looks for, for people."""


GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "number": Grader(
            lambda text, gold: grade_number(last_number(text), gold),
            lambda gold: gold,
            "the last number of the reply",
        ),
        "marked": Grader(
            lambda text, gold: grade_number(marked_number(text), gold),
            lambda gold: f"#### {gold}",
            'the number after the last "####"',
        ),
        "boxed": Grader(
            lambda text, gold: grade_answer(last_box(text), gold),
            lambda gold: f"\\boxed{{{gold}}}",
            "the content of the last \\boxed{}",
        ),
        "answer_line": Grader(
            lambda text, gold: grade_answer(last_answer_line(text), gold),
            lambda gold: f"Answer: {gold}",
            'the last line "Answer: ..."',
        ),
        "exact": Grader(grade_text, lambda gold: gold, "the whole reply, case and spaces aside"),
    }
)
"""The graders that a recipe can name."""


def _plain(text: str) -> str:
    return text.translate(_MINUS)


def _value(found: re.Match[str]) -> Decimal | None:
    digits = found["digits"]
    if "," in digits and not _GROUPED.fullmatch(digits):
        return None
    return Decimal((found["sign"] or "") + digits.replace(",", ""))


def _exact(text: str) -> Fraction | None:
    """The number or fraction that the whole text is; None: it is neither."""
    bare = _bare(text)
    number = _NUMBER.fullmatch(bare)
    if number is not None:
        value = _value(number)
        return None if value is None else Fraction(value)
    found = _FRACTION.fullmatch(bare)
    if found is None:
        return None
    above = found["above"] or found["digit"] or found["over"]
    below = found["below"] or found["under"] or found["divisor"]
    if not int(below):
        return None
    return Fraction(int(found["sign"] + "1") * int(above), int(below))


def _bare(text: str) -> str:
    """The text without what only decorates it: unit, markdown, dollar signs, LaTeX spacing."""
    bare = _plain(text).replace("\\$", "$").strip().rstrip(".").strip("_")
    for _ in range(_MOST_LAYERS):
        shorter = _UNIT.sub("", _MATH_MODE.sub("", bare.strip("$* ")))
        if not shorter or shorter == bare:
            break
        bare = _without_end_spaces(shorter) or shorter
    bare = _DECORATION.sub("", bare).replace("{,}", ",")
    bare = re.sub(r"\\(?:text|mbox)\s*{([^{}]*)}", r"\1", bare)
    bare = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", bare)
    # A space between two letters or digits says something: "1 2" is not 12.
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", " ".join(bare.split()))


def _without_end_spaces(text: str) -> str:
    """Without white space at the end, that of LaTeX included: what stood before a unit."""
    while text.endswith(_SPACES) or text[-1:].isspace():
        text = text[: -2 if text.endswith(_SPACES) else -1]
    return text


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".")
