"""The members of running groups: each plays its rollout, once more where something failed.

    group --begin--> [Member, ...] --play--> trajectories --end-->
                          |
                          +-- pack, restore: all of it at any moment, for a checkpoint

A member of a replay takes answers and endings from the schedule (`estr.recorded`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from .config import Recipe
from .errors import CheckpointError
from .group import Group
from .metrics import Metrics
from .recorded import as_recorded, recorded_end, recorded_leftover, recorded_setting
from .rollout import RolloutSetting, run_rollout
from .rollout_state import (
    RolloutState,
    SegmentPool,
    pack_state,
    pack_trajectory,
    unpack_state,
    unpack_trajectory,
)
from .schedule import Schedule
from .types import SCORED_STATUSES, RolloutId, Segment, Trajectory


@dataclass(slots=True)
class Member:
    """One member of a running group: the attempt that is under way, or how it ended."""

    index: int
    attempt: int = 0
    state: RolloutState = field(default_factory=RolloutState)
    trajectory: Trajectory | None = None

    def next_attempt(self) -> None:
        """The attempt failed: once more, from nothing."""
        self.attempt += 1
        self.state = RolloutState()


def pack_member(member: Member, drawn: Segment | None, pool: SegmentPool) -> dict[str, Any]:
    """A member as JSON data; drawn as in pack_state."""
    ended = member.trajectory
    return {
        "index": member.index,
        "attempt": member.attempt,
        "state": None if ended else pack_state(member.state, drawn, pool),
        "trajectory": pack_trajectory(ended, pool) if ended else None,
    }


def unpack_member(data: Mapping[str, Any], pool: SegmentPool) -> Member:
    """The inverse of pack_member. Raises CheckpointError on malformed data."""
    try:
        index, attempt, state, ended = (
            data[name] for name in ("index", "attempt", "state", "trajectory")
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"a saved group member is malformed: {error!r}") from error
    return Member(
        int(index),
        int(attempt),
        RolloutState() if state is None else unpack_state(state, pool),
        None if ended is None else unpack_trajectory(ended, pool),
    )


class Members:
    """The members of every running group. settings: by task. totals: where attempts are
    counted."""

    def __init__(
        self,
        recipe: Recipe,
        settings: Mapping[str, RolloutSetting],
        schedule: Schedule,
        totals: Metrics,
    ) -> None:
        self._recipe = recipe
        self._settings = settings
        self._schedule = schedule
        self._totals = totals
        self._running: dict[int, list[Member]] = {}
        self._num_playing = 0
        self._may_play = asyncio.Event()
        self._may_play.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __iter__(self) -> Iterator[tuple[RolloutId, Member]]:
        """Every member, with the id of its attempt."""
        for group_id, members in self._running.items():
            for member in members:
                yield self._id_of(group_id, member), member

    def _id_of(self, group_id: int, member: Member) -> RolloutId:
        return RolloutId(self._recipe.seed, group_id, member.index, member.attempt)

    def begin(self, group_id: int) -> None:
        """A group starts with fresh members."""
        self._running[group_id] = [Member(index) for index in range(self._recipe.group_size)]

    def end(self, group_id: int) -> None:
        """Its rollouts are over."""
        del self._running[group_id]

    async def play(self, group: Group) -> list[Trajectory]:
        """All rollouts of a group at once; those that a checkpoint saved are gone on with."""
        async with asyncio.TaskGroup() as tasks:
            members = self._running[group.id]
            runs = [tasks.create_task(self._play_member(group, member)) for member in members]
        return [run.result() for run in runs]

    async def _play_member(self, group: Group, member: Member) -> Trajectory:
        """One member; what engine, environment or grader failed at is tried again in a fresh
        environment."""
        setting = self._settings[group.task]
        while member.trajectory is None:
            rollout_id = self._id_of(group.id, member)
            recorded = self._schedule.rollout(rollout_id)
            async with self._playing():
                trajectory = await run_rollout(
                    recorded_setting(setting, recorded),
                    rollout_id,
                    group.problem,
                    dispatch_version=group.dispatch_version,
                    deadline_version=group.deadline,
                    state=member.state,
                )
            trajectory = as_recorded(trajectory, recorded, setting.task)
            self._note(trajectory, member.state)
            last = member.attempt + 1 >= self._recipe.rollout.max_attempts
            if trajectory.status in SCORED_STATUSES or last:
                member.trajectory = trajectory
            else:
                member.next_attempt()
        return member.trajectory

    def _note(self, trajectory: Trajectory, state: RolloutState) -> None:
        self._totals.add_sum(f"attempts/{trajectory.status}", 1.0)
        if state.num_restarts:
            self._totals.add_sum("restarted_rollouts", float(state.num_restarts))
        if self._schedule.deterministic:
            self._schedule.note("rollout", **recorded_end(trajectory, state))
            self._schedule.on_rollout_end(trajectory.id)

    def note_leftover(self) -> None:
        """The run ends: note what unfinished rollouts had been answered, so that a replay does not
        ask again."""
        if self._schedule.deterministic:
            for rollout_id, member in self:
                if member.trajectory is None:
                    self._schedule.note("rollout", **recorded_leftover(rollout_id, member.state))

    @asynccontextmanager
    async def _playing(self) -> AsyncIterator[None]:
        while not self._may_play.is_set():  # another version may be due before this one wakes
            await self._may_play.wait()
        self._num_playing += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_playing -= 1
            if not self._num_playing:
                self._idle.set()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """While weights change. Where they do not change in flight, the rollouts under way come to
        their end first and no other begins, so that every trajectory is of one version. A replay
        follows its schedule instead."""
        if self._recipe.in_flight or self._schedule.replay is not None:
            yield
            return
        self._may_play.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._may_play.set()

    def pack(
        self, groups: Iterable[Group], drawn: Mapping[RolloutId, Segment], pool: SegmentPool
    ) -> dict[str, Any]:
        """The members of all outstanding groups, finished ones too, as JSON data. drawn: what the
        engine had drawn of the turns under way."""
        packed = {}
        for group in groups:
            members = [Member(t.id.index, t.id.attempt, trajectory=t) for t in group.trajectories]
            if group.state == "running":
                members = self._running[group.id]
            packed[str(group.id)] = [
                pack_member(m, drawn.get(self._id_of(group.id, m)), pool) for m in members
            ]
        return packed

    def restore(self, groups: Iterable[Group], saved: Mapping[int, list[Member]]) -> None:
        """Take back the members of the groups that are running again."""
        for group in groups:
            if group.state == "running":
                self._running[group.id] = saved[group.id]

    def restart_other_versions(self, version: int) -> None:
        """Begin anew what holds tokens of another version: without in-flight updates a trajectory
        is of one version only."""
        for _, member in self:
            if member.state.oldest_version() not in (None, version):
                member.state.restart()


def unpack_members(data: Mapping[str, Any], pool: SegmentPool) -> dict[int, list[Member]]:
    """The inverse of Members.pack. Raises CheckpointError on malformed data."""
    return {
        int(group): [unpack_member(member, pool) for member in members]
        for group, members in data.items()
    }


def finished_trajectories(
    members: Mapping[int, list[Member]],
) -> dict[int, tuple[Trajectory, ...]]:
    """The trajectories of the groups all of whose members have ended."""
    ended = {
        group: tuple(m.trajectory for m in those if m.trajectory is not None)
        for group, those in members.items()
    }
    return {group: found for group, found in ended.items() if len(found) == len(members[group])}
