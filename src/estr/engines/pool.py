"""Several engines as one, of which any may die and be replaced.

    rollouts --Request--> EnginePool --by group--> engine 0, engine 1, ...
    loop ----load(v)----> EnginePool --to all----> acknowledged when the last living one has it

- All rollouts of a group ask one engine, so that their common prompt is computed once.
- An engine that dies or hangs takes nothing with it: the turns that it was writing are asked of
  another one, from their first token (or the checkpoint's) and with the same random numbers. Where
  none lives they wait, as long as their own time limit allows.
- A replacement loads the newest version that the pool was told to load, and only then serves.

No token of a group is older than its dispatch version: the pool acknowledges a version when every
living engine has it, and no engine ever goes back or joins with an older one. Nor does a rollout go
back: after a death only engines serve that are as new as the one that died.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from ..calls import all_or_none
from ..engine import Engine, KVPolicy, Request
from ..errors import EngineError, EngineTimeout, WeightsError, WorkerDied, WorkerError
from ..types import RolloutId, Segment
from ..weights import WeightStore

MAX_MOVES = 3
"""How many engines may die under one turn; then its member is tried again as after any error."""

MAX_FAILURES = 3
"""Starts in a row that fail, or end before a single answer, while no engine lives: the run ends."""

_PAUSE_S = 10.0
"""Between two attempts to bring a replacement up."""


class PoolEngine(Engine, Protocol):
    """What the pool asks of an engine; `EngineProcess` is one. Where the engine has died, whatever
    it raises has a WorkerDied as its cause, or is one."""

    async def probe(self, temperature: float) -> list[Segment]:
        """Its canaries."""
        ...

    async def statistics(self) -> dict[str, float]:
        """Its counters since its start."""
        ...

    async def watch(self, timeout_s: float) -> None:
        """Runs until the engine has died or has not answered for timeout_s: WorkerError."""
        ...

    def take_busy(self) -> float:
        """Share of wall time at work since this was last asked."""
        ...

    @property
    def seen(self) -> dict[str, float]:
        """The counters that `watch` has seen last."""
        ...


class EnginePool:
    """The Engine protocol over `engines`, all of the same version. start: brings up engine number i
    anew, at any version. tell: is told of deaths and replacements."""

    def __init__(
        self,
        engines: list[PoolEngine],
        start: Callable[[int], Awaitable[PoolEngine]],
        *,
        tell: Callable[[str], None] = lambda line: None,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._engines: list[PoolEngine | None] = list(engines)
        self._start = start
        self._tell = tell
        self._pause_s = pause_s
        self._version = engines[0].version
        self._least = 0
        """The version that an engine must have to serve; rises at a death."""
        self._newest: tuple[int, WeightStore, KVPolicy] | None = None
        """What was to be loaded last."""
        self._changed = asyncio.Event()
        self._asked: dict[RolloutId, Request] = {}
        self._answers: Counter[int] = Counter()
        self._retired: dict[str, float] = {}
        """Statistics of the engines that have died."""
        self.num_deaths = 0

    @classmethod
    async def bring_up(
        cls,
        count: int,
        start: Callable[[int], Awaitable[PoolEngine]],
        *,
        tell: Callable[[str], None] = lambda line: None,
    ) -> EnginePool:
        """All at once; as soon as one does not come up, the others are given up."""
        starts = [asyncio.ensure_future(start(index)) for index in range(count)]
        return cls(await all_or_none(*starts), start, tell=tell)

    @property
    def version(self) -> int:
        return self._version

    @property
    def living(self) -> list[PoolEngine]:
        """The engines that are up now."""
        return [engine for engine in self._engines if engine is not None]

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        self._asked[request.id] = request
        try:
            async with asyncio.timeout(timeout_s):
                return await self._generate(request, timeout_s)
        except TimeoutError as error:
            raise EngineTimeout(
                f"{request.id}: no answer within {timeout_s:g} s; {len(self.living)} of "
                f"{len(self._engines)} engines live"
            ) from error
        finally:
            if self._asked.get(request.id) is request:
                del self._asked[request.id]

    async def _generate(self, request: Request, timeout_s: float) -> Segment:
        for move in range(MAX_MOVES + 1):
            index, engine = await self._engine_for(request)
            try:
                segment = await engine.generate(request, timeout_s)
            except EngineError as error:
                if not _is_death(error) or move == MAX_MOVES:
                    raise
                self._lose(index, engine, error)
            else:
                self._answers[index] += 1
                return segment
        raise AssertionError("the last move returns or raises")

    async def _engine_for(self, request: Request) -> tuple[int, PoolEngine]:
        """The group's own engine, or the next one that can serve; waits for one."""
        count = len(self._engines)
        while True:
            for step in range(count):
                index = (request.id.group + step) % count
                engine = self._engines[index]
                if engine is not None and engine.version >= self._least:
                    return index, engine
            self._changed.clear()
            await self._changed.wait()

    # -- weights ------------------------------------------------------------------------------

    async def load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        self._newest = (version, weights, kv)
        engines = [(i, engine) for i, engine in enumerate(self._engines) if engine is not None]
        loads = (engine.load(version, weights, kv) for _, engine in engines)
        for (index, engine), error in zip(
            engines, await asyncio.gather(*loads, return_exceptions=True), strict=True
        ):
            if error is not None:
                if not _is_death(error):
                    raise error
                self._lose(index, engine, error)
        self._version = max(self._version, version)
        self._changed.set()

    # -- what a checkpoint, the guard and the metrics ask -------------------------------------

    async def snapshot(self) -> dict[RolloutId, Segment]:
        asked = dict(self._asked)
        drawn: dict[RolloutId, Segment] = {}
        snapshots = (engine.snapshot() for engine in self.living)
        for part in await asyncio.gather(*snapshots, return_exceptions=True):
            if isinstance(part, BaseException):
                if not _is_death(part):
                    raise part
                continue
            drawn |= part
        # The engines answer one after the other: a turn may have ended since the first did.
        return {
            rollout_id: segment
            for rollout_id, segment in drawn.items()
            if rollout_id in asked and self._asked.get(rollout_id) is asked[rollout_id]
        }

    async def probes(self, temperature: float) -> list[list[Segment]]:
        """The canaries of every engine; of one that dies meanwhile none."""
        probes = (engine.probe(temperature) for engine in self.living)
        answers = await asyncio.gather(*probes, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not _is_death(answer):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def statistics(self) -> dict[str, float]:
        """Counters of all engines together, of those that have died as far as was seen."""
        asked = (engine.statistics() for engine in self.living)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not _is_death(answer):
                raise answer
        living = [answer for answer in answers if not isinstance(answer, BaseException)]
        return _sum([self._retired, *living])

    @property
    def seen(self) -> dict[str, float]:
        """The statistics as far as `watch` has seen them."""
        return _sum([self._retired, *(engine.seen for engine in self.living)])

    def take_busy(self) -> float:
        """Mean share of wall time at work, of the living engines, since this was last asked."""
        shares = [engine.take_busy() for engine in self.living]
        return sum(shares) / len(shares) if shares else 0.0

    # -- death and replacement ----------------------------------------------------------------

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.living))

    async def watch(self, timeout_s: float) -> None:
        """Runs for ever: notices engines that have died or have not answered for timeout_s, and
        replaces them. Raises WorkerDied when none lives and none can be brought up."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._engines)):
                tasks.create_task(self._keep(index, timeout_s), name=f"keep engine {index}")

    async def _keep(self, index: int, timeout_s: float) -> None:
        failures = 0
        while True:
            engine = self._engines[index]
            try:
                if engine is None:
                    engine = await self._join(index)
                await engine.watch(timeout_s)
            except WorkerError as error:
                failures = 0 if self._answers.pop(index, 0) else failures + 1
                if engine is None:
                    self._tell(f"engine {index} does not come up again: {error}")
                else:
                    self._lose(index, engine, error)
                    await engine.close()
                if failures >= MAX_FAILURES and not self.living:
                    raise WorkerDied(
                        f"no engine lives, and engine {index} has failed {failures} times in a "
                        f"row: {error}"
                    ) from error
                if engine is None:
                    await asyncio.sleep(self._pause_s)

    async def _join(self, index: int) -> PoolEngine:
        engine = await self._start(index)
        try:
            while (newest := self._newest) is not None and engine.version != newest[0]:
                try:
                    await engine.load(*newest)
                except WeightsError:
                    if newest is self._newest:
                        raise  # else it is forgotten by now, since there is a newer one
        except BaseException:
            await engine.close()
            raise
        self._engines[index] = engine
        self._changed.set()
        self._tell(f"engine {index} has joined at version {engine.version}")
        return engine

    def _lose(self, index: int, engine: PoolEngine, error: BaseException) -> None:
        """It serves no more; whoever finds out first says so."""
        if self._engines[index] is not engine:
            return
        self._engines[index] = None
        self._least = max(self._least, engine.version)
        self._retired = _sum([self._retired, engine.seen])
        self.num_deaths += 1
        self._tell(
            f"engine {index} is lost: {error}; what it was writing is asked of "
            f"{'the others' if self.living else 'its replacement'}"
        )


def _is_death(error: BaseException) -> bool:
    return isinstance(error, WorkerDied) or isinstance(error.__cause__, WorkerDied)


def _sum(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in counters:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total
