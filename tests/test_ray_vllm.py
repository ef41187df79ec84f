"""vLLM in a child process of an actor: a switch of weights, and a run that loses its engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray_cases
import vllm_cases
from estr.cluster.ray_child import spawn_of
from estr.cluster.ray_weights import RayWeightStore, start_board
from estr.cluster.ray_worker import Place, RayWorker
from estr.cluster.session import Session
from estr.config import load_recipe
from estr.engines.process import EngineProcess
from estr.ledger import open_ledger
from estr.metrics import read_metrics
from estr.options.run import EngineOptions, RayOptions
from estr.progress import SilentReporter
from estr.run import train
from ray_cases import command_of, descendants, gone, processes_of_ray_left_alone
from vllm_cases import FOLDER, LIMIT_S, PYTHON, ROOT, Versions, request

pytestmark = [*vllm_cases.MARKS, *ray_cases.MARKS]

SHORT = [
    "placement=ray",
    "engine.name=vllm",
    f"engine.python={PYTHON}",
    "engine.timeout_s=900",  # a busy machine is no hung engine
    "engine.kv_cache_gb=0.5",
    "name=short",
    "groups_per_step=2",
    "group_size=2",
    "steps=3",
    "eval.every=0",
    "eval.problems=4",
    "eval.final_problems=4",
]


def vllm_children() -> list[int]:
    """The engines' processes that live below this one."""
    start = [str(Path(PYTHON).absolute()), "-m", "estr.worker"]
    return [pid for pid in descendants(os.getpid()) if command_of(pid)[:3] == start]


class Killer(SilentReporter):
    """Kills the engine's child after the first step."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.messages: list[str] = []

    def stepped(self, step: int, version: int, wall_s: float, row: Mapping[str, Any]) -> None:
        if step == 1:
            self.killed = vllm_children()
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)

    def message(self, text: str) -> None:
        self.messages.append(text)


async def test_running_requests_survive_a_switch_through_the_object_store(tmp_path: Path) -> None:
    """Every token, scored again by the weights of the version that it carries, agrees."""
    options = EngineOptions(name="vllm", python=PYTHON, max_batch=4, kv_cache_gb=0.5)
    versions = Versions(2)
    num_bytes = sum(tensor.nbytes for tensor in versions.states[1].values())
    with processes_of_ray_left_alone():
        session = Session(RayOptions(), num_cpus=1, weights_bytes=2 * num_bytes)
        worker = await RayWorker.start(
            "engine",
            "estr.engines.process:EngineHost",
            {"folder": FOLDER, "options": options, "version": 0, "in_flight": True},
            Place("DEFAULT", 1),
            log=tmp_path / "log.txt",
            spawn=spawn_of(options),
        )
        engine = EngineProcess(worker, 0)
        try:
            store = RayWeightStore(start_board(keep=2))
            await asyncio.to_thread(store.publish, 1, versions.states[1])
            # They are drawn while the actor fetches: so many that they are still running after it.
            asked = [request(group, length=40, tokens=4000) for group in range(2)]
            running = [asyncio.create_task(engine.generate(one, LIMIT_S)) for one in asked]
            while sum(map(len, (await engine.snapshot()).values())) < 4:
                await asyncio.sleep(0.01)
            await engine.load(1, store, "recompute")
            drawn = await engine.snapshot()
            while any(part.versions[-1] != 1 for part in drawn.values()):
                await asyncio.sleep(0.01)
                drawn = await engine.snapshot()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            (child,) = vllm_children()
        finally:
            await engine.close()
            session.close()
    for one in asked:
        assert set(drawn[one.id].versions.tolist()) == {0, 1}
        versions.assert_rescored(one, drawn[one.id])
    assert await gone(child)


def test_a_run_on_vllm_under_ray_outlives_the_end_of_vllm(tmp_path: Path) -> None:
    """One engine at a time: what it was writing waits for its replacement."""
    reporter = Killer()
    recipe = load_recipe(ROOT / "recipes" / "smollm2-arithmetic.toml", SHORT)
    with processes_of_ray_left_alone():
        summary = train(recipe, runs=tmp_path, reporter=reporter)
    (killed,) = reporter.killed
    assert summary.steps == 3
    assert set(summary.statuses) <= {"ok", "truncated"}
    (lost,) = [line for line in reporter.messages if "is lost" in line]
    assert f"(pid {killed}) ended: killed by SIGKILL" in lost
    assert any("engine 0 has joined at version" in line for line in reporter.messages)
    assert vllm_children() == []
    rows = [r for r in read_metrics(tmp_path / "short" / "metrics.jsonl").records if "loss" in r]
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert max(r["staleness_max"] for r in rows) <= recipe.max_staleness
    drawn = open_ledger(tmp_path / "short").query(
        "select count(distinct versions) from tokens where versions >= 0"
    )
    assert drawn.rows[0][0] > 1, "weights were switched"
