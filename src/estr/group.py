"""One group, a single instance of a problem, on its way from dispatch to the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .types import Trajectory

State = Literal["pending", "running", "finished", "consumed", "filtered", "failed", "leftover"]
TERMINAL_STATES: tuple[State, ...] = ("consumed", "filtered", "failed", "leftover")


@dataclass(slots=True, eq=False)
class Group:
    """One instance of a problem. `estr.groups` says which state follows which.

    issue counts the groups of this problem that failed before this one. `trajectories` is empty
    until the group has finished. Only `Groups` changes a group.
    """

    id: int
    task: str
    problem: int
    dispatch_version: int
    deadline: int
    issue: int = 0
    state: State = "pending"
    trajectories: tuple[Trajectory, ...] = ()

    def urgency(self) -> tuple[int, int]:
        """The key of the order in which groups are taken: oldest deadline first, ties by id."""
        return self.deadline, self.id

    def __str__(self) -> str:
        return (
            f"group {self.id} ({self.state}, {self.task} problem {self.problem}, "
            f"dispatched at {self.dispatch_version}, deadline {self.deadline})"
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """A problem to be dispatched again: its group failed (id None: it gets a new one), or was
    outstanding in a checkpoint whose bounds the resumed run has changed (it keeps its id)."""

    task: str
    problem: int
    issue: int
    id: int | None = None
