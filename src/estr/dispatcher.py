"""From problems to finished groups: dispatch what the bound admits, play it, hand it to the buffer.

    Problems --> a lease in Groups --> rollouts (Members) --> Buffer

A group is dispatched at the version that the engine has loaded, while the bound admits one more;
its rollouts are a task of their own. A replay dispatches what its schedule says, when it says so.
"""

from __future__ import annotations

import asyncio

from .buffer import MIN_SCORED, Buffer
from .engine import Engine
from .group import Group
from .group_endings import GroupEndings
from .members import Members
from .problems import Problems
from .schedule import Schedule


class Dispatcher:
    """The groups of a run from their dispatch to the end of their rollouts.

    `run` never ends; it looks again whenever `wake` says that something has changed which may
    admit a group: one has left, a batch was taken, the engine has another version.
    """

    def __init__(
        self,
        engine: Engine,
        problems: Problems,
        members: Members,
        buffer: Buffer,
        *,
        endings: GroupEndings,
        schedule: Schedule,
    ) -> None:
        self._engine = engine
        self._problems = problems
        self._members = members
        self._buffer = buffer
        self._groups = buffer.groups
        self._endings = endings
        self._schedule = schedule
        self._woken = asyncio.Event()
        self._tasks: asyncio.TaskGroup
        self._group_tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Play in `tasks` from now on; groups that a checkpoint saved while they ran go on."""
        self._tasks = tasks
        for group in self._groups:
            if group.state == "running":
                self._start(group)

    async def run(self) -> None:
        """Dispatch whatever may be, again and again."""
        while True:
            self._woken.clear()
            while group := self._next_group():
                self._groups.start(group)
                self._members.begin(group.id)
                self._start(group)
            await self._woken.wait()

    def wake(self) -> None:
        """Look whether a group may be dispatched now."""
        self._woken.set()

    def cancel(self) -> None:
        """Give up the groups under way: the run ends."""
        for task in self._group_tasks.values():
            task.cancel()

    def _start(self, group: Group) -> None:
        self._group_tasks[group.id] = self._tasks.create_task(
            self._play(group), name=f"group {group.id}"
        )

    def _next_group(self) -> Group | None:
        """A new lease, if the steps left need one and F admits it at the engine's version."""
        version = self._engine.version
        if self._schedule.replay is not None:
            event = self._schedule.replay.next
            if event is None or event["event"] != "dispatch":
                return None
            version = event["version"]
        if self._groups.remaining() == 0 or not self._groups.can_dispatch(version):
            return None
        group = self._groups.reissue(version) or self._new_group(version)
        if group is not None:
            self._schedule.note(
                "dispatch",
                group=group.id,
                task=group.task,
                problem=group.problem,
                issue=group.issue,
                version=version,
            )
        return group

    def _new_group(self, version: int) -> Group | None:
        """The next problem; at the end of the data None, and no more will come."""
        upcoming = self._problems.next()
        if upcoming is None:
            if not self._groups.closed:
                self._groups.close()
            return None
        return self._groups.dispatch(*upcoming, version)

    async def _play(self, group: Group) -> None:
        """All rollouts of a group, then what the buffer makes of them: the group is finished,
        filtered or failed."""
        trajectories = await self._members.play(group)
        scored = sum(t.reward is not None for t in trajectories)
        if scored < MIN_SCORED:
            await self._schedule.turn("fail", group=group.id)
        del self._group_tasks[group.id]
        self._members.end(group.id)
        self._buffer.add(group.id, trajectories)
        if group.state == "failed":
            self._schedule.note("fail", group=group.id)
        elif group.state == "filtered":
            self._schedule.note("filter", group=group.id)
            self._problems.record(trajectories)
        self._endings.note(group, trajectories)
        self.wake()
