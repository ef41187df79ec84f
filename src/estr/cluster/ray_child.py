"""A host in a child process of its actor: for an interpreter that Ray cannot start, vLLM's.

    RayWorker <==Ray==> HostActor, a thread: serve_from_child <==Worker==> estr.worker in the child

Calls are passed on in their order, answers as they come. The child knows nothing of Ray: the
weights of a load are fetched by the actor, while the child goes on drawing, and handed over as a
file in the node's memory, which is verified once more where it is read, and is gone when the load
is answered.

The end of the child fails what was asked of it with WorkerDied, and the actor's host ends, too. The
child ends when it is told to, and within seconds of its actor, however that ended (`estr.worker`).
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..calls import NO_ANSWER, Message, portable
from ..engine import KVPolicy
from ..engines.interpreter import vllm_process
from ..errors import ConfigError
from ..options.run import EngineOptions
from ..run_folder import weights_folder
from ..weights import FileWeightStore, WeightStore
from ..worker import Channel, Worker

Spawn = Callable[[], dict[str, Any]]
"""Asked on the actor's node: what `Worker.start` needs besides the host. May raise ConfigError."""

_POLL_S = 1.0


def spawn_of(options: EngineOptions) -> Spawn | None:
    """For the engine of these options; None: it lives in the actor itself."""
    return partial(vllm_process, options) if options.name == "vllm" else None


async def serve_from_child(channel: Channel, spawn: Spawn, name: str, log: Path | None) -> None:
    """`estr.worker.host_and_serve` with the host in a child process, to be called `name`."""
    messages: list[Message] = []
    while not messages:
        messages = await asyncio.to_thread(channel.receive, _POLL_S)
    ((number, _, (factory, kwargs, threads, _)),) = messages
    try:
        worker = await Worker.start(name, factory, kwargs, threads=threads, log=log, **spawn())
    except ConfigError as error:
        channel.send([(number, ConfigError(f"{error} (on the node {socket.gethostname()})"))])
        return
    except Exception as error:  # noqa: BLE001 - the border where errors become data
        channel.send([(number, portable(error))])
        return
    channel.send([(number, None)])
    asked: set[asyncio.Task[None]] = set()
    async for message in _messages(channel, worker):
        # Tasks begin in the order in which they were made: no message overtakes another.
        task = asyncio.create_task(_ask(channel, worker, message))
        asked.add(task)
        task.add_done_callback(asked.discard)
    if worker.died.done():
        print(worker.died.result().partition("\n")[0], flush=True)  # into the log
    await worker.close()
    await asyncio.gather(*asked)


async def _messages(channel: Channel, worker: Worker) -> AsyncIterator[Message]:
    """Until the controller says close, or the child ends."""
    while not worker.died.done():
        for message in await asyncio.to_thread(channel.receive, _POLL_S):
            if message[1] == "close":
                return
            yield message


async def _ask(channel: Channel, worker: Worker, message: Message) -> None:
    """No time limit of its own: the controller has one, and the child's end ends it."""
    number, method, args = message
    if number == NO_ANSWER:
        worker.notify(method, *args)
        return
    try:
        if method == "load":
            result = await _load(worker, *args)
        else:
            result = await worker.call(method, *args, timeout_s=None)
    except Exception as error:  # noqa: BLE001 - the border where errors become data
        result = portable(error)
    channel.send([(number, result)])


async def _load(worker: Worker, version: int, weights: WeightStore, kv: KVPolicy) -> Any:
    state = await asyncio.to_thread(weights.fetch, version)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    folder = weights_folder(Path(tempfile.gettempdir()), num_bytes)
    try:
        store = FileWeightStore(folder, keep=1)
        await asyncio.to_thread(store.publish, version, state)
        del state
        return await worker.call("load", version, store, kv, timeout_s=None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
