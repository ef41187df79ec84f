"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import ConfigError
from ..recipe_files import find_recipe as find_recipe
from ..recipe_files import recipe_folders as recipe_folders

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


def run_folder(source: str, runs: Path) -> Path:
    """The folder of a run, found by path or name. Raises ConfigError where there is none."""
    from ..subject import find_run

    run = find_run(source, runs)
    if run is None:
        raise ConfigError(f"neither {source} nor {runs / source} is a run folder")
    return run.path
