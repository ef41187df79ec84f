"""`estr train`: a recipe in, a run folder out."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

import click

from ..errors import ConfigError, EstrError
from .options import find_recipe, run_folder, runs_option, set_option
from .report import DEFAULT_BUDGET, REPORT

MOST_TOKENS = 700_000
"""Of a run whose report is written at its end, for which two seconds are enough."""


@click.command()
@click.argument("recipe", required=False)
@set_option
@click.option("--resume", metavar="RUN", help="Go on with this run, from its last checkpoint.")
@click.option("--accept-changes", is_flag=True, help="Resume although the recipe has changed.")
@click.option("--deterministic", is_flag=True, help="Keep a schedule that a replay can follow.")
@click.option(
    "--replay-schedule",
    "replay",
    metavar="RUN",
    help="Do this deterministic run again, bit for bit.",
)
@runs_option
@click.option("--live/--plain", default=None, help="Display; by default live on a terminal only.")
def train(
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    accept_changes: bool,
    deterministic: bool,
    replay: str | None,
    runs: Path,
    live: bool | None,
) -> None:
    """Train a model.

    RECIPE is a TOML file or the name of a shipped recipe. Without one, the built-in model learns
    the built-in calculator task on this machine, in a few minutes. The result is a run folder,
    runs/NAME: summary.json, metrics.jsonl, report.html, the model.

    \b
    Examples:
      estr train
      estr train recipes/calculator.toml --set max_staleness=0
      estr train --resume runs/calculator
      estr train --deterministic --set name=once
      estr train --replay-schedule runs/once --set name=again
    """
    from ..config import load_recipe

    if recipe is not None and (resume or replay):
        option = "--resume" if resume else "--replay-schedule"
        raise ConfigError(f"{option} goes by the run's own recipe; give either it or RECIPE")
    if resume and replay:
        raise ConfigError("a replay that was interrupted goes on with --resume alone")
    file, folder, recorded = find_recipe(recipe), None, None
    if resume is not None:
        folder = run_folder(resume, runs)
        file = folder / "config.toml"
    if replay is not None:
        recorded = run_folder(replay, runs)
        file = recorded / "config.toml"
    if accept_changes and resume is None:
        raise ConfigError("--accept-changes belongs to --resume; a new run has no recipe to change")
    if deterministic:
        overrides = (*overrides, "deterministic=true")
    resolved = load_recipe(file, overrides)
    from ..display import reporter_for
    from ..printable import printable
    from ..run import train as train_recipe

    with reporter_for(sys.stdout, live=live) as reporter:
        summary = train_recipe(
            resolved,
            reporter=reporter,
            runs=runs,
            resume=folder,
            accept_changes=accept_changes,
            replay=recorded,
        )
    run = folder or runs / summary.name
    report = printable(report_of(run, summary.trained_tokens))
    with contextlib.suppress(OSError):  # a terminal that hung up takes nothing from a run
        click.echo(f"{'report':<18} {report}")


def report_of(run: Path, trained_tokens: int) -> str:
    """Write the report of a run that is finished, if that is quick; says where it lies, or how to
    make it. A run is not a failure because its report is."""
    from ..report import Budget, write_report

    command = f"estr report {shlex.quote(str(run))}"
    if trained_tokens > MOST_TOKENS:
        return f"{command} makes a page of it"
    try:
        write_report([run], run / REPORT, Budget(*DEFAULT_BUDGET))
    except EstrError as error:
        return f"none: {error}; try again with {command}"
    return str(run / REPORT)
