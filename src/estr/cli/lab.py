"""`estr lab`: a claim of the paper, re-measured."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from ..errors import ConfigError


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--quick", is_flag=True, help="One seed, a quarter of the steps, nothing tuned.")
@click.option("--seeds", type=click.IntRange(1, 10), help="Seeds to judge on, from 10 up.")
@click.option(
    "--only",
    multiple=True,
    metavar="LABEL=VALUE",
    help="Leave out the runs with another value of this label; may be repeated.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("lab"),
    show_default=True,
    help="Folder of results and of finished runs; the same command goes on from them.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
def lab(
    name: str, quick: bool, seeds: int | None, only: tuple[str, ...], out: Path, jobs: int
) -> None:
    """Re-measure a claim of the paper on this machine.

    NAME is compare, staleness, sensitivity, controls, scaling, switches, fidelity or paper (all of
    them). Every run takes a core for seconds to a minute; finished ones are kept, so stopping costs
    nothing. The result is one table, the verdicts, a page and, with matplotlib, a figure.

    \b
    Examples:
      estr lab paper --quick
      estr lab compare --only regime=M --seeds 5
    """
    from ..lab.experiments import find_experiment
    from ..lab.lab import Lab, write_report
    from ..lab.progress import SweepProgress
    from ..lab.sweep import Sweep

    experiment = find_experiment(name)
    started = time.monotonic()
    with SweepProgress(sys.stderr) as progress:
        sweep = Sweep(out, processes=jobs, progress=progress)
        report = experiment.run(Lab(sweep, quick=quick, num_seeds=seeds, only=_only(only)))
    folder = out / f"{name}-quick" if quick else out / name
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_report(name, report, folder)
    for claim in report.claims:
        click.echo(f"{claim.answer:<10} {claim.claim}")
        click.echo(f"{'':<10} here: {claim.measured or 'nothing'}; published: {claim.published}")
    click.echo(f"wall time  {time.monotonic() - started:.0f} s")
    click.echo(f"results    {', '.join(map(str, paths))}")


def _only(words: tuple[str, ...]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for word in words:
        label, equals, value = word.partition("=")
        if not (label and equals and value):
            raise ConfigError(f"--only {word!r} is not of the form label=value")
        wanted.setdefault(label, []).append(value)
    return wanted
