"""The ledger as tables of DuckDB: the parts as they are, and everything that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..corrections import build_correction
from ..corrections.base import TokenColumns
from ..corrections.surrogates import MAX_LOG_RATIO, ClippedSurrogate
from ..diagnostics import ENTROPY_EDGES
from ..errors import DataError, EstrError
from ..losses import default_surrogate
from .parts import damaged_parts, find_parts, part_path
from .schema import SCHEMAS, logged_entries

if TYPE_CHECKING:
    import duckdb

_DEFAULT_EPS = 0.01

_AT_ONCE = 10_000
"""Rows of an answer that are taken from DuckDB together."""


class Answer(NamedTuple):
    """The rows that a query gave, under the names of its columns. left_out: further ones, counted
    and not kept."""

    names: list[str]
    rows: list[tuple[Any, ...]]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """An opened ledger. torn: a line on what was left out. connection: DuckDB's, in
    memory, for whatever `query` does not do; `asked` turns its errors into ours."""

    connection: duckdb.DuckDBPyConnection
    torn: list[str]
    run_folder: Path

    def query(self, sql: str, parameters: Sequence[Any] = (), *, most: int | None = None) -> Answer:
        """Run one statement. most: rows to keep, so that a large answer needs little memory; None:
        all. Raises DataError with DuckDB's own words where it is wrong."""
        names, batches = self.batches(sql, parameters)
        rows: list[tuple[Any, ...]] = []
        number = 0
        for batch in batches:
            rows += batch if most is None else batch[: max(0, most - len(rows))]
            number += len(batch)
        return Answer(names, rows, number - len(rows))

    def batches(
        self, sql: str, parameters: Sequence[Any] = ()
    ) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """The same as it comes, a part of the rows at a time, for answers larger than the memory:
        names, and the rows. Nothing else may be asked until they are read."""
        with self.asked():
            number = len(self.connection.extract_statements(sql))
            if number != 1:
                raise DataError(f"a query is one statement, not {number}: {sql!r:.80}")
            found = self.connection.execute(sql, list(parameters))
            names = [column[0] for column in found.description or ()]
        return names, self._fetched(found)

    def _fetched(self, found: duckdb.DuckDBPyConnection) -> Iterator[list[tuple[Any, ...]]]:
        with self.asked():
            while batch := found.fetchmany(_AT_ONCE):
                yield batch

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A block that asks DuckDB. Raises DataError in place of its errors, naming the parts that
        are damaged where that may be the reason."""
        import duckdb

        try:
            yield
        except duckdb.ProgrammingError as error:  # the statement is wrong
            raise DataError(f"the query failed: {error}") from error
        except duckdb.Error as error:
            lines = "".join(f"\n  {line}" for line in damaged_parts(self.run_folder))
            raise DataError(f"the query failed: {error}{lines}") from error

    def tables(self) -> dict[str, list[str]]:
        """The columns of every table and view."""
        rows = self.query(
            "select table_name, list(column_name order by ordinal_position) "
            "from information_schema.columns group by table_name order by table_name"
        ).rows
        return dict(rows)


def open_ledger(run_folder: str | Path, *, threads: int | None = None) -> Ledger:
    """Open the ledger of a run, also while it is being written.

    `tokens` and `trajectories` are the facts (see `estr.ledger.schema`); `trained_tokens`,
    `loss_terms` and `trajectory_facts` are views on them (views.sql); `settings` holds what the
    corrections of each step say of themselves. Raises DataError where there is no ledger or not
    one whole step in it.
    """
    import duckdb

    parts = find_parts(run_folder)
    if not parts.whole:
        detail = "".join(f"\n  {line}" for line in parts.torn)
        raise DataError(f"the ledger of {run_folder} holds no whole step{detail}")
    config: dict[str, Any] = {"autoinstall_known_extensions": False}
    if threads is not None:
        config["threads"] = threads
    connection = duckdb.connect(config=config)
    opened = Ledger(connection, parts.torn, Path(run_folder))
    with opened.asked():
        for table in SCHEMAS:
            paths = [part_path(Path(run_folder), table, *part) for part in parts.whole]
            _create_view(connection, table, paths, older=parts.older)
        connection.execute(_macros())
        _create_settings(connection)
        connection.execute(files(__package__).joinpath("views.sql").read_text("utf-8"))
    return opened


def _create_view(
    connection: duckdb.DuckDBPyConnection, table: str, paths: Sequence[Path], *, older: bool
) -> None:
    """The parts of a table under its name. Columns that an older part lacks are NULL. A folder with
    a name such as "step=5" is no column of it."""
    listed = ", ".join(f"'{_escaped(path)}'" for path in paths)
    source = (
        f"read_parquet([{listed}], union_by_name = {str(older).lower()}, hive_partitioning = false)"
    )
    if older:
        present = set(connection.sql(f"from {source} limit 0").columns)
        columns = ", ".join(
            f'"{f.name}"' if f.name in present else f'null as "{f.name}"' for f in SCHEMAS[table]
        )
    else:
        columns = "*"
    connection.execute(f"create view {table} as select {columns} from {source}")


def _escaped(path: Path) -> str:
    """A path as a DuckDB string that is no glob pattern, nor begins with a home folder's "~"."""
    text = "".join(f"[{c}]" if c in "[*?" else c for c in str(path.absolute()))
    return text.replace("'", "''")


def _macros() -> str:
    """What the views need that the code defines: bounds and bins, in one place."""
    cases = " ".join(
        f"when entropy < {high}::float then {low}" for low, high in pairwise((0.0, *ENTROPY_EDGES))
    )
    bound = MAX_LOG_RATIO
    return (
        "create macro entropy_bin(entropy) as (case when entropy is null then null "
        f"{cases} else {ENTROPY_EDGES[-1]} end)::float;"
        # case, not greatest and least: those are slow, and take a NULL for the other argument.
        f"create macro bounded_ratio(log_ratio) as exp(case when log_ratio > {bound} "
        f"then {bound}::float when log_ratio < -{bound} then -{bound}::float else log_ratio end);"
        "create macro not_negative(value) as case when value < 0 then 0 else value end;"
        f"create macro is_in_bounds(log_ratio) as abs(log_ratio) <= {bound};"
    )


def _create_settings(connection: duckdb.DuckDBPyConnection) -> None:
    """One row for each step: how its correction scores, weighs and bounds a token."""
    connection.execute(
        "create table settings (step integer, target_version integer, version integer, "
        "aggregation varchar, correction varchar, eps float, weight_edge varchar, "
        "surrogate_edge varchar, clip_low float, clip_high float)"
    )
    steps = connection.execute(
        "select distinct step, target_version, version, aggregation, correction "
        "from trajectories order by step"
    ).fetchall()
    followed: dict[str, Any] = {}
    for step, *_, text in steps:
        try:
            followed.setdefault(text, _followed(text))
        except DataError as error:
            raise DataError(
                f"step {step} of the ledger: {error}; move its parts away to leave it out"
            ) from error
    connection.executemany(
        "insert into settings values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [[*row, *followed[row[-1]]] for row in steps],
    )


def _followed(text: str) -> tuple[float, str | None, str | None, float | None, float | None]:
    """(eps, weight_edge, surrogate_edge, clip_low, clip_high) of a step's corrections, asked of
    themselves; None where SQL cannot follow them."""
    entries = logged_entries(text)
    eps = next((e.get("eps", _DEFAULT_EPS) for e in entries if e["name"] == "estr"), _DEFAULT_EPS)
    one, place = torch.full((1,), -0.5), torch.zeros(1, dtype=torch.int64)
    columns = TokenColumns(one, one, -one, one < 0, one, -one, -one, place, place, place)
    try:
        verdict = build_correction(entries)(columns)
    except EstrError:  # a correction of the user's own that is not importable here
        return eps, None, None, None, None
    weighing = [e for e in entries if e.get("edge") == "B"]
    weight_edge = None if verdict.weight is not None else "none"
    if verdict.weight is not None and len(weighing) == 1 and len(entries) == 1:
        weight_edge = "B" if weighing[0]["name"] in ("icepop", "kpop") else None
    surrogate = verdict.surrogate or default_surrogate(verdict)
    if not isinstance(surrogate, ClippedSurrogate) or math.isfinite(surrogate.restore_cap):
        return eps, weight_edge, None, None, None
    return eps, weight_edge, surrogate.edge, surrogate.clip_low, surrogate.clip_high
