"""Empty modules in place of packages that are imported on the way and not used by what is compared
(deepspeed, vllm and their like need an accelerator or take gigabytes)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock


class Stub(ModuleType):
    """Has every attribute."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: list[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stub(names: str) -> None:
    """Put an empty module in place of each of these packages, separated by spaces."""
    sys.meta_path.insert(0, Stubs(names.split()))
