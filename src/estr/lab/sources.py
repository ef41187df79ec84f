"""The source files behind a module: its own and those that it imports, and so on.

Read, never imported: an import of a user's module may do anything. Imports inside of functions
count as those at the top do; those for type checkers do not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

Import = tuple[int, str, tuple[str, ...]]
"""(level, module, names): `from ..a import b, c` is (2, "a", ("b", "c"))."""


def closure(start: Iterable[Path], root: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """`start` and every wanted file below `root`, a folder of modules, that it leads to; sorted."""
    found = set(start)
    todo = list(found)
    while todo:
        for file in _imported(todo.pop(), root):
            if file not in found and wanted(file):
                found.add(file)
                todo.append(file)
    return sorted(found)


def digest_of(files: Iterable[Path], root: Path) -> str:
    """Of names and contents. Of Python's source formatting and comments do not count."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{os.path.relpath(file, root)}\n{_read(file)[0]}\n".encode())
    return digest.hexdigest()


def files_of_module(name: str) -> tuple[list[Path], Path | None]:
    """Of a module that a user names: its file, or all Python files of the package that it is in;
    with whatever they import that lies beside them, but no installed package. And the folder that
    holds them. Nothing where there is no such module."""
    top = _find(name.partition(".")[0])
    if top is None:
        return [], None
    places = list(top.submodule_search_locations or ())
    if places:
        folder = Path(places[0])
        start, root = list(folder.rglob("*.py")), folder.parent
    elif top.origin is not None and Path(top.origin).is_file():
        start, root = [Path(top.origin)], Path(top.origin).parent
    else:
        return [], None  # built into the interpreter

    def is_beside(file: Path) -> bool:
        return "site-packages" not in file.parts

    return closure(start, root, is_beside), root


def _find(name: str) -> ModuleSpec | None:
    """As `estr.functions.import_object` would: what lies in the current folder is found, too."""
    try:
        return find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])
    except (ImportError, ValueError):
        return None


def _imported(file: Path, root: Path) -> Iterator[Path]:
    for level, module, names in _read(file)[1]:
        base = file.parents[level - 1] if level else root
        base = base.joinpath(*module.split(".")) if module else base
        for name in (None, *names):
            place = base if name is None else base / name
            for candidate in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if candidate.is_file():
                    yield candidate
                    yield from _initializers(candidate, root)


def _initializers(file: Path, root: Path) -> Iterator[Path]:
    """What Python runs of the packages that a module is in."""
    for folder in file.parents:
        if folder == root:
            return
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"


def _read(file: Path) -> tuple[str, tuple[Import, ...]]:
    status = file.stat()
    return _parse(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _parse(file: Path, mtime_ns: int, size: int) -> tuple[str, tuple[Import, ...]]:
    """(digest, imports) of a file as it was at that time."""
    data = file.read_bytes()
    imports = _Imports()
    if file.suffix == ".py":
        try:
            tree = ast.parse(data)
            imports.visit(tree)
            data = ast.dump(tree).encode()
        except (SyntaxError, ValueError):
            pass  # whoever runs it is told; until then it is data
    return hashlib.sha256(data).hexdigest(), tuple(imports.found)


class _Imports(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Import] = []

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)
            return
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(0, alias.name, ()) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        names = tuple(alias.name for alias in node.names)
        self.found.append((node.level, node.module or "", names))
