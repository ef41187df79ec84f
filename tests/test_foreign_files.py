"""Files of a run that were changed by hand, or made by something else: named, never a traceback;
and two runs that part, with the place at which they do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from estr.checkpoint import verify
from estr.config import load_recipe
from estr.errors import CheckpointError, DataError
from estr.ledger.schema import logged_entries
from estr.metrics import read_metrics
from estr.models import ignored_sampling_settings
from estr.report import Budget, build_report, render
from estr.run_folder import RunFolder
from estr.runs import first_difference, verify_run
from estr.schedule import LOOP_FILE, last_recipe, read_lineage
from estr.subject import stamped_version
from report_cases import make_run

BUDGET = Budget(trajectories=20, tokens=1000)
DEEP = "[" * 100_000

START = {"event": "start", "groups_per_step": 1, "max_staleness": 1}
DISPATCH = {
    "event": "dispatch", "group": 0, "problem": 0, "issue": 0, "version": 0, "task": "calculator",
}  # fmt: skip
TRAIN = {"event": "train", "groups": [0]}
STEP = {"event": "step", "step": 1, "version": 1, "target": 0}
ROLLOUT = {"event": "rollout", "id": [0, 0, 0], "status": "ok", "replies": [{"text": "x" * 60}]}


def put_schedule(run: Path, *events: dict[str, Any]) -> None:
    lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in events]
    (run / LOOP_FILE).write_text("".join(lines))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 3, "version": 3}', "line 5 has no wall_s"),
        ('{"step": 3, "wall_s": 1.0}', "line 5 has no version"),
        ('{"step": 3, "version": null, "wall_s": 1.0, "eval/accuracy": 0.5}', "has no version"),
        ('{"step": 3, "version": 3, "wall_s": 1.0, "loss": "x"}', "loss is no number: 'x'"),
        ('{"step": 3, "version": 3, "wall_s": 1.0, "eval/accuracy": 7}', "is no share: 7"),
        ('{"step": 3, "a": ' + DEEP, "line 5 is not JSON"),
    ],
)
def test_a_line_of_metrics_that_nothing_draws_is_named(
    tmp_path: Path, line: str, words: str
) -> None:
    run = make_run(tmp_path, "run", steps=2, ledger=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=rf"metrics\.jsonl, .*{words}"):
        build_report([run], BUDGET)


def test_numbers_that_json_has_not_are_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=1, ledger=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "version": 2, "wall_s": 9.0, "loss": NaN}\n')
    render(build_report([run], BUDGET))


@pytest.mark.parametrize("text", [DEEP, '{"name": "\\ud800"}'])
def test_a_summary_that_no_page_can_hold_is_named(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, "run", steps=1, ledger=False)
    (run / "summary.json").write_text(text)
    with pytest.raises(DataError, match=r"summary\.json is not JSON"):
        build_report([run], BUDGET)
    with pytest.raises(DataError, match=r"summary\.json is not the summary of a run"):
        RunFolder.open(run).summary()


def test_brackets_without_end_are_named_by_every_reader(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", LOOP_FILE):
        (tmp_path / name).write_text('{"event":"recipe","a":' + DEEP + "\n")
    (tmp_path / "replays.json").write_text(DEEP)
    with pytest.raises(DataError, match="line 1 is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match="line 1 is no event"):
        read_lineage(tmp_path / LOOP_FILE)
    with pytest.raises(DataError, match="holds a recipe that cannot be read"):
        last_recipe(tmp_path / LOOP_FILE)
    with pytest.raises(DataError, match="does not say which run is replayed"):
        RunFolder(tmp_path).replays()
    with pytest.raises(DataError, match="is not a list of corrections"):
        logged_entries(DEEP)
    for name in ("manifest.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_text(DEEP)
    with pytest.raises(CheckpointError, match="is torn"):
        verify(tmp_path)
    with pytest.raises(DataError, match="is not the config of a model"):
        stamped_version(tmp_path)
    with pytest.raises(DataError, match=r"generation_config\.json is not JSON"):
        ignored_sampling_settings(tmp_path)


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([START | {"groups_per_step": 0}, DISPATCH, TRAIN], "groups_per_step"),
        ([START, DISPATCH, TRAIN | {"groups": [[0]]}], "groups"),
        ([START, DISPATCH, ROLLOUT | {"id": [[0]]}], "id"),
    ],
)
def test_events_of_impossible_values_are_named(
    tmp_path: Path, events: list[dict[str, Any]], name: str
) -> None:
    run = make_run(tmp_path, "run", steps=1, ledger=False)
    put_schedule(run, *events)
    with pytest.raises(DataError, match=f"has no {name} that can be read"):
        verify_run(run)


def test_a_step_without_a_loss_is_a_fault_and_no_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=1, ledger=False)
    row = {"step": 1, "version": 1, "wall_s": 1.0, "loss": 0.5, "lr": 0.1}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    put_schedule(run, START, DISPATCH, TRAIN, STEP)
    assert "step 1: loss is 0.5 in metrics.jsonl, None in the schedule" in verify_run(run).faults


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task=countdown", "task.name is 'calculator' here, 'countdown' there"),
        ("correction=icepop", "correction[0].name is 'estr' here, 'icepop' there"),
        ('correction=["estr", "none"]', "correction[1] is None here, {'name': 'none'} there"),
        ("trainer.lr=1e-3", "trainer.lr is 0.0005 here, 0.001 there"),
    ],
)
def test_recipes_that_differ_are_told_by_key(tmp_path: Path, override: str, words: str) -> None:
    runs = [make_run(tmp_path, "a", ledger=False), make_run(tmp_path, "b", override, ledger=False)]
    for run in runs:
        put_schedule(run, START)
    assert first_difference(*runs) == f"recipes: {words}"


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (ROLLOUT, {"replies": [{"text": "x" * 60 + "y"}]},
         "replies[0].text, from character 60 on is '' here, 'y' there"),
        (TRAIN | {"groups": [*range(100)]}, {"groups": [*range(99), 7]},
         "groups[99] is 99 here, 7 there"),
        (ROLLOUT, {"status": "timeout"}, "status is 'ok' here, 'timeout' there"),
    ],
)  # fmt: skip
def test_events_that_differ_are_told_by_field(
    tmp_path: Path, mine: dict[str, Any], theirs: dict[str, Any], words: str
) -> None:
    """Also where the field is one that is not shown, or lies behind what is."""
    runs = [make_run(tmp_path, name, ledger=False) for name in ("a", "b")]
    put_schedule(runs[0], START, mine)
    put_schedule(runs[1], START, mine | theirs)
    found = first_difference(*runs)
    assert found is not None
    assert found.startswith("schedule.jsonl: ")
    assert found.endswith(f" there; {words}")


def test_each_step_has_the_recipe_of_its_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", ledger=False)
    assert RunFolder.open(run).recipes() == {}
    first = load_recipe(run / "config.toml")
    second = dataclasses.replace(first, num_minibatches=2)
    told = [{"event": "recipe", **dataclasses.asdict(recipe)} for recipe in (first, second)]
    put_schedule(run, START, told[0], STEP, told[1], STEP | {"step": 2, "version": 2, "target": 1})
    assert RunFolder.open(run).recipes() == {1: first, 2: second}
