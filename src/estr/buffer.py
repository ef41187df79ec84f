"""The buffer between rollouts and trainer: finished groups in, batches out.

    rollouts --add--> running group -> finished --take--> mini-batches of TrainingGroup --> trainer
                                    |-> failed   (fewer than two members could be scored)
                                    `-> filtered (no advantage in it, where that is asked for)

`Groups` keeps the accounts and decides what may be taken; the buffer brings in the trajectories,
computes advantages, waits, and checks the bound once more on the versions really recorded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .advantages import AdvantageKind, VarianceOf, group_advantages
from .config import Recipe
from .errors import GroupsError, StalenessError, Stalled
from .group import Group
from .groups import Groups
from .metrics import Metrics
from .types import SCORED_STATUSES, Consumption, Finding, Trajectory

MIN_SCORED = 2
"""Scored members below which a group fails: an advantage compares members."""

_NAMED = 8
"""Groups named in an error; the others are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGroup:
    """A group as the trainer gets it. advantages[i] belongs to trajectories[i]; None: unscored.
    target_version is the version that its step is taken at, had no update been skipped before."""

    id: int
    target_version: int
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the trainer gives back of one optimizer step. target_version is the version that the
    loss was taken at, version the one after the step (the same if it was skipped). digest: of the
    weights, where this step's were published. consumptions: one for each trajectory, in the order
    of the mini-batch's groups. findings: what the guard found in the batch, with its first step."""

    step: int
    target_version: int
    version: int
    metrics: Metrics
    digest: str | None = None
    consumptions: tuple[Consumption, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def skipped(self) -> bool:
        return self.version == self.target_version


class Buffer:
    """Finished groups on their way to the trainer. Used from one event loop; it takes over
    `groups.on_change` to wake whoever waits. max_filtered: how many groups without an advantage
    may be given up between two batches (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2)."""

    def __init__(
        self,
        groups: Groups,
        advantage: AdvantageKind = "grpo",
        variance_of: VarianceOf = "outcome",
        *,
        max_filtered: int = 0,
    ) -> None:
        self.groups = groups
        self._advantage: AdvantageKind = advantage
        self._variance_of: VarianceOf = variance_of
        self._max_filtered = max_filtered
        self.num_filtered = 0
        """Groups given up since the last batch; kept in checkpoints."""
        self._changed = asyncio.Event()
        self._num_added = 0
        groups.on_change = self._changed.set

    def add(self, group_id: int, trajectories: Sequence[Trajectory]) -> None:
        """The running group has ended: it finishes, or fails if fewer than two of its members
        could be scored, and its problem is then dispatched again. A finished one that would teach
        nothing is filtered, as long as there are problems left and max_filtered allows it; it
        leaves F, so the next problem takes its place.

        Raises GroupsError if the group is not running or the trajectories are not its own, each
        member once; NumericsError on a reward that is not finite.
        """
        group = self.groups[group_id]
        _require_own(group, trajectories)
        advantages = self._advantages(trajectories)
        scored = [a is not None for a in advantages]
        if sum(scored) >= MIN_SCORED:
            self._num_added += 1
            self.groups.finish(group, trajectories)
            spare = self.num_filtered < self._max_filtered and not self.groups.closed
            if spare and not any(advantages):
                self.num_filtered += 1
                self.groups.filter(group, "no_advantage")
            return
        lost = Counter(
            "unscored" if t.status in SCORED_STATUSES else t.status
            for t, has_score in zip(trajectories, scored, strict=True)
            if not has_score
        )
        self.groups.fail(group, lost.most_common(1)[0][0] if lost else "too_few_members")

    def take(
        self, version: int, *, only: Sequence[int] | None = None
    ) -> list[list[TrainingGroup]] | None:
        """The mini-batches of the next batch, one for each optimizer step from `version` on, or
        None while the trainer must wait. only: exactly these
        groups, as a replay wants them.

        Raises StalenessError, before anything is taken, if a trajectory holds a token that is too
        old for its step, older than its group's dispatch, or newer than the trainer.
        """
        batch = self.groups.select() if only is None else self.groups.named(only)
        if not batch:
            return None
        size = self.groups.groups_per_step
        targets = [version + place // size for place in range(len(batch))]
        for group, target in zip(batch, targets, strict=True):
            for trajectory in group.trajectories:
                _check_versions(trajectory, group, target, self.groups.max_staleness)
        self.groups.consume(batch, version)
        self.num_filtered = 0
        taken = [
            TrainingGroup(
                group.id,
                target,
                group.trajectories,
                tuple(self._advantages(group.trajectories)),
            )
            for group, target in zip(batch, targets, strict=True)
        ]
        return [taken[start : start + size] for start in range(0, len(taken), size)]

    async def wait_for_batch(self, timeout_s: float) -> bool:
        """Wait until `take` gives a batch (True) or there will never be one again (False).

        timeout_s bounds the time in which no group finishes; failures do not extend it, so a run
        in which everything fails stops as well. Raises Stalled, which says who waits for whom.
        """
        clock = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while not self.groups.ready():
                    if self.groups.done:
                        return False
                    num_added = self._num_added
                    self._changed.clear()
                    await self._changed.wait()
                    if self._num_added > num_added:
                        limit.reschedule(clock.time() + timeout_s)
                return True
        except TimeoutError:
            if self.groups.ready():  # the process itself stood still: time passed, nobody waited
                return True
            raise Stalled(self._who_waits(timeout_s)) from None

    async def wait_for_groups(self, ids: Sequence[int], timeout_s: float) -> None:
        """Wait until these groups are finished, at most timeout_s. Raises Stalled."""
        wanted = set(ids)
        try:
            async with asyncio.timeout(timeout_s):
                while wanted - {group.id for group in self.groups if group.state == "finished"}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Stalled(self._who_waits(timeout_s)) from None

    def leftover(self) -> list[Trajectory]:
        """The run ends: mark every outstanding group as leftover and give back the finished
        trajectories among them, which nobody will train on."""
        return [t for group in self.groups.leftover() for t in group.trajectories]

    def _advantages(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return group_advantages(
            [t.reward for t in trajectories],
            [t.outcome for t in trajectories],
            kind=self._advantage,
            variance_of=self._variance_of,
        )

    def _who_waits(self, timeout_s: float) -> str:
        groups = self.groups
        blocking = groups.blocking()
        named = ", ".join(str(group) for group in blocking[:_NAMED])
        if len(blocking) > _NAMED:
            named += f" and {len(blocking) - _NAMED} more"
        whom = named or f"groups to be dispatched ({len(groups.waiting)} problems wait for it)"
        failed = ", ".join(f"{n} by {reason}" for reason, n in groups.counters["failed"].items())
        return (
            f"no group finished within {timeout_s:g} s; the trainer, at version {groups.version}, "
            f"waits for {whom}; {groups.num_finished} groups are finished, {len(groups)} of at "
            f"most {groups.capacity} outstanding; failed: {failed or 'none'}. "
            "Look at the engine and the environments, or raise rollout.timeout_s"
        )


def build_buffer(recipe: Recipe) -> Buffer:
    """An empty one over fresh accounts, as the recipe says."""
    groups = Groups(
        groups_per_step=recipe.groups_per_step,
        max_staleness=recipe.max_staleness,
        steps=recipe.steps,
        steps_per_batch=recipe.num_minibatches,
    )
    return Buffer(
        groups,
        recipe.loss.advantage,
        recipe.loss.variance_of,
        max_filtered=recipe.rollout.max_filtered_groups,
    )


def _require_own(group: Group, trajectories: Sequence[Trajectory]) -> None:
    if group.state != "running":
        raise GroupsError(f"{group} is not running; trajectories are added once, at its end")
    foreign = [str(t.id) for t in trajectories if t.id.group != group.id]
    if foreign:
        raise GroupsError(f"{group} was given {', '.join(foreign)}")
    members = [t.id.index for t in trajectories]
    if len(set(members)) != len(members):
        raise GroupsError(f"{group} was given members {members}; each counts once")


def _check_versions(trajectory: Trajectory, group: Group, target: int, max_staleness: int) -> None:
    first = trajectory.first_version
    if first is None:
        return
    if first < group.dispatch_version:
        raise StalenessError(
            f"{trajectory.id}: a token was drawn at version {first}, before its group was "
            f"dispatched at {group.dispatch_version}; the engine had not loaded what it claimed"
        )
    if target - first > max_staleness:
        raise StalenessError(
            f"{trajectory.id}: trained at version {target}, its oldest token is of {first}: "
            f"{target - first} versions apart, max_staleness is {max_staleness}"
        )
    inter = trajectory.inter(target)
    if inter < 0:
        raise StalenessError(
            f"{trajectory.id}: trained at version {target}, its newest token is of "
            f"{trajectory.last_version} (inter = {inter}); tokens newer than the trainer come from "
            "another run: start in an empty run folder"
        )
