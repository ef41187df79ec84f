"""Hosts in actors and weights in the object store, on one local Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from estr.check import check_recipe
from estr.cluster.ray_weights import RayWeightStore, start_board
from estr.cluster.ray_worker import Place, RayWorker
from estr.cluster.session import Session
from estr.config import load_recipe
from estr.errors import ConfigError, EngineError, WeightsError, WorkerDied, WorkerError
from estr.options.run import RayOptions
from estr.ray_head import require_head
from estr.run import train
from ray_cases import MARKS, gone, processes_of_ray_left_alone

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[Session]:
    before = signal.getsignal(signal.SIGTERM)
    with processes_of_ray_left_alone():
        session = Session(RayOptions(), num_cpus=1, weights_bytes=16 << 20)
        assert signal.getsignal(signal.SIGTERM) is before, "a run stops on SIGTERM, Ray must not"
        yield session
        session.close()
        del session


@pytest.fixture(autouse=True)
def _hosts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


async def start(host: str, **kwargs: Any) -> RayWorker:
    options = {key: kwargs.pop(key) for key in ("log", "shared") if key in kwargs}
    return await RayWorker.start(
        "test", f"worker_hosts:{host}", kwargs, Place("DEFAULT"), **options
    )


async def test_an_actor_answers_as_a_process_does() -> None:
    worker = await start("Plain", start=5)
    answers = await asyncio.gather(*(worker.call("add", i, timeout_s=60) for i in (1, 2, 3)))
    assert answers == [6, 8, 11]
    assert await worker.call("variable", "OMP_NUM_THREADS", timeout_s=60) == "1"
    with pytest.raises(EngineError, match="known"):
        await worker.call("fail", True, timeout_s=60)
    with pytest.raises(WorkerError, match=r"KeyError: 'unknown' at worker_hosts.py:\d+"):
        await worker.call("fail", False, timeout_s=60)
    with pytest.raises(WorkerError, match=r"the test actor .* did not answer 'sleep' within 0.2 s"):
        await worker.call("sleep", 60, timeout_s=0.2)
    await worker.close(timeout_s=0.2)
    with pytest.raises(WorkerDied, match="was closed"):
        await worker.call("add", 1, timeout_s=60)


async def test_deferred_calls_overlap_and_a_killed_process_is_noticed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    worker = await start("Pumped", log=log)
    slow = asyncio.create_task(worker.call("work", 1_000_000_000, timeout_s=300))
    assert await worker.call("work", 3, timeout_s=60) >= 3
    assert not slow.done()
    log.write_text("the last words\n")
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"(?s)the test actor \(pid \d+ on node .*the last words"):
        await slow
    with pytest.raises(WorkerDied):
        await worker.alive()
    await worker.close()


async def test_an_answer_that_cannot_be_read_ends_the_actor_for_us() -> None:
    worker = await start("Plain")
    with pytest.raises(WorkerDied, match=r"test actor .* no answer can be read: .*invalid literal"):
        await worker.call("unreadable", timeout_s=60)
    with pytest.raises(WorkerDied, match="was given up"):
        await worker.alive(for_s=60)
    pid = worker.pid
    await worker.close()
    assert await gone(pid)


async def test_what_does_not_come_up_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="start is -1"):
        await start("Plain", start=-1)
    with pytest.raises(ConfigError, match=r"does not see .*/nowhere; .* on a shared file system"):
        await start("Plain", shared=[tmp_path, tmp_path / "nowhere"])


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.tensor(7, dtype=torch.int64)}


def test_the_store_keeps_the_newest_versions_and_no_other_course() -> None:
    store = RayWeightStore(start_board(keep=2))
    assert store.latest() is None
    for version in range(4):
        store.publish(version, weights(version))
    assert store.latest() == 3
    with pytest.raises(WeightsError, match=r"version 1 is not in the store, which holds \[2, 3\]"):
        store.fetch(1)
    fetched = store.fetch(3)
    assert fetched["a"].equal(weights(3)["a"])
    assert fetched["b"] == 7
    fetched["a"].zero_()
    assert store.fetch(3)["a"].equal(weights(3)["a"]), "what is fetched is one's own"
    store.publish(2, weights(20))
    assert store.latest() == 2
    assert store.fetch(2)["a"][0, 0] == 20


def test_a_buffer_under_a_wrong_label_is_refused() -> None:
    import ray

    from estr.cluster.flat import pack

    board = start_board(keep=2)
    (manifest, _), (_, other) = pack(1, weights(1)), pack(1, weights(2))
    ray.get(board.publish.remote(manifest, [ray.put(other)]), timeout=60)
    with pytest.raises(WeightsError, match="the flat buffer is not version 1 as published"):
        RayWeightStore(board).fetch(1)


def test_a_board_that_is_gone_is_named() -> None:
    import ray
    from ray.exceptions import RayActorError

    board = start_board(keep=2)
    store = RayWeightStore(board)
    assert store.latest() is None
    ray.kill(board)
    with pytest.raises(RayActorError):  # it is killed beside what goes on here
        ray.get([board.versions.remote() for _ in range(1000)], timeout=60)
    with pytest.raises(WeightsError, match="the board of weights does not answer: ActorDiedError"):
        store.latest()


def test_a_local_ray_that_is_too_slow_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    failures = [Exception("The current node timed out during startup."), ValueError("no room")]
    tries: list[str] = []

    def init(**options: Any) -> None:
        tries.append(options["address"])
        raise failures[len(tries) - 1]

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(WorkerError, match="no local Ray came up: no room"):
        Session(RayOptions(), num_cpus=1, weights_bytes=0)
    assert tries == ["local", "local"], "the first failure is Ray's own time limit"
    tries.clear()
    with pytest.raises(WorkerError, match=r"no local Ray came up: .* timed out"):
        Session(RayOptions(start_timeout_s=1e-9), num_cpus=1, weights_bytes=0)
    assert tries == ["local"]


def test_an_address_where_no_cluster_is_gives_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    address = "127.0.0.1:1"
    words = f"ray.address = '{address}': no Ray cluster .*refused.*`ray start --head`"
    with pytest.raises(ConfigError, match=words):
        Session(RayOptions(address), num_cpus=1, weights_bytes=0)
    overrides = ["placement=ray", f"ray.address={address}"]
    (error,) = check_recipe(None, overrides).errors
    assert re.search(words, error)
    with pytest.raises(ConfigError, match=words):
        train(load_recipe(overrides=overrides), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_auto_of_a_cluster_that_is_gone_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"ray.address = 'auto': .*:1: .*refused.*`ray start"):
        Session(RayOptions("auto"), num_cpus=1, weights_bytes=0)


def test_a_head_is_taken_for_one() -> None:
    import ray

    require_head(ray.get_runtime_context().gcs_address)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_listener_that_is_no_head_is_refused_at_once(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"no Ray cluster .*is no head of a Ray cluster"):
            Session(RayOptions(address), num_cpus=1, weights_bytes=0)
        thread.join()
