"""The schedule: the lineage that survives resumes, and the order that a replay keeps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import estr.schedule
from estr.engine import ScriptedEngine
from estr.engine_versions import EngineVersions
from estr.errors import DataError, ScheduleError
from estr.members import Members
from estr.metrics import Metrics
from estr.schedule import EventLog, Position, Replay, Schedule, read_lineage
from estr.types import RolloutId
from estr.weights import MemoryWeightStore
from loop_parts import recipe


def test_a_resume_keeps_the_first_lines_of_the_lineage(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "s.jsonl")
    for number in range(5):
        log.write("step", step=number)
    log.close()
    second = EventLog(tmp_path / "s.jsonl", keep_lines=3)
    second.write("step", step=30)
    second.close()
    third = EventLog(tmp_path / "s.jsonl", keep_lines=4)
    third.write("step", step=40)
    assert third.num_lines == 5
    third.close()
    assert [e["step"] for e in read_lineage(tmp_path / "s.jsonl")] == [0, 1, 2, 30, 40]


@given(st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=12))
def test_the_lineage_is_what_a_list_would_be(tmp_path_factory, script: list[int | None]) -> None:
    """None: an event; n: a resume that keeps at most n lines."""
    path = tmp_path_factory.mktemp("s") / "s.jsonl"
    expected: list[int] = []
    log = EventLog(path)
    for number, keep in enumerate(script):
        if keep is None:
            log.write("step", step=number)
            expected.append(number)
        else:
            log.close()
            keep = min(keep, len(expected))
            log = EventLog(path, keep_lines=keep)
            del expected[keep:]
        assert log.num_lines == len(expected)
    log.close()
    assert [e["step"] for e in read_lineage(path)] == expected


def test_a_torn_last_line_is_cut_and_line_separators_are_text_check_127(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    log = EventLog(path)
    log.write("rollout", error="one\u2028two\u0085three")
    log.close()
    path.write_bytes(path.read_bytes() + b'{"event": "st')
    assert len(read_lineage(path)) == 1
    again = EventLog(path)
    again.write("step", step=1)
    again.close()
    assert [e["event"] for e in read_lineage(path)] == ["rollout", "step"]
    assert read_lineage(path)[0]["error"] == "one\u2028two\u0085three"


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "nonsense",
        '{"no": "event"}',
        '{"event": "resume", "lines": 7}',
        '{"event": "resume", "lines": "x"}',
    ],
)
def test_what_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"event": "start"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"s\.jsonl, line 2 is no event"):
        read_lineage(path)


def test_a_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "s.jsonl")
    log.write("start")
    log.close()
    with pytest.raises(DataError, match="has 1 lines, the checkpoint was taken after 9"):
        EventLog(tmp_path / "s.jsonl", keep_lines=9)


def events(*kinds: str) -> list[dict]:
    return [{"event": kind, "group": i} for i, kind in enumerate(kinds)]


async def test_each_sequenced_event_waits_for_its_turn() -> None:
    schedule = Schedule(replay=Replay(events("dispatch", "step", "train", "load")))
    done: list[str] = []

    async def do(kind: str) -> None:
        await schedule.turn(kind)
        done.append(kind)
        schedule.note(kind)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for kind in ("load", "train", "dispatch"):
            tasks.create_task(do(kind))
    assert done == ["dispatch", "train", "load"]
    assert schedule.replay is not None
    assert schedule.replay.next is None


def test_what_is_not_due_parts_from_the_schedule() -> None:
    schedule = Schedule(replay=Replay(events("dispatch", "train")))
    with pytest.raises(ScheduleError, match=r"train .* happened, dispatch \(group 0\) was due"):
        schedule.note("train", group=0)
    with pytest.raises(ScheduleError, match="group is 4 here, 0 there"):
        schedule.note("dispatch", group=4)
    schedule.note("dispatch", group=0)
    schedule.note("train", group=1)
    with pytest.raises(ScheduleError, match="the end of the schedule was due"):
        schedule.note("train", group=1)


async def test_a_turn_that_cannot_come_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estr.schedule, "REPLAY_TIMEOUT_S", 0.01)
    schedule = Schedule(replay=Replay(events("dispatch", "train")))
    with pytest.raises(ScheduleError, match=r"waits for dispatch \(group 0\) and cannot come"):
        await schedule.turn("train")


async def test_without_a_replay_nothing_waits_and_without_a_log_nothing_is_written() -> None:
    schedule = Schedule()
    await asyncio.wait_for(schedule.turn("train"), 1)
    schedule.note("train", groups=[1])
    schedule.sync()
    schedule.close()
    assert schedule.upcoming("train") is None
    assert schedule.rollout(RolloutId(0, 0, 0)) is None


def test_a_position_survives_json() -> None:
    position = Position(12, 34, 2**31, 5, (RolloutId(2**62, 7, 1, 0), RolloutId(2**62, 8, 0, 1)))
    assert Position.unpack(json.loads(json.dumps(position.pack()))) == position


async def test_the_replay_of_a_run_killed_in_a_checkpoint_ends_there() -> None:
    """The event of the checkpoint was written, the load that it waits for was not."""
    schedule = Schedule(replay=Replay(events("train", "checkpoint"), position=2))
    store = MemoryWeightStore()
    store.publish(1, {})
    versions = EngineVersions(
        ScriptedEngine(lambda request: []),
        store,
        Members(recipe(), {}, schedule, Metrics()),
        schedule,
        kv="recompute",
        on_load=lambda: None,
    )
    with pytest.raises(ScheduleError, match="killed in a checkpoint, before its engine had"):
        await asyncio.wait_for(versions.reach(1), 5)
