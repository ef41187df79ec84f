"""The shipped queries: one SQL file each, which begins with a comment that says what it answers."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple


class Query(NamedTuple):
    """A shipped query. meaning: the comment at its head, as one line."""

    sql: str
    meaning: str


def shipped_queries() -> dict[str, Query]:
    """Every query by its name, such as "mask-rate"."""
    found = {}
    for file in sorted(files(__package__).iterdir(), key=lambda file: file.name):
        name, _, suffix = file.name.rpartition(".")
        if suffix == "sql":
            sql = file.read_text("utf-8")
            found[name] = Query(sql, _head_comment(sql))
    return found


def _head_comment(sql: str) -> str:
    lines = []
    for line in sql.split("\n"):
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)
