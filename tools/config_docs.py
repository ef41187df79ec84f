"""Writes docs/config.md from the options dataclasses: every key with type, default and meaning.

python tools/config_docs.py            write it
python tools/config_docs.py --check    exit with 1 if it is not what the code says
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from estr.config import Recipe
from estr.environments import TASKS
from estr.options.corrections import CORRECTION_OPTIONS

DOCUMENT = Path(__file__).parents[1] / "docs" / "config.md"

INTRODUCTION = """\
# The recipe: every key

This page is written by `python tools/config_docs.py` from the code; a test keeps it current.

A recipe is a TOML file. Defaults come first, then the file, then `--set KEY=VALUE`, the later one
winning. Unknown keys are refused at every level. `estr check RECIPE --all` prints all values.
A table is written as `[trainer]` in the file and as `trainer.lr=...` on the command line. VALUE
is TOML (`3e-4`, `true`, `["a", "b"]`, `[{name = "tis"}, {name = "none", edge = "U"}]`); what is not
TOML is taken as text, so that names need no quotes.
"""

OPEN_TABLES = {
    "correction": """\
One table, or several (`[[correction]]`) that compose. The keys depend on `correction.name`;
`correction = "none"` is short for a table with only the name. A correction of your own is named
`"module:Class"`.""",
    "task": """\
The keys depend on `task.name`; `task = "calculator"` is short for a table with only the name. A
task of your own is named `"module:Class"`.""",
}


def render() -> str:
    """The whole document."""
    parts = [INTRODUCTION, "## Top level", _rows(Recipe, tables=False)]
    for name, hint in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(hint):
            parts += [f"## `{name}`", _summary(hint), _rows(hint)]
    parts += ["## `correction`", OPEN_TABLES["correction"]]
    for name, options in CORRECTION_OPTIONS.items():
        parts += [f'### `correction.name = "{name}"`', _summary(options), _rows(options)]
    parts += ["## `task`", OPEN_TABLES["task"]]
    for name, target in TASKS.items():
        module, _, attribute = target.partition(":")
        options = getattr(importlib.import_module(module), attribute).Options
        parts += [f'### `task.name = "{name}"`', _summary(options), _rows(options)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _summary(cls: Any) -> str:
    return " ".join((cls.__doc__ or "").split())


def _rows(cls: Any, *, tables: bool = True) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    meanings = _meanings(cls)
    hints = typing.get_type_hints(cls)
    inherited = {
        f.name
        for base in cls.__mro__[1:]
        for f in getattr(base, "__dataclass_fields__", {}).values()
    }
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in inherited):
        if dataclasses.is_dataclass(hints[field.name]) and not tables:
            continue
        cells = [
            f"`{field.name}`",
            " or ".join(_types(hints[field.name])),
            _shown(_default(field)),
            meanings.get(field.name, ""),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _meanings(cls: Any) -> dict[str, str]:
    """The string that stands under each field of a dataclass or of one that it inherits from."""
    return {
        place.target.id: " ".join(text.value.value.split())
        for owner in cls.__mro__
        if dataclasses.is_dataclass(owner)
        for place, text in itertools.pairwise(_body(owner))
        if isinstance(place, ast.AnnAssign)
        and isinstance(place.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _body(cls: Any) -> list[ast.stmt]:
    tree = ast.parse(inspect.getsource(cls))
    return typing.cast("ast.ClassDef", tree.body[0]).body


def _types(hint: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        yield from (f"`{json.dumps(choice)}`" for choice in arguments)
    elif origin is tuple and arguments == (str, ...):
        yield "list of texts"
    elif origin is tuple and arguments[-1] is Ellipsis:
        yield "table or list of tables"
    elif origin is tuple:
        yield f"list of {len(arguments)} numbers"
    elif origin is dict:
        yield "name or table"
    elif origin is Mapping:
        yield "table"
    elif origin is types.UnionType:
        yield from (name for a in arguments if a is not type(None) for name in _types(a))
    else:
        yield {bool: "true or false", int: "integer", float: "number", str: "text"}[hint]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shown(value: Any) -> str:
    return "unset" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    text = render()
    if "--check" in sys.argv[1:]:
        current = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
        sys.exit(0 if current == text else f"{DOCUMENT} is not current; run {sys.argv[0]}")
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
