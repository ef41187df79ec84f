"""One HTML page of any number of runs: what they recorded, read once, and a page that draws it.

    metrics.jsonl --curves-------------+
    ledger --------token_facts, noise--+--> Report --page--> report.html
           --------microscope----------+
    model/ --------texts---------------+

    curves         the course of every metric; intervals over seeds
    token_facts    sums over all tokens and trajectories
    noise          does the log-ratio grow with the entropy?
    microscope     some trajectories with all of their tokens, to be read
    texts          what a token says
    runs           all of these, of every run: plain data
    page           the data as a page; assets/ holds its scripts and style sheet

Charts are of everything; only the microscope is of a sample, and says of which.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..output_files import write_whole
from .microscope import Budget
from .page import render
from .runs import Report, build_report

__all__ = ["Budget", "Report", "build_report", "render", "write_report"]


def write_report(folders: Sequence[str | Path], out: Path, budget: Budget) -> Report:
    """Write the page of these runs to `out`; returns what it shows. Raises DataError where one of
    them is no run, or the file cannot be written."""
    report = build_report(folders, budget)
    write_whole(out, render(report))
    return report
