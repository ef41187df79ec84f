"""What an experiment is given, and what it gives back.

    run(lab: Lab) -> Report      in experiments/NAME.py, beside TITLE

An experiment makes jobs, has them run (`lab.run`), and reads claims, tables and a figure off the
rows; it computes nothing that is not in them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .methods import JUDGE_SEEDS, REFERENCE, TUNE_SEEDS
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
    label -> the values that jobs may have; a job without that label runs."""

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
        self._only = dict(only or {})
        wanted = num_seeds if num_seeds is not None else 1 if quick else len(JUDGE_SEEDS)
        if not 1 <= wanted <= len(JUDGE_SEEDS):
            raise ConfigError(f"--seeds must be within 1 and {len(JUDGE_SEEDS)}, not {wanted}")
        self.judge_seeds = JUDGE_SEEDS[:wanted]
        self.tune_seeds = () if quick else TUNE_SEEDS

    def base(self) -> dict[str, Any]:
        """The configuration that runs share, but for what an experiment sets."""
        short = {"steps": 30, "window": 15, "eval_problems": 128, "eval_k": 1}
        return short if self.quick else {"steps": 120, "window": 40}

    def wants(self, label: str, value: str) -> bool:
        """Whether --only leaves this value of a label in."""
        return label not in self._only or value in self._only[label]

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """The rows of those jobs that --only leaves in; the reference always runs."""
        return self._sweep.run([job for job in jobs if self._wanted(job)])

    def _wanted(self, job: Job) -> bool:
        is_reference = job.labels.get("regime") == REFERENCE
        return is_reference or all(self.wants(k, str(v)) for k, v in job.labels.items())


def write_report(name: str, report: Report, folder: Path) -> list[Path]:
    """table.parquet, verdict.json, report.md and, with matplotlib, figure.png; the paths."""
    table, verdict, page = (folder / n for n in ("table.parquet", "verdict.json", "report.md"))
    write_table(report.rows, table)
    claims = [dataclasses.asdict(claim) for claim in report.claims]
    verdict.write_text(
        json.dumps({"experiment": name, "claims": claims}, indent=2) + "\n", encoding="utf-8"
    )
    page.write_text(as_markdown(name, report), encoding="utf-8")
    paths = [table, verdict, page]
    if report.draw is not None and _can_draw():
        report.draw(folder / "figure.png")
        paths.append(folder / "figure.png")
    return paths


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
        *("| " + " | ".join(str(row.get(n, "")) for n in names) + " |" for row in rows),
        "",
    ]


def _can_draw() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


__all__ = ["Claim", "Job", "Lab", "Report", "Row", "as_markdown", "read_table", "write_report"]
