"""A host in a child process of its actor, as vLLM's is: fakes in another interpreter."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from estr.calls import NO_ANSWER, Message
from estr.cluster.ray_child import Spawn, serve_from_child, spawn_of
from estr.cluster.ray_worker import Place, RayWorker
from estr.cluster.session import Session
from estr.errors import ConfigError, EngineError, WeightsError, WorkerDied
from estr.options.run import EngineOptions, RayOptions
from estr.run_folder import weights_folder
from estr.weights import MemoryWeightStore
from ray_cases import MARKS, gone, processes_of_ray_left_alone

LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    """As for vLLM; its interpreter is this one, and finds the hosts of the tests."""
    script = tmp_path / "python"
    tests = Path(__file__).parent
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tests}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    found = spawn_of(EngineOptions(name="vllm", python=str(script), device="cuda:0"))
    assert found is not None
    return found


class Frames:
    """Both ends of a channel of `estr.worker`."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[list[tuple[int, Any]]] = queue.SimpleQueue()
        self.send = self.answers.put

    def receive(self, timeout_s: float | None) -> list[Message]:
        try:
            return self.messages.get(timeout=timeout_s)
        except queue.Empty:
            return []

    async def answer(self) -> list[tuple[int, Any]]:
        return await asyncio.to_thread(self.answers.get, timeout=LIMIT_S)

    async def ask(self, *messages: Message, answers: int = 1) -> dict[int, Any]:
        """The next answers, by number."""
        self.messages.put(list(messages))
        return dict([pair for _ in range(answers) for pair in await self.answer()])


async def serving(
    spawn: Spawn, host: str, **kwargs: Any
) -> tuple[Frames, asyncio.Task[None], dict[int, Any]]:
    frames = Frames()
    task = asyncio.create_task(serve_from_child(frames, spawn, "test", None))
    first = await frames.ask((0, "", (f"worker_hosts:{host}", kwargs, 1, None)))
    return frames, task, first


async def test_calls_are_passed_on_in_their_order_and_answers_come_back(spawn: Spawn) -> None:
    frames, task, first = await serving(spawn, "Pumped")
    assert first == {0: None}
    endless = 10**9
    assert await frames.ask((1, "work", (endless,)), (NO_ANSWER, "drop", ()), (2, "drop", ())) == {
        2: 0
    }
    answers = await frames.ask(
        (3, "work", (endless,)), (4, "drop", ()), (5, "work", (3,)), answers=2
    )
    assert answers[4] == 1
    assert answers[5] >= 3
    frames.messages.put([(6, "work", (endless,)), (NO_ANSWER, "close", ())])
    async with asyncio.timeout(LIMIT_S):
        await task
    ((number, error),) = await frames.answer()
    assert number == 6
    assert isinstance(error, WorkerDied)


async def test_weights_arrive_by_a_file_that_is_gone_afterwards(spawn: Spawn) -> None:
    frames, task, _ = await serving(spawn, "Loading")
    store = MemoryWeightStore()
    store.publish(7, {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)})
    answers = await frames.ask((1, "load", (7, store, "keep")))
    folder, total = answers[1]
    assert total == 3.0
    assert f"-{os.getpid()}-" in folder.name
    assert not folder.exists()
    answers = await frames.ask((2, "load", (7, store, "recompute")))
    assert isinstance(answers[2], EngineError)
    answers = await frames.ask((3, "load", (8, store, "keep")))
    assert isinstance(answers[3], WeightsError)
    assert not list(folder.parent.glob(f"estr-weights-*-{os.getpid()}-*"))
    frames.messages.put([(NO_ANSWER, "close", ())])
    async with asyncio.timeout(LIMIT_S):
        await task


async def test_the_end_of_the_child_fails_what_was_asked_of_it_and_ends_the_host(
    spawn: Spawn,
) -> None:
    frames, task, _ = await serving(spawn, "Plain")
    pid = (await frames.ask((1, "pid", ())))[1]
    assert pid != os.getpid()
    frames.messages.put([(2, "sleep", (LIMIT_S,))])
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    ((number, error),) = await frames.answer()
    assert number == 2
    assert isinstance(error, WorkerDied)
    assert f"the test process (pid {pid}) ended: killed by SIGKILL" in str(error)
    async with asyncio.timeout(LIMIT_S):
        await task


async def test_a_host_or_an_interpreter_that_is_not_there_is_named(spawn: Spawn) -> None:
    _, task, first = await serving(spawn, "Plain", start=-1)
    assert isinstance(first[0], EngineError)
    await task
    nowhere = spawn_of(EngineOptions(name="vllm", python="/nowhere/python"))
    assert nowhere is not None
    _, task, first = await serving(nowhere, "Plain")
    assert isinstance(first[0], ConfigError)
    assert "engine.python = '/nowhere/python' is no interpreter" in str(first[0])
    assert f"(on the node {os.uname().nodename})" in str(first[0])
    await task
    assert spawn_of(EngineOptions()) is None


def test_what_a_killed_actor_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(LIMIT_S)
    own = os.stat("/proc/self/ns/pid").st_ino
    dead = tmp_path / f"estr-weights-{own}-{ended.pid}-x"
    living = tmp_path / f"estr-weights-{own}-{os.getppid()}-x"
    # Of another container, where that number is a process that lives.
    foreign = tmp_path / f"estr-weights-{own + 1}-{ended.pid}-x"
    for folder in (dead, living, foreign):
        folder.mkdir()
        (folder / "v00000001.safetensors").touch()
    made = weights_folder(tmp_path, bytes_needed=1 << 60)
    assert made.parent == tmp_path, "no memory has room"
    assert made.name.startswith(f"estr-weights-{own}-{os.getpid()}-")
    assert not dead.exists()
    assert living.exists()
    assert foreign.exists()


class TestInAnActor:
    pytestmark = MARKS

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def ray_with_two_gpus(cls) -> Iterator[None]:
        """As far as Ray is told."""
        import ray

        with processes_of_ray_left_alone(), pytest.MonkeyPatch.context() as patches:
            patches.setattr(ray, "init", partial(ray.init, num_gpus=2))
            session = Session(RayOptions(), num_cpus=1, weights_bytes=0)
            yield
            session.close()
            del session

    async def start(self, spawn: Spawn) -> RayWorker:
        place = Place("DEFAULT", num_gpus=1)
        return await RayWorker.start("test", "worker_hosts:Plain", {}, place, spawn=spawn)

    async def test_each_child_sees_the_gpu_of_its_actor_and_ends_when_it_is_closed(
        self, spawn: Spawn
    ) -> None:
        workers = [await self.start(spawn) for _ in range(2)]
        seen, pids = set(), []
        for worker in workers:
            seen.add(await worker.call("environment", "CUDA_VISIBLE_DEVICES", timeout_s=LIMIT_S))
            pids.append(await worker.call("pid", timeout_s=LIMIT_S))
        assert seen == {"0", "1"}
        await workers[0].close()
        assert await gone(pids[0])
        await workers[1].close(timeout_s=0)
        assert await gone(pids[1])

    async def test_a_killed_child_is_a_dead_engine_and_a_killed_actor_leaves_no_child(
        self, spawn: Spawn
    ) -> None:
        worker = await self.start(spawn)
        pid = await worker.call("pid", timeout_s=LIMIT_S)
        waiting = asyncio.create_task(worker.call("sleep", LIMIT_S, timeout_s=LIMIT_S))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"the test process \(pid {pid}\) ended: .*SIGKILL"):
            await waiting
        with pytest.raises(WorkerDied):
            await worker.alive(for_s=LIMIT_S)
        await worker.close()
        worker = await self.start(spawn)
        pid = await worker.call("pid", timeout_s=LIMIT_S)
        os.kill(worker.pid, signal.SIGKILL)
        assert await gone(pid)
        with pytest.raises(WorkerDied):
            await worker.alive(for_s=LIMIT_S)
        await worker.close()
