"""Whole runs on a local cluster of several nodes, of which one is killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estr.cluster.ray_worker import Place, RayWorker
from estr.cluster.session import Session
from estr.config import Recipe, load_recipe
from estr.engine import Request
from estr.errors import WorkerDied
from estr.ledger import open_ledger
from estr.metrics import read_metrics
from estr.models import resolve_model
from estr.progress import SilentReporter
from estr.run import train
from estr.run_folder import RunFolder
from estr.runs import verify_run
from estr.types import RolloutId, SamplingSettings
from ray_cases import MARKS, SMALL, command_of, gone, processes_of_ray_left_alone

pytestmark = MARKS

STORE_BYTES = 100 << 20
TRAINER_CPUS = 2
"""Only the head has as many: the trainer is not on a node that is killed."""


@dataclass
class Nodes:
    """A cluster of a head and of nodes that have room for one engine each."""

    cluster: Any
    engine_nodes: list[Any] = field(default_factory=list)

    def add(self) -> None:
        self.engine_nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))

    def kill_one(self) -> None:
        self.cluster.remove_node(self.engine_nodes.pop(0), allow_graceful=False)

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe(
            overrides=[
                *SMALL,
                f"ray.address={self.cluster.address}",
                "engine.count=2",
                f"trainer.threads={TRAINER_CPUS}",
                *overrides,
            ]
        )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    with processes_of_ray_left_alone(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": TRAINER_CPUS,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_system_config": {"enable_worker_prestart": False},
            },
        )
        nodes = Nodes(cluster)
        nodes.add()
        nodes.add()
        yield nodes
        cluster.shutdown()
        del nodes, cluster


class At(SilentReporter):
    """Does something beside the run when it has made a step; keeps what the run says."""

    def __init__(self, step: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.step = step
        self.messages: list[str] = []
        self._acting = threading.Thread(target=act)

    def stepped(self, step: int, version: int, wall_s: float, row: Mapping[str, Any]) -> None:
        if step == self.step:
            self._acting.start()

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def survivor(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, At]:
    """A run during which the node of one of its two engines is killed."""
    runs = tmp_path_factory.mktemp("runs")
    reporter = At(2, nodes.kill_one)
    summary = train(nodes.recipe("steps=10", "name=survivor"), runs=runs, reporter=reporter)
    reporter._acting.join()
    assert summary.steps == 10
    return runs / "survivor", reporter


def nothing_lost_or_doubled(run: Path, steps: int) -> None:
    verdict = verify_run(run)
    assert verdict.faults == []
    assert (verdict.lost, verdict.doubled) == (0, 0)
    trained = [r for r in read_metrics(run / "metrics.jsonl").records if "loss" in r]
    assert [r["step"] for r in trained] == list(range(1, steps + 1))
    ledger = open_ledger(run)
    assert ledger.query("select count(distinct step) from trajectories").rows == [(steps,)]
    again = "select group_id from trajectories group by 1 having count(distinct step) > 1"
    assert ledger.query(again).rows == []


def test_a_run_outlives_a_node(survivor: tuple[Path, At]) -> None:
    run, reporter = survivor
    lost = [line for line in reporter.messages if "is lost" in line]
    assert len(lost) == 1
    assert "what it was writing is asked of the others" in lost[0]
    nothing_lost_or_doubled(run, 10)
    rows = [r for r in read_metrics(run / "metrics.jsonl").records if "engines" in r]
    assert rows[0]["engines"] == 2
    assert max(r["staleness_max"] for r in rows) <= 4


def test_it_goes_on_from_its_checkpoint_on_what_nodes_there_are(
    nodes: Nodes, survivor: tuple[Path, At]
) -> None:
    run, _ = survivor
    recipe = load_recipe(run / "config.toml", ["steps=12", "engine.count=1"])
    assert recipe.placement == "ray"
    summary = train(recipe, resume=run, accept_changes=True)
    assert summary.steps == 12
    nothing_lost_or_doubled(run, 12)


async def test_an_engine_joins_on_a_new_node_at_the_current_version(
    nodes: Nodes, survivor: tuple[Path, At], tmp_path: Path
) -> None:
    from estr.cluster.placement import RayProcesses

    while len(nodes.engine_nodes) < 2:
        nodes.add()
    recipe = nodes.recipe("engine.timeout_s=60")
    told: list[str] = []
    model = resolve_model("builtin")
    folder = RunFolder.create(recipe, tmp_path)
    processes = await RayProcesses.start(model, recipe, folder, told.append)
    try:
        pool = processes.engine
        assert len({engine.worker.node for engine in pool.living}) == 2
        version = await processes.trainer.publish()
        await pool.load(version, processes.store, "recompute")
        watching = asyncio.create_task(pool.watch(60.0))
        nodes.kill_one()
        nodes.add()
        async with asyncio.timeout(300):
            while not told or len(pool.living) < 2:
                await asyncio.sleep(0.1)
        assert told[-1].endswith("has joined at version 0")
        requests = [
            Request(
                RolloutId(0, group, 0),
                np.array([1, 2, 3], dtype=np.int32),
                SamplingSettings(),
                max_new_tokens=4,
                first_position=3,
            )
            for group in range(2)
        ]
        answers = await asyncio.gather(*(pool.generate(r, 60.0) for r in requests))
        assert all(set(answer.versions.tolist()) == {0} for answer in answers)
        watching.cancel()
    finally:
        await processes.close()


def test_synchronous_training_is_the_same_on_ray_and_in_processes(
    nodes: Nodes, tmp_path: Path
) -> None:
    runs = {}
    same = ["steps=2", "max_staleness=0", "engine.count=1"]
    for name, own in {
        "ray": ["placement=ray"],
        "ranks": ["placement=ray", "trainer.ranks=2", "trainer.threads=1"],
        "local": ["placement=local"],
    }.items():
        recipe = nodes.recipe(*same, *own, f"name={name}")
        train(recipe, runs=tmp_path)
        tokens = open_ledger(tmp_path / name).query(
            "select step, group_id, trajectory, segment, position, token_ids from trained_tokens "
            "order by all"
        )
        records = read_metrics(tmp_path / name / "metrics.jsonl").records
        runs[name] = (tokens.rows, [r for r in records if "loss" in r])
    assert runs["ray"][0]
    assert runs["ray"][0] == runs["ranks"][0] == runs["local"][0]
    for key in ("loss", "grad_norm", "reward_mean"):
        *on_ray, local = ([r[key] for r in records] for _, records in runs.values())
        for values in on_ray:
            assert values == pytest.approx(local, abs=1e-4 if key == "grad_norm" else 1e-5)


async def test_a_child_of_an_engine_ends_with_its_node(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    monkeypatch.syspath_prepend(Path(__file__).parent)
    nodes.add()
    node = nodes.engine_nodes[0].node_id
    session = Session(nodes.recipe().ray, num_cpus=0, weights_bytes=0)
    place = Place(NodeAffinitySchedulingStrategy(node, soft=False))
    worker = await RayWorker.start(
        "test", "worker_hosts:Plain", {}, place, spawn=partial(dict, nice=0)
    )
    assert worker.node == node
    pid = await worker.call("pid", timeout_s=60)
    assert command_of(pid)
    nodes.kill_one()
    assert await gone(pid)
    with pytest.raises(WorkerDied):
        await worker.alive(for_s=120)
    await worker.close()
    session.close()
