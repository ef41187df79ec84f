"""Natural lag: a real asynchronous run of `estr.train` as a job of the laboratory.

Engine and trainer are processes of their own and the lag is whatever comes of their speeds, so a
run takes two cores, does not repeat itself, and its lag belongs to the machine. The rows are named
as those of `estr.lab.training`, so both stand in one table.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import recipe_from_table
from ..errors import DataError
from ..metrics import RECORD_KEYS, read_metrics
from ..own_folders import own_folder, remove_abandoned
from ..run import train
from ..run_folder import RunFolder
from .table import Row
from .training import has_collapsed

_RUNS = "lab-run"


def train_naturally(table: Mapping[str, Any]) -> list[Row]:
    """One run of the recipe `table` (as a recipe file has it); its folder is not kept."""
    recipe = recipe_from_table({**table, "ledger": False})
    place = Path(tempfile.gettempdir())
    remove_abandoned(_RUNS, place)
    runs = own_folder(_RUNS, place)
    try:
        train(recipe, runs=runs)
        return rows_of_run(runs / recipe.name)
    finally:
        shutil.rmtree(runs, ignore_errors=True)


def rows_of_run(folder: Path) -> list[Row]:
    """The metrics of every step and the held-out accuracy at both ends of a finished run."""
    run = RunFolder.open(folder)
    rows: list[Row] = []
    for record in read_metrics(run.path / "metrics.jsonl").records:
        rows += [
            {"measure": name, "step": record["step"], "value": value}
            for name, value in record.items()
            if name not in RECORD_KEYS
        ]
    summary = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    start, end, step = summary["start_accuracy"], summary["final_accuracy"], summary["steps"]
    if start is None or end is None:
        raise DataError(
            f"{folder} has no held-out accuracy at its start and end; let it run to its end"
        )
    found = {
        "accuracy_start": start,
        "accuracy_end": end,
        "accuracy": end,
        "collapsed": float(has_collapsed(start, end, False)),
    }
    rows.append({"measure": "accuracy", "step": 0, "value": start})
    return rows + [{"measure": n, "step": step, "value": v} for n, v in found.items()]
