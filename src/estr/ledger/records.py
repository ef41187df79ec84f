"""A step of the ledger as the trainer had it: trajectories and consumptions made of the rows again.

    StepRecord --schema--> rows --parts--> files --records--> StepRecord

A part of an older schema lacks columns; what they would hold was not computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from ..types import COLUMNS, Consumption, RolloutId, SamplingSettings, Segment, Trajectory, Turn
from .parts import TORN, find_part, find_parts, part_path, read_part
from .schema import CONSUMED, SCHEMAS, StepRecord, logged_entries

Arrays = Mapping[str, npt.NDArray[Any]]


def read_step(run_folder: str | Path, step: int) -> StepRecord:
    """The step as it was written. Segments that hold no token and are the last ones of their
    trajectory are not in the rows, so they are absent; all else is as it was.

    Raises DataError naming the part where one is absent or torn, and the step where it holds what
    cannot have been written.
    """
    part = find_part(run_folder, step)
    tables = {
        name: _rows_of(step, read_part(part_path(Path(run_folder), name, *part)))
        for name in SCHEMAS
    }
    rows = tables["trajectories"].to_pylist()
    if not rows:
        raise DataError(f"step {step} of the ledger of {run_folder} holds no trajectory")
    try:
        return _record(step, rows, tables["tokens"])
    except (DataError, ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise DataError(
            f"step {step} of the ledger of {run_folder} holds what no run writes: {error}; move "
            "its parts away to leave it out"
        ) from error


def _record(step: int, rows: Sequence[Mapping[str, Any]], tokens: pa.Table) -> StepRecord:
    columns, known = _arrays(tokens)
    _check(step, rows, columns, known)
    totals = np.bincount(columns["trajectory"], minlength=len(rows)).tolist()
    spans = [slice(a, b) for a, b in pairwise(accumulate(totals, initial=0))]
    absent = {n for n in ("proximal_logprobs", "ref_logprobs") if not known[n].any()}
    return StepRecord(
        step,
        rows[0]["target_version"],
        rows[0]["version"],
        [_trajectory(row, columns, known, span) for row, span in zip(rows, spans, strict=True)],
        [_consumption(row, columns, absent, span) for row, span in zip(rows, spans, strict=True)],
        rows[0]["correction"],
        rows[0]["aggregation"],
    )


def _rows_of(step: int, table: pa.Table) -> pa.Table:
    """Those of a part's rows, which are in the order of the steps, that are of this one."""
    first, last = np.searchsorted(table["step"].to_numpy(), [step, step + 1]).tolist()
    return table.slice(first, last - first)


def _check(step: int, rows: Sequence[Mapping[str, Any]], columns: Arrays, known: Arrays) -> None:
    """Raises DataError on what would be taken for something else later, or ask for all memory."""
    logged_entries(rows[0]["correction"])
    if rows[0]["aggregation"] not in ("batch", "group"):
        raise DataError(
            f"the aggregation {rows[0]['aggregation']!r:.80} is neither batch nor group"
        )
    for name in ("trajectory", "segment", "token_ids", "sampled"):
        if not known[name].all():
            raise DataError(f"a token without {name}")
    number, count = columns["trajectory"], len(columns["trajectory"])
    if count and not (number[0] >= 0 and number[-1] < len(rows) and (np.diff(number) >= 0).all()):
        raise DataError(f"tokens out of the order of their {len(rows)} trajectories")
    if count and not 0 <= columns["segment"].min() <= columns["segment"].max() < count:
        raise DataError(f"a segment beyond those of {count} tokens")
    lags = rows[0]["target_version"] - columns["versions"][columns["sampled"]].astype(np.int64)
    if len(lags) and not 0 <= lags.min() <= lags.max() <= step:
        raise DataError(
            f"tokens of a version between {lags.min()} and {lags.max()} versions before the "
            f"{rows[0]['target_version']} that it trained"
        )


def _arrays(tokens: pa.Table) -> tuple[Arrays, Arrays]:
    """(values with the fills of `estr.types` where NULL, whether they are known) by column."""
    fills = {column.name: column.fill for column in COLUMNS}
    values, known = {}, {}
    for field in SCHEMAS["tokens"]:
        if field.name not in tokens.column_names:
            column = pa.chunked_array([pa.nulls(len(tokens), field.type)])
        else:
            column = tokens[field.name]
        default: float | bool = False if pa.types.is_boolean(field.type) else 0
        if pa.types.is_floating(field.type):
            default = float("nan")
        fill = pa.scalar(fills.get(field.name, default), field.type)
        known[field.name] = column.is_valid().to_numpy()
        values[field.name] = column.fill_null(fill).to_numpy()
    return values, known


def _trajectory(row: Mapping[str, Any], columns: Arrays, known: Arrays, span: slice) -> Trajectory:
    lengths = np.bincount(columns["segment"][span]).tolist()
    borders = accumulate(lengths, initial=span.start)
    return Trajectory(
        id=RolloutId(row["run"], row["group_id"], row["index"], row["attempt"]),
        task=row["task"],
        problem=row["problem"],
        segments=tuple(_segment(columns, known, slice(a, b)) for a, b in pairwise(borders)),
        turns=tuple(Turn(**turn) for turn in row["turns"] or ()),
        sampling=SamplingSettings(
            row["temperature"],
            row["max_new_tokens"],
            row["max_tokens"],
            tuple(row["stop_token_ids"] or ()),
        ),
        status=row["status"],
        dispatch_version=row["dispatch_version"],
        outcome=row["outcome"],
        rewards=dict(row["rewards"] or ()),
        reward=row["reward"],
        worker=row["worker"],
        times_s=dict(row["times_s"] or ()),
        error=row["error"],
    )


def _segment(columns: Arrays, known: Arrays, span: slice) -> Segment:
    sampled = columns["sampled"][span]
    values: dict[str, Any] = {column.name: columns[column.name][span] for column in COLUMNS}
    for column in COLUMNS:
        if column.optional and sampled.any() and not known[column.name][span].any():
            values[column.name] = None
    return Segment(**values)


def _consumption(
    row: Mapping[str, Any], columns: Arrays, absent: Collection[str], span: slice
) -> Consumption:
    made: dict[str, Any] = {n: None if n in absent else columns[n][span] for n in CONSUMED}
    return Consumption(advantage=row["advantage"], **made)


def target_versions(run_folder: str | Path) -> dict[int, int]:
    """The version that the loss of each step of the ledger was taken at, ascending by step. Raises
    DataError naming the part that does not say it."""
    found: dict[int, int] = {}
    for part in find_parts(run_folder).whole:
        path = part_path(Path(run_folder), "trajectories", *part)
        try:
            file = pq.ParquetFile(path.absolute())
            rows = file.read(columns=["step", "target_version"], use_threads=False)
            steps, targets = (rows[name].to_pylist() for name in ("step", "target_version"))
            found |= {int(step): int(target) for step, target in zip(steps, targets, strict=True)}
        except (*TORN, KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"ledger part {path} does not say at which version its loss was taken: {error}; "
                "move it away to leave out what it holds"
            ) from error
    return found
