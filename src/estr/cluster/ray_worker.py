"""A host of `estr.worker` inside an actor of Ray, spoken to as if it were a spawned process.

    RayWorker (asyncio) --send(number, frame)--> HostActor ==queue==> thread: host_and_serve
                        <--receive(wait_s)------           <==list===

The host runs in a thread of its own, so that messages come in while it computes, as they do over a
socket; or in a child process that this thread starts (`ray_child`). One `receive` is under way at a
time: answers arrive in the order in which they were given.
Its failure is how the end of actor, process or node is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calls import NO_ANSWER, Calls, Message
from ..errors import ConfigError, WorkerError
from ..worker import host_and_serve, last_lines, lower_priority, search_path, torch_settings
from .ray_child import Spawn, serve_from_child

START_TIMEOUT_S = 600.0

_POLL_S = 10.0
_SILENCE_S = 300.0
"""The actor answers every poll, whatever its host computes; silent for so long it is dead."""

_CONCURRENCY = 3
"""Threads of Ray's in the actor: one waits in `receive`, the others take frames."""

Answer = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor goes and what it takes up there. strategy: a scheduling strategy of Ray."""

    strategy: Any
    num_cpus: int = 0
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the actor's process is given: its name in messages, threads, niceness, working directory
    and module search path of the controller (as far as they are there), a log to append to."""

    name: str
    threads: int
    nice: int
    cwd: str
    path: Sequence[str]
    log: Path | None


class RayWorker(Calls):
    """The controller's end of a host inside an actor."""

    def __init__(self, name: str, actor: Any, log: Path | None) -> None:
        super().__init__(name)
        self._actor = actor
        self._log = log
        self._num_sent = 0
        self._silence_s = START_TIMEOUT_S + _SILENCE_S
        self._reading = asyncio.create_task(self._read(), name=f"read {name}")
        self.node = ""
        """Ray's id of the node that it lives on."""
        self.pid = 0

    @classmethod
    async def start(
        cls,
        name: str,
        factory: str,
        kwargs: Mapping[str, Any],
        place: Place,
        *,
        threads: int = 1,
        nice: int = 0,
        log: Path | None = None,
        shared: Sequence[Path] = (),
        timeout_s: float = START_TIMEOUT_S,
        spawn: Spawn | None = None,
    ) -> RayWorker:
        """Make the actor and wait until its host is built.

        factory: "module:callable". shared: paths that must be there. spawn: how to start a child
        process of the actor, in which the host is to live. Raises ConfigError where a path is not
        there, WorkerError (or the EstrError that the factory raised) when it does not come up.
        """
        import ray

        surroundings = Surroundings(name, threads, nice, os.getcwd(), search_path(), log)
        remote = ray.remote(HostActor).options(
            num_cpus=place.num_cpus,
            num_gpus=place.num_gpus,
            scheduling_strategy=place.strategy,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CONCURRENCY,
        )
        worker = cls(name, remote.remote(surroundings, spawn), log)
        try:
            async with asyncio.timeout(timeout_s):
                await worker._look_around(shared)
                await worker.call("", factory, dict(kwargs), threads, None, timeout_s=None)
            worker._silence_s = _SILENCE_S
        except TimeoutError as error:
            await worker.close(timeout_s=0)
            raise WorkerError(f"{worker.place} did not come up within {timeout_s:g} s") from error
        except BaseException:
            await worker.close(timeout_s=0)
            raise
        return worker

    async def _look_around(self, shared: Sequence[Path]) -> None:
        from ray.exceptions import RayError

        try:
            self.node, self.pid, absent = await self._actor.look_around.remote(list(shared))
        except RayError as error:
            raise WorkerError(f"{self.place} did not come up: {_first_words(error)}") from error
        if absent:
            raise ConfigError(
                f"{self.place} does not see {', '.join(map(str, absent))}; with placement = "
                '"ray" the model and the run folder must lie where every node finds them, on a '
                "shared file system"
            )

    @property
    def place(self) -> str:
        where = f"pid {self.pid} on node {self.node[:8]}" if self.node else "not placed yet"
        return f"the {self.name} actor ({where})"

    async def close(self, timeout_s: float = 5.0) -> None:
        import ray

        self._closing = True
        try:
            if not self.died.done() and not self._reading.done() and timeout_s:
                self._send(NO_ANSWER, "close", ())
                await asyncio.wait([self._reading], timeout=timeout_s)
        finally:  # an interrupt ends the wait, and no actor outlives it
            with contextlib.suppress(Exception):  # Ray itself may be gone, and with it the actor
                ray.kill(self._actor)
            self._reading.cancel()
        await asyncio.wait([self._reading], timeout=5.0)
        self._fail_calls(f"{self.place} was closed")

    def _transmit(self, frame: list[Message]) -> None:
        self._actor.send.remote(self._num_sent, frame)
        self._num_sent += 1

    async def _read(self) -> None:
        from ray.exceptions import RayError, RaySystemError

        reason = f"{self.place} ended"
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    answers = await self._actor.receive.remote(_POLL_S)
                if answers is None:
                    break
                self._deliver(answers)
        except TimeoutError:
            reason = f"{self.place} has not been heard of for {self._silence_s:g} s"
        except RayError as error:
            reason = f"{self.place} ended: {_first_words(error)}"
            if isinstance(error, RaySystemError):  # of the actor's end Ray has errors of their own
                reason = self._unreadable(error)
        except Exception as error:  # noqa: BLE001 - unpickling raises anything
            reason = self._unreadable(error)
        self._fail_calls(f"{reason}{last_lines(self._log)}")

    def _unreadable(self, error: Exception) -> str:
        name = type(error).__name__
        return f"{self.place} was given up: no answer can be read: {name}: {_first_words(error)}"


def _first_words(error: Exception) -> str:
    """Ray's messages list the actor's data in indented lines; what happened is in the others."""
    lines = [line for line in str(error).splitlines() if line and not line[0].isspace()]
    return " ".join(lines)[:400] or type(error).__name__


class HostActor:
    """What runs inside the actor, whose methods, in threads of Ray's, only hand over: the host and
    its channel live in a thread of their own."""

    def __init__(self, surroundings: Surroundings, spawn: Spawn | None) -> None:
        _settle(surroundings)
        self._name, self._log, self._spawn = surroundings.name, surroundings.log, spawn
        self._ordering = threading.Lock()
        self._frames: dict[int, list[Message]] = {}
        self._num_taken = 0
        self._messages: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Answer] | None] = queue.SimpleQueue()
        threading.Thread(target=self._live, daemon=True).start()

    def look_around(self, shared: Sequence[Path]) -> tuple[str, int, list[Path]]:
        """(id of the node, process id, those of the paths that are not there)."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, os.getpid(), [path for path in shared if not path.exists()]

    def send(self, number: int, frame: list[Message]) -> None:
        """Frames may arrive in any order; they are taken in that of their numbers."""
        with self._ordering:
            self._frames[number] = frame
            while self._num_taken in self._frames:
                self._messages.put(self._frames.pop(self._num_taken))
                self._num_taken += 1

    def receive(self, wait_s: float) -> list[Answer] | None:
        """The next answers; [] when there were none within wait_s; None when the host has ended
        and all were fetched."""
        try:
            answers = self._answers.get(timeout=wait_s)
            while answers is not None and not self._answers.empty():
                more = self._answers.get()
                if more is None:
                    self._answers.put(None)
                    break
                answers = answers + more
        except queue.Empty:
            return []
        return answers

    def _live(self) -> None:
        channel = _QueueChannel(self._messages, self._answers)
        try:
            if self._spawn is None:
                host_and_serve(channel)
            else:
                log = self._log if self._log is not None and self._log.exists() else None
                asyncio.run(serve_from_child(channel, self._spawn, self._name, log))
        except BaseException:  # noqa: BLE001 - a thread's end is silent, a process's is not
            traceback.print_exc()
            os._exit(1)
        self._answers.put(None)


class _QueueChannel:
    """The channel of `estr.worker` over two queues."""

    def __init__(
        self,
        messages: queue.SimpleQueue[list[Message]],
        answers: queue.SimpleQueue[list[Answer] | None],
    ) -> None:
        self._messages = messages
        self._answers = answers

    def receive(self, timeout_s: float | None) -> list[Message]:
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return []

    def send(self, answers: list[Answer]) -> None:
        self._answers.put(answers)


def _settle(surroundings: Surroundings) -> None:
    """Before torch is imported: threads, priority, and what the controller finds, as far as it is
    on this node, too."""
    os.environ.update(torch_settings(surroundings.threads))
    if surroundings.nice:
        lower_priority(surroundings.nice)
    with contextlib.suppress(OSError):
        os.chdir(surroundings.cwd)
    sys.path += [p for p in surroundings.path if p not in sys.path and os.path.exists(p)]
    if surroundings.log is not None:
        with contextlib.suppress(OSError), open(surroundings.log, "ab") as log:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
