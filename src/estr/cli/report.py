"""`estr report`: runs as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from .options import run_folder, runs_option

REPORT = "report.html"
"""The report of a run, in its folder."""

DEFAULT_BUDGET = (600, 500_000)
"""Trajectories that can be read, and their tokens."""


@click.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; report.html in the folder of the first RUN if absent.",
)
@click.option(
    "--trajectories",
    type=click.IntRange(min=1),
    default=DEFAULT_BUDGET[0],
    show_default=True,
    help="How many can be read token by token, of all runs together.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_BUDGET[1],
    show_default=True,
    help="How many tokens these may have together.",
)
@runs_option
def report(
    names: tuple[str, ...], out: Path | None, trajectories: int, tokens: int, runs: Path
) -> None:
    """Make one HTML page of a run, or of several laid over one another.

    It needs no network and no other file. Charts count everything that the runs recorded; some
    trajectories can be read token by token. Runs that differ in nothing but their seed are drawn as
    one, with intervals.

    \b
    Examples:
      estr report calculator
      estr report calculator calculator-2 calculator-3 --out seeds.html
    """
    from rich.console import Console

    from ..output_files import require_writable
    from ..printable import printable
    from ..report import Budget, write_report

    folders = [run_folder(name, runs) for name in names]
    out = out or folders[0] / REPORT
    require_writable(out)
    with Console(stderr=True).status("reading the runs"):
        made = write_report(folders, out, Budget(trajectories, tokens))
    for run in made.runs:
        for note in run.notes:
            click.echo(f"note: {printable(f'{run.name}: {note}')}", err=True)
    click.echo(f"report: {printable(str(out))} ({out.stat().st_size / 1e6:.1f} MB)")
