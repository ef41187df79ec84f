"""Text of models, users and programs, as a terminal may have it."""

from __future__ import annotations


def printable(text: str, *, newlines: bool = False) -> str:
    """The text with everything that is not a visible character or a space as a Python escape
    (newlines: those are kept)."""
    return "".join(
        c if c.isprintable() or (newlines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text.encode("utf-8", "backslashreplace").decode()
    )
