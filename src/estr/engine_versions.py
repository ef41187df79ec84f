"""The way back: the newest version that the trainer has published, into the engine.

weight store --load(version), between two tokens--> engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .engine import Engine, KVPolicy
from .errors import ScheduleError
from .members import Members
from .schedule import Schedule
from .weights import WeightStore


class EngineVersions:
    """Gives the engine every version that is due. kv: what becomes of its caches. on_load is called
    whenever it has another one."""

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        members: Members,
        schedule: Schedule,
        *,
        kv: KVPolicy,
        on_load: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._store = store
        self._members = members
        self._schedule = schedule
        self._kv = kv
        self._on_load = on_load
        self._published = asyncio.Event()
        self._loaded = asyncio.Event()

    async def run(self) -> None:
        """Bring the newest published version, again and again."""
        while True:
            await self._published.wait()
            self._published.clear()
            while (version := self._due()) is not None:
                async with self._members.quiet():
                    await self._engine.load(version, self._store, self._kv)
                await self._schedule.turn("load", version=version)
                self._schedule.note("load", version=version)
                self._loaded.set()
                self._on_load()

    def published(self) -> None:
        """There may be a new version in the store."""
        self._published.set()

    async def reach(self, version: int) -> None:
        """Returns when the engine has this version, which is in the store. Raises ScheduleError
        where the run that is replayed ended before it had."""
        self.published()
        while self._engine.version < version:
            if self._schedule.replay is not None and self._schedule.upcoming("load") is None:
                raise ScheduleError(
                    f"the run that is replayed was killed in a checkpoint, before its engine had "
                    f"version {version}; nothing is recorded beyond it"
                )
            self._loaded.clear()
            await self._loaded.wait()

    def _due(self) -> int | None:
        """The version that the engine should have and has not; None: it is up to date."""
        newest = self._store.latest()
        if newest is None or newest <= self._engine.version:
            return None
        if self._schedule.replay is None:
            return newest
        planned = self._schedule.upcoming("load")
        return None if planned is None or planned["version"] > newest else planned["version"]
