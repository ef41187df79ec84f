"""`estr lab`: a claim of the paper, re-measured."""

from __future__ import annotations

import contextlib
import datetime
import re
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..lab.lab import Lab, Report


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--quick", is_flag=True, help="One seed, a quarter of the steps, nothing tuned.")
@click.option("--seeds", type=click.IntRange(1, 10), help="Seeds to judge on, from 10 up.")
@click.option(
    "--only",
    multiple=True,
    metavar="LABEL=VALUE",
    help="Leave out the runs with another value of this label, such as regime=M or method=tis; may "
    "be repeated. Runs without the label, and the reference, stay. The result lies in a folder of "
    "its own.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("lab"),
    show_default=True,
    help="Folder of results and of finished runs; the same command goes on from them.",
)
@click.option(
    "--from",
    "tables",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TABLE",
    help="A table.parquet of the same experiment, made elsewhere: its runs are not made again if "
    "they are of the same code; may be repeated.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option(
    "--recipe",
    metavar="RECIPE",
    help="With compare: on this recipe's model and task, by `estr train`, one run at a time; a "
    "file, or a shipped recipe by name. Up to 8 trainings for each seed, 3 seeds unless --seeds "
    "says otherwise.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --recipe: change one key of it, such as steps=50; may be repeated.",
)
def lab(
    name: str,
    quick: bool,
    seeds: int | None,
    only: tuple[str, ...],
    out: Path,
    tables: tuple[Path, ...],
    jobs: int,
    recipe: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Re-measure a claim of the paper on this machine.

    NAME is compare, staleness, sensitivity, controls, scaling, switches, fidelity, diversity,
    collapse, selector, rules, or paper (every claim of the paper: all but the three before). Every
    run takes a core for seconds to a minute; finished ones are kept, so stopping costs nothing. The
    result is one table, the verdicts, a page and, with matplotlib, a figure.

    \b
    Examples:
      estr lab paper --quick
      estr lab compare --only regime=M --seeds 5
      estr lab compare --recipe mine.toml --set steps=50
    """
    from ..lab.experiments import find_experiment
    from ..lab.lab import Lab, write_report
    from ..lab.own import NUM_SEEDS
    from ..lab.progress import SweepProgress
    from ..lab.sweep import Sweep
    from ..lab.table import rows_by_job

    run = find_experiment(name).run
    if recipe is not None:
        own, run = _on_recipe(name, quick, recipe, overrides)
        # Each such run is several processes, as fast as the machine; two at once would share it.
        name, seeds, jobs = f"{name}-{own}", seeds or NUM_SEEDS, 1
    elif overrides:
        raise ConfigError("--set changes a recipe, and there is none; name one with --recipe")
    started = time.monotonic()
    elsewhere = rows_by_job(tables)
    folder = out / "-".join([name, *(["quick"] if quick else []), *_part(only, overrides)])
    with _made_folder(folder), SweepProgress(sys.stderr) as progress:
        bench = Lab(
            Sweep(out, processes=jobs, progress=progress, elsewhere=elsewhere),
            quick=quick,
            num_seeds=seeds,
            only=_only(only),
        )
        report = run(bench)
        bench.only.check()
    for claim in report.claims:
        click.echo(f"{claim.answer:<10} {claim.claim}")
        published = f"; published: {claim.published}" if claim.published else ""
        click.echo(f"{'':<10} here: {claim.measured or 'nothing'}{published}")
    click.echo(f"wall time  {time.monotonic() - started:.0f} s")
    paths = write_report(name, report, folder, _made(report))
    click.echo(f"results    {', '.join(map(str, paths))}")


def _part(only: tuple[str, ...], overrides: tuple[str, ...]) -> list[str]:
    """What a part of an experiment adds to the name of its folder, so that it does not take the
    place of the whole."""
    words = "_".join((*only, *overrides))
    if not words:
        return []
    plain = re.sub(r"[^\w.=+-]+", "-", words)
    return [plain if len(plain) <= 80 else f"{plain[:80]}-{zlib.crc32(words.encode()):08x}"]


@contextlib.contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """It is made before anything is computed, so that nothing is computed that cannot be kept; what
    is refused leaves no empty one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be made: {error.strerror}; choose another --out"
        ) from error
    try:
        yield
    except ConfigError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise


def _made(report: Report) -> dict[str, str | int]:
    """Where a report comes from."""
    from .. import __version__
    from ..bench import machine

    return {
        "command": shlex.join(["estr", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "estr": __version__,
        "machine": machine(),
        "runs": len({row["job"] for row in report.rows}),
    }


def _on_recipe(
    name: str, quick: bool, recipe: str, overrides: tuple[str, ...]
) -> tuple[str, Callable[[Lab], Report]]:
    """(the recipe's name, the comparison on it)."""
    from ..config import load_recipe
    from ..lab.own import compare_recipe
    from ..recipe_files import find_recipe

    if name != "compare" or quick:
        raise ConfigError(
            "--recipe goes with `estr lab compare` alone, without --quick; fewer steps: "
            "--set steps=20"
        )
    found = load_recipe(find_recipe(recipe), overrides)
    if any(word.partition("=")[0].strip() == "seed" for word in overrides):
        raise ConfigError(
            "--set seed=... would change nothing: every method runs on the seeds 10, 11, ...; "
            "--seeds says on how many"
        )
    return found.name, lambda lab: compare_recipe(lab, found)


def _only(words: tuple[str, ...]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for word in words:
        label, equals, value = word.partition("=")
        if not (label and equals and value):
            raise ConfigError(f"--only {word!r} is not of the form label=value")
        wanted.setdefault(label, []).append(value)
    return wanted
