"""The accounts of all groups as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from .errors import CheckpointError
from .group import Group, State, Waiting

Natural = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Lease:
    """An outstanding group. Its trajectories are kept elsewhere."""

    id: Natural
    task: str
    problem: Natural
    dispatch_version: Natural
    deadline: Natural
    issue: Natural
    state: Literal["pending", "running", "finished"]

    @classmethod
    def of(cls, group: Group) -> Lease:
        """That of an outstanding group."""
        return cls(
            group.id,
            group.task,
            group.problem,
            group.dispatch_version,
            group.deadline,
            group.issue,
            group.state,  # type: ignore[arg-type]
        )

    def taken_back(self, deadline: int) -> Group:
        """Its group, to be trained by `deadline`: finished or running, as it goes straight on."""
        group = Group(self.id, self.task, self.problem, self.dispatch_version, deadline, self.issue)
        group.state = "finished" if self.state == "finished" else "running"
        return group


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint keeps of the accounts; the fields are those of `Groups`."""

    version: Natural
    step: Natural
    next_id: Natural
    num_abandoned: Natural
    counters: dict[State, dict[str, int]]
    waiting: list[Waiting]
    outstanding: list[Lease]


def read_snapshot(data: Mapping[str, Any]) -> Snapshot:
    """From the plain dict of a checkpoint. Raises CheckpointError where it is malformed, or an id
    comes twice or was never given."""
    try:
        saved = msgspec.convert(dict(data), Snapshot)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint's groups are malformed: {error}") from error
    ids = [p.id for p in saved.waiting if p.id is not None]
    ids += [g.id for g in saved.outstanding]
    if len(set(ids)) != len(ids) or any(not 0 <= i < saved.next_id for i in ids):
        raise CheckpointError(
            f"the checkpoint's groups have ids {ids}; each must be below {saved.next_id}, once"
        )
    return saved
