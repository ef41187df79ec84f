"""Rollouts of a replay: environments that answer what the schedule recorded.

A replay never asks a tool again and never looks at a clock: each answer, and how each rollout
ended, is taken from the recorded run by value. Only the prompt comes from the task itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .environment import Action, Environment, Prompt, Reply, Task
from .errors import EnvError
from .rollout import RolloutSetting
from .rollout_state import RolloutState, pack_reply, unpack_reply
from .schedule import REPLAY_TIMEOUT_S
from .types import RolloutId, Status, Trajectory

LEFTOVER = "leftover"


class RecordedEnvironment:
    """Answers one rollout's turns as they were answered. What comes after the last recorded answer
    raises EnvError; in a rollout that was left over at the end it waits, as that one did."""

    restorable = True

    def __init__(self, inner: Environment, replies: Sequence[Reply], status: str) -> None:
        self._inner = inner
        self._replies = iter(replies)
        self._status = status

    async def start(self) -> Prompt:
        return await self._inner.start()

    async def step(self, action: Action) -> Reply:
        reply = next(self._replies, None)
        if reply is not None:
            return reply
        if self._status == LEFTOVER:
            await asyncio.Event().wait()
        raise EnvError(f"the recorded rollout ended here: {self._status}")

    async def close(self) -> None:
        await self._inner.close()


class RecordedTask:
    """The task of one rollout of a replay: its environment is recorded, all else is the task's."""

    def __init__(self, task: Task, recorded: Mapping[str, Any]) -> None:
        self._task = task
        self._recorded = recorded
        self.name = task.name
        self.stop = task.stop
        self.max_turns = task.max_turns
        self.unfinished_outcome = task.unfinished_outcome

    def size(self, split: str) -> int | None:
        return self._task.size(split)

    def make(self, split: str, index: int) -> Environment:
        replies = [unpack_reply(reply) for reply in self._recorded["replies"]]
        inner = self._task.make(split, index)
        return RecordedEnvironment(inner, replies, self._recorded["status"])

    def gold(self, split: str, index: int) -> Sequence[str]:
        return self._task.gold(split, index)


def recorded_setting(setting: RolloutSetting, recorded: Mapping[str, Any] | None) -> RolloutSetting:
    """The setting of one rollout of a replay; None: of a rollout that was not recorded."""
    if recorded is None:
        return setting
    limits = dataclasses.replace(
        setting.limits, timeout_s=REPLAY_TIMEOUT_S, step_timeout_s=REPLAY_TIMEOUT_S
    )
    return dataclasses.replace(setting, task=RecordedTask(setting.task, recorded), limits=limits)


def as_recorded(
    trajectory: Trajectory, recorded: Mapping[str, Any] | None, task: Task
) -> Trajectory:
    """The trajectory with the status that was recorded, scored by the rule for that status."""
    if recorded is None or recorded["status"] in (trajectory.status, LEFTOVER):
        return trajectory
    status = cast(Status, recorded["status"])
    unfinished = task.unfinished_outcome if status in ("timeout", "truncated") else None
    return dataclasses.replace(
        trajectory,
        status=status,
        error=recorded["error"],
        outcome=unfinished,
        rewards={},
        reward=unfinished,
    )


def recorded_end(trajectory: Trajectory, state: RolloutState) -> dict[str, Any]:
    """What the schedule of a deterministic run keeps of an ended rollout. The checksums are of all
    token ids and of all recorded log-probs, so that two runs can be compared token by token."""
    segments = trajectory.segments
    return {
        "id": _key(trajectory.id),
        "status": trajectory.status,
        "error": trajectory.error,
        "replies": [pack_reply(reply) for reply in state.replies],
        "tokens": trajectory.num_sampled_tokens,
        "crc_tokens": zlib.crc32(b"".join(s.token_ids.tobytes() for s in segments)),
        "crc_logprobs": zlib.crc32(b"".join(s.behavior_logprobs.tobytes() for s in segments)),
    }


def recorded_leftover(rollout_id: RolloutId, state: RolloutState) -> dict[str, Any]:
    """The same of a rollout that the end of the run cut short."""
    replies = [pack_reply(reply) for reply in state.replies]
    return {"id": _key(rollout_id), "status": LEFTOVER, "error": None, "replies": replies}


def _key(rollout_id: RolloutId) -> list[int]:
    return [rollout_id.group, rollout_id.index, rollout_id.attempt]
