"""Run folders that were cut, edited, mixed up or moved: refused by name, or gone on from."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from estr.checkpoint import Checkpoints
from estr.cli import cli
from estr.config import Recipe, load_recipe
from estr.errors import CheckpointError, ConfigError, DataError
from estr.ledger.parts import part_path
from estr.metrics import MetricsWriter
from estr.resume import Saved, find_replayed, find_saved, set_aside
from estr.rollout_state import SegmentPool
from estr.run import train
from estr.run_folder import RunFolder
from estr.runs import first_difference, verify_run
from estr.schedule import ENGINE_FILE, LOOP_FILE, EventLog, Position
from estr.types import RolloutId
from ledger_cases import write_random_ledger

Harm = Callable[[Path], object]


async def save_nothing(folder: Path) -> None:
    (folder / "trainer.json").write_text("{}")


def make_run(runs: Path, *overrides: str, steps: int = 3, start: int = 0) -> RunFolder:
    """A run of one group a step, stopped after `steps`, with a checkpoint at every step from
    `start` on."""
    recipe = load_recipe(overrides=["steps=9", "groups_per_step=1", *overrides])
    folder = RunFolder.create(recipe, runs)
    log = EventLog(folder.path / LOOP_FILE)
    log.write("start", groups_per_step=1, max_staleness=4)
    log.write("recipe", **dataclasses.asdict(recipe))
    engine = EventLog(folder.path / ENGINE_FILE) if recipe.deterministic else None
    checkpoints = Checkpoints(folder.checkpoints, keep=9, data="data")
    with MetricsWriter(folder.path, tensorboard=False) as metrics:
        for step in range(steps + 1):
            if step:
                row = {"step": step, "version": step, "loss": 0.5, "lr": 0.1}
                group = step - 1
                issued = {"task": "calculator", "issue": 0, "version": step - 1}
                log.write("dispatch", group=group, problem=group, **issued)
                log.write("rollout", id=[group, 0, 0], status="ok", error=None, replies=[{}])
                log.write("train", step=step - 1, groups=[group])
                log.write("step", **row, target=step - 1)
                metrics.write(step=step, version=step, wall_s=0.0, values={"loss": 0.5, "lr": 0.1})
            if step and engine is not None:
                engine.write("admit", at=step, ids=[[0, step - 1, 0, 0]])
            state = {
                "step": step,
                "engine": None if engine is None else Position(1, step, engine.crc).pack(),
                "schedule": {"lines": log.num_lines, "crc": log.crc, "replayed": 0},
            }
            if step >= start:
                columns = SegmentPool().columns()
                asyncio.run(checkpoints.write(step, state, columns, save_nothing))
    for each in (log, engine):
        if each is not None:
            each.close()
    return folder


def saved(folder: RunFolder, *overrides: str, accept: bool = False) -> Saved:
    recipe = load_recipe(folder.path / "config.toml", overrides)
    return find_saved(folder, recipe, data="data", accept_changes=accept)


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def test_a_whole_run_is_gone_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    found = saved(folder)
    assert (found.folder.name, found.notes) == ("step-00000003", ())
    assert verify_run(folder.path).faults == []


def cut(name: str, share: float = 0.5) -> Harm:
    def harm(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: int(len(data) * share)])

    return harm


def put(name: str, text: str) -> Harm:
    return lambda run: (run / name).write_text(text)


def add(name: str, line: str) -> Harm:
    return lambda run: (run / name).write_text((run / name).read_text() + line + "\n")


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (put("config.toml", ""), ConfigError, r"changed recipe as config\.toml now has it"),
        (put("config.toml", "steps = 9\nseed = 4"), ConfigError, "started with seed = 0, not 4"),
        (put("config.toml", "a = ["), ConfigError, r"config\.toml is not TOML"),
        (put("metrics.jsonl", "{}\n"), DataError, "line 1 does not say .* the run goes on"),
        (add("metrics.jsonl", "}{"), DataError, "line 4 is not JSON.* the run goes on"),
        (put("schedule.jsonl", ""), CheckpointError, "has 0 lines, the checkpoint was taken after"),
        (add("schedule.jsonl", '{"event":[]}'), CheckpointError, "line 15 is no event"),
        (
            lambda run: shutil.rmtree(run / "checkpoints"),
            CheckpointError,
            "no usable checkpoint",
        ),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_by_name(
    tmp_path: Path, harm: Harm, error: type[Exception], words: str
) -> None:
    folder = make_run(tmp_path)
    harm(folder.path)
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    with pytest.raises(error, match=words):
        saved(folder)
    assert before == {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("harm", "step"),
    [
        (cut("schedule.jsonl", 0.95), 2),
        (lambda run: (newest(run) / "state.json").unlink(), 2),
        (lambda run: (newest(run) / "manifest.json").write_text(""), 2),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named_and_the_one_before_is_used(
    tmp_path: Path, harm: Harm, step: int
) -> None:
    folder = make_run(tmp_path)
    harm(folder.path)
    found = saved(folder)
    assert found.state["step"] == step
    assert "step-00000003" in found.notes[0]
    assert any("step-00000003" in fault for fault in verify_run(folder.path).faults)


def test_the_checkpoint_of_another_run_is_passed_over_and_never_costs_an_own_one(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path)
    other = make_run(tmp_path, "trainer.lr=1e-3", steps=5)
    for step in (4, 5):
        name = f"step-{step:08d}"
        shutil.copytree(other.checkpoints / name, folder.checkpoints / name)
    found = saved(folder)
    assert found.state["step"] == 3
    assert "belongs to another run" in found.notes[0]
    keeping_two = Checkpoints(folder.checkpoints, keep=2, data="data")
    state = found.state | {"step": 3}
    asyncio.run(keeping_two.write(3, state, SegmentPool().columns(), save_nothing))
    assert (folder.checkpoints / "step-00000003").is_dir()
    set_aside(found, folder, folder.recipe())
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names[:2] == ["step-00000002", "step-00000003"]
    assert names[2:] == ["superseded-step-00000004", "superseded-step-00000005"]


def test_a_finished_run_that_goes_on_is_not_finished_until_its_new_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "steps=3")
    (folder.path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="is finished"):
        saved(folder)
    longer = load_recipe(folder.path / "config.toml", ["steps=5"])
    set_aside(saved(folder, "steps=5", accept=True), folder, longer)
    assert not folder.is_finished()
    assert (folder.path / "summary.previous.json").read_text() == "{}"


async def test_rollouts_go_on_while_a_checkpoint_is_read_again(tmp_path: Path) -> None:
    """A pipe stands for a large file: to read it takes until somebody writes."""
    pipe = tmp_path / ".writing-step-00000001" / "model.safetensors"
    rescued = threading.Event()

    def write_nothing() -> None:
        pipe.open("wb").close()

    def rescue() -> None:
        rescued.set()
        write_nothing()

    async def save_much(folder: Path) -> None:
        await save_nothing(folder)
        os.mkfifo(pipe)

    columns = SegmentPool().columns()
    late = threading.Timer(30, rescue)
    late.start()
    writing = asyncio.create_task(Checkpoints(tmp_path).write(1, {"step": 1}, columns, save_much))
    while not pipe.exists() and not rescued.is_set():
        await asyncio.sleep(0.01)
    if not rescued.is_set():
        await asyncio.to_thread(write_nothing)
        late.cancel()
    assert (await writing).name == "step-00000001"
    assert not rescued.is_set()


def test_what_a_kill_left_half_written_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    """A checkpoint of that step may never be written again; the best model was to be replaced."""
    folder = make_run(tmp_path)
    left = folder.checkpoints / ".writing-step-00000099"
    models = {name: folder.path / "model" / name for name in (".best.7", ".best.7.old", ".last.7")}
    for each in (left, *models.values(), folder.model_last):
        each.mkdir(parents=True)
        (each / "model.safetensors").write_text(each.name)
    set_aside(saved(folder), folder, folder.recipe())
    assert not left.exists()
    assert sorted(path.name for path in (folder.path / "model").iterdir()) == ["best", "last"]
    assert (folder.model_best / "model.safetensors").read_text() == ".best.7.old"
    assert (folder.model_last / "model.safetensors").read_text() == "last"


def test_an_engine_waits_only_for_what_goes_on(tmp_path: Path) -> None:
    gone, coming = RolloutId(0, 1, 0, 0), RolloutId(0, 2, 0, 0)
    engine = Position(7, 9, 5, running=(gone, coming)).pack()
    found = Saved(tmp_path, {"engine": engine}).position({coming})
    assert found == Position(7, 9, 5, running=(coming,))
    assert Saved(tmp_path, {"engine": None}).position({coming}) is None


def test_what_is_missing_of_the_metrics_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lines = (folder.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "metrics.jsonl").write_text(lines[2])
    (note,) = saved(folder).notes
    assert "lacks 2 of the 3 steps so far, the first is 1" in note


def test_a_recipe_that_was_accepted_needs_no_second_word(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    changed = load_recipe(folder.path / "config.toml", ["trainer.lr=1e-3"])
    set_aside(saved(folder, "trainer.lr=1e-3", accept=True), folder, changed)
    with EventLogOf(folder) as log:
        log.write("recipe", **dataclasses.asdict(changed))
    assert saved(folder).changed == ()


class EventLogOf:
    """The schedule of a run, gone on with from its last checkpoint."""

    def __init__(self, folder: RunFolder) -> None:
        lines = saved(folder, accept=True).state["schedule"]["lines"]
        self.log = EventLog(folder.path / LOOP_FILE, keep_lines=lines)

    def __enter__(self) -> EventLog:
        return self.log

    def __exit__(self, *error: object) -> None:
        self.log.close()


def test_the_bound_is_that_of_the_recipe_of_the_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    wider = load_recipe(folder.path / "config.toml", ["groups_per_step=2"])
    set_aside(saved(folder, "groups_per_step=2", accept=True), folder, wider)
    with EventLogOf(folder) as log:
        log.write("recipe", **dataclasses.asdict(wider))
        for group in (3, 4):
            issued = {"task": "calculator", "issue": 0, "version": 3}
            log.write("dispatch", group=group, problem=group, **issued)
        log.write("train", step=3, groups=[3, 4])
        log.write("step", step=4, version=4, target=3, loss=0.5, lr=0.1)
    with MetricsWriter(folder.path, tensorboard=False) as metrics:
        metrics.write(step=4, version=4, wall_s=0.0, values={"loss": 0.5, "lr": 0.1})
    assert verify_run(folder.path).faults == []


@pytest.mark.parametrize("key", ["deterministic=true", "seed=5", "task=lookup", "model=x"])
def test_no_word_makes_it_another_run(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"was started with {key.partition('=')[0]}"):
        saved(make_run(tmp_path), key, accept=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"replays\.json does not say which run"),
        ("[]", r"replays\.json does not say which run"),
        ('{"run": 7}', r"replays\.json does not say which run"),
        ('{"run": "/nowhere/once"}', "replays /nowhere/once, where no run is now"),
    ],
)
def test_a_replay_that_does_not_know_its_run_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    folder = make_run(tmp_path)
    (folder.path / "replays.json").write_text(text)
    with pytest.raises(DataError, match=words):
        find_replayed(folder, saved(folder), None)


def test_a_replay_stays_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    found = saved(folder)
    found.state["schedule"]["replayed"] = 4
    with pytest.raises(DataError, match=r"is a replay, and its replays\.json"):
        find_replayed(folder, found, None)
    (folder.path / "replays.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a replay and follows its recipe"):
        saved(folder, "trainer.lr=1", accept=True)


def replay(folder: RunFolder) -> None:
    recipe: Recipe = load_recipe(folder.path / "config.toml", ["name=again"])
    train(recipe, replay=folder.path, runs=folder.path.parent)


def test_a_schedule_that_lacks_what_a_replay_would_wait_for_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "deterministic=true")
    engine = folder.path / ENGINE_FILE
    whole = engine.read_text()
    engine.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match=r"was cut: it lacks a turn of rollout \[2, 0, 0\]"):
        replay(folder)
    engine.write_text(whole.replace('"at"', '"to"'))
    with pytest.raises(DataError, match=r"event 1 of the lineage.* has no at"):
        replay(folder)
    assert not (tmp_path / "again").exists()


def test_a_run_of_two_recipes_cannot_be_replayed(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "deterministic=true")
    longer = dataclasses.asdict(folder.recipe()) | {"epochs": 7}
    add(LOOP_FILE, json.dumps({"event": "recipe", **longer}, separators=(",", ":")))(folder.path)
    folder.update_recipe(folder.recipe())
    with pytest.raises(ConfigError, match=r"another recipe.* epochs = 7 \(was 1000\)"):
        replay(folder)


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"train"}',
        '{"event":"train","groups":7}',
        '{"event":"dispatch","group":"x","task":"a","problem":0,"issue":0,"version":0}',
        '{"event":"dispatch","group":3,"problem":0,"issue":0,"version":0}',
    ],
)
def test_events_that_do_not_say_enough_are_named(tmp_path: Path, line: str) -> None:
    folder = make_run(tmp_path)
    add(LOOP_FILE, line)(folder.path)
    with pytest.raises(DataError, match=r"event 15 of the lineage.* that can be read"):
        verify_run(folder.path)


def test_verify_sees_files_beside_the_schedule(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    put("summary.json", "{}")(folder.path)
    put("config.toml", "steps = 10\ngroups_per_step = 1")(folder.path)
    shutil.rmtree(folder.checkpoints)
    faults = verify_run(folder.path).faults
    assert len(faults) == 3
    assert "no checkpoint is left" in faults[0]
    assert "config.toml is not the recipe of the run: steps = 10 (was 9)" in faults[1]
    assert "summary.json is not the summary of a run" in faults[2]


@pytest.mark.parametrize("table", ["tokens", "trajectories"])
def test_verify_reads_every_byte_of_the_ledger(tmp_path: Path, table: str) -> None:
    """The end of the file is whole: only the checksums of its pages tell."""
    folder = make_run(tmp_path)
    write_random_ledger(folder.path, steps=2)
    assert verify_run(folder.path).faults == []
    path = part_path(folder.path, table, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    (fault,) = verify_run(folder.path).faults
    assert f"ledger part {path} is absent or torn" in fault
    shown = CliRunner().invoke(cli, ["runs", "verify", str(folder.path)])
    assert shown.exit_code == 1
    assert f"error: {fault}" in shown.output


def test_a_run_at_work_is_not_verified(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with folder.locked(), pytest.raises(DataError, match="in use by another estr process"):
        verify_run(folder.path)
    verify_run(folder.path)


def test_a_run_without_a_schedule_is_not_the_same_as_one_with(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    shutil.copytree(folder.path, tmp_path / "copy")
    assert first_difference(folder.path, tmp_path / "copy") is None
    (tmp_path / "copy" / LOOP_FILE).unlink()
    with pytest.raises(DataError, match=r"cannot read .*schedule\.jsonl"):
        first_difference(folder.path, tmp_path / "copy")


def test_what_cannot_be_written_to_is_an_error_with_its_place(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder.path / ".lock").mkdir()
    with pytest.raises(DataError, match=f"cannot write to {folder.path}: Is a directory"):
        train(load_recipe(folder.path / "config.toml"), resume=folder.path)


@pytest.mark.parametrize("name", ["a\nb", "a\0", "", "..", "a/b", "\x1b[1m"])
def test_names_are_plain_folder_names(name: str) -> None:
    with pytest.raises(ConfigError, match="name must be a plain folder name"):
        load_recipe(overrides=[f"name={json.dumps(name)}"])
