"""The accounts of groups: transitions, admission, selection, counters, checkpoints."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Sequence

import pytest

from estr.errors import CheckpointError, ConfigError, GroupsError, StalenessError
from estr.group import TERMINAL_STATES, Group
from estr.groups import Groups


def run_to_finish(groups: Groups, version: int, number: int = 1) -> list[Group]:
    """Dispatch, start and finish `number` groups."""
    made = [groups.dispatch("task", groups.next_id, version) for _ in range(number)]
    for group in made:
        groups.start(group)
        groups.finish(group)
    return made


def put_in(groups: Groups, state: str) -> Group:
    """A fresh group brought into `state`."""
    group = groups.dispatch("task", 0, groups.version)
    if state != "pending":
        groups.start(group)
    if state in ("finished", "consumed", "filtered"):
        groups.finish(group)
    if state == "consumed":
        groups.consume([group], groups.version)
    elif state == "filtered":
        groups.filter(group, "zero_variance")
    elif state == "failed":
        groups.fail(group, "env_error")
    elif state == "leftover":
        groups.leftover()
    assert group.state == state
    return group


MOVES: dict[str, Callable[[Groups, Group], object]] = {
    "start": lambda groups, group: groups.start(group),
    "finish": lambda groups, group: groups.finish(group),
    "filter": lambda groups, group: groups.filter(group, "zero_variance"),
    "fail": lambda groups, group: groups.fail(group, "env_error"),
    "consume": lambda groups, group: groups.consume([group], groups.version),
}
LEGAL = {
    "pending": {"start", "fail"},
    "running": {"finish", "fail"},
    "finished": {"filter", "fail", "consume"},
}


@pytest.mark.parametrize("state", ["pending", "running", "finished", *TERMINAL_STATES])
@pytest.mark.parametrize("move", MOVES)
def test_every_move_from_every_state(state: str, move: str) -> None:
    groups = Groups(1, 4, steps=9)
    group = put_in(groups, state)
    if move in LEGAL.get(state, set()):
        MOVES[move](groups, group)
        assert group.state != state
        return
    before = (len(groups), groups.num_finished, json.dumps(groups.counters))
    with pytest.raises(GroupsError, match=f"group {group.id} "):
        MOVES[move](groups, group)
    assert group.state == state
    assert (len(groups), groups.num_finished, json.dumps(groups.counters)) == before


def test_a_lease_is_released_once_on_every_path() -> None:
    for state in TERMINAL_STATES:
        groups = Groups(1, 0, steps=9)
        group = put_in(groups, state)
        assert len(groups) == 0
        assert sum(c.total() for c in groups.counters.values()) == 1
        with pytest.raises(GroupsError, match="released exactly once"):
            groups.fail(group, "again")
        with pytest.raises(GroupsError, match=f"group {group.id} has left already"):
            groups[group.id]


def test_a_group_of_other_accounts_is_refused() -> None:
    groups, others = Groups(1, 1, steps=9), Groups(1, 1, steps=9)
    groups.dispatch("task", 0, 0)
    with pytest.raises(GroupsError, match="has left already"):
        groups.start(others.dispatch("task", 0, 0))
    with pytest.raises(GroupsError, match="group 7 was never dispatched"):
        groups[7]


def test_consuming_the_same_group_twice_in_one_batch_changes_nothing() -> None:
    groups = Groups(2, 1, steps=9)
    (group,) = run_to_finish(groups, 0)
    with pytest.raises(GroupsError, match="each once"):
        groups.consume([group, group], 0)
    with pytest.raises(GroupsError, match="a batch needs groups"):
        groups.consume([], 0)
    assert group.state == "finished"
    assert groups.version == 0


def test_capacity_has_one_owner_check_59() -> None:
    """Four workers under one controller share 24 places; none divides them again."""
    groups = Groups(8, 2, steps=1000)
    dispatched = [0, 0, 0, 0]
    for worker in itertools.cycle(range(4)):
        if not groups.can_dispatch(0):
            break
        groups.dispatch("task", groups.next_id, 0)
        dispatched[worker] += 1
    assert groups.capacity == len(groups) == sum(dispatched) == 24
    with pytest.raises(StalenessError, match="would break the bound"):
        groups.dispatch("task", 24, 0)
    assert len(groups) == groups.next_id == 24


def test_dispatch_stops_at_capacity_while_the_trainer_stands_still() -> None:
    for staleness, per_step in ((0, 1), (0, 5), (3, 2), (4, 16)):
        groups = Groups(per_step, staleness, steps=1000)
        while groups.can_dispatch(0):
            run_to_finish(groups, 0)
        assert len(groups) == (staleness + 1) * per_step


def test_without_staleness_it_is_synchronous() -> None:
    """Every group of version v is taken before any dispatch at v + 1, and none goes on at v."""
    groups = Groups(3, 0, steps=9)
    for version in range(3):
        made = []
        while groups.can_dispatch(version):
            assert not groups.ready()
            made += run_to_finish(groups, version)
        assert len(made) == 3
        batch = groups.select()
        assert batch == made
        groups.consume(batch, version)
        assert not groups.can_dispatch(version)


@pytest.mark.parametrize("version", [-1, 1, 6])
def test_an_acknowledged_version_that_never_was_is_an_error_check_65(version: int) -> None:
    groups = Groups(1, 4, steps=9)
    with pytest.raises(StalenessError, match=f"claims version {version}, the trainer is at 0"):
        groups.can_dispatch(version)
    with pytest.raises(StalenessError, match="claims version"):
        groups.dispatch("task", 0, version)


def test_a_lagging_engine_is_refused_only_when_it_must_be() -> None:
    """publish_every = 3 at S = 2: dispatches at version 0 go on until deadline 2 is past."""
    groups = Groups(1, 2, steps=9)
    admitted = []
    for version in range(4):
        admitted.append(groups.can_dispatch(0))
        if admitted[-1]:
            run_to_finish(groups, 0)
            groups.consume(groups.select(), version)
        else:
            assert version == 3
    assert admitted == [True, True, True, False]
    assert groups.can_dispatch(3)


def test_the_oldest_deadline_goes_first_and_ties_by_id() -> None:
    groups = Groups(2, 3, steps=9)
    first = run_to_finish(groups, 0, 4)
    groups.consume(groups.select(), 0)
    newer = [groups.dispatch("task", 9, 1) for _ in range(2)]
    for group in reversed(newer):
        groups.start(group)
        groups.finish(group)
    assert groups.select() == first[2:]
    groups.consume(groups.select(), 1)
    assert groups.select() == newer


def test_a_lagging_engine_hands_in_younger_groups_with_older_deadlines() -> None:
    groups = Groups(1, 2, steps=9)
    run_to_finish(groups, 0)
    groups.consume(groups.select(), 0)
    (fresh,) = run_to_finish(groups, 1)
    (lagging,) = run_to_finish(groups, 0)
    assert (fresh.id, lagging.id) == (1, 2)
    assert groups.select() == [lagging]


def test_a_batch_waits_for_the_group_that_the_invariant_names() -> None:
    """Three at version 0 with S = 2: one taken, one newer finished; the two old ones need the
    steps at 1 and 2, so the newer one must wait although nothing is due at 1."""
    groups = Groups(1, 2, steps=9)
    old = [groups.dispatch("task", i, 0) for i in range(3)]
    for group in old:
        groups.start(group)
    groups.finish(old[0])
    assert groups.blocking() == []
    groups.consume(groups.select(), 0)
    newer = groups.dispatch("task", 3, 1)
    groups.start(newer)
    assert groups.blocking() == old[1:]
    groups.finish(newer)
    assert groups.select() == []
    assert groups.blocking() == old[1:]
    with pytest.raises(StalenessError, match="deadline up to 2"):
        groups.consume([newer], 1)
    assert newer.state == "finished"
    assert groups.version == 1
    groups.fail(old[1], "engine_error")
    assert groups.select() == [newer]


def test_blocking_names_all_unfinished_where_the_batch_only_lacks_groups() -> None:
    groups = Groups(4, 1, steps=9)
    assert groups.blocking() == []
    made = [groups.dispatch("task", i, 0) for i in range(3)]
    for group in made:
        groups.start(group)
    groups.finish(made[1])
    assert groups.blocking() == [made[0], made[2]]


def test_training_after_the_deadline_is_an_error() -> None:
    """M = 2, S = 2: the wrong order in a batch puts a group with deadline 2 at the step at 3."""
    groups = Groups(1, 2, steps=9, steps_per_batch=2)
    run_to_finish(groups, 0, 3)
    groups.consume(groups.select(), 0)
    (newer,) = run_to_finish(groups, 2)
    older, _ = batch = groups.select()
    with pytest.raises(StalenessError, match=r"group 2 .* would be trained at version 3"):
        groups.consume([newer, older], 2)
    with pytest.raises(StalenessError, match="the trainer is at version 1, the accounts at 2"):
        groups.consume(batch, 1)
    groups.consume(batch, 2)


def test_mini_batches_take_the_oldest_deadlines_first() -> None:
    """M = 3, B = 2: the groups of the step at v + j have deadlines >= v + j, for S down to 2."""
    groups = Groups(2, 2, steps=12, steps_per_batch=3)
    for start in (0, 3, 6, 9):
        while groups.remaining() and groups.can_dispatch(start):
            run_to_finish(groups, start)
        batch = groups.select()
        assert len(batch) == 6
        for place, group in enumerate(batch):
            assert group.deadline >= start + place // 2
        groups.consume(batch, start)
        assert groups.version == start + 3
    assert groups.done


def test_the_last_batch_of_a_run_is_as_small_as_the_steps_left() -> None:
    groups = Groups(2, 2, steps=4, steps_per_batch=3)
    sizes = []
    while not groups.done:
        while groups.remaining() and groups.can_dispatch(groups.version):
            run_to_finish(groups, groups.version)
        batch = groups.select()
        sizes.append(len(batch))
        groups.consume(batch, groups.version)
    assert sizes == [6, 2]
    assert len(groups) == groups.remaining() == 0


def test_dispatch_stops_when_outstanding_groups_cover_the_steps_left() -> None:
    groups = Groups(2, 4, steps=3)
    assert groups.remaining() == 6
    made = run_to_finish(groups, 0, 6)
    assert groups.remaining() == 0
    assert groups.can_dispatch(0)
    groups.fail(made[0], "env_error")
    assert groups.remaining() == 1
    assert groups.reissue(0) is not None
    assert groups.remaining() == 0


def test_end_of_data_check_116() -> None:
    """5 groups, batch 2: two full steps and a last one on the group that is left."""
    groups = Groups(2, 1, steps=100)
    problems = iter(range(5))
    sizes = []
    while not groups.done:
        while not groups.closed and groups.can_dispatch(groups.version):
            problem = next(problems, None)
            if problem is None:
                groups.close()
                break
            group = groups.dispatch("task", problem, groups.version)
            groups.start(group)
            groups.finish(group)
        batch = groups.select()
        assert batch, "the trainer waits although all groups are finished"
        sizes.append(len(batch))
        groups.consume(batch, groups.version)
    assert sizes == [2, 2, 1]
    assert groups.counters["consumed"].total() == groups.next_id == 5
    assert (groups.version, groups.step, len(groups)) == (3, 3, 0)
    with pytest.raises(GroupsError, match="problem 5 comes after the end of the data"):
        groups.dispatch("task", 5, groups.version)


def test_the_end_of_data_waits_for_what_runs_and_for_what_is_re_issued() -> None:
    groups = Groups(2, 1, steps=100)
    (kept,) = run_to_finish(groups, 0)
    lost = groups.dispatch("task", 7, 0)
    groups.close()
    assert groups.select() == []
    groups.fail(lost, "engine_error")
    assert groups.select() == []
    again = groups.reissue(0)
    assert again is not None
    assert (again.problem, again.issue, again.id) == (7, 1, 2)
    assert groups.reissue(0) is None
    groups.fail(again, "engine_error")
    last = groups.reissue(0)
    assert last is not None
    groups.fail(last, "engine_error")
    assert groups.num_abandoned == 1
    assert groups.select() == [kept]
    groups.consume([kept], 0)
    assert groups.done


def test_a_partial_batch_needs_the_invariant_too() -> None:
    """B = 2, S = 1, four at version 0: a step on one would leave three for the step at 1."""
    groups = Groups(2, 1, steps=9)
    made = [groups.dispatch("task", i, 0) for i in range(4)]
    for group in made:
        groups.start(group)
    groups.finish(made[3])
    with pytest.raises(StalenessError, match="would leave more groups"):
        groups.consume([made[3]], 0)
    assert groups.blocking() == made[:3]
    groups.fail(made[0], "env_error")
    groups.consume([made[3]], 0)
    assert groups.version == 1


def test_a_partial_batch_makes_as_many_steps_as_its_groups_fill() -> None:
    groups = Groups(2, 3, steps=9, steps_per_batch=4)
    batch = run_to_finish(groups, 0, 3)
    assert groups.select() == []
    groups.consume(batch, 0)
    assert [group.state for group in batch] == ["consumed"] * 3
    assert (groups.version, groups.step) == (2, 2)


def test_failed_groups_are_refilled_and_counted_check_114() -> None:
    """Three wanted; one never returns, one raises: the batch completes by refill."""
    groups = Groups(3, 0, steps=9)
    made = [groups.dispatch("task", i, 0) for i in range(3)]
    for group in made:
        groups.start(group)
    groups.finish(made[0])
    groups.fail(made[1], "timeout")
    groups.fail(made[2], "env_error")
    assert groups.select() == []
    for _ in range(2):
        group = groups.reissue(0)
        assert group is not None
        groups.start(group)
        groups.finish(group)
    batch = groups.select()
    assert [group.problem for group in batch] == [0, 1, 2]
    assert groups.counters["failed"] == {"timeout": 1, "env_error": 1}
    groups.consume(batch, 0)
    assert groups.counters["consumed"].total() == 3
    assert groups.next_id == 5


def test_a_problem_that_always_fails_is_given_up() -> None:
    groups = Groups(1, 0, steps=9, max_issues=3)
    groups.fail(groups.dispatch("task", 5, 0), "env_error")
    issues = []
    while (group := groups.reissue(0)) is not None:
        issues.append(group.issue)
        groups.fail(group, "env_error")
    assert issues == [1, 2]
    assert groups.num_abandoned == 1
    assert groups.counters["failed"] == {"env_error": 3}


def test_a_refused_re_issue_keeps_the_problem_waiting() -> None:
    groups = Groups(1, 0, steps=9)
    groups.fail(groups.dispatch("task", 5, 0), "env_error")
    groups.dispatch("task", 6, 0)
    with pytest.raises(StalenessError, match="would break the bound"):
        groups.reissue(0)
    assert [problem.problem for problem in groups.waiting] == [5]


def test_skipped_updates_take_the_version_back_and_free_a_synchronous_run() -> None:
    groups = Groups(1, 0, steps=3)
    for _ in range(3):
        assert groups.can_dispatch(0)
        run_to_finish(groups, 0)
        groups.consume(groups.select(), 0)
        assert not groups.can_dispatch(0)
        groups.skip()
    assert (groups.version, groups.step, groups.done) == (0, 3, True)
    for number in (-1, 1):
        with pytest.raises(GroupsError, match=f"cannot skip {number} updates"):
            groups.skip(number)


def test_leftover_marks_and_counts_what_is_outstanding() -> None:
    groups = Groups(2, 1, steps=9)
    (finished,) = run_to_finish(groups, 0)
    pending = groups.dispatch("task", 1, 0)
    running = groups.dispatch("task", 2, 0)
    groups.start(running)
    assert groups.leftover() == [finished, pending, running]
    assert groups.counters["leftover"] == {"finished": 1, "pending": 1, "running": 1}
    assert len(groups) == groups.num_finished == 0
    assert groups.leftover() == []


def test_every_change_is_told() -> None:
    groups = Groups(1, 2, steps=9)
    told: list[int] = []
    groups.on_change = lambda: told.append(len(groups))
    (consumed,) = run_to_finish(groups, 0)
    assert told == [1, 1, 1]
    groups.consume([consumed], 0)
    assert told == [1, 1, 1, 0]
    (filtered,) = run_to_finish(groups, 0)
    groups.filter(filtered, "zero_variance")
    groups.fail(groups.dispatch("task", 1, 0), "env_error")
    groups.close()
    groups.leftover()
    assert told[4:] == [1, 1, 1, 0, 1, 0, 0, 0]


def mixed_accounts() -> Groups:
    """Version 1; outstanding groups in all states, a failed one waiting, one filtered."""
    groups = Groups(1, 4, steps=9)
    run_to_finish(groups, 0)
    groups.consume(groups.select(), 0)
    run_to_finish(groups, 0)
    groups.start(groups.dispatch("task", 10, 1))
    groups.dispatch("task", 11, 1)
    groups.fail(groups.dispatch("task", 12, 1), "env_error")
    groups.filter(run_to_finish(groups, 0)[0], "zero_variance")
    return groups


def test_a_snapshot_survives_json_and_every_group_is_as_it_was() -> None:
    groups = mixed_accounts()
    text = json.dumps(groups.snapshot(1))
    resumed = Groups(1, 4, steps=9)
    assert resumed.restore(json.loads(text)) is True
    found = [(g.id, g.problem, g.state, g.dispatch_version, g.deadline) for g in resumed]
    assert found == [
        (1, 1, "finished", 0, 4),
        (2, 10, "running", 1, 5),
        (3, 11, "running", 1, 5),  # it was pending
    ]
    assert [(w.id, w.problem, w.issue) for w in resumed.waiting] == [(None, 12, 1)]
    assert resumed.num_finished == 1
    assert resumed.counters == groups.counters
    assert [g.id for g in resumed.select()] == [1]
    assert resumed.dispatch("task", 13, 1).id == 6


def test_finished_groups_get_their_trajectories_back() -> None:
    groups = mixed_accounts()
    resumed = Groups(1, 4, steps=9)
    resumed.restore(groups.snapshot(1), {1: ("one", "two")})  # type: ignore[dict-item]
    assert resumed[1].trajectories == ("one", "two")
    assert resumed[2].trajectories == ()


@pytest.mark.parametrize(("groups_per_step", "max_staleness"), [(1, 1), (1, 0)])
def test_under_a_smaller_bound_groups_wait_to_be_dispatched_anew(
    groups_per_step: int, max_staleness: int
) -> None:
    resumed = Groups(groups_per_step, max_staleness, steps=9)
    assert resumed.restore(mixed_accounts().snapshot(1)) is False
    assert len(resumed) == 0
    assert [w.id for w in resumed.waiting] == [1, 2, 3, None]
    again = []
    while resumed.can_dispatch(1) and (group := resumed.reissue(1)) is not None:
        again.append((group.id, group.problem, group.dispatch_version, group.issue))
    assert again == [(1, 1, 1, 0), (2, 10, 1, 0), (3, 11, 1, 0)][: resumed.capacity]
    assert len(resumed) == resumed.capacity


def test_a_smaller_staleness_that_still_holds_binds_old_groups_too() -> None:
    groups = Groups(2, 4, steps=9)
    groups.start(groups.dispatch("task", 0, 0))
    resumed = Groups(2, 2, steps=9)
    assert resumed.restore(groups.snapshot(0)) is True
    assert resumed[0].deadline == 2
    larger = Groups(2, 8, steps=9)
    assert larger.restore(groups.snapshot(0)) is True
    assert larger[0].deadline == 4, "a larger one does not make it younger"


def test_a_snapshot_while_a_batch_is_with_the_trainer_is_refused() -> None:
    groups = Groups(1, 1, steps=9)
    run_to_finish(groups, 0)
    groups.consume(groups.select(), 0)
    with pytest.raises(GroupsError, match="a batch is with the trainer"):
        groups.snapshot(0)
    groups.snapshot(1)


def test_only_fresh_accounts_are_restored() -> None:
    groups = mixed_accounts()
    with pytest.raises(GroupsError, match="fresh accounts"):
        groups.restore(groups.snapshot(1))


@pytest.mark.parametrize(
    "damage",
    [
        {"version": -1},
        {"step": "two"},
        {"next_id": None},
        {"counters": {"eaten": {"x": 1}}},
        {"counters": {"failed": 3}},
        {"waiting": [{"task": "task"}]},
        {"waiting": [{"task": "task", "problem": 1, "issue": 0, "id": 99}]},
        {"waiting": [{"task": "task", "problem": 1, "issue": 0, "id": -1}]},
        {"waiting": [{"task": "task", "problem": 1, "issue": 0, "id": 2}]},
        {"outstanding": [{"id": 1}]},
        {"outstanding": "none"},
    ],
)
def test_a_malformed_snapshot_is_refused(damage: dict[str, object]) -> None:
    snapshot = {**mixed_accounts().snapshot(1), **damage}
    groups = Groups(1, 4, steps=9)
    with pytest.raises(CheckpointError, match="the checkpoint's groups"):
        groups.restore(snapshot)
    assert (groups.version, groups.next_id, len(groups.waiting)) == (0, 0, 0)


def test_a_snapshot_with_a_key_missing_is_refused() -> None:
    snapshot = mixed_accounts().snapshot(1)
    for key in snapshot:
        with pytest.raises(CheckpointError, match=key):
            Groups(1, 4, steps=9).restore({k: v for k, v in snapshot.items() if k != key})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step must be at least 1, not 0"),
        ({"max_staleness": -1}, "max_staleness must be at least 0, not -1"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"steps_per_batch": 0}, "num_minibatches must be at least 1, not 0"),
        ({"max_issues": 0}, "max_issues must be at least 1, not 0"),
        ({"steps_per_batch": 4}, "raise max_staleness to 3"),
    ],
)
def test_bad_numbers_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Groups(**{"groups_per_step": 1, "max_staleness": 2, "steps": 9, **numbers})


def test_a_hundred_thousand_groups_leave_no_trace_but_their_count() -> None:
    groups = Groups(16, 4, steps=6250)
    while not groups.done:
        while groups.remaining() and groups.can_dispatch(groups.version):
            run_to_finish(groups, groups.version)
        assert len(groups) <= groups.capacity
        groups.consume(groups.select(), groups.version)
    assert groups.counters["consumed"].total() == groups.next_id == 100_000
    assert list(groups) == list(groups.waiting) == []
    assert len(json.dumps(groups.snapshot(6250))) < 220


Rule = Callable[[Groups], Sequence[Group]]


def nothing_is_due_now(groups: Groups) -> Sequence[Group]:
    """The tempting rule: any finished groups will do unless an unfinished one is due at v."""
    if any(g.deadline <= groups.version for g in groups if g.state != "finished"):
        return []
    finished = sorted((g.deadline, g.id) for g in groups if g.state == "finished")
    batch = [groups[group_id] for _, group_id in finished[: groups.groups_per_step]]
    return batch if len(batch) == groups.groups_per_step else []


def bound_breaks(rule: Rule, seed: int, groups: Groups) -> bool:
    """A whole run in simulated time: heavy-tailed rollouts (log-normal, sigma 1.5), one in twenty
    fails, a batch is trained in 0.3 of the median. Does a batch leave an F that cannot hold?"""
    rng = random.Random(seed)
    ticks = itertools.count()
    events: list[tuple[float, int, Group | int]] = []
    now, engine, training = 0.0, 0, False
    while not groups.done:
        while groups.remaining() and groups.can_dispatch(engine):
            group = groups.reissue(engine) or groups.dispatch("task", groups.next_id, engine)
            groups.start(group)
            heapq.heappush(events, (now + rng.lognormvariate(0, 1.5), next(ticks), group))
        if not training and (batch := rule(groups)):
            try:
                groups.consume(batch, groups.version)
            except StalenessError:
                return True
            target = groups.version - 1
            assert all(target - g.dispatch_version <= groups.max_staleness for g in batch)
            training = True
            heapq.heappush(events, (now + 0.3, next(ticks), groups.version))
            continue
        now, _, event = heapq.heappop(events)
        if isinstance(event, int):
            engine, training = event, False
        elif rng.random() < 0.05:
            groups.fail(event, "env_error")
        else:
            groups.finish(event)
    return False


def test_waiting_only_for_what_is_due_now_breaks_the_bound() -> None:
    runs = 100
    tempting = sum(
        bound_breaks(nothing_is_due_now, seed, Groups(1, 2, steps=40)) for seed in range(runs)
    )
    ours = sum(bound_breaks(Groups.select, seed, Groups(1, 2, steps=40)) for seed in range(runs))
    assert tempting > 10
    assert ours == 0
