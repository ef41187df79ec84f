"""The Engine protocol over a LocalEngine in the same process, for tests and small uses.

    generate() --submit--> LocalEngine <--step()-- pump task, while there is work
               <--future------------------------------+

The pump yields to the event loop between two steps. What a step raises fails every waiting caller
with EngineError. After an EngineError (logits that are NaN) the engine can be used again, say with
other weights; anything else closes it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine import KVPolicy, Request
from ..errors import EngineError, EngineTimeout
from ..types import RolloutId, Segment
from ..weights import WeightStore
from .local import LocalEngine


class InProcessEngine:
    """All methods are called from one event loop. load_timeout_s bounds how long a load waits for
    running requests, where the engine does not switch in flight."""

    def __init__(self, engine: LocalEngine, *, load_timeout_s: float = 600.0) -> None:
        self._engine = engine
        self._load_timeout_s = load_timeout_s
        self._answers: dict[RolloutId, asyncio.Future[Segment]] = {}
        self._loads: list[tuple[int, asyncio.Future[None]]] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    def statistics(self) -> dict[str, float]:
        """The counters of the LocalEngine."""
        return self._engine.statistics()

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        self._engine.submit(request)
        answer: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = answer
        self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise EngineTimeout(
                f"{request.id}: no answer within {timeout_s:g} s; raise rollout.timeout_s"
            ) from error
        finally:
            del self._answers[request.id]
            self._engine.cancel(request.id)

    async def load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        self._engine.begin_load(version, weights.fetch(version), kv)
        if self._engine.version == version:
            return
        switched: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append((version, switched))
        self._wake()
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await switched
        except TimeoutError as error:
            raise EngineTimeout(
                f"version {version} is still waiting for running requests after "
                f"{self._load_timeout_s:g} s"
            ) from error
        finally:
            self._loads = [entry for entry in self._loads if entry[1] is not switched]

    async def snapshot(self) -> dict[RolloutId, Segment]:
        return self._engine.snapshot()

    async def probe(self, temperature: float) -> list[Segment]:
        """The canaries; see `LocalEngine.probe`."""
        return self._engine.probe(temperature)

    async def close(self) -> None:
        self._engine.close()
        self._fail_all(EngineError("the engine was closed"))
        if self._pump is not None:
            await asyncio.wait([self._pump], timeout=60.0)

    def _wake(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="engine pump")
            self._pump.add_done_callback(self._pump_ended)

    async def _run(self) -> None:
        while self._engine.num_running or self._engine.num_waiting or self._loads:
            for rollout_id, segment in self._engine.step():
                answer = self._answers.get(rollout_id)
                if answer is not None and not answer.done():
                    answer.set_result(segment)
            for version, switched in self._loads:
                if version <= self._engine.version and not switched.done():
                    switched.set_result(None)
            await asyncio.sleep(0)

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        error = None if pump.cancelled() else pump.exception()
        if error is None:
            return
        if isinstance(error, EngineError):
            self._fail_all(error)
            return
        self._engine.close()
        self._fail_all(EngineError(f"the engine failed: {type(error).__name__}: {error}"))

    def _fail_all(self, error: EngineError) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._answers.values()]
        waiting += [switched for _, switched in self._loads]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
