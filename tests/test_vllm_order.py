"""Without in-flight updates a load waits; with little room the oldest deadline goes first."""

from __future__ import annotations

import asyncio
from pathlib import Path

from estr.engines.process import EngineProcess
from estr.options.run import EngineOptions
from estr.types import RolloutId
from estr.weights import FileWeightStore
from vllm_cases import FOLDER, LIMIT_S, MARKS, PYTHON, Versions, request

pytestmark = MARKS


async def test_running_requests_finish_under_the_old_weights_and_deadlines_decide(
    tmp_path: Path,
) -> None:
    versions = Versions(2)
    store = FileWeightStore(tmp_path / "weights", keep=2)
    store.publish(1, versions.states[1])
    options = EngineOptions(name="vllm", python=PYTHON, max_batch=2, kv_cache_gb=0.5, gini=False)
    engine = await EngineProcess.start(FOLDER, options, in_flight=False, log=tmp_path / "log.txt")
    ends: list[RolloutId] = []

    async def ask(group: int, deadline: int):
        asked = request(group, deadline=deadline, tokens=8)
        drawn = await engine.generate(asked, LIMIT_S)
        ends.append(asked.id)
        return drawn

    try:
        first = [asyncio.create_task(ask(group, 0)) for group in (0, 1)]
        while len(await engine.snapshot()) < 2:
            await asyncio.sleep(0.01)
        later = [asyncio.create_task(ask(group, 9 - group)) for group in (2, 3, 4, 5)]
        while len(await engine.snapshot()) < 6:
            await asyncio.sleep(0.01)
        await engine.load(1, store, "recompute")
        drawn = await asyncio.gather(*first, *later)
    finally:
        await engine.close()
    assert [set(s.versions.tolist()) for s in drawn] == [{0}] * 2 + [{1}] * 4
    assert {rollout.group for rollout in ends[2:4]} == {4, 5}
    assert all(s.behavior_gini is None for s in drawn)
