"""`estr sample`: a few rollouts to read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError
from .options import runs_option, seed_option, set_option, task_option

if TYPE_CHECKING:
    from ..subject import Subject


@click.command()
@click.argument("source", metavar="RUN|MODEL")
@task_option
@click.option("-n", "num", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--before", is_flag=True, help="Only with the weights that the run started from.")
@click.option("--after", is_flag=True, help="Only with the weights of the run's end.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: argmax.")
@seed_option
@set_option
@runs_option
def sample(
    source: str,
    task: str | None,
    num: int,
    before: bool,
    after: bool,
    temperature: float | None,
    seed: int | None,
    overrides: tuple[str, ...],
    runs: Path,
) -> None:
    """Show a few rollouts.

    Of a run, before and after training, or of a model: what it read and what it wrote. The same
    held-out problems with the same random numbers each time. Rollouts are printed only; redirect
    the output to keep them.

    \b
    Examples:
      estr sample calculator
      estr sample builtin --task calculator -n 4
    """
    from ..subject import find_run, find_subject

    chosen = {"eval.temperature": temperature, "seed": seed}
    keys = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    is_run = find_run(source, runs) is not None
    if not is_run and (before or after):
        raise ConfigError(f"{source} is no run, so it has no --before and no --after")
    both = before == after
    if not is_run:
        wanted = [("model", "best")]
    else:
        wanted = [("before", "start")] if before or both else []
        wanted += [("after", "last")] if after or both else []
    for title, weights in wanted:
        subject = find_subject(
            source,
            task=task,
            overrides=[*overrides, *keys],
            weights=weights,  # type: ignore[arg-type]
            runs=runs,
        )
        _print_rollouts(title, subject, num)


def _print_rollouts(title: str, subject: Subject, num: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from ..display import rollout_head, rollout_lines
    from ..evaluation import sample_rollouts
    from ..printable import printable

    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(Text(printable(f"{title}: {subject.folder}"), style="bold cyan"))
    trajectories, decode = sample_rollouts(subject, num)
    for trajectory in trajectories:
        console.print(Text(rollout_head(trajectory)))
        console.print(rollout_lines(trajectory, decode))
