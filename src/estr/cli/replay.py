"""`estr replay`: the logged tokens of a run under other corrections."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..output_files import require_writable, write_whole
from .options import run_folder, runs_option


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--correction",
    "-c",
    "corrections",
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="One to compare with the run's own; may be given again and again. Absent: all of them.",
)
@click.option("--steps", metavar="FROM:TO", help="Only these optimizer steps, both ends included.")
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Tokens shown of each correction that judges them differently.",
)
@click.option("--gradients", is_flag=True, help="Exact losses, gradient norms and cosines instead.")
@click.option("--step", type=click.IntRange(min=1), help="With --gradients: which optimizer step.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write everything there, as one JSON object.",
)
@runs_option
def replay(
    run: str,
    corrections: tuple[str, ...],
    steps: str | None,
    examples: int,
    gradients: bool,
    step: int | None,
    out: Path | None,
    runs: Path,
) -> None:
    """Judge the logged tokens of a run by other corrections.

    Without a model: which tokens each correction keeps, how it weighs them, and what they
    contribute to the gradient, beside the run's own correction. With --gradients: exact losses and
    gradients on one step whose weights the run still has. Results are printed; --out keeps them.

    Options of a correction are those of a recipe; + joins several to one.

    \b
    Examples:
      estr replay calculator
      estr replay calculator -c estr:tau=0.5 -c icepop:edge=B
      estr replay calculator -c "estr:surrogate=none + tis:level=geometric" --out replay.json
      estr replay calculator -c icepop --gradients
    """
    if step is not None and not gradients:
        raise ConfigError("--step needs --gradients; --steps FROM:TO chooses steps without it")
    if gradients and (steps is not None or not corrections):
        raise ConfigError("--gradients needs --correction, and --step in place of --steps")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out is not None:
        require_writable(out)
    folder = run_folder(run, runs)
    from .replay_tables import print_gradients, print_replay

    found: Any
    if gradients:
        from ..replay import replay_gradients

        with _progress("micro-batches") as tell:
            found = replay_gradients(folder, corrections, step=step, tell=tell)
        print_gradients(found)
    else:
        from ..replay import replay_corrections

        with _progress("steps") as tell:
            found = replay_corrections(
                folder,
                corrections or None,
                steps=None if steps is None else _range(steps),
                num_examples=examples,
                tell=tell,
            )
        print_replay(found, _decoder(folder))
    if out is not None:
        write_whole(out, json.dumps(found.to_json()) + "\n")
        click.echo(f"written to {out}")


def _range(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        begin, end = int(first or 1), int(last or 2**31) if colon else int(first)
    except ValueError as error:
        raise ConfigError(f"--steps {text!r} is not of the form FROM:TO") from error
    if not 1 <= begin <= end:
        raise ConfigError(f"--steps {text!r} holds no step: steps count from 1, and FROM <= TO")
    return range(begin, end + 1)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while it lasts, on a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _decoder(folder: Path) -> Callable[[list[int]], str]:
    """Token ids as text: the run's own tokenizer, or the ids themselves where it is gone."""
    from ..config import load_recipe
    from ..errors import EstrError
    from ..models import load_tokenizer
    from ..run_folder import RunFolder
    from ..subject import model_folder

    run = RunFolder.open(folder)
    saved = [path for path in (run.model_last, run.model_best) if path.is_dir()]
    try:
        tokenizer = load_tokenizer(
            saved[0] if saved else model_folder(load_recipe(folder / "config.toml"))
        )
    except EstrError as error:
        click.echo(f"token ids are shown in place of text: {error}", err=True)
        return lambda ids: "".join(f"<{i}>" for i in ids)
    return lambda ids: str(tokenizer.decode(ids))
