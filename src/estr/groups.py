"""Groups: who may be dispatched, who may be trained on, and when.

    dispatch                 start              finish                consume
    --------> pending ----------> running ----------> finished ----------> consumed
                 |                   |                   |  filter
                 |                   |                   |---------------> filtered
                 |  fail             |                   |
                 |-------------------+-------------------+---------------> failed
                 |  leftover         |                   |
                 `-------------------+-------------------+---------------> leftover

Let B be the groups in one optimizer step, S the maximum staleness, M the optimizer steps made of
one batch, and v the version that the next optimizer step is taken at. A group dispatched at
version d (the one that the serving engine has acknowledged as loaded) may be trained on at
versions up to its deadline d + S. Invariants, with "outstanding" for pending, running, finished:

F(v)          for every k >= 0 at most (k+1)*B outstanding groups have a deadline <= v+k, and none
              has one < v (`estr.deadlines`). Hence at most (S+1)*B are outstanding. Admission
              refuses what would break F; taking a batch waits for what would break it; leaving
              only lowers counts.
lease         a group's place among the outstanding is its lease on capacity: taken by dispatch,
              released by the transition into a terminal state, exactly once.
conservation  every id below next_id is outstanding, waiting to be dispatched again after a resume,
              or counted in exactly one terminal state.

docs/the-loop.md proves that F gives the bound v_target - v_first <= S and that nothing deadlocks.
Plain Python and counts by deadline only: no clock, no asyncio, no tensors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .deadlines import Deadlines
from .errors import ConfigError, GroupsError, StalenessError
from .group import TERMINAL_STATES, Group, State, Waiting
from .groups_snapshot import Lease, Snapshot, read_snapshot

if TYPE_CHECKING:
    from .types import Trajectory


class Groups:
    """The accounts of all groups of a run; the one owner of its capacity.

    groups_per_step: B. max_staleness: S. steps: optimizer steps of the whole run.
    steps_per_batch: M. max_issues: how many groups a problem may have before it is given up.
    version is v, step the optimizer steps made, skipped ones included. waiting holds the problems
    to be dispatched again, counters[state][reason] the groups that have left, num_abandoned the
    problems given up. on_change is called after every change of any group, and by close.

    Raises ConfigError if a number is out of range or S < M - 1, under which no batch could ever
    be admitted as a whole.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        *,
        steps: int,
        steps_per_batch: int = 1,
        max_issues: int = 3,
    ) -> None:
        for key, value, least in (
            ("groups_per_step", groups_per_step, 1),
            ("max_staleness", max_staleness, 0),
            ("steps", steps, 1),
            ("num_minibatches", steps_per_batch, 1),
            ("max_issues", max_issues, 1),
        ):
            if value < least:
                raise ConfigError(f"{key} must be at least {least}, not {value}")
        if max_staleness < steps_per_batch - 1:
            raise ConfigError(
                f"max_staleness = {max_staleness} cannot hold with num_minibatches = "
                f"{steps_per_batch}; raise max_staleness to {steps_per_batch - 1}"
            )
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.steps = steps
        self.steps_per_batch = steps_per_batch
        self.max_issues = max_issues
        self.version = 0
        self.step = 0
        self.next_id = 0
        self.closed = False
        self.num_abandoned = 0
        self.counters: dict[State, Counter[str]] = {state: Counter() for state in TERMINAL_STATES}
        self.on_change: Callable[[], None] = lambda: None
        self._outstanding: dict[int, Group] = {}
        self._deadlines = Deadlines(groups_per_step)
        self.waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        """Outstanding groups."""
        return len(self._outstanding)

    def __iter__(self) -> Iterator[Group]:
        """The outstanding groups, in the order of their dispatch."""
        return iter(list(self._outstanding.values()))

    def __getitem__(self, group_id: int) -> Group:
        """The outstanding group of that id. Raises GroupsError if it has left or never was."""
        if group_id not in self._outstanding:
            known = "has left already" if 0 <= group_id < self.next_id else "was never dispatched"
            raise GroupsError(f"group {group_id} {known}; {len(self)} groups are outstanding")
        return self._outstanding[group_id]

    @property
    def capacity(self) -> int:
        """(S+1)*B: outstanding groups, at most."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def num_finished(self) -> int:
        """Groups that are finished and not yet taken."""
        return self._deadlines.num_finished

    @property
    def done(self) -> bool:
        """No further batch will come: all steps are made, or the data ended and all has left."""
        return self.step >= self.steps or (self.closed and not len(self) and not self.waiting)

    def remaining(self) -> int:
        """Groups still to be dispatched: those that the steps left need, less the outstanding."""
        return max(0, (self.steps - self.step) * self.groups_per_step - len(self))

    def can_dispatch(self, version: int) -> bool:
        """Would F still hold with one more group, dispatched at `version`?

        Raises StalenessError for a version that is negative or newer than the trainer's.
        """
        if not 0 <= version <= self.version:
            raise StalenessError(
                f"the engine claims version {version}, the trainer is at {self.version}; an engine "
                "can only have loaded what this run's trainer has published"
            )
        return self._deadlines.admits(version + self.max_staleness, self.version)

    def dispatch(self, task: str, problem: int, version: int) -> Group:
        """Take a lease for a new group, dispatched at the acknowledged `version`.

        Raises StalenessError if F forbids it, GroupsError after `close`.
        """
        if self.closed:
            raise GroupsError(f"{task} problem {problem} comes after the end of the data")
        return self._admit(Waiting(task, problem, issue=0), version)

    def reissue(self, version: int) -> Group | None:
        """Dispatch the problem that has waited longest; None where none waits.

        Raises StalenessError if F forbids it.
        """
        if not self.waiting:
            return None
        group = self._admit(self.waiting[0], version)
        self.waiting.popleft()
        return group

    def _admit(self, problem: Waiting, version: int) -> Group:
        if not self.can_dispatch(version):
            raise StalenessError(
                f"a group dispatched at {version} would break the bound: the next step is at "
                f"{self.version}, {len(self)} groups are outstanding; ask can_dispatch first"
            )
        group_id = self.next_id if problem.id is None else problem.id
        self.next_id = max(self.next_id, group_id + 1)
        deadline = version + self.max_staleness
        group = Group(group_id, problem.task, problem.problem, version, deadline, problem.issue)
        self._outstanding[group_id] = group
        self._deadlines.add(deadline)
        self.on_change()
        return group

    def close(self) -> None:
        """No new problem will come. Waiting ones may still be dispatched; once nothing waits and
        nothing runs, `select` gives what is left, be it less than a batch."""
        self.closed = True
        self.on_change()

    def start(self, group: Group) -> None:
        """pending -> running. Raises GroupsError from any other state."""
        self._require(group, "pending")
        group.state = "running"
        self.on_change()

    def finish(self, group: Group, trajectories: Sequence[Trajectory] = ()) -> None:
        """running -> finished. Raises GroupsError from any other state."""
        self._require(group, "running")
        group.state = "finished"
        group.trajectories = tuple(trajectories)
        self._deadlines.finish(group.deadline)
        self.on_change()

    def filter(self, group: Group, reason: str) -> None:
        """finished -> filtered: it taught nothing. Raises GroupsError from any other state."""
        self._require(group, "finished")
        self._release(group, "filtered", reason)
        self.on_change()

    def fail(self, group: Group, reason: str) -> None:
        """Outstanding -> failed. Its problem waits to be dispatched again at the version of that
        time, unless it has had max_issues groups. Raises GroupsError if the group has left."""
        self._require(group, "pending", "running", "finished")
        self._release(group, "failed", reason)
        if group.issue + 1 < self.max_issues:
            self.waiting.append(Waiting(group.task, group.problem, group.issue + 1))
        else:
            self.num_abandoned += 1
        self.on_change()

    def leftover(self) -> list[Group]:
        """Outstanding -> leftover, all of them, counted by the state they were in: the run ends."""
        groups = list(self)
        for group in groups:
            self._release(group, "leftover", group.state)
        self.on_change()
        return groups

    def _require(self, group: Group, *states: State) -> None:
        if self._outstanding.get(group.id) is not group:
            raise GroupsError(f"{group} has left already; its lease is released exactly once")
        if group.state not in states:
            raise GroupsError(f"{group} is not {' or '.join(states)}; it cannot move like this")

    def _release(self, group: Group, state: State, reason: str) -> None:
        """The only place where a lease ends."""
        del self._outstanding[group.id]
        self._deadlines.remove(group.deadline, finished=group.state == "finished")
        group.state = state
        self.counters[state][reason] += 1

    def select(self) -> list[Group]:
        """The next batch, oldest deadline first (ties by id), or [] while it must wait.

        It has M*B finished groups (fewer before the last step of the run), and is given only if F
        holds once it is taken: F(v+M). Groups j*B ... (j+1)*B-1 belong to the step at v+j and all
        have deadlines >= v+j. Once the data has ended and nothing runs or waits, it may be any
        number n > 0 of groups, in ceil(n/B) steps, if F allows.
        """
        if not self.ready():
            return []
        finished = (group for group in self if group.state == "finished")
        return sorted(finished, key=Group.urgency)[: self._batch_size()]

    def named(self, ids: Sequence[int]) -> list[Group]:
        """The outstanding groups of these ids, in this order. Raises GroupsError for one that is
        not finished; `consume` checks the bound."""
        batch = [self[group_id] for group_id in ids]
        for group in batch:
            self._require(group, "finished")
        return batch

    def ready(self) -> bool:
        """Would `select` give a batch? Costs the number of deadlines, not of groups."""
        size = self._batch_size()
        return 0 < size <= self.num_finished and self._overfull_after(size) is None

    def blocking(self) -> list[Group]:
        """The unfinished groups that the trainer waits for, most urgent first.

        Those that F names: with a deadline up to the first one at which F would fail. Where F
        names none and the batch merely lacks groups: all unfinished ones. [] while a batch is
        ready, and where only a dispatch can help.
        """
        if self.ready():
            return []
        overfull = self._overfull_after(self._batch_size())
        unfinished = sorted((g for g in self if g.state != "finished"), key=Group.urgency)
        return [group for group in unfinished if overfull is None or group.deadline <= overfull]

    def consume(self, batch: Sequence[Group], version: int) -> None:
        """finished -> consumed: hand the batch to the trainer, whose next step is at `version`.

        The accounts move on to the version that the batch will end at, so that engines work while
        it is trained. Raises StalenessError, before anything has changed, if the accounts stand
        at another version, a group would be trained after its deadline, or F would fail;
        GroupsError if a group is not finished or comes twice.
        """
        if version != self.version:
            raise StalenessError(
                f"the trainer is at version {version}, the accounts at {self.version}; "
                "report skipped updates with skip"
            )
        if not batch or len({group.id for group in batch}) != len(batch):
            raise GroupsError(f"a batch needs groups, each once, not {[g.id for g in batch]}")
        for place, group in enumerate(batch):
            self._require(group, "finished")
            target = version + place // self.groups_per_step
            if target > group.deadline:
                raise StalenessError(f"{group} would be trained at version {target}")
        after = version + self._num_steps(len(batch))
        overfull = self._deadlines.overfull(after, Counter(group.deadline for group in batch))
        if overfull is not None:
            raise StalenessError(
                f"this batch would leave more groups with a deadline up to {overfull} than the "
                f"steps from version {after} can take; take what select gives"
            )
        for group in batch:
            self._release(group, "consumed", "trained")
        self.step += after - version
        self.version = after
        self.on_change()

    def skip(self, num_updates: int = 1) -> None:
        """Steps with the trainer left the weights as they were (nothing to learn): they count as
        steps, but their versions never came to be. F holds at a lower version whenever it does at
        a higher one. Raises GroupsError for more updates than were ever made."""
        if not 0 <= num_updates <= self.version:
            raise GroupsError(f"cannot skip {num_updates} updates at version {self.version}")
        self.version -= num_updates
        self.on_change()

    def _num_steps(self, size: int) -> int:
        return -(-size // self.groups_per_step)

    def _batch_size(self) -> int:
        num_steps = max(0, min(self.steps_per_batch, self.steps - self.step))
        full = num_steps * self.groups_per_step
        ended = self.closed and not self.waiting and self.num_finished == len(self)
        return min(full, self.num_finished) if ended else full

    def _overfull_after(self, size: int) -> int | None:
        """The first deadline at which F fails once the steps on the `size` most urgent finished
        groups are made. Only unfinished groups can make it fail (docs/the-loop.md, lemma 3)."""
        return self._deadlines.overfull_by_unfinished(self.version + self._num_steps(size))

    def snapshot(self, version: int) -> dict[str, Any]:
        """The accounts as a plain dict, at a moment when the trainer's weights are `version`.

        Raises GroupsError while a batch is with the trainer: its groups are consumed here and its
        steps are not yet in the weights.
        """
        if version != self.version:
            raise GroupsError(
                f"a batch is with the trainer: its weights are version {version}, the accounts "
                f"stand at {self.version}; snapshot between two batches"
            )
        snapshot = Snapshot(
            version=self.version,
            step=self.step,
            next_id=self.next_id,
            num_abandoned=self.num_abandoned,
            counters={state: dict(reasons) for state, reasons in self.counters.items()},
            waiting=list(self.waiting),
            outstanding=[Lease.of(group) for group in self],
        )
        return dataclasses.asdict(snapshot)

    def restore(
        self,
        snapshot: Mapping[str, Any],
        finished: Mapping[int, tuple[Trajectory, ...]] | None = None,
    ) -> bool:
        """Go on from `snapshot`, in accounts that nothing was dispatched from yet. True: every
        outstanding group is as it was, lease, deadline and state (a pending one is running then,
        as dispatch goes straight on to it). False: B or S have changed so that F would not hold;
        all of them wait instead, under their old ids, to be dispatched anew by `reissue`.
        finished: the trajectories of finished groups, by id.

        Raises CheckpointError if the snapshot is malformed, GroupsError in used accounts.
        """
        if self.next_id or self.step:
            raise GroupsError("only fresh accounts can be restored; build new Groups")
        saved = read_snapshot(snapshot)
        self.version = saved.version
        self.step = saved.step
        self.next_id = saved.next_id
        self.num_abandoned = saved.num_abandoned
        for name, reasons in saved.counters.items():
            self.counters[name] = Counter(reasons)
        whole = self._take_back(saved.outstanding, finished or {})
        if not whole:
            self.waiting.extend(
                Waiting(g.task, g.problem, g.issue, id=g.id) for g in saved.outstanding
            )
        self.waiting.extend(saved.waiting)
        self.on_change()
        return whole

    def _take_back(
        self, leases: Sequence[Lease], finished: Mapping[int, tuple[Trajectory, ...]]
    ) -> bool:
        """Restore leases as they were, if F holds with them under the S and B of these accounts."""
        # A larger S must not make old groups younger than they are; a smaller one binds them.
        deadlines = [min(g.deadline, g.dispatch_version + self.max_staleness) for g in leases]
        accounts = Deadlines(self.groups_per_step, deadlines)
        if accounts.overfull(self.version, taken={}) is not None:
            return False
        self._deadlines = accounts
        for lease, deadline in zip(leases, deadlines, strict=True):
            self._outstanding[lease.id] = group = lease.taken_back(deadline)
            if group.state == "finished":
                group.trajectories = finished.get(group.id, ())
                self._deadlines.finish(deadline)
        return True
