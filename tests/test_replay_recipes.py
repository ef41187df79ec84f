"""Logged tokens of a run whose recipe was changed, or whose first step taught nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from estr.config import load_recipe
from estr.errors import DataError
from estr.ledger.schema import StepRecord
from estr.replay import OWN, replay_corrections
from estr.schedule import LOOP_FILE
from estr.types import RolloutId
from ledger_cases import consumption, record, trajectory, write_step

READS_Q = "none:edge=U"


def one_step(step: int, *, q: bool, scored: bool = True) -> StepRecord:
    pairs = []
    for index, advantage in enumerate((1.0, -1.0)):
        rid = RolloutId(0, step, index)
        own = trajectory(rid, logprobs=[-1.0] * 2, entropies=[1.0] * 2, versions=[0] * 2)
        given: dict[str, Any] = {"proximal": [-1.0] * 2} if q else {}
        made = consumption(own, [0.1, -0.1], advantage=advantage if scored else None, **given)
        pairs.append((own, made))
    return record(step, pairs)


def make_run(folder: Path, minibatches: list[int], records: list[StepRecord]) -> Path:
    """A run whose steps were taken with these num_minibatches."""
    first = load_recipe(overrides=["correction=estr"])
    folder.mkdir()
    (folder / "config.toml").write_text(first.to_toml())
    events: list[dict[str, Any]] = [{"event": "start", "groups_per_step": 1, "max_staleness": 9}]
    for step, (number, one) in enumerate(zip(minibatches, records, strict=True), start=1):
        recipe = dataclasses.asdict(dataclasses.replace(first, num_minibatches=number))
        events.append({"event": "recipe", **recipe})
        events.append({"event": "step", "step": step, "version": step, "target": step - 1})
        write_step(folder, one)
    lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in events]
    (folder / LOOP_FILE).write_text("".join(lines))
    return folder


def test_q_is_asked_of_the_steps_that_need_it(tmp_path: Path) -> None:
    """Step 2 was one of two of its batch, so its q is not pi, whatever the last recipe."""
    records = [one_step(step, q=False) for step in (1, 2, 3)]
    run = make_run(tmp_path / "run", [1, 2, 1], records)
    with pytest.raises(DataError, match=r"step 2 under none:edge=U: .*made 2 optimizer steps"):
        replay_corrections(run, [READS_Q])
    assert replay_corrections(run, [READS_Q], steps=[1, 3]).labels == (OWN, READS_Q)
    every = replay_corrections(run)
    assert "decoupled" in dict(every.refused)
    assert "icepop" in every.labels


def test_a_step_that_taught_nothing_decides_nothing(tmp_path: Path) -> None:
    """It holds no q, as all of its columns are empty: others do."""
    records = [one_step(1, q=False, scored=False), one_step(2, q=True)]
    run = make_run(tmp_path / "run", [2, 2], records)
    found = replay_corrections(run)
    assert "decoupled" in found.labels
    assert found.tokens == 4
    assert replay_corrections(run, [READS_Q]).tokens == 4
