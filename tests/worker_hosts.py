"""Hosts for the tests of estr.worker; spawned processes import them by name."""

from __future__ import annotations

import importlib.util
import os
import time

from estr.errors import EngineError


class Plain:
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise EngineError(f"start is {start}")
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def fail(self, known: bool) -> None:
        raise EngineError("known") if known else KeyError("unknown")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def exit(self, code: int) -> None:
        print("last words", flush=True)
        os._exit(code)

    def variable(self, name: str) -> str:
        return os.environ[name]

    def finds(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None


class Pumped:
    """Answers `work` after as many pumps as asked, in between taking other calls."""

    deferred = ("work",)

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.pumps = 0

    def work(self, number: int, pumps: int) -> None:
        self.left[number] = pumps

    def drop(self) -> int:
        dropped = len(self.left)
        self.left.clear()
        return dropped

    def busy(self) -> bool:
        return bool(self.left)

    def pump(self) -> list[tuple[int, object]]:
        self.pumps += 1
        self.left = {number: n - 1 for number, n in self.left.items()}
        done = [number for number, n in self.left.items() if n <= 0]
        for number in done:
            del self.left[number]
        return [(number, self.pumps) for number in done]
