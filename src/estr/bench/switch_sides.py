"""Where the engine of `estr bench switch` runs, and how weights reach it.

spawned    a process of this machine; a file in memory
on_ray     an actor of a local Ray; its object store
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from ..engines.interpreter import vllm_process
from ..engines.process import EngineProcess
from ..options.run import EngineOptions, RayOptions
from ..weights import FileWeightStore, State, WeightStore
from ..worker import Worker

_HOST = "estr.bench.timed_host:TimedHost"
_KEEP = 2

Open = tuple[EngineProcess, WeightStore]


class Side(Protocol):
    """Opens an engine at version 0 and the store that it loads from, for weights like `state`."""

    def __call__(self, state: State) -> AbstractAsyncContextManager[Open]: ...


def side(folder: Path, options: EngineOptions, *, ray: bool = False) -> Side:
    """The engine of `options` on the model in `folder`, behind a host that marks its tokens."""
    kwargs = {"folder": folder, "options": options, "version": 0, "in_flight": True}

    def open_it(state: State) -> AbstractAsyncContextManager[Open]:
        return _on_ray(kwargs, options, state) if ray else _spawned(kwargs, options)

    return open_it


@asynccontextmanager
async def _spawned(kwargs: dict[str, Any], options: EngineOptions) -> AsyncIterator[Open]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        worker = await Worker.start(
            "engine",
            _HOST,
            kwargs,
            threads=options.threads,
            log=Path(scratch) / "log.txt",
            **(vllm_process(options) if options.name == "vllm" else {}),
        )
        engine = EngineProcess(worker, 0)
        try:
            yield engine, FileWeightStore(Path(scratch), keep=_KEEP)
        finally:
            await engine.close()


@asynccontextmanager
async def _on_ray(
    kwargs: dict[str, Any], options: EngineOptions, state: State
) -> AsyncIterator[Open]:
    from ..cluster.ray_child import spawn_of
    from ..cluster.ray_weights import RayWeightStore, start_board
    from ..cluster.ray_worker import Place, RayWorker
    from ..cluster.session import Session

    num_bytes = sum(tensor.nbytes for tensor in state.values())
    # One more than the board keeps while it is published; the oldest may still be read.
    session = Session(RayOptions(), num_cpus=options.threads, weights_bytes=(_KEEP + 2) * num_bytes)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            worker = await RayWorker.start(
                "engine",
                _HOST,
                kwargs,
                Place("DEFAULT", options.threads),
                threads=options.threads,
                log=Path(scratch) / "log.txt",
                spawn=spawn_of(options),
            )
            engine = EngineProcess(worker, 0)
            try:
                yield engine, RayWeightStore(start_board(_KEEP))
            finally:
                await engine.close()
    finally:
        session.close()
