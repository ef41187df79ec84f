"""Asynchronous runs done again bit for bit, killed and resumed; with real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from estr.cli.runs import diff
from estr.config import load_recipe
from estr.errors import CheckpointError, ConfigError
from estr.metrics import read_metrics
from estr.run import train
from estr.runs import first_difference, verify_run, where_one_ends
from estr.schedule import ENGINE_FILE, LOOP_FILE, read_lineage

ROOT = Path(__file__).parents[1]
SMALL = [
    "steps=8",
    "groups_per_step=4",
    "group_size=4",
    "eval.every=0",
    "eval.final_problems=4",
    "checkpoint.every_steps=3",
    "checkpoint.keep=9",
    "deterministic=true",
    "task={name='calculator', latency_mean_s=0.02, latency_min_s=0.001, latency_max_s=0.1}",
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One deterministic run."""
    runs = tmp_path_factory.mktemp("runs")
    train(load_recipe(overrides=[*SMALL, "name=once"]), runs=runs)
    return runs / "once"


def test_a_replay_that_is_killed_twice_is_equal_to_the_bit(recorded: Path) -> None:
    runs = recorded.parent
    again = runs / "again"
    base = [sys.executable, str(ROOT / "tools/chaos/child.py"), "train", "--plain"]
    first = [*base, "--runs", str(runs), "--replay-schedule", "once", "--set", "name=again"]
    resume = [*base, "--runs", str(runs), "--resume", str(again)]
    for command, kill in ((first, "metrics:5:after"), (resume, "fsync:9:after"), (resume, "")):
        env = os.environ | ({"CHAOS_KILL": kill} if kill else {})
        ended = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=200
        )
        assert ended.returncode == (-9 if kill else 0), ended.stderr
    assert first_difference(recorded, again) is None
    weights = [(run / "model/last/model.safetensors").read_bytes() for run in (recorded, again)]
    assert weights[0] == weights[1]
    losses = [
        [r["loss"] for r in read_metrics(run / "metrics.jsonl").records if "loss" in r]
        for run in (recorded, again)
    ]
    assert losses[0] == losses[1]
    verdict = verify_run(again)
    assert verdict.faults == []
    assert (verdict.steps, verdict.consumed, verdict.resumes) == (8, 32, 2)


def test_rollouts_in_flight_are_gone_on_with(recorded: Path) -> None:
    checkpoints = sorted((recorded / "checkpoints").glob("step-*"))
    states = [json.loads((path / "state.json").read_text()) for path in checkpoints]
    members = [m for state in states for group in state["members"].values() for m in group]
    growing = [m["state"] for m in members if m["state"] is not None]
    assert any(state["drawn"] is not None for state in growing), "half a turn was saved"
    assert any(state["replies"] for state in growing), "and whole turns with their answers"


def test_trajectories_of_the_recorded_run_span_versions(recorded: Path) -> None:
    rows = read_metrics(recorded / "metrics.jsonl").records
    assert max(row["intra_max"] for row in rows if "loss" in row) > 0


def test_a_run_differs_from_one_with_another_seed_and_says_where(
    recorded: Path, tmp_path: Path
) -> None:
    overrides = [*SMALL, "name=other", "steps=2", "trainer.lr=1e-3"]
    train(load_recipe(overrides=overrides), runs=tmp_path)
    found = first_difference(recorded, tmp_path / "other")
    assert found is not None
    assert found.startswith("recipes: ")


def test_a_prefix_is_not_called_the_same(recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", LOOP_FILE, ENGINE_FILE):
        (copy / name).write_bytes((recorded / name).read_bytes())
    assert where_one_ends(recorded, copy) is None
    assert CliRunner().invoke(diff, [str(recorded), str(copy)]).output.startswith("the same")
    lines = (copy / LOOP_FILE).read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"event":"step","step":3' in line)
    (copy / LOOP_FILE).write_text("".join(lines[: place + 1]))
    assert first_difference(recorded, copy) is None
    expected = f"{copy} is a prefix of {recorded}: it ends after step 3 with step (step 3"
    for pair in ((recorded, copy), (copy, recorded)):
        found = where_one_ends(*pair)
        assert found is not None
        assert found.startswith(expected)
        assert found.endswith(f"; {recorded} goes on to step 8")
        result = CliRunner().invoke(diff, [str(run) for run in pair])
        assert (result.output, result.exit_code) == (found + "\n", 0)


def test_first_difference_names_the_first_event(recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", LOOP_FILE, ENGINE_FILE):
        (copy / name).write_bytes((recorded / name).read_bytes())
    assert first_difference(recorded, copy) is None
    lines = (copy / LOOP_FILE).read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"event":"step","step":3' in line)
    event = json.loads(lines[place])
    lines[place] = json.dumps({**event, "loss": event["loss"] + 1e-9}) + "\n"
    (copy / LOOP_FILE).write_text("".join(lines))
    found = first_difference(recorded, copy)
    assert found is not None
    assert "step (step 3" in found


def edited(recorded: Path, folder: Path, change) -> Path:
    """A copy of the run whose schedule was tampered with."""
    folder.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (folder / name).write_bytes((recorded / name).read_bytes())
    events = change(read_lineage(recorded / LOOP_FILE))
    (folder / LOOP_FILE).write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def without(events, index):
    return events[:index] + events[index + 1 :]


def index_of(events, kind, number=0):
    return [i for i, e in enumerate(events) if e["event"] == kind][number]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: without(e, index_of(e, "dispatch", 3)), "never dispatched"),
        (lambda e: [*e, e[index_of(e, "train")]], "trained, failed or filtered twice"),
        (lambda e: without(e, index_of(e, "step", 2)), "step 3 is missing"),
        (lambda e: [*e, e[index_of(e, "dispatch")]], "dispatched more than once"),
        (
            lambda e: [{**x, "problem": x["problem"] * 2} if "problem" in x else x for x in e],
            "the data jumps",
        ),
        (
            lambda e: [{**x, "max_staleness": 0} if x["event"] == "recipe" else x for x in e],
            "max_staleness is 0",
        ),
        (
            lambda e: [{**x, "lr": 7.0} if x["event"] == "step" else x for x in e],
            "lr is 5e-05 in metrics.jsonl, 7.0 in the schedule",
        ),
    ],
)
def test_verify_sees_what_is_wrong(recorded: Path, tmp_path: Path, change, words: str) -> None:
    verdict = verify_run(edited(recorded, tmp_path / "copy", change))
    assert any(words in fault for fault in verdict.faults), verdict.faults


def test_only_a_deterministic_run_of_the_same_recipe_is_replayed(
    recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"changed: steps = 9 \(was 8\)"):
        train(load_recipe(recorded / "config.toml", ["steps=9"]), replay=recorded)
    (tmp_path / "config.toml").write_text(load_recipe().to_toml())
    with pytest.raises(ConfigError, match="keeps no schedule of its engine"):
        train(load_recipe(), replay=tmp_path)


def test_kept_caches_cannot_be_replayed() -> None:
    with pytest.raises(ConfigError, match="deterministic = true needs kv = 'recompute'"):
        load_recipe(overrides=["deterministic=true", "kv=keep"])


def test_a_finished_run_and_a_changed_recipe_need_a_word(recorded: Path) -> None:
    recipe = load_recipe(recorded / "config.toml")
    with pytest.raises(ConfigError, match="is finished: 8 of 8 steps are made"):
        train(recipe, resume=recorded)
    changed = load_recipe(recorded / "config.toml", ["steps=9", "trainer.lr=1e-4"])
    with pytest.raises(ConfigError, match=r"steps = 9 \(was 8\)"):
        train(changed, resume=recorded)


@pytest.mark.parametrize("log", [LOOP_FILE, ENGINE_FILE])
@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_a_resume_without_its_schedule_is_refused_before_anything_changes(
    recorded: Path, tmp_path: Path, log: str, harm: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    (run / "summary.json").unlink()
    if harm == "cut":
        (run / log).write_bytes((run / log).read_bytes()[:20])
    else:
        (run / log).unlink()
    shutil.rmtree(sorted((run / "checkpoints").glob("step-*"))[-1])
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="the checkpoint was taken after"):
        train(
            load_recipe(run / "config.toml", ["trainer.lr=1e-4"]), resume=run, accept_changes=True
        )
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"}
    assert {p: after.get(p) for p in before if p.name != "lock"} == {
        p: data for p, data in before.items() if p.name != "lock"
    }
    assert set(after) - set(before) == set()


def test_a_run_with_filtered_groups_is_verified(tmp_path: Path) -> None:
    overrides = [*SMALL, "deterministic=false", "name=filtered", "steps=3", "group_size=2"]
    train(load_recipe(overrides=[*overrides, "rollout.max_filtered_groups=9"]), runs=tmp_path)
    verdict = verify_run(tmp_path / "filtered")
    assert verdict.faults == []
    assert verdict.consumed == 12
    assert verdict.filtered > 0


def test_five_kills_lose_nothing() -> None:
    command = [sys.executable, str(ROOT / "tools/chaos"), "--only", "scripted", "--kills", "5"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    tally = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, tally
    assert (tally["kills"], tally["lost"], tally["doubled"], tally["faults"]) == (5, 0, 0, [])
