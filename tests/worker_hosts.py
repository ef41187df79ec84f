"""Hosts for the tests of estr.worker; spawned processes import them by name."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from estr.errors import EngineError
from estr.weights import FileWeightStore


class Unreadable:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


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

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def unreadable(self) -> Unreadable:
        return Unreadable()

    def finds(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None


class Loading:
    """Says where the weights of a load lay, and what they were."""

    def load(self, version: int, weights: FileWeightStore, kv: str) -> tuple[Path, float]:
        if kv != "keep":
            raise EngineError(f"kv is {kv}")
        return weights.folder, float(weights.fetch(version)["a"].sum())


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


class Endless:
    """An evaluator that never comes to an end."""

    deferred = ("evaluate",)

    def __init__(self) -> None:
        self.waiting = 0

    def evaluate(self, number: int, version: int, num_problems: int, k: int) -> None:
        self.waiting += 1

    def num_waiting(self) -> int:
        return self.waiting
