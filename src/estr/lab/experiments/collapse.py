"""`collapse`: which indicators preceded the collapses, how early, how often for nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from .. import figures
from ..indicators import INDICATORS, RunCurves, as_line, runs_of, warned
from ..lab import Claim, Lab, Report
from ..methods import ALL_METHODS, REGIMES
from ..protocol import Choice, cell_jobs
from ..rules import RATES
from ..statistics import MIN_PAIRS, Answer
from ..sweep import Job
from ..table import Row

TITLE = "indicators before a collapse"

COMPARED = ("M", "D", "MD")
METHODS = ("none", "icepop", "kpop", "estr", "dppo")
RECORDS: dict[str, int] = {"window": 5, "eval_problems": 128}
"""A record every five steps, at the price of a smaller held-out set."""

LEAD = 10
USEFUL = 0.5


def run(lab: Lab) -> Report:
    rows = lab.run(jobs(lab))
    runs = runs_of(rows)
    found = {name: warned(runs, indicator) for name, indicator in INDICATORS.items()}
    leads = {name: its.leads for name, its in found.items() if its is not None and its.leads}
    lines = [as_line(name, its) for name, its in found.items() if its is not None]
    return Report(
        rows,
        [claim(name, runs) for name in INDICATORS],
        {"indicators": lines, "collapses": counts(rows)},
        functools.partial(figures.dots, {"collapses": leads}, ylabel="steps from alarm to onset")
        if leads
        else None,
    )


def jobs(lab: Lab) -> list[Job]:
    """Methods at their defaults, as a user would start with."""
    regimes, methods = (COMPARED[:1], METHODS[:2]) if lab.quick else (COMPARED, METHODS)
    return [
        dataclasses.replace(job, config={**job.config, **RECORDS})
        for regime in regimes
        for method in methods
        for job in cell_jobs(
            lab,
            (regime, method),
            REGIMES[regime],
            Choice(RATES[regime], *ALL_METHODS[method].default),
            lab.judge_seeds,
        )
    ]


def claim(name: str, runs: Sequence[RunCurves]) -> Claim:
    found = warned(runs, INDICATORS[name])
    answer: Answer = "not run" if not runs else "undecided"
    measured = "no collapse, or no healthy run in one half of the seeds" if runs else ""
    if found is not None:
        early = sum(lead >= LEAD for lead in found.leads)
        measured = (
            f"{early} of {found.collapsed} collapses by {LEAD} steps or more, "
            f"{found.false_alarms} of {found.healthy} healthy runs for nothing"
        )
        if min(found.collapsed, found.healthy) >= MIN_PAIRS:
            answer = "holds" if early >= USEFUL * found.collapsed else "not here"
    return Claim(
        f"{name} warns of a collapse",
        "",
        measured,
        answer,
        f"at least {USEFUL:.0%} of the collapses {LEAD} steps before; runs of the other seeds; "
        f"{MIN_PAIRS} collapses and {MIN_PAIRS} healthy runs at least",
    )


def counts(rows: Sequence[Row]) -> list[dict[str, str]]:
    """How many runs of each cell collapsed, and when."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["regime"], row["method"]), []).append(row)
    lines = []
    for (regime, method), own in cells.items():
        runs = runs_of(own)
        onsets = sorted(run.onset for run in runs if run.onset is not None)
        lines.append(
            {
                "regime": regime,
                "method": method,
                "collapsed": f"{len(onsets)} of {len(runs)}",
                "onset, steps": ", ".join(map(str, onsets)),
            }
        )
    return lines
