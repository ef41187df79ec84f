"""A calculator for what a model writes: exact fractions, four operations, nothing is evaluated.

calculator("48/2")            "24"
calculator("(12 + 3) * 0.2")  "3"
calculator("1/3")             "0.333333"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

_MAX_CHARS = 200
_MAX_DEPTH = 20
_PLACES = 6

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)|(?P<sign>//|[-+*/()]))")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_SPELLINGS = str.maketrans(
    {"\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-", "$": " "}
)


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, for example (12 + 3) * 4.
    """
    return written(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises ValueError saying what cannot be read, ZeroDivisionError."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression has at most {_MAX_CHARS} characters")
    text = expression.translate(_SPELLINGS).strip().removesuffix("=").rstrip()
    if not text:
        raise ValueError("the expression is empty")
    parser = _Parser(text)
    value = parser.sum(0)
    if parser.next is not None:
        raise ValueError(f"unexpected {parser.next!r}")
    return value


def written(value: Fraction) -> str:
    """A whole number as such, any other with at most six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**_PLACES)
    whole, part = divmod(scaled, 10**_PLACES)
    decimals = f"{part:0{_PLACES}d}".rstrip("0")
    sign = "-" if value < 0 and scaled else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


class _Parser:
    """sum = product (("+" | "-") product)*; product = factor (("*" | "/" | "//") factor)*;
    factor = ("+" | "-") factor | number | "(" sum ")". next: the token that comes; None: the end.
    """

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self.next = next(self._tokens, None)

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            sign = self._take()
            other = self._product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/", "//"):
            sign = self._take()
            other = self._factor(depth)
            if sign == "*":
                value *= other
            elif not other:
                raise ZeroDivisionError("division by zero")
            else:
                value = value / other if sign == "/" else Fraction(value // other)
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise ValueError("the expression is nested too deeply")
        token = self._take()
        if token in ("+", "-"):
            value = self._factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ValueError("a closing parenthesis is missing")
            return value
        if token is None or token in ("*", "/", "//", ")"):
            raise ValueError(f"a number is missing before {token or 'the end'}")
        return Fraction(token)

    def _take(self) -> str | None:
        token, self.next = self.next, next(self._tokens, None)
        return token


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"cannot read {text[at:].strip()[:20]!r}; use numbers, + - * / and ()")
        at = found.end()
        number = found["number"]
        if number is None:
            yield found["sign"]
        elif "," in number and not _GROUPED.fullmatch(number):
            raise ValueError(f"{number!r} is not a number")
        else:
            yield number.replace(",", "").removesuffix(".")
