"""vLLM's weight transfer in vLLM itself, on the CPU: its factory, its worker's steps and its
layers, with our engine for gloo. NCCL and CUDA IPC differ in the transport alone: test_gpu.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from estr.config import load_recipe
from estr.engine import KVPolicy
from estr.engines.process import EngineProcess
from estr.engines.transfer import TransferStore
from estr.errors import EngineError, WeightsError
from estr.options.run import EngineOptions
from estr.trainer_process import TrainerProcess
from vllm_cases import FOLDER, LIMIT_S, MARKS, PYTHON, TOLERANCE, Versions, request

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]

OPTIONS = EngineOptions(
    name="vllm", python=PYTHON, max_batch=16, kv_cache_gb=0.5, weight_transfer="gloo"
)
TIED = "lm_head.weight"


@pytest.fixture(scope="module")
def versions() -> Versions:
    versions = Versions(3)
    # As the trainer publishes them: a tied tensor once.
    versions.published = [
        {name: tensor for name, tensor in state.items() if name != TIED}
        for state in versions.states
    ]
    return versions


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TransferStore:
    """Its sender lives in this process, which plays the trainer."""
    folder = tmp_path_factory.mktemp("weights")
    return TransferStore(folder, 4, backend="gloo", device="cpu", timeout_s=LIMIT_S / 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    engine = await EngineProcess.start(FOLDER, OPTIONS, log=log)
    yield engine
    await engine.close()


async def load(
    engine: EngineProcess, store: TransferStore, version: int, kv: KVPolicy = "recompute"
) -> None:
    """The newest version, whose tensors come out of memory."""
    before = await engine.statistics()
    await engine.load(version, store, kv)
    after = await engine.statistics()
    assert after["transfers"] == before["transfers"] + 1


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_running_requests_survive_a_transfer(
    engine: EngineProcess, store: TransferStore, versions: Versions, kv: KVPolicy
) -> None:
    """Every token carries the version that it was drawn under: scored again by it, it agrees; with
    kept caches, up to the switch. A request after the switch finds nothing of the older version."""
    store.publish(0, versions.published[0])
    await load(engine, store, 0)
    store.publish(1, versions.published[1])
    first = 100 if kv == "recompute" else 200
    asked = [request(first + i, length=7 * i + 40, tokens=16) for i in range(8)]
    running = asyncio.gather(*(engine.generate(one, LIMIT_S) for one in asked))
    while True:
        drawn = await engine.snapshot()
        if all(len(drawn.get(one.id, ())) >= 3 for one in asked):
            break
        await asyncio.sleep(0.01)
    await load(engine, store, 1, kv)
    for one, segment in zip(asked, await running, strict=True):
        border = int(np.argmax(segment.versions))
        assert segment.versions.tolist() == [0] * border + [1] * (16 - border)
        assert border >= 3
        if kv == "recompute":
            versions.assert_rescored(one, segment)
        old = versions.errors(one, segment, 0)["behavior_logprobs"]
        assert old[:border].max() < TOLERANCE
        assert old[border:].max() > 10 * TOLERANCE
    again = request(first + 9, prompt=asked[7].token_ids)
    fresh = await engine.generate(again, LIMIT_S)
    assert set(fresh.versions.tolist()) == {1}
    versions.assert_rescored(again, fresh)


async def test_what_does_not_fit_or_is_gone_leaves_the_engine_whole(
    engine: EngineProcess, store: TransferStore, versions: Versions
) -> None:
    store.publish(0, versions.published[0])
    await load(engine, store, 0)
    name = "model.layers.3.mlp.up_proj.weight"
    good = versions.published[1]
    for change, message in (
        ({name: good[name][:-1]}, "has shape"),
        ({name: good[name] * float("nan")}, "NaN"),
        ({name: good[name].bfloat16()}, "dtype bfloat16"),
    ):
        store.publish(1, good | change)
        with pytest.raises(WeightsError, match=message):
            await engine.load(1, store, "recompute")
    asked = request(300)
    drawn = await engine.generate(asked, LIMIT_S)
    assert set(drawn.versions.tolist()) == {0}
    versions.assert_rescored(asked, drawn)
    # The trainer has gone on to version 2 by the time that version 1 is loaded: out of the file.
    store.publish(1, good)
    store.publish(2, versions.published[2])
    before = await engine.statistics()
    await engine.load(1, store, "recompute")
    assert (await engine.statistics())["transfers"] == before["transfers"]
    asked = request(301)
    drawn = await engine.generate(asked, LIMIT_S)
    assert set(drawn.versions.tolist()) == {1}
    versions.assert_rescored(asked, drawn)
    await load(engine, store, 2)
    asked = request(302)
    versions.assert_rescored(asked, await engine.generate(asked, LIMIT_S))


async def test_a_trainer_process_sends_to_the_engine(
    engine: EngineProcess, versions: Versions, tmp_path: Path
) -> None:
    """Both as in a run. The engine meets this sender anew, as after a resume it would."""
    store = TransferStore(tmp_path, 4, backend="gloo", device="cpu", timeout_s=LIMIT_S / 2)
    recipe = load_recipe(overrides=["guard=off", "engine.name=vllm", "engine.weight_transfer=gloo"])
    trainer = await TrainerProcess.start(FOLDER, recipe, store, log=tmp_path / "log.txt")
    try:
        before = await engine.statistics()
        assert await trainer.publish() == 0
        await engine.load(0, store, "recompute")
        assert (await engine.statistics())["transfers"] == before["transfers"] + 1
    finally:
        await trainer.close()
    asked = request(350)
    drawn = await engine.generate(asked, LIMIT_S)
    assert set(drawn.versions.tolist()) == {0}
    versions.assert_rescored(asked, drawn)


async def test_what_changes_on_its_way_ends_the_engine(
    engine: EngineProcess, store: TransferStore, versions: Versions
) -> None:
    """The last test of this engine: one bit more in one element, after the digest was taken."""
    store.publish(2, versions.published[2])
    assert store._sender is not None
    assert store._sender._held is not None
    held = store._sender._held.tensors["model.norm.weight"]
    held.view(torch.int32)[5] += 1
    with pytest.raises(WeightsError, match=r"version 2 into vLLM failed.*digest 0x.*given 0x"):
        await engine.load(2, store, "recompute")
    with pytest.raises(EngineError, match=r"version 2 into vLLM failed.*digest"):
        await engine.generate(request(400), LIMIT_S)
