"""What a run left, typed: read from its folder, so that an old run tells as much as a new one.

result = read_run("calculator")          runs/calculator
result.before.accuracy, result.after.interval, result.model_last
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError
from .metrics import read_metrics
from .run_folder import RunFolder, Summary
from .subject import find_run, stamped_version

_ABOUT_A_ROW = ("step", "version", "wall_s", "time")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out evaluation of a run.

    step, version: optimizer steps made by then, and the version of the weights. accuracy: share of
    solved rollouts. interval: 95 %, bootstrap over problems; None: the run did not write it down.
    num_problems: how many were played.
    """

    step: int
    version: int
    accuracy: float
    interval: tuple[float, float] | None
    num_problems: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What came of a run. It may stand wherever a run is named, as in `estr.evaluate(result)`.

    folder: the run folder, runs/NAME. summary: everything about the run as a whole, see
    estr.run_folder.Summary. before, after: the first and the last held-out evaluation (None: not
    measured); best: that of model/best. metrics: the last optimizer step, by the names of
    docs/metrics.md; a metric that this step does not have is absent.
    """

    folder: Path
    summary: Summary
    before: HeldOut | None
    after: HeldOut | None
    best: HeldOut | None
    metrics: Mapping[str, float]

    @property
    def steps(self) -> int:
        """Optimizer steps made."""
        return self.summary.steps

    @property
    def version(self) -> int:
        """Of the weights at the end."""
        return self.summary.version

    @property
    def model_best(self) -> Path:
        """Hugging Face folder of the best version at held-out evaluation."""
        return RunFolder(self.folder).model_best

    @property
    def model_last(self) -> Path:
        """Hugging Face folder of the version at the end."""
        return RunFolder(self.folder).model_last

    @property
    def metrics_file(self) -> Path:
        """Every optimizer step and evaluation, one JSON object a line."""
        return self.folder / "metrics.jsonl"

    def __fspath__(self) -> str:
        return str(self.folder)


def read_run(
    source: str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs"
) -> TrainResult:
    """The result of a finished run: its folder, or its name under `runs`.

    Raises DataError where there is no such run, it is not finished, or its files are torn.
    """
    folder = Path(runs)
    run = find_run(source, folder)
    if run is None:
        name = os.fspath(source)
        raise DataError(f"neither {name} nor {folder / name} is a run folder")
    if not run.is_finished():
        raise DataError(
            f"{run.path} is not finished: it has no summary.json; go on with "
            f"estr train --resume {shlex.quote(str(run.path))}"
        )
    rows = read_metrics(run.path / "metrics.jsonl").records
    found = [_accuracy(row) for row in rows if "eval/accuracy" in row]
    steps = [row for row in rows if "loss" in row]
    return TrainResult(
        folder=run.path,
        summary=run.summary(),
        before=found[0] if found else None,
        after=found[-1] if found else None,
        best=_best(found, run.model_best),
        metrics=_numbers(steps[-1]) if steps else {},
    )


def _best(found: Sequence[HeldOut], model_best: Path) -> HeldOut | None:
    """That of the model in model_best; where it cannot be told, the one of the highest lower end,
    as evaluations differ in size."""
    try:
        kept = stamped_version(model_best)
    except DataError:
        kept = None
    of_it = [one for one in found if one.version == kept]
    return max(of_it or found, key=_lower_end, default=None)


def _lower_end(found: HeldOut) -> float:
    return found.accuracy if found.interval is None else found.interval[0]


def _accuracy(row: Mapping[str, Any]) -> HeldOut:
    low, high = row.get("eval/accuracy_low"), row.get("eval/accuracy_high")
    return HeldOut(
        step=int(row["step"]),
        version=int(row["version"]),
        accuracy=float(row["eval/accuracy"]),
        interval=None if low is None or high is None else (float(low), float(high)),
        num_problems=int(row["eval/problems"]),
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in _ABOUT_A_ROW and isinstance(value, int | float)
    }
