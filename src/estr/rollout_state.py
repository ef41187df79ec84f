"""Rollouts as a checkpoint keeps them: finished trajectories, and those still growing.

    RolloutState, Trajectory --pack--> JSON data + columns --unpack--> the same again

Tokens of all segments lie end to end in one array for each column (`SegmentPool`), so a checkpoint
of thousands of rollouts is six arrays and one JSON file. Facts only: what is derived is derived
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from .environment import Reply
from .errors import CheckpointError
from .types import (
    COLUMNS,
    FinishReason,
    Int32Array,
    RolloutId,
    SamplingSettings,
    Segment,
    Trajectory,
    Turn,
)

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class RolloutState:
    """A trajectory while it grows.

    parts: context and drawn turns, in order. starts: which of them begin a segment. replies: the
    environment's answers, one for each answered turn. drawn: what an engine had drawn of the turn
    in progress when the state was saved; the engine goes on from it. num_restarts: how often a
    resume had to begin it anew.
    """

    parts: list[Segment] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    turns: list[Turn] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    drawn: Segment | None = None
    engine_s: float = 0.0
    environment_s: float = 0.0
    num_restarts: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def answer_due(self) -> bool:
        """Has the model written a turn that the environment has not answered?"""
        return len(self.turns) > len(self.replies)

    @property
    def ended(self) -> bool:
        """Has the environment given its last answer?"""
        return bool(self.replies) and self.replies[-1].observation is None

    def history(self) -> Int32Array:
        """The token ids that the next turn goes on from: those of the last segment."""
        return np.concatenate([part.token_ids for part in self.parts[self.starts[-1] :]])

    def segments(self) -> tuple[Segment, ...]:
        """The parts joined, one segment for each start."""
        stops = [*self.starts[1:], len(self.parts)]
        return tuple(
            Segment.join(self.parts[start:stop])
            for start, stop in zip(self.starts, stops, strict=True)
        )

    def written(self) -> list[Segment]:
        """What the model wrote, one segment a turn."""
        return [part for part in self.parts if part.finish_reason is not None]

    def add_context(
        self, token_ids: Sequence[int], max_tokens: int, *, new_segment: bool = False
    ) -> None:
        """What the model reads next, as far as a trajectory of max_tokens has room: what does not
        fit ends the rollout before it is read."""
        ids = token_ids[: max(0, max_tokens - self.num_tokens)]
        if not ids and self.parts:
            return
        if new_segment:
            self.starts.append(len(self.parts))
        self.parts.append(Segment.context(ids))

    def add_turn(self, drawn: Segment) -> None:
        """A turn that the engine has finished."""
        start = sum(len(part) for part in self.parts[self.starts[-1] :])
        self.parts.append(drawn)
        self.drawn = None
        reason = drawn.finish_reason or "abort"
        self.turns.append(Turn(len(self.starts) - 1, start, start + len(drawn), reason))

    def restart(self) -> None:
        """Forget everything but the number of restarts."""
        self.parts, self.starts, self.turns, self.replies = [], [0], [], []
        self.drawn = None
        self.num_restarts += 1

    def oldest_version(self) -> int | None:
        """The oldest version among the tokens drawn so far (None: none is)."""
        parts = self.parts if self.drawn is None else [*self.parts, self.drawn]
        versions = [int(p.versions[p.sampled].min()) for p in parts if p.sampled.any()]
        return min(versions, default=None)


class SegmentPool:
    """Segments laid end to end; `add` gives the reference by which `get` finds one again."""

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns
        self._segments: list[Segment] = []
        self._length = 0

    def add(self, segment: Segment) -> list[Any]:
        """[start, stop, has gini, finish reason], plain JSON data."""
        start = self._length
        self._length += len(segment)
        self._segments.append(segment)
        return [start, self._length, segment.behavior_gini is not None, segment.finish_reason]

    def columns(self) -> Columns:
        """One array for each recorded column, of all segments added."""
        arrays = {}
        for column in COLUMNS:
            parts = [
                np.full(len(s), column.fill, dtype=column.dtype)
                if getattr(s, column.name) is None
                else getattr(s, column.name)
                for s in self._segments
            ]
            arrays[column.name] = np.concatenate([np.zeros(0, dtype=column.dtype), *parts])
        return arrays

    def get(self, reference: Sequence[Any]) -> Segment:
        """The segment of a reference. Raises CheckpointError where the columns lack it."""
        start, stop, has_gini, reason = reference
        columns = self._columns or {}
        if any(len(columns.get(c.name, ())) < stop for c in COLUMNS):
            raise CheckpointError(f"the columns end before token {stop} of a saved rollout")
        arrays: dict[str, Any] = {c.name: columns[c.name][start:stop].copy() for c in COLUMNS}
        if not has_gini:
            arrays["behavior_gini"] = None
        return Segment(**arrays, finish_reason=cast(FinishReason | None, reason))


def pack_state(state: RolloutState, drawn: Segment | None, pool: SegmentPool) -> dict[str, Any]:
    """A growing rollout as JSON data, none of which grows with it. drawn: the turn in progress,
    from the engine's snapshot; None: the engine was not asked for it yet, and it stands where the
    state has it."""
    drawn = state.drawn if drawn is None else drawn
    return {
        "parts": [pool.add(part) for part in state.parts],
        "starts": list(state.starts),
        "turns": [list(turn) for turn in state.turns],
        "replies": [pack_reply(reply) for reply in state.replies],
        "drawn": None if drawn is None or not len(drawn) else pool.add(drawn),
        "engine_s": state.engine_s,
        "environment_s": state.environment_s,
        "num_restarts": state.num_restarts,
    }


def unpack_state(data: Mapping[str, Any], pool: SegmentPool) -> RolloutState:
    """The inverse of pack_state. Raises CheckpointError on malformed data."""
    try:
        return RolloutState(
            parts=[pool.get(part) for part in data["parts"]],
            starts=[int(start) for start in data["starts"]],
            turns=[Turn(*turn) for turn in data["turns"]],
            replies=[unpack_reply(reply) for reply in data["replies"]],
            drawn=None if data["drawn"] is None else pool.get(data["drawn"]),
            engine_s=float(data["engine_s"]),
            environment_s=float(data["environment_s"]),
            num_restarts=int(data["num_restarts"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a saved rollout is malformed: {error!r}") from error


def pack_reply(reply: Reply) -> dict[str, Any]:
    """An environment's answer as JSON data."""
    data: dict[str, Any] = msgspec.to_builtins(reply)
    if isinstance(data["observation"], tuple):  # as it comes back from JSON, so that both are equal
        data["observation"] = list(data["observation"])
    return data


def unpack_reply(data: Mapping[str, Any]) -> Reply:
    """The inverse of pack_reply. Raises KeyError or TypeError on malformed data."""
    return Reply(data["observation"], data["outcome"], dict(data["rewards"]))


def pack_trajectory(trajectory: Trajectory, pool: SegmentPool) -> dict[str, Any]:
    """A finished rollout as JSON data."""
    data = {
        f.name: getattr(trajectory, f.name)
        for f in dataclasses.fields(trajectory)
        if f.name not in ("segments", "id", "sampling")
    }
    data["segments"] = [pool.add(segment) for segment in trajectory.segments]
    data["id"] = list(dataclasses.astuple(trajectory.id))
    data["sampling"] = dataclasses.asdict(trajectory.sampling)
    data["rewards"] = dict(trajectory.rewards)
    data["times_s"] = dict(trajectory.times_s)
    return data


def unpack_trajectory(data: Mapping[str, Any], pool: SegmentPool) -> Trajectory:
    """The inverse of pack_trajectory. Raises CheckpointError on malformed data."""
    try:
        fields = dict(data)
        fields["segments"] = tuple(pool.get(segment) for segment in data["segments"])
        fields["turns"] = tuple(Turn(*turn) for turn in data["turns"])
        fields["id"] = RolloutId(*data["id"])
        fields["sampling"] = msgspec.convert(data["sampling"], SamplingSettings)
        return Trajectory(**fields)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"a saved trajectory is malformed: {error!r}") from error
