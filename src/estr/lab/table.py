"""The tidy table: one row for each measured number, every number and plot is made from it.

    measure  step  value  | method  regime  seed  lr ...  (labels of the job)  | job  code

Labels are whatever the experiment says of its jobs; a column exists where some row has it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Row = dict[str, Any]


def write_table(rows: Sequence[Row], path: Path) -> None:
    """All rows as one Parquet file, written aside, then renamed."""
    import pyarrow
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        parquet.write_table(table, aside, compression="zstd")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_table(path: Path) -> list[Row]:
    """The rows of a file that `write_table` wrote, without the labels that they lack."""
    from pyarrow import parquet

    rows: list[Row] = parquet.read_table(path).to_pylist()
    return [{k: v for k, v in row.items() if v is not None or k == "value"} for row in rows]


def rows_by_job(paths: Iterable[Path]) -> dict[str, list[Row]]:
    """The rows of tables that were made elsewhere, by the digest of their job; of tables that share
    a job those of the first. Raises ConfigError naming a file that is no such table."""
    found: dict[str, list[Row]] = {}
    for path in paths:
        there: dict[str, list[Row]] = {}
        try:
            for row in read_table(path):
                there.setdefault(row.pop("job"), []).append(row)
        except (OSError, ValueError, KeyError, TypeError) as error:  # what pyarrow raises, too
            raise ConfigError(
                f"{path} is no table of `estr lab` ({error!r:.200}); name a table.parquet"
            ) from error
        found = {**there, **found}
    return found


def select(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """The rows with these labels."""
    return [row for row in rows if all(row.get(k) == v for k, v in labels.items())]


def last_values(rows: Iterable[Row], measure: str, *keys: str) -> dict[tuple[Any, ...], float]:
    """The value of the last step of a measure, by these labels; a value that is missing is NaN.

    Raises ValueError where two jobs share all the labels: a number would hide another."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["measure"] != measure:
            continue
        key = tuple(row.get(k) for k in keys)
        old = found.get(key)
        if old is not None and old["job"] != row["job"]:
            raise ValueError(f"two jobs have the labels {dict(zip(keys, key, strict=True))}")
        if old is None or row["step"] >= old["step"]:
            found[key] = row
    return {key: _number(row["value"]) for key, row in found.items()}


def weighted_means(
    rows: Iterable[Row], measure: str, weight: str, *keys: str
) -> dict[tuple[Any, ...], float]:
    """The mean of a measure over the windows of its jobs, each counting as much as the other
    measure `weight` (its number of tokens, say) has in that window."""
    rows = list(rows)
    weights = {(r["job"], r["step"]): r["value"] for r in rows if r["measure"] == weight}
    sums: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["measure"] != measure or row["value"] is None:
            continue
        times = _number(weights.get((row["job"], row["step"])))
        total = sums.setdefault(tuple(row.get(k) for k in keys), [0.0, 0.0])
        total[0] += times * row["value"]
        total[1] += times
    return {key: total / count if count else math.nan for key, (total, count) in sums.items()}


def by_seed(values: dict[tuple[Any, ...], float]) -> dict[Any, dict[int, float]]:
    """Values whose last label is the seed, as other labels -> seed -> value; a lone other label
    stands for itself."""
    nested: dict[Any, dict[int, float]] = {}
    for (*others, seed), value in values.items():
        nested.setdefault(others[0] if len(others) == 1 else tuple(others), {})[seed] = value
    return nested


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
