"""A local engine whose every step is written down, or done again as it was written down.

The file holds what decides an engine's arithmetic, between which steps it happened, in order:

    {"event": "load", "at": 12, "version": 3}      weights switched before step 12
    {"event": "admit", "at": 12, "ids": [...]}     requests that began to run, in row order
    {"event": "cancel", "at": 15, "id": [...]}     a request dropped
    {"event": "refill", "at": 20}                  a checkpoint: caches dropped, rows kept

Everything else follows: which rows run in which order, what is prefilled and what is shared. In a
replay the engine waits at a step until it has been given all that this step needs, however late it
comes. Nothing here looks at a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..engine import KVPolicy, Request
from ..errors import EngineError
from ..schedule import EngineSchedule, EventLog, Position, read_lineage
from ..types import RolloutId, Segment
from ..weights import State
from .local import LocalEngine

if TYPE_CHECKING:
    from torch import nn


class ScheduledEngine(LocalEngine):
    """LocalEngine that records, and replays if the schedule has a plan. Nothing is recorded, and
    nothing waited for, before `begin`. Other arguments as in LocalEngine."""

    def __init__(self, model: nn.Module, *, schedule: EngineSchedule, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._log_path = schedule.log
        self._plan = None if schedule.plan is None else read_lineage(schedule.plan)
        self._planned = 0
        self._log: EventLog | None = None
        self._begun_at = 0
        self._restoring: tuple[RolloutId, ...] = ()
        self._loads: list[tuple[int, State, KVPolicy]] = []
        self._refill = False
        self._at_refill: tuple[Position, dict[RolloutId, Segment]] | None = None
        self._dropped: list[RolloutId] = []

    @property
    def at(self) -> int:
        """Steps made since the beginning of the run."""
        return self._begun_at + self._counts["steps"]

    def begin(self, position: Position) -> None:
        """The schedule begins here: at its start, or where a checkpoint stands, whose running
        requests are waited for and given their rows before anything else."""
        fresh = position.lines == 0 and not self._log_path.exists()
        self._log = EventLog(self._log_path, keep_lines=None if fresh else position.lines)
        self._begun_at = position.step - self._counts["steps"]
        self._planned = position.planned
        self._restoring = position.running

    def ready(self) -> bool:
        """Can the engine do anything now, or does it wait for what has not come yet?"""
        if self._log is None or not (self._restoring or self._plan):
            return True
        if self._restoring:
            return all(rollout_id in self._waiting for rollout_id in self._restoring)
        due = self._due_event()
        return self._has(due) if due is not None else bool(self._rows)

    def submit(self, request: Request) -> None:
        super().submit(request)
        # A rollout that failed before it came back is tried again: it comes no more as it was.
        self._restoring = tuple(
            each
            for each in self._restoring
            if each.attempt >= request.id.attempt
            or dataclasses.replace(each, attempt=request.id.attempt) != request.id
        )

    def begin_load(self, version: int, state: State, kv: KVPolicy) -> None:
        if self._plan is None or self._log is None:
            super().begin_load(version, state, kv)
            return
        self._runner.check(state)
        self._loads.append((version, state, kv))

    def cancel(self, rollout_id: RolloutId) -> None:
        """Also of a request that a checkpoint had running: it is waited for no longer."""
        if self._plan is not None and self._log is not None:
            return  # only as it was recorded
        self._restoring = tuple(each for each in self._restoring if each != rollout_id)
        if rollout_id in self._served:
            self._write("cancel", id=dataclasses.astuple(rollout_id))
        super().cancel(rollout_id)

    def request_refill(self) -> None:
        """A checkpoint is due: at once, or when a replay comes to it."""
        self._refill = True
        if self._plan is None:
            self._do_refill()

    def take_refill(self) -> tuple[Position, dict[RolloutId, Segment]] | None:
        """Where the checkpoint asked for stands and what had been drawn then; None: not yet."""
        taken, self._at_refill = self._at_refill, None
        return taken

    def take_dropped(self) -> list[RolloutId]:
        """Requests that a replay has cancelled as recorded."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def step(self) -> list[tuple[RolloutId, Segment]]:
        if self._log is None:
            return super().step()
        if not self.ready():
            return []
        self._admit_these(self._restoring)
        self._restoring = ()
        while (event := self._due_event()) is not None:
            if not self._has(event):
                return []
            self._planned += 1
            self._do(event)
        return super().step()

    def close(self) -> None:
        super().close()
        if self._log is not None:
            self._log.close()

    def _switch_if_due(self) -> None:
        before = self._version
        super()._switch_if_due()
        if self._version != before:
            self._write("load", version=self._version)

    def _admit(self) -> None:
        if self._plan is not None and self._log is not None:
            return  # done as planned
        before = len(self._rows)
        super()._admit()
        new = [dataclasses.astuple(row.request.id) for row in self._rows[before:]]
        if new:
            self._write("admit", ids=new)

    def _do_refill(self) -> None:
        self._refill = False
        self._write("refill")
        if self._log is not None:
            self._log.sync()  # the checkpoint that asks for it is refused without these lines
        self.drop_caches()
        lines, crc = (self._log.num_lines, self._log.crc) if self._log is not None else (0, 0)
        # Of a checkpoint that is gone on from, those that have not all come yet.
        running = self._restoring or tuple(row.request.id for row in self._rows)
        position = Position(self.at, lines, crc, self._planned, running)
        self._at_refill = (position, self.snapshot())

    def _write(self, event: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(event, at=self.at, **values)

    # -- replay -------------------------------------------------------------------------------

    def _due_event(self) -> Mapping[str, Any] | None:
        """What a replay has to do before the coming step; None: nothing more."""
        if self._plan is None or self._planned == len(self._plan):
            return None
        event = self._plan[self._planned]
        return event if event["at"] <= self.at else None

    def _has(self, event: Mapping[str, Any]) -> bool:
        kind = event["event"]
        if kind == "load":
            return any(version == event["version"] for version, _, _ in self._loads)
        if kind == "refill":
            return self._refill
        ids = event["ids"] if kind == "admit" else [event["id"]]
        return all(RolloutId(*key) in self._served for key in ids)

    def _do(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "load":
            self._load_planned(event["version"])
        elif kind == "refill":
            self._do_refill()
        elif kind == "admit":
            ids = [RolloutId(*key) for key in event["ids"]]
            self._require_waiting(ids, event)
            self._admit_these(ids)
            self._write("admit", ids=event["ids"])
        elif kind == "cancel":
            rollout_id = RolloutId(*event["id"])
            self._write("cancel", id=event["id"])
            super().cancel(rollout_id)
            self._dropped.append(rollout_id)

    def _load_planned(self, version: int) -> None:
        (due,) = [load for load in self._loads if load[0] == version]
        self._loads.remove(due)
        super().begin_load(*due)

    def _require_waiting(self, ids: Sequence[RolloutId], event: Mapping[str, Any]) -> None:
        running = [str(rollout_id) for rollout_id in ids if rollout_id not in self._waiting]
        if running:
            raise EngineError(
                f"the replay parts from its schedule at engine step {event['at']}: "
                f"{', '.join(running)} should begin there and runs already"
            )
