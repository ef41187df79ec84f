"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def set_option(command: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the recipe, such as trainer.lr=3e-4; may be given again and again.",
    )(command)


def runs_option(command: F) -> F:
    return click.option(
        "--runs",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("runs"),
        show_default=True,
        help="The folder that run folders are in.",
    )(command)


def task_option(command: F) -> F:
    return click.option(
        "--task", metavar="NAME", help="The task to play, if it is not that of the recipe."
    )(command)


def seed_option(command: F) -> F:
    return click.option(
        "--seed", type=click.IntRange(min=0), help="Of the draws; the recipe's if absent."
    )(command)


def find_recipe(name: str | None) -> Path | None:
    """A recipe file, or the shipped recipe of that name. Raises ConfigError naming those."""
    if name is None or Path(name).is_file():
        return None if name is None else Path(name)
    shipped = {path.stem: path for place in recipe_folders() for path in place.glob("*.toml")}
    if name in shipped:
        return shipped[name]
    raise ConfigError(
        f"recipe {name} is neither a file nor a shipped recipe ({', '.join(sorted(shipped))})"
    )


def recipe_folders() -> list[Path]:
    """Where recipes are: beside the package's sources, or inside an installed package."""
    package = Path(__file__).parents[1]
    return [package.parents[1] / "recipes", package / "recipes"]


def run_folder(source: str, runs: Path) -> Path:
    """The folder of a run, found by path or name. Raises ConfigError where there is none."""
    from ..subject import find_run

    run = find_run(source, runs)
    if run is None:
        raise ConfigError(f"neither {source} nor {runs / source} is a run folder")
    return run.path
