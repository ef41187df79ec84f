"""Writes the ledger of a run beside its training, in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from ..config import Table
from ..types import Consumption, Trajectory
from .parts import parts_up_to, sync, write_steps
from .schema import StepRecord, described

BURST_TOKENS = 50_000
"""Steps are written as one part once they hold so many tokens: most of what a small step costs
alone is the same for each part, however little it holds."""

BURST_S = 60.0
"""Steps that have waited so long are written with the step that comes next, whatever they hold."""


class LedgerWriter:
    """Appends to RUN_FOLDER/ledger.

    Steps wait until they are a burst (BURST_TOKENS, BURST_S), for `sync` or for `close`; a burst
    becomes one part, written in a thread.
    While one is being written another may gather, and no more: whoever completes that one waits,
    which bounds the memory. What went wrong in the thread is raised at a later call, once. A kill
    loses what waited, none of which a checkpoint has counted on.
    """

    def __init__(
        self, run_folder: str | Path, *, correction: Sequence[Table], aggregation: str = "batch"
    ) -> None:
        self._folder = Path(run_folder)
        self._correction = described(correction)
        self._aggregation = aggregation
        self._waiting: list[StepRecord] = []
        self._waiting_tokens = 0
        self._waiting_since = 0.0
        self._writing: asyncio.Future[list[Path]] | None = None
        self._unsynced: list[Path] = []

    async def write(
        self,
        trajectories: Sequence[Trajectory],
        consumptions: Sequence[Consumption],
        *,
        step: int,
        target_version: int,
        version: int,
    ) -> None:
        """Take a step. consumptions[i] belongs to trajectories[i]; the rest as in
        `estr.trainer.StepResult`. Raises DataError where an earlier part cannot be written."""
        record = StepRecord(
            step,
            target_version,
            version,
            trajectories,
            consumptions,
            self._correction,
            self._aggregation,
        )
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append(record)
        self._waiting_tokens += sum(t.num_tokens for t in trajectories)
        waited_s = time.monotonic() - self._waiting_since
        if self._waiting_tokens >= BURST_TOKENS or waited_s >= BURST_S:
            await self._begin()

    async def sync(self, step: int) -> list[str]:
        """Bring all steps to the disk; returns the names of the parts up to `step`, for a
        checkpoint."""
        await self.close()
        unsynced, self._unsynced = self._unsynced, []
        await asyncio.to_thread(sync, unsynced)
        return await asyncio.to_thread(parts_up_to, self._folder, step)

    async def close(self) -> None:
        """Write what waits. May be called twice."""
        await self._begin()
        await self._written()

    async def _begin(self) -> None:
        """Begin to write what waits, once what is being written is done."""
        await self._written()
        if self._waiting:
            burst, self._waiting, self._waiting_tokens = self._waiting, [], 0
            work = asyncio.to_thread(write_steps, self._folder, burst)
            self._writing = asyncio.ensure_future(work)

    async def _written(self) -> None:
        writing = self._writing
        if writing is None:
            return
        try:
            self._unsynced += await asyncio.shield(writing)  # a cancelled run completes its parts
        finally:
            if writing.done():
                self._writing = None
