"""An engine's host that notes when its tokens come, inside the engine's own process.

It goes in the place of `estr.engines.process.EngineHost`, for the local engine and for vLLM alike.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ..engine import KVPolicy
from ..engines.process import EngineHost
from ..weights import WeightStore


class Mark(NamedTuple):
    """The end of one engine step that drew tokens. wall_s: time.monotonic(), which all processes of
    a machine share; cpu_s: of the engine's process; version: of the weights then."""

    wall_s: float
    cpu_s: float
    tokens: int
    version: int


class Taken(NamedTuple):
    """What a load took before the step that it came in front of: read, verify, copy."""

    wall_s: float
    cpu_s: float


class TimedHost(EngineHost):
    """EngineHost with a mark after each step and each load. Its own cost is two clock readings."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._marks: list[Mark] = []
        self._taken: list[Taken] = []
        self._tokens = 0.0

    def pump(self) -> list[tuple[int, Any]]:
        results = super().pump()
        tokens = self._engine.statistics()["tokens"]
        if tokens > self._tokens:
            drawn = int(tokens - self._tokens)
            self._marks.append(
                Mark(time.monotonic(), time.process_time(), drawn, self._engine.version)
            )
        self._tokens = tokens
        return results

    def load(self, number: int, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        super().load(number, version, weights, kv)
        self._taken.append(Taken(time.monotonic() - wall, time.process_time() - cpu))

    def take_marks(self) -> tuple[list[Mark], list[Taken]]:
        """Everything since this was last asked."""
        found = self._marks, self._taken
        self._marks, self._taken = [], []
        return found
