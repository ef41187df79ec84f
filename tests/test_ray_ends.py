"""How a run on Ray ends before its time: a process of it dies, or somebody presses Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from estr.cluster.ray_worker import RayWorker
from estr.cluster.session import Session
from estr.config import load_recipe
from estr.errors import WorkerDied
from estr.metrics import read_metrics
from estr.options.run import RayOptions
from estr.progress import SilentReporter
from estr.run import train
from estr.runs import verify_run
from ray_cases import MARKS, SMALL, command_of, descendants, processes_of_ray_left_alone

pytestmark = MARKS

LIMIT_S = 300.0
ENDLESS = [*SMALL, "steps=400", "name=run", "checkpoint.every_steps=1"]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """The program's own connection, which a run uses and keeps: what the run leaves is seen."""
    with processes_of_ray_left_alone():
        session = Session(RayOptions(), num_cpus=2, weights_bytes=16 << 20)
        yield session
        session.close()
        del session


class Kill(SilentReporter):
    """Kills a process of the run when it has made two steps."""

    def __init__(self, name: str) -> None:
        self._name = name

    def stepped(self, step: int, version: int, wall_s: float, row: Mapping[str, Any]) -> None:
        if step == 2:
            workers = [each for each in gc.get_objects() if type(each) is RayWorker]
            (pid,) = [w.pid for w in workers if w.name == self._name and command_of(w.pid)]
            os.kill(pid, signal.SIGKILL)


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def nothing_is_left() -> None:
    """No actor of a run, no bundle, nothing that is reserved."""
    import ray
    from ray.util import placement_group_table

    def actors() -> list[str]:
        commands = (command_of(pid) for pid in descendants(os.getpid()))
        ours = ("ray::HostActor", "ray::Board")
        return [words[0] for words in commands if words and words[0].startswith(ours)]

    def reserved() -> bool:
        states = {group["state"] for group in placement_group_table().values()}
        free = ray.available_resources().get("CPU", 0)
        return states != {"REMOVED"} or free != ray.cluster_resources()["CPU"]

    wait_until(lambda: not actors(), "actors are left")
    wait_until(lambda: not reserved(), "bundles are left")


def goes_on(run: Path) -> None:
    """From its checkpoint, on Ray again, for two steps more; nothing was lost or doubled."""
    done = max(r["step"] for r in read_metrics(run / "metrics.jsonl").records if "loss" in r)
    recipe = load_recipe(run / "config.toml", [f"steps={done + 2}"])
    assert recipe.placement == "ray"
    summary = train(recipe, resume=run, accept_changes=True)
    assert summary.steps == done + 2
    trained = [r["step"] for r in read_metrics(run / "metrics.jsonl").records if "loss" in r]
    assert trained == list(range(1, done + 3))
    verdict = verify_run(run)
    assert verdict.faults == []
    assert (verdict.lost, verdict.doubled) == (0, 0)


@pytest.mark.parametrize("name", ["trainer", "evaluator"])
def test_a_run_ends_by_name_with_its_trainer_or_evaluator_and_goes_on(
    session: Session, tmp_path: Path, name: str
) -> None:
    words = rf"(?s)the {name} actor \(pid \d+ on node .* ended.*estr train --resume"
    with pytest.raises(WorkerDied, match=words):
        train(load_recipe(overrides=ENDLESS), runs=tmp_path, reporter=Kill(name))
    nothing_is_left()
    goes_on(tmp_path / "run")
    nothing_is_left()


class Program:
    """`estr train` in a session of its own, on a Ray of its own: whatever it starts is told apart
    by its environment."""

    def __init__(self, runs: Path, *overrides: str) -> None:
        self._mark = f"ESTR_TEST={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        sets = [word for each in (*ENDLESS, *overrides) for word in ("--set", each)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "estr.cli", "train", "--plain", "--runs", str(runs), *sets],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {name: value},
            start_new_session=True,
        )
        self.run = runs / "run"

    def processes(self) -> list[list[str]]:
        """Command lines of all that live."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found.append(command_of(int(entry.name)))
            except OSError:
                continue
        return [words for words in found if words]

    def has_started_an_actor(self) -> bool:
        self._lives()
        return any(words[0].startswith("ray::HostActor") for words in self.processes())

    def has_made_steps(self) -> bool:
        self._lives()
        file = self.run / "metrics.jsonl"
        return file.exists() and any(r["step"] >= 2 for r in read_metrics(file).records)

    def _lives(self) -> None:
        assert self._process.poll() is None, self._process.communicate()[1].decode()

    def interrupt(self) -> None:
        """As a terminal does it: all that belong to it hear of it."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> str:
        """What it says at its end, which is that of an interrupted run and leaves nothing."""
        _, stderr = self._process.communicate(timeout=LIMIT_S)
        said = stderr.decode()
        assert self._process.returncode == 130, said
        assert "Traceback" not in said
        wait_until(lambda: not self.processes(), "processes are left")
        return said


def test_ctrl_c_saves_ends_and_leaves_nothing(session: Session, tmp_path: Path) -> None:
    program = Program(tmp_path, "checkpoint.every_steps=0")
    wait_until(program.has_made_steps, "no steps")
    program.interrupt()
    assert "estr train --resume" in program.end()
    goes_on(program.run)


def test_a_second_ctrl_c_stops_at_once_and_leaves_nothing(session: Session, tmp_path: Path) -> None:
    program = Program(tmp_path)
    wait_until(program.has_made_steps, "no steps")
    program.interrupt()
    time.sleep(0.2)
    program.interrupt()
    assert "estr train --resume" in program.end()
    goes_on(program.run)


def test_ctrl_c_twice_while_actors_start_leaves_nothing(tmp_path: Path) -> None:
    program = Program(tmp_path)
    wait_until(program.has_started_an_actor, "no actor")
    program.interrupt()
    time.sleep(0.2)
    program.interrupt()
    program.end()
