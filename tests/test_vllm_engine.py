"""vLLM behind the Engine protocol: what it records, and what becomes of it at a switch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from estr.engine import KVPolicy, Request
from estr.engines.process import EngineProcess
from estr.errors import ConfigError, EngineError, EngineTimeout, WeightsError
from estr.options.run import EngineOptions
from estr.types import Segment
from estr.weights import FileWeightStore
from vllm_cases import FOLDER, LIMIT_S, MARKS, PYTHON, TOLERANCE, Versions, request

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]

OPTIONS = EngineOptions(name="vllm", python=PYTHON, max_batch=16, kv_cache_gb=0.5)


@pytest.fixture(scope="module")
def versions() -> Versions:
    return Versions(3)


@pytest.fixture(scope="module")
def store(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> FileWeightStore:
    store = FileWeightStore(tmp_path_factory.mktemp("weights"), keep=4)
    for version, state in enumerate(versions.states):
        if version == 2:  # the tied output layer without a name of its own
            state = {name: t for name, t in state.items() if name != "lm_head.weight"}
        store.publish(version, state)
    return store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    engine = await EngineProcess.start(FOLDER, OPTIONS, log=log)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: EngineProcess, store: FileWeightStore) -> EngineProcess:
    """The shared engine, under version 0."""
    if shared.version != 0:
        await shared.load(0, store, "recompute")
    return shared


async def run_all(engine: EngineProcess, requests: list[Request]) -> list[Segment]:
    return await asyncio.gather(*(engine.generate(one, LIMIT_S) for one in requests))


async def until_drawn(engine: EngineProcess, requests: list[Request], count: int) -> None:
    """Until every request has drawn at least `count` tokens."""
    while True:
        drawn = await engine.snapshot()
        if all(len(drawn.get(one.id, ())) >= count for one in requests):
            return
        await asyncio.sleep(0.01)


async def switched(
    engine: EngineProcess, store: FileWeightStore, requests: list[Request], kv: KVPolicy
) -> list[Segment]:
    """The requests, with version 1 coming after their third token or a little later."""
    running = asyncio.gather(*(engine.generate(one, LIMIT_S) for one in requests))
    await until_drawn(engine, requests, 3)
    await engine.load(1, store, kv)
    return await running


async def test_records_agree_with_our_own_function(
    engine: EngineProcess, versions: Versions
) -> None:
    asked = [
        request(group, length=5 + 30 * group, temperature=temperature)
        for group, temperature in enumerate([1.0, 0.7, 1.3, 1.0, 0.3, 2.0])
    ]
    for one, drawn in zip(asked, await run_all(engine, asked), strict=True):
        assert len(drawn) == 12
        assert drawn.finish_reason == "length"
        assert set(drawn.versions.tolist()) == {0}
        versions.assert_rescored(one, drawn)


async def test_stop_tokens_greedy_draws_and_refusals(
    engine: EngineProcess, versions: Versions
) -> None:
    greedy = request(20, tokens=6, temperature=0.0)
    (first,) = await run_all(engine, [greedy])
    stop = int(first.token_ids[3])
    place = first.token_ids.tolist().index(stop)
    stopping = Request(
        greedy.id,
        greedy.token_ids,
        type(greedy.sampling)(temperature=0.0, stop_token_ids=(stop,)),
        6,
        greedy.first_position,
    )
    (second,) = await run_all(engine, [stopping])
    assert second.token_ids.tolist() == first.token_ids.tolist()[: place + 1]
    assert second.finish_reason == "stop"
    with pytest.raises(EngineError, match="token id 49152 is outside the vocabulary"):
        await engine.generate(request(21, prompt=[49152]), LIMIT_S)


async def test_eight_running_requests_survive_a_switch(
    engine: EngineProcess, versions: Versions, store: FileWeightStore
) -> None:
    """Every token, scored again by the weights of its own version, agrees: so the version that it
    carries is right at the token. Their prompts are more than vLLM reads in one step."""
    asked = [request(group, length=7 * group + 40, tokens=16) for group in range(30, 38)]
    for one, drawn in zip(asked, await switched(engine, store, asked, "recompute"), strict=True):
        assert len(drawn) == 16
        assert sorted(drawn.versions.tolist()) == drawn.versions.tolist()
        assert set(drawn.versions.tolist()) == {0, 1}
        versions.assert_rescored(one, drawn)
        border = int(np.argmax(drawn.versions))
        wrong = versions.errors(one, drawn, 0)["behavior_logprobs"][border:]
        assert wrong.max() > 100 * TOLERANCE, "the two versions are told apart"


async def test_with_kept_caches_requests_go_on_as_hybrids(
    engine: EngineProcess, versions: Versions, store: FileWeightStore
) -> None:
    """Up to the switch the tokens are of version 0; after it of no version alone. A new request
    with the very same prompt finds nothing of the older version."""
    asked = [request(group, length=300, tokens=12) for group in range(40, 42)]
    results = await switched(engine, store, asked, "keep")
    for one, drawn in zip(asked, results, strict=True):
        assert len(drawn) == 12
        border = int(np.argmax(drawn.versions))
        assert drawn.versions.tolist() == [0] * border + [1] * (12 - border)
        old, new = (versions.errors(one, drawn, version) for version in (0, 1))
        assert all(error[:border].max() < TOLERANCE for error in old.values())
        assert old["behavior_logprobs"][border:].max() > 10 * TOLERANCE
        assert new["behavior_logprobs"][border:].max() > 10 * TOLERANCE
    before = await engine.statistics()
    again = request(42, prompt=asked[0].token_ids)
    (drawn,) = await run_all(engine, [again])
    after = await engine.statistics()
    assert after["cached_tokens"] == before["cached_tokens"]
    versions.assert_rescored(again, drawn)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_a_repeated_prompt_after_an_update_equals_a_cold_engine(
    engine: EngineProcess, versions: Versions, store: FileWeightStore, kv: KVPolicy
) -> None:
    prompt = request(50, length=300).token_ids
    cached = []
    for group, version in ((51, 0), (52, 0), (53, 2), (54, 2)):
        if engine.version != version:
            await engine.load(version, store, kv)
        before = await engine.statistics()
        asked = request(group, prompt=prompt)
        (drawn,) = await run_all(engine, [asked])
        after = await engine.statistics()
        cached.append(after["cached_tokens"] - before["cached_tokens"])
        assert set(drawn.versions.tolist()) == {version}
        versions.assert_rescored(asked, drawn)
    # 300 tokens are nine whole blocks of 32; the first time, they may be there from another case.
    assert cached[1:] == [288, 0, 288]


async def test_weights_that_do_not_fit_leave_the_old_ones_in_force(
    engine: EngineProcess, versions: Versions, tmp_path: Path
) -> None:
    store = FileWeightStore(tmp_path, keep=4)
    state = dict(versions.states[1])
    name = "model.layers.3.mlp.up_proj.weight"
    store.publish(1, {k: v for k, v in state.items() if k != name})
    store.publish(2, state | {name: state[name][:-1]})
    store.publish(3, state | {name: state[name] * float("nan")})
    for version, message in ((1, "1 missing"), (2, "has shape"), (3, "NaN"), (4, "not readable")):
        with pytest.raises(WeightsError, match=message):
            await engine.load(version, store, "recompute")
    asked = request(60)
    (drawn,) = await run_all(engine, [asked])
    assert set(drawn.versions.tolist()) == {0}
    versions.assert_rescored(asked, drawn)


async def test_logits_that_are_no_distribution_are_an_error_and_no_token(
    engine: EngineProcess, versions: Versions, tmp_path: Path, store: FileWeightStore
) -> None:
    state = dict(versions.states[0])
    state["model.norm.weight"] = state["model.norm.weight"] * 1e38
    broken = FileWeightStore(tmp_path)
    broken.publish(5, state)
    await engine.load(5, broken, "recompute")
    with pytest.raises(EngineError, match=r"no distribution .* under version 5"):
        await engine.generate(request(70), LIMIT_S)
    await engine.load(0, store, "recompute")
    asked = request(71)
    (drawn,) = await run_all(engine, [asked])
    versions.assert_rescored(asked, drawn)


async def test_a_request_goes_on_from_a_snapshot(engine: EngineProcess, versions: Versions) -> None:
    """With the tokens that it had, and with the uniform of the next place."""
    asked = request(80, tokens=16)
    running = asyncio.create_task(engine.generate(asked, LIMIT_S))
    await until_drawn(engine, [asked], 4)
    part = (await engine.snapshot())[asked.id]
    running.cancel()
    await asyncio.wait([running])
    assert await engine.snapshot() == {}
    (resumed,) = await run_all(engine, [request(80, tokens=16, drawn=part)])
    assert len(resumed) == 16
    assert resumed.token_ids[: len(part)].tolist() == part.token_ids.tolist()
    versions.assert_rescored(asked, resumed)
    with pytest.raises(EngineError, match="complete"):
        await engine.generate(request(80, tokens=16, drawn=resumed), LIMIT_S)


async def test_what_is_cancelled_or_late_leaves_nothing_behind(engine: EngineProcess) -> None:
    asked = [request(group, tokens=400) for group in range(90, 93)]
    tasks = [asyncio.create_task(engine.generate(one, LIMIT_S)) for one in asked]
    with pytest.raises(EngineTimeout):
        await engine.generate(request(93, tokens=400), 0.05)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await engine.snapshot() == {}
    (drawn,) = await run_all(engine, [request(94, tokens=2)])
    assert len(drawn) == 2


async def test_too_little_room_for_keys_and_values_is_named() -> None:
    too_small = replace(OPTIONS, kv_cache_gb=1e-4)
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_gb = 0\.0001 has too little room"):
        await EngineProcess.start(FOLDER, too_small)
