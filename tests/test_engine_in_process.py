"""The Engine protocol over a LocalEngine in the same process."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from engine_cases import assert_rescored, random_requests, request, serve, state_of
from estr.engine import Engine
from estr.engines.in_process import InProcessEngine
from estr.engines.local import LocalEngine
from estr.errors import EngineError, EngineTimeout, WeightsError
from estr.weights import MemoryWeightStore
from tiny_models import tiny_model

LIMIT_S = 60.0


def store_of(versions: int = 3) -> MemoryWeightStore:
    store = MemoryWeightStore()
    for version in range(versions):
        store.publish(version, state_of("llama-grouped", version))
    return store


async def until_running(engine: InProcessEngine, tokens: int) -> None:
    """Wait until every request has drawn at least so many tokens."""
    async with asyncio.timeout(LIMIT_S):
        while min((len(s) for s in (await engine.snapshot()).values()), default=0) < tokens:
            await asyncio.sleep(0)


async def test_requests_of_many_tasks_are_answered_each_its_own() -> None:
    requests = random_requests(np.random.default_rng(0), 10)
    expected = serve(LocalEngine(tiny_model()), requests)
    engine: Engine = InProcessEngine(LocalEngine(tiny_model(), max_batch=4))
    answers = await asyncio.gather(*(engine.generate(one, LIMIT_S) for one in requests))
    for one, drawn in zip(requests, answers, strict=True):
        assert drawn.token_ids.tolist() == expected[one.id].token_ids.tolist()
        assert drawn.finish_reason in ("stop", "length")
    await engine.close()


async def test_a_load_in_mid_turn_shows_in_the_versions_and_returns_when_in_force() -> None:
    store = store_of()
    engine = InProcessEngine(LocalEngine(tiny_model()))
    one = request(tokens=30)
    answer = asyncio.create_task(engine.generate(one, LIMIT_S))
    for version in (1, 2):
        await until_running(engine, 5 * version)
        await engine.load(version, store, "recompute")
        assert engine.version == version
    drawn = await answer
    assert set(drawn.versions.tolist()) == {0, 1, 2}
    assert_rescored(tiny_model(), [store.fetch(v) for v in range(3)], one, drawn)
    await engine.close()


async def test_without_in_flight_updates_a_load_waits_for_what_runs_check_71() -> None:
    store = store_of()
    engine = InProcessEngine(LocalEngine(tiny_model(), in_flight=False))
    running = asyncio.create_task(engine.generate(request(0, tokens=20), LIMIT_S))
    await until_running(engine, 2)
    loading = asyncio.create_task(engine.load(1, store, "recompute"))
    await asyncio.sleep(0)
    later = asyncio.create_task(engine.generate(request(1), LIMIT_S))
    async with asyncio.timeout(LIMIT_S):
        await loading
    assert running.done() or engine.version == 1
    assert set((await running).versions.tolist()) == {0}
    assert set((await later).versions.tolist()) == {1}
    await engine.close()


async def test_a_load_that_waits_too_long_is_an_error_and_still_comes_later() -> None:
    engine = InProcessEngine(LocalEngine(tiny_model(), in_flight=False), load_timeout_s=0.0)
    running = asyncio.create_task(engine.generate(request(tokens=20), LIMIT_S))
    await until_running(engine, 2)
    with pytest.raises(EngineTimeout, match="version 1"):
        await engine.load(1, store_of(), "recompute")
    assert set((await running).versions.tolist()) == {0}
    assert set((await engine.generate(request(1), LIMIT_S)).versions.tolist()) == {1}
    await engine.close()


async def test_a_failed_load_leaves_the_old_weights_in_force() -> None:
    store = store_of(1)
    bad = state_of("llama-grouped", 1)
    bad["lm_head.weight"][0, 0] = math.nan
    store.publish(1, bad)
    engine = InProcessEngine(LocalEngine(tiny_model()))
    for version in (1, 9):
        with pytest.raises(WeightsError):
            await engine.load(version, store, "recompute")
    assert engine.version == 0
    await engine.close()


async def test_cancelling_the_task_cancels_the_request() -> None:
    engine = InProcessEngine(LocalEngine(tiny_model()))
    kept = asyncio.create_task(engine.generate(request(0, tokens=20), LIMIT_S))
    dropped = asyncio.create_task(engine.generate(request(1, tokens=30), LIMIT_S))
    await until_running(engine, 3)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    assert set(await engine.snapshot()) == {request(0).id}
    assert len(await kept) == 20
    await engine.close()


async def test_a_request_out_of_time_is_an_engine_timeout_and_leaves() -> None:
    engine = InProcessEngine(LocalEngine(tiny_model()))
    with pytest.raises(EngineTimeout, match=r"group 0 .*rollout\.timeout_s"):
        await engine.generate(request(tokens=40), 0.0)
    assert await engine.snapshot() == {}
    assert len(await engine.generate(request(), LIMIT_S)) == 6
    await engine.close()


async def test_logits_that_are_nan_fail_every_caller_and_leave_the_engine_usable() -> None:
    model = tiny_model()
    engine = InProcessEngine(LocalEngine(model))
    answers = [asyncio.create_task(engine.generate(request(g, tokens=40), 60.0)) for g in range(3)]
    await until_running(engine, 2)
    sound = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    for failure in await asyncio.gather(*answers, return_exceptions=True):
        assert isinstance(failure, EngineError)
        assert "version 0" in str(failure)
    with pytest.raises(EngineError, match="version 0"):
        await engine.generate(request(7), LIMIT_S)
    model.load_state_dict(sound)
    assert len(await engine.generate(request(7), LIMIT_S)) == 6, "of a prompt that was kept before"
    await engine.close()


async def test_an_error_of_the_model_itself_reaches_the_caller_as_engine_error() -> None:
    model = tiny_model()
    engine = InProcessEngine(LocalEngine(model))
    answer = asyncio.create_task(engine.generate(request(tokens=40), LIMIT_S))
    await until_running(engine, 2)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(EngineError, match="RuntimeError"):
        await answer
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request(7), LIMIT_S)
    await engine.close()


async def test_closing_ends_what_runs_and_may_be_repeated() -> None:
    engine = InProcessEngine(LocalEngine(tiny_model()))
    answer = asyncio.create_task(engine.generate(request(tokens=40), LIMIT_S))
    await until_running(engine, 1)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await answer


async def test_a_refused_request_leaves_no_trace() -> None:
    engine = InProcessEngine(LocalEngine(tiny_model()))
    with pytest.raises(EngineError, match="empty"):
        await engine.generate(request(prompt=[]), LIMIT_S)
    running = asyncio.create_task(engine.generate(request(tokens=20), LIMIT_S))
    await until_running(engine, 1)
    with pytest.raises(EngineError, match="already"):
        await engine.generate(request(), LIMIT_S)
    assert len(await running) == 20
    await engine.close()
