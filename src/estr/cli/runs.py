"""`estr runs`: runs looked at from their files alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from .options import run_folder, runs_option


@click.group()
def runs() -> None:
    """Check a run, or compare two, from their files.

    \b
    Examples:
      estr runs verify calculator
      estr runs diff once again
    """


@runs.command("verify")
@click.argument("run", metavar="RUN")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(run: str, runs: Path, as_json: bool) -> None:
    """Check that nothing was lost or done twice.

    In the lineage that survives all kills and resumes: every group is consumed exactly once, the
    data comes in order, steps, versions, learning rate and metrics go on without a jump, staleness
    keeps its bound, checkpoints and the ledger are whole (every byte of them is read). Exit code 1
    where something is wrong.

    \b
    Example:
      estr runs verify calculator
    """
    from ..runs import verify_run

    verdict = verify_run(run_folder(run, runs))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(verdict), default=str))
    else:
        click.echo(
            f"{verdict.run}: steps {verdict.steps}; groups dispatched {verdict.groups}, trained on "
            f"{verdict.consumed}, failed {verdict.failed}, filtered {verdict.filtered}, left "
            f"{verdict.outstanding}; resumes {verdict.resumes}"
        )
        for fault in verdict.faults:
            click.echo(f"error: {fault}", err=True)
        click.echo("nothing is wrong" if not verdict.faults else f"faults: {len(verdict.faults)}")
    if verdict.faults:
        sys.exit(1)


@runs.command("diff")
@click.argument("a", metavar="RUN")
@click.argument("b", metavar="RUN")
@runs_option
def diff(a: str, b: str, runs: Path) -> None:
    """Name the first event at which two runs part.

    Exit code 1 where they do; of two runs that are the same as far as both go, the one that ends
    first is named, and where. Of deterministic runs every token and every step of the engine is
    compared; of others the losses, versions and weights.

    \b
    Example:
      estr runs diff once again
    """
    from ..runs import first_difference, where_one_ends

    folders = run_folder(a, runs), run_folder(b, runs)
    found = first_difference(*folders)
    click.echo(found or where_one_ends(*folders) or "the same, event by event")
    if found:
        sys.exit(1)
