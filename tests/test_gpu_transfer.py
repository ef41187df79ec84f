"""vLLM's own engines for weight transfer, which need CUDA devices. Run with: pytest -m gpu, and
$ESTR_VLLM_PYTHON the interpreter of a CUDA build of vLLM for those that name one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from estr.config import load_recipe
from estr.engines.process import EngineProcess
from estr.engines.transfer import TransferStore
from estr.metrics import read_metrics
from estr.options.run import EngineOptions
from estr.run import train
from vllm_cases import FOLDER, LIMIT_S, MARKS, PYTHON, ROOT, Versions, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

WAYS = pytest.mark.parametrize(("way", "trainer"), [("ipc", "cuda:0"), ("nccl", "cuda:1")])
NEEDS_VLLM = [mark for mark in MARKS if mark.name == "skipif"]


def with_vllm(test: object) -> object:
    for mark in NEEDS_VLLM:
        test = mark(test)
    return test


def skip_without(device: str) -> None:
    if torch.cuda.device_count() <= torch.device(device).index:
        pytest.skip(f"needs {device}")


PUBLISHER = """
import sys, time, torch
from estr.engines.transfer import TransferStore
store = TransferStore(sys.argv[1], 4, backend="ipc", device="cuda:0", timeout_s=60.0)
pad = torch.zeros(1000, device="cuda:0")
store.publish(1, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)})
print("published", flush=True)
time.sleep(600)
"""


def test_memory_of_another_process_is_read_through_its_handles(tmp_path: Path) -> None:
    store = TransferStore(tmp_path, 4, backend="ipc", device="cuda:0", timeout_s=LIMIT_S)
    gpu = str(torch.cuda.get_device_properties(0).uuid)
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "published\n"
        offer = store.offer(1)
        assert offer is not None
        with offer.during("join") as info:
            assert info == {"packed": False}
        with offer.during("send") as info:
            handles = [handle[gpu] for handle in info["ipc_handles"]]
            a, b = (rebuild_cuda_tensor(*handle).clone() for handle in handles)
        offer.close()
        trainer.kill()
    assert torch.equal(a.cpu(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(b.cpu(), torch.ones(5, dtype=torch.bfloat16))


@with_vllm
@WAYS
async def test_tokens_are_of_the_version_that_was_sent(
    way: str, trainer: str, tmp_path: Path
) -> None:
    """The digest of what stands in vLLM's layers is that of what was sent, or the load fails."""
    skip_without(trainer)
    versions = Versions(2)
    options = EngineOptions(
        name="vllm", python=PYTHON, device="cuda:0", max_batch=16, weight_transfer=way
    )
    store = TransferStore(tmp_path / "w", 4, backend=way, device=trainer, timeout_s=60.0)
    engine = await EngineProcess.start(FOLDER, options, log=tmp_path / "log.txt")
    try:
        for version, state in enumerate(versions.states):
            tied_once = {name: t for name, t in state.items() if name != "lm_head.weight"}
            await asyncio.to_thread(store.publish, version, tied_once)
            await engine.load(version, store, "recompute")
            assert (await engine.statistics())["transfers"] == version + 1
            asked = request(version, length=40)
            drawn = await engine.generate(asked, LIMIT_S)
            assert set(drawn.versions.tolist()) == {version}
            right, wrong = (
                versions.errors(asked, drawn, each)["behavior_logprobs"].max()
                for each in (version, 1 - version)
            )
            assert right < 0.02
            assert wrong > 10 * right
    finally:
        await engine.close()


@with_vllm
@WAYS
def test_a_run_on_gpus(way: str, trainer: str, tmp_path: Path) -> None:
    skip_without(trainer)
    overrides = [
        "engine.name=vllm",
        f"engine.python={PYTHON}",
        "engine.device=cuda:0",
        f"engine.weight_transfer={way}",
        f"trainer.device={trainer}",
        "eval.every=0",
        "eval.final_problems=8",
        "steps=4",
        "name=sent",
    ]
    recipe = load_recipe(ROOT / "recipes" / "smollm2-arithmetic.toml", overrides)
    assert train(recipe, runs=tmp_path).steps == 4
    rows = [r for r in read_metrics(tmp_path / "sent" / "metrics.jsonl").records if "loss" in r]
    assert max(abs(row["ratio_deviation"]) for row in rows) < 0.1
