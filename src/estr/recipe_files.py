"""Where recipes are found: a file, or one that ships with estr, by its name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from .errors import ConfigError


def find_recipe(name: str | None) -> Path | None:
    """A recipe file, or the shipped recipe of that name. Raises ConfigError naming those."""
    if name is None or os.path.isfile(name):  # False for a name that no file can have, too
        return None if name is None else Path(name)
    shipped = {path.stem: path for place in recipe_folders() for path in place.glob("*.toml")}
    if name in shipped:
        return shipped[name]
    folder = Path(name).parent
    files = {str(folder / path.name) for path in folder.glob("*.toml")}
    near = difflib.get_close_matches(name, [*shipped, *files], n=1)
    remedy = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(sorted(shipped))}"
    raise ConfigError(f"recipe {name} is neither a file nor a shipped recipe; {remedy}")


def recipe_folders() -> list[Path]:
    """Where recipes are: beside the package's sources, or inside an installed package."""
    package = Path(__file__).parent
    return [package.parents[1] / "recipes", package / "recipes"]
