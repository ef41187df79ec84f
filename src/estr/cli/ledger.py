"""`estr ledger`: questions to the ledger of a run."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from .options import run_folder, runs_option

if TYPE_CHECKING:
    from ..ledger import Answer, Ledger

_WIDEST = 60
"""Characters of a cell that are shown."""


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("query", required=False)
@click.option("--rows", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
@runs_option
def ledger(run: str, query: str | None, rows: int, as_json: bool, runs: Path) -> None:
    """Ask about every trained token of a run.

    QUERY is SQL (DuckDB's), or the name of a shipped query. Without one, the tables with their
    columns and the shipped queries are listed. Answers are printed; redirect the output to keep
    them. SQL can do what you can: `copy (...) to 'FILE'` writes, and overwrites, files.

    \b
    Examples:
      estr ledger calculator
      estr ledger calculator mask-rate
      estr ledger calculator "select lag, count(*) from trained_tokens group by lag order by lag"
    """
    from ..ledger import open_ledger, shipped_queries
    from ..printable import printable

    opened = open_ledger(run_folder(run, runs))
    for line in opened.torn:
        click.echo(f"warning: {printable(line)}", err=True)
    if query is None:
        click.echo(_overview(opened))
        return
    shipped = shipped_queries()
    if query not in shipped and re.fullmatch(r"[\w-]+", query):
        near = difflib.get_close_matches(query, shipped, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"shipped: {', '.join(shipped)}"
        raise ConfigError(f"there is no shipped query {query}, and a word is no SQL; {remedy}")
    sql = shipped[query].sql if query in shipped else query
    if as_json:
        _print_json(opened, sql)
    else:
        click.echo(_table(opened.query(sql, most=rows)))


def _overview(opened: Ledger) -> str:
    """What can be asked."""
    from ..ledger import shipped_queries

    parts = [f"{name}\n  {', '.join(columns)}" for name, columns in opened.tables().items()]
    queries = [f"{name}\n  {query.meaning}" for name, query in shipped_queries().items()]
    return "\n".join(["tables and views", "", *parts, "", "shipped queries", "", *queries])


def _print_json(opened: Ledger, sql: str) -> None:
    """One object for each row; a second column of a name is NAME_1, so that none is lost."""
    columns, batches = opened.batches(sql)
    names: list[str] = []
    for column in columns:
        spellings = itertools.chain([column], (f"{column}_{i}" for i in itertools.count(1)))
        names.append(next(name for name in spellings if name not in names))
    for batch in batches:
        for row in batch:
            click.echo(json.dumps(dict(zip(names, map(_plain, row), strict=True))))


def _table(answer: Answer) -> str:
    """Aligned columns; names above, and below how many rows there were."""
    shown = [[_shown(cell) for cell in row] for row in answer.rows]
    widths = [max(map(len, column)) for column in zip(answer.names, *shown, strict=True)]
    numeric = [_is_numeric(column) for column in zip(*answer.rows, strict=True)]
    lines = []
    for row in [answer.names, *shown]:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric or [False] * len(row), strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    more = f" ({answer.left_out} more; see --rows)" if answer.left_out else ""
    return "\n".join([*lines, f"{len(shown)} rows{more}"])


def _is_numeric(column: Sequence[Any]) -> bool:
    return all(cell is None or isinstance(cell, int | float | Decimal) for cell in column)


def _shown(cell: Any) -> str:
    from ..printable import printable

    if cell is None:
        return "-"
    text = f"{cell:.6g}" if isinstance(cell, float) else printable(str(cell)[: _WIDEST + 1])
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _plain(cell: Any) -> Any:
    """A cell as JSON: what is not finite is null, and what JSON has no form for is text."""
    if isinstance(cell, float | Decimal):  # SQL's 0.5 is a decimal number
        cell = float(cell)
        return cell if math.isfinite(cell) else None
    if isinstance(cell, dict):
        return {str(key): _plain(value) for key, value in cell.items()}
    if isinstance(cell, list | tuple):
        return [_plain(value) for value in cell]
    return cell if cell is None or isinstance(cell, bool | int | str) else str(cell)
