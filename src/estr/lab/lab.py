"""What an experiment is given, and what it gives back.

    run(lab: Lab) -> Report      in experiments/NAME.py, beside TITLE

An experiment makes jobs, has them run (`lab.run`), and reads claims, tables and a figure off the
rows; it computes nothing that is not in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..output_files import write_whole
from .methods import JUDGE_SEEDS, REFERENCE, TUNE_SEEDS
from .only import LATER, Only
from .statistics import Answer
from .sweep import Job, Sweep
from .table import Row, read_table, write_table


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper and what became of it here. published: the paper's own figure; measured:
    ours, in words; why: what the answer rests on."""

    claim: str
    published: str
    measured: str
    answer: Answer
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """rows: the tidy table. tables: title -> lines, each a mapping of column to text. draw(path)
    makes the figure; None: there is none."""

    rows: list[Row]
    claims: list[Claim] = field(default_factory=list)
    tables: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    draw: Callable[[Path], None] | None = None


class Lab:
    """The bench of one experiment. quick: one seed, a quarter of the steps, nothing tuned. only:
    label -> the values that jobs may have; a job without that label runs. strict: a label or value
    of `only` that the first jobs do not have is refused before any of them runs."""

    def __init__(
        self,
        sweep: Sweep,
        *,
        quick: bool = False,
        num_seeds: int | None = None,
        only: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._sweep = sweep
        self.quick = quick
        self.only = Only(only or {})
        self.strict = True
        self._has_run = False
        wanted = num_seeds if num_seeds is not None else 1 if quick else len(JUDGE_SEEDS)
        if not 1 <= wanted <= len(JUDGE_SEEDS):
            raise ConfigError(
                f"--seeds must be within 1 and {len(JUDGE_SEEDS)}, not {wanted}: it says on how "
                f"many of the seeds {JUDGE_SEEDS[0]} to {JUDGE_SEEDS[-1]}"
            )
        self.judge_seeds = JUDGE_SEEDS[:wanted]
        self.tune_seeds = () if quick else TUNE_SEEDS

    def base(self) -> dict[str, Any]:
        """The configuration that runs share, but for what an experiment sets."""
        short = {"steps": 30, "window": 15, "eval_problems": 128, "eval_k": 1}
        return short if self.quick else {"steps": 120, "window": 40}

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """The rows of those jobs that --only leaves in; the reference runs beside any of them.

        Raises ConfigError where --only has a word that no job has, or leaves none of the first jobs
        in; DataError for an accuracy that is not finite."""
        self.only.see(jobs)
        if self.strict and not self._has_run and jobs:
            self.only.check(but=LATER)
            if not any(map(self.only.matches, jobs)):
                raise ConfigError(
                    f"{self.only} leaves out all {len(jobs)} runs that come first, and nothing "
                    f"comes after; {_told_labels(jobs, self.only)}"
                )
        self._has_run = True
        rows = self._sweep.run([job for job in jobs if self._wanted(job)])
        for row in rows:
            value = row.get("value")
            if row["measure"] == "accuracy" and (value is None or not math.isfinite(value)):
                raise DataError(
                    f"the run {row['job']} in the cache has an accuracy of {value}; delete its file"
                )
        return rows

    def _wanted(self, job: Job) -> bool:
        return job.labels.get("regime") == REFERENCE or self.only.matches(job)


def _told_labels(jobs: Sequence[Job], only: Only) -> str:
    """What those labels are, of the jobs, that something was asked of."""
    return "; ".join(
        f"{label} is " + ", ".join(sorted({str(job.labels.get(label)) for job in jobs}))
        for label in only.labels
    )


def write_report(
    name: str, report: Report, folder: Path, made: Mapping[str, Any] | None = None
) -> list[Path]:
    """table.parquet, verdict.json (claims, tables and `made`: by what command, when, where),
    report.md and, with matplotlib, figure.png; the paths. Each is there whole or not at all."""
    table, verdict, page = (folder / n for n in ("table.parquet", "verdict.json", "report.md"))
    figure = folder / "figure.png"
    write_table(report.rows, table)
    kept = {
        "experiment": name,
        "made": dict(made or {}),
        "claims": [dataclasses.asdict(claim) for claim in report.claims],
        "tables": {title: list(lines) for title, lines in report.tables.items()},
    }
    write_whole(verdict, json.dumps(kept, indent=2) + "\n")
    write_whole(page, as_markdown(name, report))
    figure.unlink(missing_ok=True)  # the one there is of an older table
    if report.draw is None or not _can_draw():
        return [table, verdict, page]
    report.draw(figure)
    return [table, verdict, page, figure]


def as_markdown(name: str, report: Report) -> str:
    """Claims and tables as a page shows them."""
    parts = [f"# {name}", ""]
    if report.claims:
        parts += _lines([dataclasses.asdict(claim) for claim in report.claims])
    for title, lines in report.tables.items():
        parts += [f"## {title}", "", *_lines(lines)]
    return "\n".join(parts)


def _lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    if not rows:
        return ["not run yet", ""]
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return [
        *lines,
        *("| " + " | ".join(_cell(row.get(n, "")) for n in names) + " |" for row in rows),
        "",
    ]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _can_draw() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


__all__ = ["Claim", "Job", "Lab", "Report", "Row", "as_markdown", "read_table", "write_report"]
