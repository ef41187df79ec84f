"""`estr check`: everything that is wrong with a recipe."""

from __future__ import annotations

import sys

import click

from .options import find_recipe, set_option


@click.command()
@click.argument("recipe", required=False)
@set_option
def check(recipe: str | None, overrides: tuple[str, ...]) -> None:
    """Check a recipe, spend no compute.

    Prints it as resolved, and everything that is wrong with it: model, task, stop tokens and
    correction are looked up, and the gold answers of a few problems are played through tokenizer,
    budgets and grader. The output is TOML, itself a recipe.

    \b
    Example:
      estr check recipes/calculator.toml --set correction.tau=0.5
    """
    from ..check import check_recipe
    from ..display import printable

    findings = check_recipe(find_recipe(recipe), overrides)
    if findings.recipe is not None:
        click.echo(findings.recipe.to_toml(), nl=False)
    for note in findings.notes:
        click.echo(f"# {printable(note)}")
    for error in findings.errors:
        click.echo(f"error: {printable(error)}", err=True)
    if findings.errors:
        sys.exit(2)
