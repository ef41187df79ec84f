"""Several engines as one: who serves, who may die, which version is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from estr.engine import Request, ScriptedEngine
from estr.engines.pool import MAX_MOVES, EnginePool
from estr.errors import EngineError, EngineTimeout, WeightsError, WorkerDied
from estr.types import RolloutId, SamplingSettings, Segment
from estr.weights import MemoryWeightStore, WeightStore

TOKENS = [3, 1, 4, 1, 5]


class Mortal(ScriptedEngine):
    """A ScriptedEngine that can be killed, as `EngineProcess` is: whatever waits hears of it."""

    def __init__(self, version: int = 0, token_s: float = 0.001) -> None:
        super().__init__(lambda request: TOKENS, version=version, token_s=token_s)
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.slow_load = asyncio.Event()
        self.slow_load.set()

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result("killed by SIGKILL")

    async def _unless_dead(self, work):
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            task.cancel()
            raise WorkerDied(self._death.result())
        return task.result()

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        try:
            return await self._unless_dead(super().generate(request, timeout_s))
        except WorkerDied as error:
            raise EngineError(str(error)) from error

    async def load(self, version: int, weights: WeightStore, kv: str) -> None:
        await self._unless_dead(self.slow_load.wait())
        await super().load(version, weights, kv)

    async def snapshot(self) -> dict[RolloutId, Segment]:
        return await self._unless_dead(super().snapshot())

    async def probe(self, temperature: float) -> list[Segment]:
        return await self._unless_dead(asyncio.sleep(0, [Segment.context([self.version])]))

    async def statistics(self) -> dict[str, float]:
        return await self._unless_dead(asyncio.sleep(0, self.seen))

    async def watch(self, timeout_s: float) -> None:
        raise WorkerDied(await asyncio.shield(self._death))

    def take_busy(self) -> float:
        return 0.5

    @property
    def seen(self) -> dict[str, float]:
        return {"tokens": float(len(TOKENS) * self.num_requests)}

    async def close(self) -> None:
        self.closed = True
        self.die()


class Farm:
    """Makes engines and keeps every one that it has made."""

    def __init__(self, make: Callable[[], Mortal] = Mortal) -> None:
        self.make = make
        self.made: list[Mortal] = []
        self.told: list[str] = []

    async def start(self, index: int) -> Mortal:
        self.made.append(self.make())
        return self.made[-1]

    async def pool(self, count: int) -> EnginePool:
        return await EnginePool.bring_up(count, self.start, tell=self.told.append)


def request(group: int, index: int = 0) -> Request:
    return Request(
        id=RolloutId(0, group, index),
        token_ids=np.array([7], dtype=np.int32),
        sampling=SamplingSettings(),
        max_new_tokens=8,
        first_position=1,
    )


def store_of(*versions: int, keep: int = 6) -> MemoryWeightStore:
    store = MemoryWeightStore(keep)
    for version in versions:
        store.publish(version, {})
    return store


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_group_asks_one_engine_and_groups_are_spread() -> None:
    farm = Farm()
    pool = await farm.pool(3)
    requests = [request(group, index) for group in range(6) for index in range(4)]
    segments = await asyncio.gather(*(pool.generate(r, 5.0) for r in requests))
    assert all(segment.token_ids.tolist() == TOKENS for segment in segments)
    assert [engine.num_requests for engine in farm.made] == [8, 8, 8]
    assert await pool.statistics() == {"tokens": 24.0 * len(TOKENS)}
    assert pool.take_busy() == 0.5
    await pool.close()
    assert all(engine.closed for engine in farm.made)


async def test_one_that_does_not_come_up_ends_the_others() -> None:
    made: list[Mortal] = []

    async def start(index: int) -> Mortal:
        if index == 1:
            raise WorkerDied("no room")
        made.append(Mortal())
        return made[-1]

    with pytest.raises(WorkerDied, match="no room"):
        await EnginePool.bring_up(3, start)
    assert made
    assert all(engine.closed for engine in made)


async def test_turns_of_a_dead_engine_are_asked_of_another_and_answered_once() -> None:
    farm = Farm(lambda: Mortal(token_s=0.02))
    pool = await farm.pool(2)
    turns = [asyncio.create_task(pool.generate(request(0, index), 30.0)) for index in range(4)]
    await until(lambda: farm.made[0].num_requests == 4)
    farm.made[0].die()
    segments = await asyncio.gather(*turns)
    assert [segment.token_ids.tolist() for segment in segments] == [TOKENS] * 4
    assert farm.made[1].num_requests == 4
    assert pool.num_deaths == 1
    assert pool.living == [farm.made[1]]
    assert "engine 0 is lost: killed by SIGKILL; what it was writing is asked of the others" in (
        farm.told
    )


async def test_an_engine_under_which_no_turn_survives_gives_up() -> None:
    farm = Farm(lambda: Mortal(token_s=10.0))
    pool = await farm.pool(MAX_MOVES + 2)
    turn = asyncio.create_task(pool.generate(request(0), 30.0))
    for engine in farm.made[: MAX_MOVES + 1]:
        await until(lambda engine=engine: engine.num_requests == 1)
        engine.die()
    with pytest.raises(EngineError, match="SIGKILL"):
        await turn


async def test_a_replacement_joins_at_the_newest_version() -> None:
    farm = Farm()
    pool = await farm.pool(2)
    store = store_of(1, 2, 3)
    await pool.load(3, store, "recompute")
    assert pool.version == 3
    watching = asyncio.create_task(pool.watch(5.0))
    farm.made[0].die()
    await until(lambda: len(pool.living) == 2 and farm.made[0].closed)
    assert farm.made[2].loads == [3]
    assert farm.told[-1] == "engine 0 has joined at version 3"
    assert (await pool.generate(request(0), 5.0)).versions.tolist() == [3] * len(TOKENS)
    assert farm.made[2].num_requests == 1
    watching.cancel()


async def test_turns_wait_while_no_engine_lives() -> None:
    farm = Farm()
    pool = await farm.pool(1)
    farm.made[0].die()
    turn = asyncio.create_task(pool.generate(request(0), 30.0))
    with pytest.raises(EngineTimeout, match="0 of 1 engines live"):
        await pool.generate(request(1), 0.05)
    watching = asyncio.create_task(pool.watch(5.0))
    assert (await turn).token_ids.tolist() == TOKENS
    watching.cancel()


async def test_no_version_is_acknowledged_before_every_living_engine_has_it() -> None:
    farm = Farm()
    pool = await farm.pool(2)
    store = store_of(1)
    farm.made[1].slow_load.clear()
    load = asyncio.create_task(pool.load(1, store, "recompute"))
    await until(lambda: farm.made[0].version == 1)
    assert pool.version == 0
    farm.made[1].slow_load.set()
    await load
    assert pool.version == 1


async def test_a_death_during_a_load_does_not_hold_it_up_and_no_rollout_goes_back() -> None:
    farm = Farm()
    pool = await farm.pool(3)
    store = store_of(1)
    farm.made[1].slow_load.clear()
    farm.made[2].slow_load.clear()
    load = asyncio.create_task(pool.load(1, store, "recompute"))
    await until(lambda: farm.made[0].version == 1)
    farm.made[0].die()
    turn = asyncio.create_task(pool.generate(request(0), 10.0))
    await until(lambda: pool.num_deaths == 1)
    await asyncio.sleep(0.02)
    assert farm.made[1].num_requests == farm.made[2].num_requests == 0
    farm.made[1].die()
    farm.made[2].slow_load.set()
    await load
    assert (await turn).versions.tolist() == [1] * len(TOKENS)
    assert pool.version == 1


async def test_a_joiner_whose_version_is_forgotten_takes_the_newer_one() -> None:
    farm = Farm()
    pool = await farm.pool(2)
    store = store_of(1, keep=1)
    await pool.load(1, store, "recompute")
    farm.make = lambda: _with_a_slow_load(Mortal())
    watching = asyncio.create_task(pool.watch(5.0))
    farm.made[0].die()
    await until(lambda: len(farm.made) == 3)
    store.publish(2, {})
    await pool.load(2, store, "recompute")
    farm.made[2].slow_load.set()
    await until(lambda: len(pool.living) == 2)
    assert farm.made[2].loads == [2]
    watching.cancel()


def _with_a_slow_load(engine: Mortal) -> Mortal:
    engine.slow_load.clear()
    return engine


async def test_weights_that_are_not_there_end_the_load() -> None:
    pool = await Farm().pool(2)
    with pytest.raises(WeightsError):
        await pool.load(9, store_of(1), "recompute")
    assert pool.version == 0


async def test_a_snapshot_has_only_turns_that_are_still_being_written() -> None:
    farm = Farm(lambda: Mortal(token_s=0.02))
    pool = await farm.pool(2)
    turns = [asyncio.create_task(pool.generate(request(group), 30.0)) for group in range(2)]
    await until(lambda: all(engine.num_requests for engine in farm.made))
    ended = request(5)
    farm.made[0]._running[ended.id] = (TOKENS, [0] * len(TOKENS))
    assert set(await pool.snapshot()) == {RolloutId(0, 0, 0), RolloutId(0, 1, 0)}
    farm.made[1].die()
    assert set(await pool.snapshot()) == {RolloutId(0, 0, 0)}
    await asyncio.gather(*turns)
    assert await pool.snapshot() == {}


async def test_every_living_engine_shows_its_canaries() -> None:
    farm = Farm()
    pool = await farm.pool(3)
    assert len(await pool.probes(1.0)) == 3
    farm.made[1].die()
    assert len(await pool.probes(1.0)) == 2


async def test_statistics_never_go_back() -> None:
    farm = Farm()
    pool = await farm.pool(2)
    await asyncio.gather(*(pool.generate(request(group), 5.0) for group in range(4)))
    before = await pool.statistics()
    watching = asyncio.create_task(pool.watch(5.0))
    farm.made[0].die()
    await until(lambda: len(pool.living) == 2)
    assert await pool.statistics() == pool.seen == before
    watching.cancel()


async def test_engines_that_only_die_end_the_run() -> None:
    farm = Farm()
    pool = await EnginePool.bring_up(1, farm.start, tell=farm.told.append)

    def stillborn() -> Mortal:
        engine = Mortal()
        engine.die()
        return engine

    farm.make = stillborn
    farm.made[0].die()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(pool.watch(5.0), 10)
    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerDied)
    assert "no engine lives, and engine 0 has failed 3 times in a row" in str(error)


async def test_a_start_that_fails_is_tried_again() -> None:
    farm = Farm()
    attempts = 0

    async def start(index: int) -> Mortal:
        nonlocal attempts
        attempts += 1
        if attempts in (3, 4):
            raise WorkerDied("no room")
        return await farm.start(index)

    pool = EnginePool([await start(0), await start(1)], start, tell=farm.told.append, pause_s=0.01)
    watching = asyncio.create_task(pool.watch(5.0))
    farm.made[0].die()
    await until(lambda: len(pool.living) == 2 and attempts == 5)
    assert [line for line in farm.told if "does not come up again: no room" in line]
    watching.cancel()
