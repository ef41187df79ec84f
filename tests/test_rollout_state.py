"""Rollouts in a checkpoint: packed and unpacked they are the same, and they are gone on with."""

from __future__ import annotations

import dataclasses
import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.engine import Request, ScriptedEngine
from estr.environment import Reply, ScriptedEnvironment, plain_reply
from estr.errors import CheckpointError
from estr.options.run import RolloutOptions
from estr.rollout import RolloutSetting, run_rollout
from estr.rollout_state import (
    RolloutState,
    SegmentPool,
    pack_reply,
    pack_state,
    pack_trajectory,
    unpack_reply,
    unpack_state,
    unpack_trajectory,
)
from estr.types import COLUMNS, RolloutId, SamplingSettings, Segment, Trajectory
from loop_parts import STOP, CoinTask, IdCodec


def same(a: Segment, b: Segment) -> bool:
    for column in COLUMNS:
        left, right = getattr(a, column.name), getattr(b, column.name)
        if left is None or right is None:
            if left is not right:
                return False
        elif left.dtype != right.dtype or not np.array_equal(
            left, right, equal_nan=left.dtype.kind == "f"
        ):
            return False
    return a.finish_reason == b.finish_reason


def drawn(ids: list[int], version: int = 3, *, gini: bool = True, reason=None) -> Segment:
    n = len(ids)
    values = np.linspace(-2, -0.1, n, dtype=np.float32)
    return Segment.drawn(
        ids, values, -values, [version] * n, gini=-values if gini else None, finish_reason=reason
    )


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=5)), max_size=6))
@settings(deadline=None)
def test_segments_come_back_from_the_pool_as_they_went_in(parts) -> None:
    segments = [
        drawn(ids, gini=False, reason="stop") if sampled else Segment.context(ids)
        for sampled, ids in parts
    ]
    pool = SegmentPool()
    references = json.loads(json.dumps([pool.add(segment) for segment in segments]))
    again = SegmentPool(pool.columns())
    assert all(same(s, again.get(r)) for s, r in zip(segments, references, strict=True))


def test_a_growing_rollout_comes_back_whole() -> None:
    state = RolloutState([Segment.context([1, 2])])
    state.add_turn(drawn([5, STOP], reason="stop"))
    state.replies.append(Reply(observation=[{"role": "tool", "content": "7"}], rewards={"a": 0.5}))
    state.parts.append(Segment.context([7]))
    state.engine_s = 1.5
    pool = SegmentPool()
    data = json.loads(json.dumps(pack_state(state, drawn([4, 4], version=4), pool)))
    again = unpack_state(data, SegmentPool(pool.columns()))
    assert [p.token_ids.tolist() for p in again.parts] == [[1, 2], [5, STOP], [7]]
    assert again.turns == state.turns
    assert again.replies == state.replies
    assert again.drawn is not None
    assert again.drawn.versions.tolist() == [4, 4]
    assert again.oldest_version() == 3
    assert (again.answer_due, again.ended, again.engine_s) == (False, False, 1.5)


def test_what_is_packed_does_not_grow_with_its_rollout() -> None:
    """A checkpoint is written while rollouts go on, a new segment among them."""
    state = RolloutState([Segment.context([1, 2])])
    state.add_turn(drawn([5, STOP], reason="stop"))
    state.replies.append(Reply(observation="7"))
    pool = SegmentPool()
    data, columns = pack_state(state, None, pool), pool.columns()
    state.add_context([1, 2, 7], 64, new_segment=True)
    again = unpack_state(json.loads(json.dumps(data)), SegmentPool(columns))
    assert again.history().tolist() == [1, 2, 5, STOP]
    assert len(again.segments()) == 1


def test_a_turn_that_the_engine_has_not_been_asked_for_again_stays_drawn() -> None:
    """A second checkpoint may come while a resumed rollout still plays to a fresh environment."""
    state = RolloutState([Segment.context([1, 2])], drawn=drawn([4, 4], version=4))
    pool = SegmentPool()
    data = pack_state(state, None, pool)
    again = unpack_state(json.loads(json.dumps(data)), SegmentPool(pool.columns()))
    assert again.drawn is not None
    assert again.drawn.token_ids.tolist() == [4, 4]
    pool = SegmentPool()
    pack_state(state, drawn([4, 4, 6], version=4), pool)
    assert pool.columns()["token_ids"].tolist() == [1, 2, 4, 4, 6], "what the engine says is newer"


def test_torn_columns_are_named() -> None:
    pool = SegmentPool()
    reference = pool.add(drawn([1, 2, 3]))
    columns = {name: values[:2] for name, values in pool.columns().items()}
    with pytest.raises(CheckpointError, match="end before token 3"):
        SegmentPool(columns).get(reference)
    with pytest.raises(CheckpointError, match="malformed"):
        unpack_state({"parts": []}, pool)


def setting(engine: ScriptedEngine, make) -> RolloutSetting:
    return RolloutSetting(
        engine,
        CoinTask(make=make),
        IdCodec(),
        SamplingSettings(stop_token_ids=(STOP,), max_new_tokens=8),
        RolloutOptions(timeout_s=5.0, step_timeout_s=1.0),
    )


async def play(engine: ScriptedEngine, make, state: RolloutState) -> Trajectory:
    return await run_rollout(
        setting(engine, make),
        RolloutId(0, 0, 0),
        0,
        dispatch_version=0,
        deadline_version=9,
        state=state,
    )


REPLIES = [Reply(observation="34"), Reply(observation="5"), Reply(outcome=1.0)]


def half_done() -> RolloutState:
    """Two turns answered, three tokens of the third drawn at version 2."""
    state = RolloutState([Segment.context([1, 2])])
    for reply in REPLIES[:2]:
        state.add_turn(drawn([6, STOP], version=1, reason="stop"))
        state.replies.append(reply)
        state.parts.append(Segment.context([int(c) for c in reply.observation]))
    state.drawn = drawn([7, 7, 7], version=2)
    return state


async def test_a_saved_rollout_goes_on_in_the_middle_of_its_turn() -> None:
    seen: list[Request] = []

    def script(request: Request) -> list[int]:
        seen.append(request)
        return [7, 7, 7, 8, STOP]

    made: list[ScriptedEnvironment] = []

    def make(index: int) -> ScriptedEnvironment:
        made.append(ScriptedEnvironment("12", REPLIES))
        return made[-1]

    trajectory = await play(ScriptedEngine(script, version=4), make, half_done())
    assert trajectory.status == "ok"
    assert trajectory.reward == 1.0
    (segment,) = trajectory.segments
    assert segment.token_ids.tolist() == [1, 2, 6, 9, 3, 4, 6, 9, 5, 7, 7, 7, 8, 9]
    assert segment.versions.tolist() == [-1, -1, 1, 1, -1, -1, 1, 1, -1, 2, 2, 2, 4, 4]
    assert len(seen) == 1, "no turn is drawn again"
    assert seen[0].first_position == 9
    assert seen[0].token_ids.tolist() == [1, 2, 6, 9, 3, 4, 6, 9, 5]
    assert [a.text for a in made[0].actions] == ["6", "6", "7778"], "the saved turns were played"


async def test_the_mask_reaches_as_far_as_the_tokens_check_63() -> None:
    state = RolloutState([Segment.context([1])], drawn=drawn([2, 2, 2], version=0))
    engine = ScriptedEngine(lambda request: [2, 2, 2, 5, STOP], version=1)
    trajectory = await play(
        engine, lambda index: ScriptedEnvironment("1", [Reply(outcome=0.0)]), state
    )
    (segment,) = trajectory.segments
    assert segment.sampled.tolist() == [False, True, True, True, True, True]
    assert segment.versions.tolist() == [-1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("restorable", "replies"),
    [(False, REPLIES), (True, [Reply(observation="99"), *REPLIES[1:]])],
    ids=["not restorable", "answers something else now"],
)
async def test_what_cannot_be_restored_begins_anew_and_is_counted(restorable, replies) -> None:
    closed: list[int] = []

    def make(index: int) -> ScriptedEnvironment:
        return ScriptedEnvironment(
            "12", replies, restorable=restorable, on_close=lambda: closed.append(1)
        )

    state = half_done()
    trajectory = await play(ScriptedEngine(lambda request: [6, STOP], version=4), make, state)
    assert trajectory.status == "ok"
    assert state.num_restarts == 1
    assert set(trajectory.sampled_versions().tolist()) == {4}
    assert len(closed) == 2, "both environments are closed"


async def test_a_turn_that_was_drawn_is_only_answered() -> None:
    state = RolloutState([Segment.context([1, 2])])
    state.add_turn(drawn([6, STOP], version=1, reason="stop"))
    engine = ScriptedEngine(lambda request: [1, STOP])
    trajectory = await play(
        engine, lambda index: ScriptedEnvironment("12", [Reply(outcome=0.5)]), state
    )
    assert (trajectory.status, trajectory.reward) == ("ok", 0.5)
    assert engine.num_requests == 0


async def test_a_rollout_saved_after_its_last_answer_only_ends() -> None:
    state = RolloutState([Segment.context([1, 2])])
    state.add_turn(drawn([6, STOP], version=1, reason="stop"))
    state.replies.append(Reply(outcome=0.25))
    engine = ScriptedEngine(lambda request: [1, STOP])
    trajectory = await play(
        engine, lambda index: ScriptedEnvironment("12", [Reply(outcome=0.25)]), state
    )
    assert (trajectory.status, trajectory.reward) == ("ok", 0.25)
    assert engine.num_requests == 0


async def test_a_finished_trajectory_comes_back_the_same() -> None:
    engine = ScriptedEngine(lambda request: [6, STOP])
    trajectory = await play(
        engine, lambda index: ScriptedEnvironment("12", REPLIES), RolloutState()
    )
    pool = SegmentPool()
    data = json.loads(json.dumps(pack_trajectory(trajectory, pool)))
    again = unpack_trajectory(data, SegmentPool(pool.columns()))
    for field in dataclasses.fields(Trajectory):
        if field.name == "segments":
            assert all(same(a, b) for a, b in zip(trajectory.segments, again.segments, strict=True))
        else:
            assert getattr(again, field.name) == getattr(trajectory, field.name)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (Reply(np.array([3, 4])), Reply([3, 4])),
        (Reply([np.int64(3)]), Reply([3])),
        (Reply((3, 4)), Reply([3, 4])),
        (Reply(observation=""), Reply(observation="")),
        (
            Reply([MappingProxyType({"role": "tool", "content": "5"})]),
            Reply([{"role": "tool", "content": "5"}]),
        ),
        (Reply(outcome=np.float32(0.5)), Reply(outcome=0.5)),
        (Reply(outcome=np.float64(0.5)), Reply(outcome=0.5)),
        (Reply(outcome=True), Reply(outcome=1.0)),
        (
            Reply(outcome=np.bool_(True), rewards=MappingProxyType({1: np.float64(2.0)})),
            Reply(outcome=1.0, rewards={"1": 2.0}),
        ),
    ],
)
def test_whatever_an_environment_answers_with_a_checkpoint_can_hold(given, plain) -> None:
    reply = plain_reply(given)
    assert reply == plain
    assert type(reply.outcome) in (float, type(None))
    assert unpack_reply(json.loads(json.dumps(pack_reply(reply)))) == plain
