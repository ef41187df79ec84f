"""The spawned processes of several ranks, spoken to as one.

    call("train", batch) ---> worker of rank 0: host.train(batch) ---+
                         `--> worker of rank 1: host.train(batch) ---+--> [answer of rank 0, ...]

What ranks do together each of them waits for, so one that has failed or died leaves the others
waiting. The controller does not: the first error ends the call, and of a rank that died it is that
rank that is named, not those that lost their connection to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .calls import Calls, all_or_none
from .errors import WorkerDied, WorkerError
from .own_folders import own_folder, remove_abandoned
from .worker import Worker

_LAST_WORDS_S = 5.0
"""A rank that loses its connection may say so before the end of the other one is noticed."""

_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process stands among its ranks. meeting: a file that none has used before, by which
    they find each other. own_devices: the device of the recipe is another one for each of them."""

    rank: int
    size: int
    meeting: Path
    own_devices: bool = False


class RankWorkers:
    """One worker for each rank, or a single one that knows of no ranks."""

    def __init__(self, workers: Sequence[Calls], meeting: Path | None = None) -> None:
        self.workers = workers
        self._meeting = meeting

    @classmethod
    async def start(
        cls,
        factory: str,
        kwargs: Mapping[str, Any],
        *,
        size: int,
        threads: int = 1,
        log: Path | None = None,
    ) -> RankWorkers:
        """Spawn `size` processes, each of which gets its `place` besides kwargs; one alone gets
        none. As soon as one does not come up, the others are given up. log: that of rank 0, the
        others have theirs beside it. Raises as `Worker.start` does."""

        async def start_rank(place: Place | None) -> Worker:
            if place is None:
                return await Worker.start("trainer", factory, kwargs, threads=threads, log=log)
            return await Worker.start(
                f"trainer rank {place.rank}",
                factory,
                {**kwargs, "place": place},
                threads=threads,
                log=log_of(log, place.rank),
                env=_environment(),
            )

        return await cls.bring_up(size, start_rank)

    @classmethod
    async def bring_up(
        cls,
        size: int,
        start_rank: Callable[[Place | None], Awaitable[Calls]],
        *,
        shared: Path | None = None,
    ) -> RankWorkers:
        """Start every rank by start_rank(its place), which is None for one alone. shared: a folder
        that all of them see, where they meet, each on a device of its own; None: they live on this
        machine."""
        if size == 1:
            return cls([await start_rank(None)])
        place = shared or Path(tempfile.gettempdir())
        remove_abandoned("ranks", place)
        meeting = own_folder("ranks", place)
        starts = [
            asyncio.ensure_future(
                start_rank(Place(rank, size, meeting / "store", own_devices=shared is not None))
            )
            for rank in range(size)
        ]
        try:
            return cls(await all_or_none(*starts), meeting)
        except BaseException:
            shutil.rmtree(meeting, ignore_errors=True)
            raise

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """The results of host.method(*args) on all ranks. Raises as `Worker.call` does, at the
        first error of any of them."""
        calls = [
            asyncio.create_task(worker.call(method, *args, timeout_s=timeout_s))
            for worker in self.workers
        ]
        try:
            return await asyncio.gather(*calls)
        except WorkerError as error:
            if len(self.workers) > 1 and not isinstance(error, WorkerDied):
                await self._raise_of_the_dead(_LAST_WORDS_S, error)
                if isinstance(error.__cause__, TimeoutError):
                    silent = [
                        worker.place
                        for worker, call in zip(self.workers, calls, strict=True)
                        if not call.done() or call.cancelled() or call.exception() is not None
                    ]
                    raise WorkerError(
                        f"{' and '.join(silent)} did not answer {method!r} within {timeout_s:g} s; "
                        "where one hangs the others wait for it"
                    ) from error
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def alive(self) -> None:
        """Returns never; raises WorkerDied when one of the processes has ended."""
        await self._raise_of_the_dead(None, None)

    async def close(self) -> None:
        """End them. May be called twice."""
        try:
            await asyncio.gather(*(worker.close() for worker in self.workers))
        finally:
            if self._meeting is not None:
                shutil.rmtree(self._meeting, ignore_errors=True)

    async def _raise_of_the_dead(self, for_s: float | None, cause: Exception | None) -> None:
        ends = [worker.died for worker in self.workers]
        done, _ = await asyncio.wait(ends, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            raise WorkerDied(end.result()) from cause


def log_of(log: Path | None, rank: int) -> Path | None:
    """Of a rank beside rank 0, which writes to `log` itself."""
    if log is None or rank == 0:
        return log
    return log.with_name(f"{log.stem}-rank-{rank}{log.suffix}")


def _environment() -> dict[str, str]:
    """gloo otherwise listens where the machine's name points to: nowhere, or at a network."""
    if _INTERFACE in os.environ:
        return {}
    return {_INTERFACE: "lo0" if sys.platform == "darwin" else "lo"}
