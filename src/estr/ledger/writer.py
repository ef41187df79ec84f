"""Writes the ledger of a run beside its training: one step at a time, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ..config import Table
from ..types import Consumption, Trajectory
from .parts import parts_up_to, sync, write_step
from .schema import StepRecord, described


class LedgerWriter:
    """Appends to RUN_FOLDER/ledger. At most one step is being written and none waits: whoever
    brings the next one first waits for it, which bounds the memory. What went wrong in the thread
    is raised at the next call."""

    def __init__(
        self, run_folder: str | Path, *, correction: Sequence[Table], aggregation: str = "batch"
    ) -> None:
        self._folder = Path(run_folder)
        self._correction = described(correction)
        self._aggregation = aggregation
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
        """Begin to write a step; returns once the one before it is written.

        consumptions[i] belongs to trajectories[i]; the rest as in `estr.trainer.StepResult`.
        Raises DataError where a part cannot be written.
        """
        await self._written()
        record = StepRecord(
            step,
            target_version,
            version,
            trajectories,
            consumptions,
            self._correction,
            self._aggregation,
        )
        self._writing = asyncio.ensure_future(asyncio.to_thread(write_step, self._folder, record))

    async def sync(self, step: int) -> list[str]:
        """Bring all that was written to the disk; returns the names of the parts up to `step`, for
        a checkpoint."""
        await self._written()
        unsynced, self._unsynced = self._unsynced, []
        await asyncio.to_thread(sync, unsynced)
        return await asyncio.to_thread(parts_up_to, self._folder, step)

    async def close(self) -> None:
        """Wait for the step that is being written. May be called twice."""
        await self._written()

    async def _written(self) -> None:
        writing = self._writing
        if writing is None:
            return
        try:
            self._unsynced += await asyncio.shield(writing)  # a cancelled run completes its part
        finally:
            if writing.done():
                self._writing = None
