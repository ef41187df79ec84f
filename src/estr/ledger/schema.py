"""What the two tables of the ledger hold, and how trajectories become their rows.

    trajectories    one row for each trajectory of an optimizer step     key: step, trajectory
    tokens          one row for each token of it, read or written        key: ... , position

Only facts, under the names of `estr.types`: what was recorded at the draw (COLUMNS), and what the
step made of it (Consumption). NULL: never computed, or nothing was drawn there. Everything that
follows from these columns is a view (`views.sql`).

Columns are only ever added, at the end, with a new SCHEMA_VERSION; none is renamed, retyped or
given another meaning. So an older part differs in nothing but absent columns, which read as NULL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..config import Table, correction_options
from ..errors import DataError
from ..types import COLUMNS, Consumption, Trajectory

SCHEMA_VERSION = 1

_TURN = pa.struct(
    [
        ("segment", pa.int32()),
        ("start", pa.int32()),
        ("stop", pa.int32()),
        ("finish_reason", pa.string()),
    ]
)

TRAJECTORIES = pa.schema(
    [
        ("step", pa.int32()),  # optimizer steps made, this one included
        ("trajectory", pa.int32()),  # counts the trajectories of the step
        ("target_version", pa.int32()),  # the version that the loss was taken at
        ("version", pa.int32()),  # the version after the step; the same if it was skipped
        ("run", pa.int64()),
        ("group_id", pa.int64()),
        ("index", pa.int32()),
        ("attempt", pa.int32()),
        ("task", pa.string()),
        ("problem", pa.int64()),
        ("worker", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("dispatch_version", pa.int32()),
        ("outcome", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),  # NULL: unscored, so not trained on
        ("turns", pa.list_(_TURN)),
        ("times_s", pa.map_(pa.string(), pa.float64())),
        ("temperature", pa.float64()),
        ("max_new_tokens", pa.int32()),
        ("max_tokens", pa.int32()),
        ("stop_token_ids", pa.list_(pa.int32())),
        ("correction", pa.string()),  # the corrections of the step with all their options, JSON
        ("aggregation", pa.string()),
    ]
)

TOKENS = pa.schema(
    [
        ("step", pa.int32()),
        ("trajectory", pa.int32()),
        ("segment", pa.int32()),
        ("position", pa.int32()),  # counts all tokens of the trajectory, its segments joined
        *((column.name, pa.from_numpy_dtype(column.dtype)) for column in COLUMNS),
        ("policy_logprobs", pa.float32()),
        ("proximal_logprobs", pa.float32()),
        ("ref_logprobs", pa.float32()),
        ("kept", pa.bool_()),  # NULL: not trained on
        ("clipped", pa.bool_()),
    ]
)

SCHEMAS = {"trajectories": TRAJECTORIES, "tokens": TOKENS}

# Columns that stand under these names in StepRecord, Trajectory and its SamplingSettings.
_OF_STEP = ("step", "target_version", "version", "correction", "aggregation")
_OF_TRAJECTORY = ("task", "problem", "worker", "status", "error", "dispatch_version")
_OF_SAMPLING = ("temperature", "max_new_tokens", "max_tokens", "stop_token_ids")

CONSUMED: dict[str, type[np.generic]] = {
    "policy_logprobs": np.float32,
    "proximal_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "kept": np.bool_,
    "clipped": np.bool_,
}


class StepRecord(NamedTuple):
    """One optimizer step as the ledger takes it. consumptions[i] belongs to trajectories[i];
    correction: as `described` gives it."""

    step: int
    target_version: int
    version: int
    trajectories: Sequence[Trajectory]
    consumptions: Sequence[Consumption]
    correction: str = "[]"
    aggregation: str = "batch"


def described(correction: Sequence[Table]) -> str:
    """A recipe's corrections as JSON, every option spelled out."""
    entries = []
    for entry in correction:
        options = correction_options(entry)
        full = options if isinstance(options, dict) else asdict(options)
        entries.append({"name": entry["name"], **full})
    return json.dumps(entries)


def logged_entries(text: str | None) -> list[Table]:
    """The corrections of a step out of what `described` made of them. Raises DataError where it is
    something else."""
    try:
        entries = json.loads(text or "")
        named = isinstance(entries, list) and all(isinstance(e["name"], str) for e in entries)
    except (ValueError, TypeError, KeyError, RecursionError):
        named = False
    if not named:
        raise DataError(f"the correction {text!r:.80} is not a list of corrections as JSON")
    found: list[Table] = entries
    return found


def trajectories_table(records: Sequence[StepRecord]) -> pa.Table:
    """One row for each trajectory of the steps, in order."""
    for record in records:
        if (made := len(record.consumptions)) != (number := len(record.trajectories)):
            raise ValueError(f"step {record.step}: {number} trajectories but {made} consumptions")
    trajectories = [t for r in records for t in r.trajectories]
    consumptions = [c for r in records for c in r.consumptions]
    ids, sampling = [t.id for t in trajectories], [t.sampling for t in trajectories]
    columns: dict[str, list[Any]] = {
        "trajectory": [i for r in records for i, _ in enumerate(r.trajectories)],
        "run": [i.run for i in ids],
        "group_id": [i.group for i in ids],
        "index": [i.index for i in ids],
        "attempt": [i.attempt for i in ids],
        "rewards": [[(_whole(k), v) for k, v in t.rewards.items()] for t in trajectories],
        "advantage": [c.advantage for c in consumptions],
        "turns": [[turn._asdict() for turn in t.turns] for t in trajectories],
        "times_s": [list(t.times_s.items()) for t in trajectories],
    }
    for name in _OF_STEP:
        columns[name] = [getattr(r, name) for r in records for _ in r.trajectories]
    for name in (*_OF_TRAJECTORY, "outcome", "reward"):
        columns[name] = [getattr(t, name) for t in trajectories]
    for name in _OF_SAMPLING:
        columns[name] = [getattr(s, name) for s in sampling]
    columns["error"] = [None if e is None else _whole(e) for e in columns["error"]]
    return pa.Table.from_pydict(columns, schema=TRAJECTORIES)


def tokens_table(records: Sequence[StepRecord]) -> pa.Table:
    """One row for each token of the steps' trajectories, in order.

    Raises ValueError where a consumption has not one entry for each token.
    """
    trajectories = [t for r in records for t in r.trajectories]
    consumptions = [c for r in records for c in r.consumptions]
    steps = np.array([r.step for r in records for _ in r.trajectories], dtype=np.int32)
    places = [i for r in records for i, _ in enumerate(r.trajectories)]
    segments = [s for t in trajectories for s in t.segments]
    lengths = [len(s) for s in segments]
    totals = [t.num_tokens for t in trajectories]
    total = sum(totals)
    starts = np.cumsum([0, *totals])[:-1]
    numbers = [i for t in trajectories for i, _ in enumerate(t.segments)]
    sampled = _joined([s.sampled for s in segments], lengths, np.bool_)
    scored = np.array([c.advantage is not None for c in consumptions], dtype=np.bool_)
    columns: dict[str, pa.Array] = {
        "step": pa.array(np.repeat(steps, totals)),
        "trajectory": pa.array(np.repeat(np.array(places, dtype=np.int32), totals)),
        "segment": pa.array(np.repeat(np.array(numbers, dtype=np.int32), lengths)),
        "position": pa.array((np.arange(total) - np.repeat(starts, totals)).astype(np.int32)),
        "sampled": pa.array(sampled),
    }
    unsampled = ~sampled
    for name, dtype, *_ in COLUMNS:
        if name != "sampled":
            unknown = None if name == "token_ids" else unsampled
            columns[name] = _column([getattr(s, name) for s in segments], lengths, dtype, unknown)
    untrained = unsampled | np.repeat(~scored, totals)
    for name, dtype in CONSUMED.items():
        columns[name] = _column([getattr(c, name) for c in consumptions], totals, dtype, untrained)
    return pa.table(columns, schema=TOKENS)


def _whole(text: str) -> str:
    """What a user's program said may hold half a character, which no file of UTF-8 takes; it
    becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _column(
    parts: Sequence[npt.NDArray[Any] | None],
    lengths: Sequence[int],
    dtype: type[np.generic],
    unknown: npt.NDArray[np.bool_] | None,
) -> pa.Array:
    """The parts as one column; NULL where nothing is known, and all along a part that is None."""
    absent = [part is None for part in parts]
    if not any(absent):
        return pa.array(_joined(parts, lengths, dtype), mask=unknown)
    if all(absent):
        return pa.nulls(sum(lengths), pa.from_numpy_dtype(dtype))
    missing = np.repeat(np.array(absent), lengths)
    filled = [np.zeros(n, dtype) if p is None else p for p, n in zip(parts, lengths, strict=True)]
    mask = missing if unknown is None else unknown | missing
    return pa.array(_joined(filled, lengths, dtype), mask=mask)


def _joined(
    parts: Sequence[Any], lengths: Sequence[int], dtype: type[np.generic]
) -> npt.NDArray[Any]:
    if (found := list(map(len, parts))) != lengths:
        wrong = next(i for i, n in enumerate(found) if n != lengths[i])
        raise ValueError(f"part {wrong} has {found[wrong]} entries for {lengths[wrong]} tokens")
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
