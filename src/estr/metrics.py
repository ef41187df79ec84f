"""Numbers that carry their reducer, and the file that they are written to.

    micro-batch --+
    micro-batch --+--> Metrics.merge --> to_row --> MetricsWriter --> metrics.jsonl, TensorBoard
    process     --+

Whatever the order and the grouping in which parts are merged, the row is that of all of them
together (`estr.reducers`). A value that is not finite is left out of its metric and counted beside
it, so it is neither hidden nor does it hide the others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from .errors import DataError
from .reducers import (
    EffectiveSampleSize,
    Max,
    Mean,
    Min,
    Quantiles,
    Reducer,
    Row,
    Sum,
    Variance,
    pack_reducer,
    unpack_reducer,
)

RECORD_KEYS = ("step", "version", "wall_s")
"""What every line of metrics.jsonl begins with; no metric may have one of these names."""


class Metrics:
    """Named metrics of a step, or of a part of it. Every `add_*` may be called again for a name:
    the parts are merged.

    A value that is not finite is not added; `nonfinite` in the row counts all of them, and
    `nonfinite/NAME` those of one metric. Raises ValueError when a name is used with two reducers.
    """

    def __init__(self) -> None:
        self._reducers: dict[str, Reducer | None] = {}
        self._nonfinite: Counter[str] = Counter()

    def add_mean(self, name: str, total: float, count: float = 1) -> None:
        """The sum of some values and their number; the row holds the mean of all."""
        if self._finite(name, total):
            self._add(name, Mean(float(total), float(count)))

    def add_sum(self, name: str, value: float) -> None:
        if self._finite(name, value):
            self._add(name, Sum(float(value)))

    def add_max(self, name: str, value: float) -> None:
        if self._finite(name, value):
            self._add(name, Max(float(value)))

    def add_min(self, name: str, value: float) -> None:
        if self._finite(name, value):
            self._add(name, Min(float(value)))

    def add_variance(self, name: str, total: float, squares: float, count: float) -> None:
        """Sum, sum of squares and number of some values; the row holds their variance."""
        if self._finite(name, total, squares):
            self._add(name, Variance(float(total), float(squares), float(count)))

    def add_ess(self, name: str, total: float, squares: float, count: float) -> None:
        """Sum, sum of squares and number of some weights; the row holds their effective sample
        size as a share of their number."""
        if self._finite(name, total, squares):
            self._add(name, EffectiveSampleSize(float(total), float(squares), float(count)))

    def add_quantiles(self, name: str, values: Iterable[float]) -> None:
        """Values, one by one; the row holds NAME_mean, NAME_p50, NAME_p90, NAME_p99, NAME_max."""
        array = np.asarray(values, dtype=np.float64)
        finite = np.isfinite(array)
        if num_bad := int(array.size - finite.sum()):
            self._nonfinite[name] += num_bad
        distinct, counts = np.unique(array[finite], return_counts=True)
        self._add(name, Quantiles(dict(zip(distinct.tolist(), counts.tolist(), strict=True))))

    def merge(self, other: Metrics) -> None:
        """Take in what another part has counted."""
        for name, reducer in other._reducers.items():
            self._add(name, reducer)
        self._nonfinite += other._nonfinite

    def to_row(self) -> Row:
        """One number for each name; None where there is none (a mean of nothing)."""
        row: Row = {}
        for name, reducer in self._reducers.items():
            row.update({name: None} if reducer is None else reducer.values(name))
        row["nonfinite"] = float(self._nonfinite.total())
        row.update({f"nonfinite/{name}": float(n) for name, n in self._nonfinite.items()})
        return row

    def to_state(self) -> dict[str, Any]:
        """Everything as JSON data, for a checkpoint."""
        reducers = {
            name: None if reducer is None else pack_reducer(reducer)
            for name, reducer in self._reducers.items()
        }
        return {"reducers": reducers, "nonfinite": dict(self._nonfinite)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Metrics:
        """What `to_state` gave. Raises DataError if it is malformed."""
        metrics = cls()
        try:
            for name, entry in state["reducers"].items():
                metrics._reducers[name] = None if entry is None else unpack_reducer(*entry)
            metrics._nonfinite.update(state["nonfinite"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the saved metrics are malformed: {error!r}") from error
        return metrics

    def _finite(self, name: str, *values: float) -> bool:
        if all(math.isfinite(value) for value in values):
            return True
        self._nonfinite[name] += 1
        self._add(name, None)
        return False

    def _add(self, name: str, reducer: Reducer | None) -> None:
        if name in RECORD_KEYS:
            raise ValueError(f"a metric may not be called {name!r}: every record has that key")
        old = self._reducers.get(name)
        if old is None or reducer is None:
            self._reducers[name] = old if reducer is None else reducer
            return
        if type(old) is not type(reducer):
            raise ValueError(
                f"metric {name!r} is a {type(old).__name__}, not a {type(reducer).__name__}: "
                "one name, one reducer"
            )
        self._reducers[name] = old.merged(reducer)


class MetricsLog(Protocol):
    """Something else that is told every record. Who made it closes it."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One record, as MetricsWriter.write makes it."""
        ...


class MetricsWriter:
    """Appends to RUN_FOLDER/metrics.jsonl, one JSON object a line, and to TensorBoard event files
    in RUN_FOLDER/tensorboard. also: whatever else is to be told.

    A record exists exactly when its newline does: an unfinished one that a kill left behind is cut
    off when the file is opened again. Each record is handed to the system as soon as it is written.
    """

    def __init__(
        self,
        run_folder: str | Path,
        *,
        tensorboard: bool = True,
        from_step: int | None = None,
        also: Sequence[MetricsLog] = (),
    ) -> None:
        folder = Path(run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        cut_torn_tail(self.path)
        self._file = self.path.open("ab")
        self._also = also
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            # A run that goes on from a step hides what TensorBoard has beyond it.
            purge = {} if from_step is None else {"purge_step": from_step + 1}
            self._board = SummaryWriter(str(folder / "tensorboard"), **purge)

    def write(self, *, step: int, version: int, wall_s: float, values: Mapping[str, Any]) -> None:
        """One record: {"step", "version", "wall_s", and every metric under its own name}. wall_s:
        seconds since the run began. A value that is not finite is written as null."""
        if taken := set(RECORD_KEYS) & set(values):
            raise ValueError(f"metrics named {sorted(taken)} collide with the record's own keys")
        record = {
            "step": step,
            "version": version,
            "wall_s": round(wall_s, 3),
            **{name: _finite_or_none(value) for name, value in values.items()},
        }
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        for log in self._also:
            log.log(record)
        if self._board is not None:
            for name, value in record.items():
                if value is not None and name != "step":
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close both. May be called twice."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class MetricsFile(NamedTuple):
    """The records of a metrics.jsonl, oldest first; `torn` describes an unfinished last record,
    None where there is none."""

    records: list[dict[str, Any]]
    torn: str | None


def read_metrics(path: str | Path) -> MetricsFile:
    """Read a metrics.jsonl, also while it is being written.

    Lines end at "\\n" only: other Unicode line separators may stand inside a record.
    Raises DataError when the file cannot be read or a complete line is not a JSON object.
    """
    try:
        *lines, tail = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number} is not a JSON object")
        if not isinstance(record.get("step"), int):
            raise DataError(f"{path}, line {number} does not say of which step it is")
        records.append(record)
    torn = f"{path}, line {len(lines) + 1} is unfinished ({len(tail)} bytes)" if tail else None
    return MetricsFile(records, torn)


def missing_steps(run_folder: str | Path, step: int) -> list[str]:
    """A line if a run's metrics lack optimizer steps up to `step`. Raises DataError where they
    cannot be read."""
    path = Path(run_folder) / "metrics.jsonl"
    try:
        rows = read_metrics(path).records if path.exists() else []
    except DataError as error:
        raise DataError(f"{error}; remove what is broken of it, and the run goes on") from error
    found = {row["step"] for row in rows if "loss" in row}
    absent = [number for number in range(1, step + 1) if number not in found]
    if not absent:
        return []
    return [f"{path} lacks {len(absent)} of the {step} steps so far, the first is {absent[0]}"]


def supersede_after(run_folder: str | Path, step: int) -> None:
    """A run goes on from `step`: records beyond it move to metrics.superseded.jsonl, which no
    reader looks at, so that every step stands in metrics.jsonl once."""
    path = Path(run_folder) / "metrics.jsonl"
    if not path.exists():
        return
    lines: dict[bool, list[bytes]] = {True: [], False: []}
    for record in read_metrics(path).records:
        lines[record["step"] <= step].append(json.dumps(record).encode() + b"\n")
    with (path.parent / "metrics.superseded.jsonl").open("ab") as file:
        file.writelines(lines[False])
    aside = path.with_name(".metrics.jsonl")
    aside.write_bytes(b"".join(lines[True]))
    aside.replace(path)


def _finite_or_none(value: Any) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def cut_torn_tail(path: Path) -> None:
    """Cut off what a kill left of an unfinished last line; a file that is not there stays so."""
    if not path.exists():
        return
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        with path.open("r+b") as file:
            file.truncate(complete)
