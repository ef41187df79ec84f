"""`estr check`: everything that is wrong with a recipe."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from .options import find_recipe, set_option

if TYPE_CHECKING:
    from ..check import Findings


@click.command()
@click.argument("recipe", required=False)
@click.option("--all", "show_all", is_flag=True, help="Print every value, defaults included.")
@set_option
def check(recipe: str | None, show_all: bool, overrides: tuple[str, ...]) -> None:
    """Check a recipe, spend no compute.

    Prints what it sets, and everything that is wrong with it: model, task, stop tokens and
    correction are looked up, and the gold answers of a few problems are played through tokenizer,
    budgets and grader. Three of them are shown as tokens decode: what is read, and what is written
    and so trained on (in color). The output is TOML, itself a recipe; nothing is written to disk.

    \b
    Example:
      estr check recipes/calculator.toml --set correction.tau=0.5
    """
    import tomli_w

    from ..check import check_recipe
    from ..printable import printable

    with contextlib.redirect_stdout(sys.stderr):  # what a user's own functions print is no recipe
        findings = check_recipe(find_recipe(recipe), overrides)
    if findings.recipe is not None:
        if show_all:
            click.echo(findings.recipe.to_toml(), nl=False)
        else:
            click.echo(tomli_w.dumps(findings.given), nl=False)
            click.echo("# every other key has its default; --all prints all values")
    for note in findings.notes:
        click.echo(f"# {printable(note)}")
    _show(findings)
    for error in findings.errors:
        click.echo(f"error: {printable(error)}", err=True)
    if findings.errors:
        sys.exit(2)


def _show(findings: Findings) -> None:
    """Each rollout as comments, so that the output stays TOML."""
    from rich.console import Console
    from rich.text import Text

    from ..display import rollout_lines
    from ..printable import printable

    console = Console(file=sys.stdout, soft_wrap=True)
    several = len({trajectory.task for trajectory in findings.shown}) > 1
    for trajectory in findings.shown:
        of = f" of {printable(trajectory.task)}" if several else ""
        console.print(Text(f"# problem {trajectory.problem}{of}:"))
        for line in rollout_lines(trajectory, findings.decode).split("\n", allow_blank=False):
            console.print(Text("# ").append_text(line))
