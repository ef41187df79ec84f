"""The bound under random interleavings: rollouts, failures, training, skipped updates, late
publishing, the end of the data and resumes, in any order.

The machine keeps its own books and its own, brute-force reading of the invariant F; nothing here
looks into the accounts beyond their public side.
"""

from __future__ import annotations

import json
from collections import Counter, deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from estr.errors import GroupsError, StalenessError
from estr.group import TERMINAL_STATES, Group
from estr.groups import Groups


def holds(deadlines: list[int], version: int, per_step: int) -> bool:
    """F(version), read off the page."""
    return all(deadline >= version for deadline in deadlines) and all(
        sum(deadline <= version + k for deadline in deadlines) <= (k + 1) * per_step
        for k in range(30)
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(B, S, M, publish_every, steps), as a recipe admits them."""
    staleness = draw(st.integers(0, 4))
    minibatches = draw(st.integers(1, min(3, staleness + 1)))
    publish_every = draw(st.integers(1, min(3, staleness - minibatches + 2)))
    return draw(st.integers(1, 3)), staleness, minibatches, publish_every, draw(st.integers(1, 40))


class Loop(RuleBasedStateMachine):
    """A loop without clocks: the rules are what engines, rollouts and trainer may do next.

    trained is the version of the trainer's weights, published the newest one in the store, loaded
    those that the two engines have acknowledged; with_trainer holds the mini-batches handed over.
    """

    @initialize(shape=shapes())
    def build(self, shape: tuple[int, int, int, int, int]) -> None:
        self.per_step, self.staleness, self.minibatches, self.publish_every, self.steps = shape
        self.groups = self.fresh()
        self.trained = self.published = 0
        self.loaded = [0, 0]
        self.with_trainer: deque[list[Group]] = deque()
        self.outstanding: dict[int, Group] = {}
        self.released: Counter[int] = Counter()
        self.problems = self.problems_at_resume = 0

    def fresh(self) -> Groups:
        return Groups(
            self.per_step, self.staleness, steps=self.steps, steps_per_batch=self.minibatches
        )

    def in_state(self, *states: str) -> list[Group]:
        return [group for group in self.outstanding.values() if group.state in states]

    def deadlines(self, without: list[Group] | None = None) -> list[int]:
        gone = {group.id for group in without or []}
        return [g.deadline for g in self.outstanding.values() if g.id not in gone]

    def gone(self, group: Group) -> None:
        """The group has left, once and for all: every further move is refused."""
        del self.outstanding[group.id]
        self.released[group.id] += 1
        state, number = group.state, len(self.groups)
        for move in (self.groups.start, self.groups.finish):
            with pytest.raises(GroupsError):
                move(group)
        for leave in (self.groups.fail, self.groups.filter):
            with pytest.raises(GroupsError):
                leave(group, "again")
        with pytest.raises(GroupsError):
            self.groups.consume([group], self.groups.version)
        assert (group.state, len(self.groups)) == (state, number)

    def has_problem(self) -> bool:
        return bool(self.groups.waiting) or not self.groups.closed

    # What engines and rollouts do

    def may_dispatch(self) -> bool:
        return self.groups.remaining() > 0 and self.has_problem()

    @precondition(may_dispatch)
    @rule(number=st.integers(1, 15), engine=st.integers(0, 1))
    def dispatch(self, number: int, engine: int) -> None:
        for _ in range(number):
            if self.may_dispatch():
                self.dispatch_if_allowed(self.loaded[engine])

    def dispatch_if_allowed(self, version: int) -> None:
        deadline = version + self.staleness
        allowed = holds([*self.deadlines(), deadline], self.groups.version, self.per_step)
        assert self.groups.can_dispatch(version) == allowed
        if not allowed:
            with pytest.raises(StalenessError):
                self.dispatch_one(version)
            return
        group = self.dispatch_one(version)
        assert group.id not in self.outstanding
        assert group.id not in self.released
        assert group.deadline == deadline
        self.outstanding[group.id] = group

    def dispatch_one(self, version: int) -> Group:
        group = self.groups.reissue(version)
        if group is None:
            group = self.groups.dispatch("task", self.problems, version)
            self.problems += 1
        return group

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def roll_out(self, data: st.DataObject) -> None:
        """Several groups go on by a move or two, in any order."""
        which = st.lists(st.sampled_from(list(self.outstanding.values())), min_size=1, max_size=8)
        for group in data.draw(which):
            if group.id not in self.outstanding:
                continue
            move = data.draw(st.sampled_from(["go on", "go on", "go on", "go on", "leave"]))
            if move == "leave":
                self.leave(group)
            elif group.state == "pending":
                self.groups.start(group)
            elif group.state == "running":
                self.groups.finish(group)

    def leave(self, group: Group) -> None:
        """Finished groups are filtered, or fail where their problem's number is odd."""
        if group.state == "finished" and group.problem % 2 == 0:
            self.groups.filter(group, "zero_variance")
        else:
            waiting = len(self.groups.waiting) + self.groups.num_abandoned
            self.groups.fail(group, "env_error")
            assert len(self.groups.waiting) + self.groups.num_abandoned == waiting + 1
        self.gone(group)

    # What the trainer does

    @precondition(lambda self: self.in_state("finished"))
    @rule()
    def take(self) -> None:
        version = self.groups.version
        finished = sorted(self.in_state("finished"), key=lambda g: (g.deadline, g.id))
        full = self.per_step * min(self.minibatches, self.steps - self.groups.step)
        if not self.has_problem() and len(finished) == len(self.outstanding):
            full = min(full, len(finished))
        num_steps = -(-full // self.per_step)
        oldest = finished[:full]
        possible = (
            0 < full == len(oldest)
            and self.groups.step < self.steps
            and holds(self.deadlines(without=oldest), version + num_steps, self.per_step)
        )
        batch = self.groups.select()
        assert self.groups.ready() == bool(batch) == possible
        assert batch == (oldest if possible else [])
        if not batch:
            return
        self.groups.consume(batch, version)
        assert self.groups.version == version + num_steps
        for group in batch:
            self.gone(group)
        for start in range(0, len(batch), self.per_step):
            self.with_trainer.append(batch[start : start + self.per_step])

    @precondition(lambda self: self.with_trainer or min(self.loaded) < self.published)
    @rule(skipped=st.lists(st.booleans(), max_size=4), engines=st.sets(st.integers(0, 1)))
    def train(self, skipped: list[bool], engines: set[int]) -> None:
        """Some steps of the trainer, and some engines take what was published."""
        for skip in skipped:
            if self.with_trainer:
                self.train_one(skip)
        for engine in engines:
            self.loaded[engine] = self.published

    def train_one(self, skip: bool) -> None:
        for group in self.with_trainer.popleft():
            assert 0 <= self.trained - group.dispatch_version <= self.staleness
        if skip:
            self.groups.skip()
        else:
            self.trained += 1
        if not self.with_trainer and self.trained - self.published >= self.publish_every:
            self.published = self.trained

    # What ends or interrupts a run

    @precondition(lambda self: self.problems > 12 and not self.groups.closed)
    @rule()
    def close(self) -> None:
        self.groups.close()
        with pytest.raises(GroupsError):
            self.groups.dispatch("task", self.problems, self.trained)

    @precondition(lambda self: self.groups.done or self.problems > self.problems_at_resume + 8)
    @rule()
    def resume(self) -> None:
        if self.with_trainer:
            with pytest.raises(GroupsError):
                self.groups.snapshot(self.trained)
            return
        snapshot = json.loads(json.dumps(self.groups.snapshot(self.trained)))
        before = {
            g.id: (
                g.dispatch_version,
                g.deadline,
                "finished" if g.state == "finished" else "running",
            )
            for g in self.groups
        }
        closed, self.groups = self.groups.closed, self.fresh()
        assert self.groups.restore(snapshot)
        assert {g.id: (g.dispatch_version, g.deadline, g.state) for g in self.groups} == before
        if closed:
            self.groups.close()
        self.outstanding = {g.id: g for g in self.groups}
        self.published = self.trained
        self.loaded = [self.trained] * 2
        self.problems_at_resume = self.problems

    # What holds always

    @invariant()
    def the_bound_holds(self) -> None:
        assert holds(self.deadlines(), self.groups.version, self.per_step)
        assert len(self.groups) <= (self.staleness + 1) * self.per_step
        assert self.trained + len(self.with_trainer) == self.groups.version

    @invariant()
    def the_books_agree(self) -> None:
        groups = self.groups
        assert {g.id: g for g in groups} == self.outstanding
        assert groups.num_finished == len(self.in_state("finished"))
        assert all(count == 1 for count in self.released.values())
        ended = sum(groups.counters[state].total() for state in TERMINAL_STATES)
        resumed = sum(problem.id is not None for problem in groups.waiting)
        assert ended == len(self.released)
        assert groups.next_id == ended + len(groups) + resumed

    @invariant()
    def nothing_deadlocks(self) -> None:
        """Once every rollout has ended, the trainer is idle and the engines have loaded what was
        published, either a batch is ready, or a group may be dispatched, or the run is done."""
        settled = not self.in_state("pending", "running") and not self.with_trainer
        if settled and min(self.loaded) == self.published and not self.groups.done:
            can_dispatch = self.may_dispatch() and self.groups.can_dispatch(self.published)
            assert self.groups.ready() or can_dispatch

    @invariant()
    def a_waiting_trainer_knows_for_whom(self) -> None:
        blocking = self.groups.blocking()
        assert all(group.state in ("pending", "running") for group in blocking)
        assert [(g.deadline, g.id) for g in blocking] == sorted(
            (g.deadline, g.id) for g in blocking
        )
        if self.in_state("pending", "running") and not self.groups.ready():
            assert blocking or self.groups.done
        else:
            assert not blocking

    def teardown(self) -> None:
        """From wherever the rules have led, a loop that only does its duty comes to the end."""
        if not hasattr(self, "groups"):
            return
        for _ in range(40 * self.steps):
            if self.groups.done:
                break
            while self.with_trainer:
                self.train_one(skip=False)
            self.loaded = [self.published] * 2
            while self.may_dispatch() and self.groups.can_dispatch(self.published):
                self.dispatch_if_allowed(self.published)
            for group in self.in_state("pending"):
                self.groups.start(group)
            for group in self.in_state("running"):
                self.groups.finish(group)
            self.take()
        assert self.groups.done, "the loop stands still"
        for group in self.groups.leftover():
            self.gone(group)
        self.the_books_agree()


TestLoop = Loop.TestCase
TestLoop.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
