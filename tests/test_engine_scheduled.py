"""The scheduled engine: what it wrote down it does again, bit for bit, whatever the timing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_cases import request, state_of
from estr.engine import Request
from estr.engines.process import EngineHost
from estr.engines.scheduled import ScheduledEngine
from estr.errors import EngineError
from estr.models import resolve_model
from estr.options.run import EngineOptions
from estr.schedule import EngineSchedule, Position, read_lineage
from estr.types import RolloutId, Segment
from tiny_models import tiny_model

REQUESTS = [
    request(g, i, prompt=[1, 2, 3 + g % 2], tokens=4 + (3 * g + i) % 9)
    for g in range(6)
    for i in range(2)
]
CHECKPOINT_AT = 9


_OPEN: list[ScheduledEngine] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()
    torch.use_deterministic_algorithms(False)  # a host has asked for it


def engine(log: Path, plan: Path | None = None) -> ScheduledEngine:
    _OPEN.append(ScheduledEngine(tiny_model(), schedule=EngineSchedule(log, plan), max_batch=6))
    return _OPEN[-1]


def record(log: Path) -> tuple[dict[RolloutId, Segment], Position, dict[RolloutId, Segment]]:
    """Twelve requests that come by and by, two loads, a cancellation and a checkpoint."""
    recorder = engine(log)
    recorder.begin(Position())
    coming, finished = list(REQUESTS), {}
    for step in range(60):
        for _ in range(2 if step % 3 == 0 else 0):
            if coming:
                recorder.submit(coming.pop(0))
        if step in (4, 12):
            recorder.begin_load(step // 4, state_of("llama-grouped", step), "recompute")
        if step == 7:
            recorder.cancel(REQUESTS[2].id)
        if step == CHECKPOINT_AT:
            recorder.request_refill()
            taken = recorder.take_refill()
            assert taken is not None
        finished.update(recorder.step())
    assert len(finished) == len(REQUESTS) - 1
    return finished, *taken


def feed(
    player: ScheduledEngine,
    requests: list[Request],
    loads: list[int],
    *,
    seed: int,
    refill: bool,
) -> dict[RolloutId, Segment]:
    """Give the engine everything in another order and at other times than it was recorded."""
    rng = random.Random(seed)
    coming, finished = list(requests), {}
    rng.shuffle(coming)
    for turn in range(400):
        if coming and rng.random() < 0.3:
            player.submit(coming.pop())
        if loads and rng.random() < 0.1:
            step = loads.pop(0)
            player.begin_load(step // 4, state_of("llama-grouped", step), "recompute")
        if refill and turn > 20:
            player.request_refill()
            refill = False
        player.cancel(REQUESTS[5].id)  # only what was recorded is cancelled
        finished.update(player.step())
    assert not coming
    return finished


def assert_same(found: dict[RolloutId, Segment], expected: dict[RolloutId, Segment]) -> None:
    assert found.keys() == expected.keys()
    for rollout_id, segment in expected.items():
        for column in ("token_ids", "versions", "behavior_logprobs", "behavior_entropies"):
            mine, theirs = getattr(found[rollout_id], column), getattr(segment, column)
            assert mine.tobytes() == theirs.tobytes(), (rollout_id, column)


def test_a_checkpoint_before_all_have_come_back_still_waits_for_them(tmp_path: Path) -> None:
    _, position, _ = record(tmp_path / "a.jsonl")
    resumed = engine(tmp_path / "a.jsonl")
    resumed.begin(position)
    resumed.request_refill()
    taken = resumed.take_refill()
    assert taken is not None
    assert taken[0].running == position.running != ()


def test_what_is_tried_again_is_not_waited_for_as_it_was(tmp_path: Path) -> None:
    """The environment of the first of two failed before the rollout came back to its turn."""
    resumed = engine(tmp_path / "a.jsonl")
    resumed.begin(Position(running=(REQUESTS[0].id, REQUESTS[1].id)))
    again = dataclasses.replace(REQUESTS[0].id, attempt=1)
    resumed.submit(dataclasses.replace(REQUESTS[0], id=again))
    assert not resumed.ready()
    resumed.submit(REQUESTS[1])
    assert resumed.ready()
    resumed.step()
    assert (resumed.num_running, resumed.num_waiting) == (2, 0)


def test_a_rollout_that_ended_before_it_came_back_is_not_waited_for(tmp_path: Path) -> None:
    """Its environment failed in every attempt, or it came and was out of time: the others go on."""
    host = EngineHost(
        resolve_model("builtin"), EngineOptions(), 0, True, EngineSchedule(tmp_path / "a.jsonl")
    )
    running = [request(g, tokens=2) for g in range(3)]
    host.begin(Position(running=tuple(each.id for each in running)))
    host.generate(0, running[0])
    host.generate(1, running[1])
    assert not host.busy()
    host.cancel(running[1].id)  # came, and went
    host.cancel(running[2].id)  # never came
    assert host.busy()
    found = [answer for _ in range(2) for answer in host.pump()]
    assert [(number, len(segment)) for number, segment in found] == [(0, 2)]
    host.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_is_equal_to_the_bit_whatever_the_timing(tmp_path: Path, seed: int) -> None:
    expected, _, _ = record(tmp_path / "a.jsonl")
    player = engine(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    player.begin(Position())
    found = feed(player, REQUESTS, [4, 12], seed=seed, refill=True)
    assert_same(found, expected)
    assert player.take_dropped() == [REQUESTS[2].id]
    assert read_lineage(tmp_path / "b.jsonl") == read_lineage(tmp_path / "a.jsonl")


@pytest.mark.parametrize("seed", range(2))
def test_an_engine_that_died_after_a_checkpoint_goes_on_to_the_bit(
    tmp_path: Path, seed: int
) -> None:
    expected, position, drawn = record(tmp_path / "a.jsonl")
    remaining = [
        dataclasses.replace(r, drawn=drawn[r.id] if len(drawn.get(r.id, ())) else None)
        for r in REQUESTS
        if r.id not in _over_by_then(tmp_path / "a.jsonl", drawn)
    ]
    player = engine(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    player.begin_load(1, state_of("llama-grouped", 4), "recompute")
    player.begin(dataclasses.replace(position, lines=0, planned=position.lines))
    found = feed(player, remaining, [12], seed=seed, refill=False)
    assert set(position.running) <= set(drawn)
    assert {r.id for r in remaining} - {REQUESTS[2].id} == found.keys()
    assert_same(found, {rollout_id: expected[rollout_id] for rollout_id in found})
    assert len(remaining) < len(REQUESTS), "some were over before the checkpoint"


def _over_by_then(log: Path, drawn: dict[RolloutId, Segment]) -> set[RolloutId]:
    """Requests that were over at the checkpoint: admitted before it and no longer there."""
    admitted: set[RolloutId] = set()
    for event in read_lineage(log):
        if event["event"] == "refill":
            break
        if event["event"] == "admit":
            admitted |= {RolloutId(*key) for key in event["ids"]}
    return admitted - drawn.keys()


def test_the_engine_waits_for_what_its_schedule_needs(tmp_path: Path) -> None:
    record(tmp_path / "a.jsonl")
    player = engine(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    player.begin(Position())
    assert not player.ready()
    assert player.step() == []
    player.submit(REQUESTS[0])
    assert not player.ready(), "the schedule admits two at once"
    player.submit(REQUESTS[1])
    assert player.ready()
    player.step()
    assert player.num_running == 2


def test_nothing_is_written_and_nothing_waits_before_the_schedule_begins(tmp_path: Path) -> None:
    early = engine(tmp_path / "a.jsonl")
    early.begin_load(3, state_of("llama-grouped", 1), "recompute")
    early.submit(request(0, tokens=2))
    while early.num_running or early.num_waiting:
        early.step()
    assert early.ready()
    early.begin(Position())
    assert read_lineage(tmp_path / "a.jsonl") == []
    assert early.at == 0


def test_a_plan_that_admits_what_runs_already_is_an_error(tmp_path: Path) -> None:
    plan = tmp_path / "a.jsonl"
    key = "[5,0,0,0]"
    plan.write_text(
        f'{{"event":"admit","at":0,"ids":[{key}]}}\n{{"event":"admit","at":1,"ids":[{key}]}}\n'
    )
    player = engine(tmp_path / "b.jsonl", plan)
    player.begin(Position())
    player.submit(request(0))
    player.step()
    with pytest.raises(EngineError, match="engine step 1: group 0 member 0 attempt 0 should begin"):
        player.step()


@pytest.mark.parametrize("replayed", [False, True])
def test_a_snapshot_arrives_before_what_the_next_step_finishes(
    tmp_path: Path, replayed: bool
) -> None:
    """Else the rollout would be a turn ahead of the tokens that the checkpoint keeps for it."""

    def checkpoint_in_the_middle(schedule: EngineSchedule) -> None:
        host = EngineHost(resolve_model("builtin"), EngineOptions(), 0, True, schedule)
        host.begin(Position())
        host.generate(1, request(tokens=2))
        assert host.pump() == []
        host.snapshot(99)
        (first, (position, drawn)), (second, segment) = host.pump()
        assert (first, second) == (99, 1)
        assert position.step == 1
        assert [len(part) for part in drawn.values()] == [1]
        assert len(segment) == 2
        host.close()

    checkpoint_in_the_middle(EngineSchedule(tmp_path / "a.jsonl"))
    if replayed:
        checkpoint_in_the_middle(EngineSchedule(tmp_path / "b.jsonl", tmp_path / "a.jsonl"))


def test_going_on_from_the_very_start_forgets_what_a_killed_life_did(tmp_path: Path) -> None:
    log = tmp_path / "engine.jsonl"
    record(log)
    assert read_lineage(log)
    player = engine(log)
    player.begin(Position())
    assert read_lineage(log) == []
