"""The buffer: what becomes a batch, what fails, what the recorded versions forbid, who waits."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from estr.buffer import Buffer, TrainingGroup
from estr.errors import EnvError, GroupsError, NumericsError, StalenessError, Stalled
from estr.group import Group
from estr.groups import Groups
from estr.types import RolloutId, SamplingSettings, Segment, Status, Trajectory, Turn

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nobody can go on: no test really waits, none depends on speed."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if timers and not self._ready:
            self._now = max(self._now, min(timers))
        super()._run_once()


def play(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


def trajectory(
    group: Group,
    index: int,
    reward: float | None = 1.0,
    *,
    versions: Sequence[int] | None = None,
    status: Status = "ok",
) -> Trajectory:
    """Two tokens read, then one written at each of `versions` (two at the dispatch version)."""
    drawn = [group.dispatch_version] * 2 if versions is None else list(versions)
    number = len(drawn)
    written = Segment.drawn(range(number), [-0.5] * number, [0.5] * number, drawn)
    return Trajectory(
        id=RolloutId(0, group.id, index),
        task=group.task,
        problem=group.problem,
        segments=(Segment.join([Segment.context([7, 8]), written]),),
        turns=(Turn(0, 2, 2 + number, "stop"),),
        sampling=SamplingSettings(),
        status=status,
        dispatch_version=group.dispatch_version,
        outcome=reward,
        reward=reward,
    )


def start(groups: Groups, version: int = 0) -> Group:
    group = groups.dispatch("task", groups.next_id, version)
    groups.start(group)
    return group


def add(buffer: Buffer, group: Group, *rewards: float | None) -> None:
    buffer.add(group.id, [trajectory(group, i, r) for i, r in enumerate(rewards or (1.0, 0.0))])


def at_version(version: int, staleness: int) -> Groups:
    """Accounts of a run that has reached `version`, B = 1."""
    groups = Groups(1, staleness, steps=100)
    state = groups.snapshot(0)
    groups.restore({**state, "version": version, "step": version})
    return groups


# Batches


def test_a_batch_comes_in_mini_batches_with_advantages_and_target_versions() -> None:
    groups = Groups(2, 3, steps=9, steps_per_batch=2)
    buffer = Buffer(groups)
    made = [start(groups) for _ in range(4)]
    for group in reversed(made):
        assert buffer.take(0) is None
        add(buffer, group, 1.0, 0.0, None)
    first, second = buffer.take(0) or []
    assert [(g.id, g.target_version) for g in first] == [(0, 0), (1, 0)]
    assert [(g.id, g.target_version) for g in second] == [(2, 1), (3, 1)]
    for group in (*first, *second):
        assert [t.id.group for t in group.trajectories] == [group.id] * 3
        assert group.advantages[:2] == pytest.approx((0.7071057811, -0.7071057811), abs=1e-9)
        assert group.advantages[2] is None
    assert groups.version == 2
    assert buffer.take(2) is None


@pytest.mark.parametrize(
    ("kind", "advantages"),
    [
        ("grpo", (1.1547, -0.5773, -0.5773)),
        ("no_std", (2 / 3, -1 / 3, -1 / 3)),
        ("leave_one_out", (1.0, -0.5, -0.5)),
    ],
)
def test_the_advantage_is_the_one_asked_for(kind: Any, advantages: tuple[float, ...]) -> None:
    groups = Groups(1, 0, steps=9)
    buffer = Buffer(groups, kind)
    add(buffer, start(groups), 1.0, 0.0, 0.0)
    ((group,),) = buffer.take(0) or []
    assert group.advantages == pytest.approx(advantages, abs=1e-4)


def test_a_group_that_lost_a_member_does_not_borrow_from_the_next_check_23() -> None:
    groups = Groups(2, 0, steps=9)
    buffer = Buffer(groups, "no_std")
    first, second = start(groups), start(groups)
    add(buffer, first, 1.0, 0.0, 0.0)
    add(buffer, second, 1.0, 1.0, 0.0, 0.0)
    (taken,) = buffer.take(0) or []
    assert taken[0].advantages == pytest.approx((2 / 3, -1 / 3, -1 / 3))
    assert taken[1].advantages == (0.5, 0.5, -0.5, -0.5)


def test_the_end_of_the_data_gives_a_smaller_batch() -> None:
    groups = Groups(2, 1, steps=9, steps_per_batch=2)
    buffer = Buffer(groups)
    for _ in range(3):
        add(buffer, start(groups))
    assert buffer.take(0) is None
    groups.close()
    batch = buffer.take(0) or []
    assert [[group.id for group in part] for part in batch] == [[0, 1], [2]]
    assert groups.version == 2


def test_a_training_group_crosses_processes() -> None:
    groups = Groups(1, 0, steps=9)
    buffer = Buffer(groups)
    add(buffer, start(groups))
    ((group,),) = buffer.take(0) or []
    copy: TrainingGroup = pickle.loads(pickle.dumps(group))
    assert (copy.id, copy.target_version, copy.advantages) == (0, 0, group.advantages)
    assert [t.id for t in copy.trajectories] == [t.id for t in group.trajectories]


# Failures


@pytest.mark.parametrize("status", ["env_error", "engine_error", "grader_error", "cancelled"])
def test_two_scored_members_are_enough_and_one_is_not(status: Status) -> None:
    groups = Groups(1, 1, steps=9)
    buffer = Buffer(groups)
    lucky, unlucky = start(groups), start(groups)
    lost = [trajectory(lucky, i, None, status=status) for i in (2, 3)]
    buffer.add(lucky.id, [trajectory(lucky, 0), trajectory(lucky, 1), *lost])
    lost = [trajectory(unlucky, i, None, status=status) for i in (1, 2)]
    buffer.add(unlucky.id, [trajectory(unlucky, 0), *lost])
    assert (lucky.state, unlucky.state) == ("finished", "failed")
    assert groups.counters["failed"] == {status: 1}
    assert [problem.problem for problem in groups.waiting] == [unlucky.problem]
    ((group,),) = buffer.take(0) or []
    assert group.advantages == (0.0, 0.0, None, None)


def test_timeouts_and_truncated_members_count_when_the_task_scored_them() -> None:
    groups = Groups(1, 0, steps=9)
    buffer = Buffer(groups)
    group = start(groups)
    statuses: tuple[Status, Status] = ("timeout", "truncated")
    buffer.add(group.id, [trajectory(group, i, 0.0, status=s) for i, s in enumerate(statuses)])
    assert group.state == "finished"


def test_why_a_group_failed_is_counted() -> None:
    groups = Groups(8, 0, steps=9)
    buffer = Buffer(groups)
    ungraded, alone, empty, mixed = (start(groups) for _ in range(4))
    buffer.add(ungraded.id, [trajectory(ungraded, i, None) for i in range(2)])
    buffer.add(alone.id, [trajectory(alone, 0)])
    buffer.add(empty.id, [])
    causes: tuple[Status, ...] = ("env_error", "engine_error", "engine_error")
    buffer.add(mixed.id, [trajectory(mixed, i, None, status=s) for i, s in enumerate(causes)])
    assert groups.counters["failed"] == {"unscored": 1, "too_few_members": 2, "engine_error": 1}


def test_a_reward_that_is_not_finite_is_an_error_and_changes_nothing() -> None:
    groups = Groups(1, 0, steps=9)
    buffer = Buffer(groups)
    group = start(groups)
    for bad in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(NumericsError):
            buffer.add(group.id, [trajectory(group, 0), trajectory(group, 1, bad)])
        assert group.state == "running"


def test_trajectories_that_do_not_belong_are_refused() -> None:
    groups = Groups(4, 0, steps=9)
    buffer = Buffer(groups)
    group, other = start(groups), start(groups)
    pending = groups.dispatch("task", 9, 0)
    own = [trajectory(group, 0), trajectory(group, 1)]
    with pytest.raises(GroupsError, match="was given group 1 member 2 attempt 0"):
        buffer.add(group.id, [*own, trajectory(other, 2)])
    with pytest.raises(GroupsError, match=r"given members \[0, 1, 1\]"):
        buffer.add(group.id, [*own, trajectory(group, 1)])
    with pytest.raises(GroupsError, match="is not running"):
        add(buffer, pending)
    with pytest.raises(GroupsError, match="group 99 was never dispatched"):
        buffer.add(99, own)
    buffer.add(group.id, own)
    with pytest.raises(GroupsError, match="added once"):
        buffer.add(group.id, own)
    groups.fail(other, "timeout")
    with pytest.raises(GroupsError, match="group 1 has left already"):
        add(buffer, other)
    assert [g.state for g in groups] == ["finished", "pending"]


def test_leftover_gives_back_finished_trajectories_only() -> None:
    groups = Groups(4, 0, steps=9)
    buffer = Buffer(groups)
    finished, _running = start(groups), start(groups)
    add(buffer, finished)
    assert [t.id.group for t in buffer.leftover()] == [finished.id] * 2
    assert groups.counters["leftover"] == {"finished": 1, "running": 1}
    assert buffer.leftover() == []


# Versions


def take_with_versions(*versions: int, target: int, dispatched: int, staleness: int) -> bool:
    groups = at_version(target, staleness)
    buffer = Buffer(groups)
    group = start(groups, dispatched)
    members = [trajectory(group, 0), trajectory(group, 1, 0.0, versions=versions)]
    buffer.add(group.id, members)
    try:
        return buffer.take(target) is not None
    finally:
        assert group.state in ("finished", "consumed")
        assert groups.version == target + (group.state == "consumed")


def test_placeholder_versions_do_not_count_check_55() -> None:
    """Tokens that were read carry version -1; the oldest of [-1, -1, 5, 5, 6] is 5."""
    group = start(at_version(7, 2), 5)
    mixed = trajectory(group, 0, versions=[5, 5, 6])
    assert mixed.segments[0].versions.tolist() == [-1, -1, 5, 5, 6]
    assert (mixed.first_version, mixed.last_version, mixed.intra) == (5, 6, 1)
    assert mixed.version_runs == [(5, 2), (6, 1)]
    assert take_with_versions(5, 5, 6, target=7, dispatched=5, staleness=2)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_allowed_lag_is_allowed_and_one_more_is_not(staleness: int) -> None:
    newest, oldest = 10, 10 - staleness
    assert take_with_versions(oldest, newest, target=10, dispatched=oldest, staleness=staleness)
    with pytest.raises(StalenessError, match=f"drawn at version {oldest - 1}, before its group"):
        take_with_versions(oldest - 1, target=10, dispatched=oldest, staleness=staleness)


def test_a_token_too_old_for_its_step_names_trajectory_and_numbers() -> None:
    """Only accounts that were tampered with let a group live past its deadline."""
    groups = at_version(10, 4)
    buffer = Buffer(groups)
    group = start(groups, 6)
    add(buffer, group)
    groups.max_staleness = 3
    with pytest.raises(StalenessError, match=r"group 0 member 0 .* 4 versions apart") as caught:
        buffer.take(10)
    assert "trained at version 10, its oldest token is of 6" in str(caught.value)
    assert group.state == "finished"


@pytest.mark.parametrize(("newest", "inter"), [(11, -1), (15, -5)])
def test_a_negative_lag_is_an_error_check_65(newest: int, inter: int) -> None:
    with pytest.raises(StalenessError, match=rf"inter = {inter}\).*empty run folder"):
        take_with_versions(9, newest, target=10, dispatched=9, staleness=2)


def test_a_member_that_wrote_nothing_has_no_versions_to_check() -> None:
    assert take_with_versions(target=10, dispatched=8, staleness=2)


def test_the_trainer_and_the_accounts_must_agree_on_the_version() -> None:
    groups = Groups(1, 2, steps=9)
    buffer = Buffer(groups)
    add(buffer, start(groups))
    with pytest.raises(StalenessError, match="the trainer is at version 1, the accounts at 0"):
        buffer.take(1)
    assert buffer.take(0) is not None


# Waiting


def test_a_waiting_trainer_is_woken_by_whatever_makes_a_batch_possible() -> None:
    """B = 1, S = 2: the third group fails, which frees the newer one that had to wait for it."""

    async def scenario() -> None:
        groups = Groups(1, 2, steps=9)
        buffer = Buffer(groups)
        old = [start(groups) for _ in range(3)]
        waiter = asyncio.create_task(buffer.wait_for_batch(10.0))
        await asyncio.sleep(1.0)
        assert not waiter.done()
        add(buffer, old[0])
        assert await waiter
        assert now() == 1.0
        buffer.take(0)
        newer = start(groups, 1)
        add(buffer, newer)
        waiter = asyncio.create_task(buffer.wait_for_batch(10.0))
        await asyncio.sleep(1.0)
        assert not waiter.done()
        groups.fail(old[1], "engine_error")
        assert await waiter
        ((taken,),) = buffer.take(1) or []
        assert taken.id == newer.id

    play(scenario())


def test_the_end_of_data_and_of_the_steps_wake_the_trainer() -> None:
    async def scenario() -> None:
        groups = Groups(2, 0, steps=9)
        buffer = Buffer(groups)
        add(buffer, start(groups))
        waiter = asyncio.create_task(buffer.wait_for_batch(10.0))
        await asyncio.sleep(0)
        groups.close()
        assert await waiter
        assert buffer.take(0) is not None
        assert not await buffer.wait_for_batch(10.0)
        last = Groups(1, 0, steps=1)
        buffer = Buffer(last)
        add(buffer, start(last))
        buffer.take(0)
        assert not await buffer.wait_for_batch(10.0)
        assert now() == 0.0

    play(scenario())


def test_a_stall_says_who_waits_for_whom() -> None:
    async def scenario() -> None:
        groups = Groups(12, 0, steps=9)
        buffer = Buffer(groups)
        for _ in range(11):
            start(groups)
        groups.dispatch("calculator", 77, 0)
        groups.fail(groups[0], "env_error")
        groups.fail(groups[1], "env_error")
        add(buffer, groups[2])
        with pytest.raises(Stalled) as caught:
            await buffer.wait_for_batch(5.0)
        assert now() == 5.0
        message = str(caught.value)
        assert (
            "no group finished within 5 s; the trainer, at version 0, waits for group 3" in message
        )
        assert "group 3 (running, task problem 3, dispatched at 0, deadline 0)" in message
        assert "group 10 (running" in message
        assert "and 1 more" in message
        assert "1 groups are finished, 10 of at most 12 outstanding" in message
        assert "failed: 2 by env_error" in message
        for group in groups:
            if group.state != "finished":
                groups.fail(group, "timeout")
        with pytest.raises(Stalled, match=r"groups to be dispatched \(11 problems wait for it\)"):
            await buffer.wait_for_batch(5.0)

    play(scenario())


def test_every_finished_group_gives_the_wait_its_whole_time_again() -> None:
    async def scenario() -> None:
        groups = Groups(5, 0, steps=9)
        buffer = Buffer(groups)
        waiter = asyncio.create_task(buffer.wait_for_batch(5.0))
        for _ in range(5):
            await asyncio.sleep(4.0)
            add(buffer, start(groups))
        assert await waiter
        assert now() == 20.0

    play(scenario())


def test_failing_groups_do_not_prolong_the_wait() -> None:
    """An environment that always fails ends the run by name instead of spinning for ever."""

    async def scenario() -> None:
        groups = Groups(1, 0, steps=9)
        buffer = Buffer(groups)

        async def fail_for_ever() -> None:
            while True:
                group = groups.reissue(0) or groups.dispatch("task", groups.next_id, 0)
                await asyncio.sleep(1.5)
                groups.fail(group, "env_error")

        failing = asyncio.create_task(fail_for_ever())
        with pytest.raises(Stalled, match="failed: 3 by env_error"):
            await buffer.wait_for_batch(5.0)
        assert now() == 5.0
        failing.cancel()

    play(scenario())


# A whole loop, in small

Rollout = Callable[[Group], Awaitable[list[Trajectory]]]


async def train(
    groups: Groups, rollout: Rollout, problems: Iterator[int], *, limit_s: float = 10.0
) -> list[list[int]]:
    """Dispatch, roll out, train for one second a batch; returns the problems of every batch."""
    buffer = Buffer(groups)
    engine = 0
    batches = []

    async def run(group: Group) -> None:
        try:
            async with asyncio.timeout(limit_s):
                trajectories = await rollout(group)
        except TimeoutError:
            groups.fail(group, "timeout")
        except EnvError:
            groups.fail(group, "env_error")
        else:
            buffer.add(group.id, trajectories)
        fill()

    def fill() -> None:
        while groups.remaining() and groups.can_dispatch(engine):
            group = groups.reissue(engine)
            if group is None:
                problem = next(problems, None)
                if problem is None:
                    if not groups.closed:
                        groups.close()
                    return
                group = groups.dispatch("task", problem, engine)
            groups.start(group)
            tasks.create_task(run(group))

    async with asyncio.TaskGroup() as tasks:
        fill()
        while await buffer.wait_for_batch(60.0):
            batch = buffer.take(groups.version) or []
            batches.append([g.trajectories[0].problem for part in batch for g in part])
            fill()
            await asyncio.sleep(1.0)
            engine = groups.version
            fill()
    return batches


async def both_members(group: Group) -> list[Trajectory]:
    await asyncio.sleep(0.1)
    return [trajectory(group, 0), trajectory(group, 1, 0.0)]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_end_of_data_ends_the_loop_check_116(staleness: int) -> None:
    """5 groups, batch 2: two full steps, one on what is left, and every task has ended."""

    async def scenario() -> list[list[int]]:
        groups = Groups(2, staleness, steps=100)
        batches = await train(groups, both_members, iter(range(5)))
        assert groups.done
        assert groups.counters["consumed"] == {"trained": 5}
        assert len(asyncio.all_tasks()) == 1
        return batches

    assert play(scenario()) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_stuck_and_a_raising_group_are_refilled_check_114(staleness: int) -> None:
    """3 groups wanted; one never returns, one raises: the batch completes by refill."""
    attempts: list[tuple[int, int]] = []

    async def rollout(group: Group) -> list[Trajectory]:
        attempts.append((group.problem, group.issue))
        if (group.problem, group.issue) == (0, 0):
            await asyncio.Event().wait()
        if (group.problem, group.issue) == (1, 0):
            raise EnvError("the tool is gone")
        return await both_members(group)

    async def scenario() -> None:
        groups = Groups(3, staleness, steps=1)
        (batch,) = await train(groups, rollout, iter(range(100)))
        assert sorted(batch) == [0, 1, 2]
        assert groups.counters["failed"] == {"timeout": 1, "env_error": 1}
        assert groups.counters["consumed"] == {"trained": 3}
        assert len(groups) == 0

    play(scenario())
    assert attempts == [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1)]


def test_generation_and_training_overlap_only_where_staleness_allows_it() -> None:
    """A rollout takes 1 s, a step 1 s; ten steps: in turns 20 s, overlapped 11 s."""

    async def rollout(group: Group) -> list[Trajectory]:
        await asyncio.sleep(1.0)
        return [trajectory(group, 0), trajectory(group, 1, 0.0)]

    async def duration(staleness: int) -> float:
        await train(Groups(2, staleness, steps=10), rollout, iter(range(1000)))
        return now()

    assert play(duration(0)) == pytest.approx(20.0)
    assert play(duration(1)) == pytest.approx(11.0)


# Dynamic sampling


def test_groups_that_teach_nothing_leave_f_and_the_bound_holds_checks_30_and_31() -> None:
    groups = Groups(1, 0, steps=3)
    buffer = Buffer(groups, max_filtered=2)
    flat, other = start(groups), None
    assert not groups.can_dispatch(0), "B = 1, no staleness: the lease is taken"
    add(buffer, flat, 0.0, 0.0)
    assert flat.state == "filtered"
    assert groups.can_dispatch(0), "and free again"
    other = start(groups)
    add(buffer, other, 1.0, 0.0)
    assert other.state == "finished"
    ((taken,),) = buffer.take(0) or []
    assert (taken.id, len(taken.trajectories)) == (other.id, 2), "a group is kept whole"
    assert groups.counters["filtered"] == {"no_advantage": 1}


def test_the_tries_are_bounded_then_what_there_is_is_trained_check_31() -> None:
    groups = Groups(1, 0, steps=3)
    buffer = Buffer(groups, max_filtered=3)
    for version in (0, 1):
        states = []
        while not (batch := buffer.take(version)):
            group = start(groups, version)
            add(buffer, group, 0.0, 0.0)
            states.append(group.state)
            assert len(states) <= 4
        assert len(states) == 4, "three tries for each batch"
        assert batch[0][0].advantages == (0.0, 0.0)


def test_shaped_rewards_do_not_save_a_group_check_25() -> None:
    groups = Groups(2, 0, steps=3)
    buffer = Buffer(groups, max_filtered=9)
    group = start(groups)
    members = [trajectory(group, i) for i in range(4)]
    members[2] = dataclasses.replace(members[2], reward=0.8)
    buffer.add(group.id, members)
    assert group.state == "filtered"
    by_reward = Buffer(groups, variance_of="reward", max_filtered=9)
    group = start(groups)
    members = [trajectory(group, i) for i in range(4)]
    members[2] = dataclasses.replace(members[2], reward=0.8)
    by_reward.add(group.id, members)
    assert group.state == "finished"


def test_nothing_is_given_up_by_default_or_when_the_data_has_ended() -> None:
    groups = Groups(2, 0, steps=3)
    one = start(groups)
    add(Buffer(groups), one, 1.0, 1.0)
    two = start(groups)
    groups.close()
    add(Buffer(groups, max_filtered=9), two, 1.0, 1.0)
    assert (one.state, two.state) == ("finished", "finished")
