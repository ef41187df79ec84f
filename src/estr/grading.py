"""Grading: plain functions from what a model wrote to an outcome. Safe in any thread, no I/O.

    exact_integer("24", 24)                               1.0   the whole text is the number
    last_number("... so **-12** in all.")                 Decimal("-12")
    marked_number("so 5*3 = 15\\n#### $1,080")             Decimal("1080")
    grade_number(last_number(text), gold="29")            1.0 or 0.0

Numbers are compared as exact decimals: "29.00" is 29, "29.50" is not. A gold answer that is no
number is the grader's failure (GraderError, the trajectory stays unscored), never a free reward.
"""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import GraderError

# A minus is a sign only where no operand stands before it: "-12" and "= -12", but not "30-12".
# Commas are taken along, so that a badly grouped "1,08" is seen as malformed and not as 8.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9.,])"
    r"(?:(?P<sign>(?<![A-Za-z0-9.)\]])-)\s?)?"
    r"[$€£]?\s?"
    r"(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)"
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


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


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _value(found: re.Match[str]) -> Decimal | None:
    digits = found["digits"]
    if "," in digits and not _GROUPED.fullmatch(digits):
        return None
    return Decimal((found["sign"] or "") + digits.replace(",", ""))
