"""Hostile environments, broken folders, killed processes; with real processes where it counts."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from estr.checkpoint import verify
from estr.config import load_recipe
from estr.corrections import build_correction
from estr.engine import ScriptedEngine
from estr.environment import Reply, ScriptedEnvironment
from estr.environments import build_task
from estr.errors import CheckpointError, ConfigError, DataError
from estr.metrics import read_metrics
from estr.options.run import RolloutOptions
from estr.rollout import RolloutSetting, run_rollout
from estr.run import train
from estr.run_folder import RunFolder
from estr.types import RolloutId, SamplingSettings, Trajectory
from loop_parts import STOP, CoinTask, IdCodec

SMALL = [
    "groups_per_step=2",
    "group_size=2",
    "eval.every=0",
    "eval.final_problems=4",
    "checkpoint.every_steps=2",
]


class Odd(BaseException):
    pass


class Unshown(Exception):
    def __str__(self) -> str:
        raise ValueError("what should I say")


async def play(environment: object) -> Trajectory:
    setting = RolloutSetting(
        ScriptedEngine(lambda request: [1, STOP]),
        CoinTask(make=lambda index: environment),
        IdCodec(),
        SamplingSettings(stop_token_ids=(STOP,)),
        RolloutOptions(timeout_s=2.0, step_timeout_s=0.2),
    )
    async with asyncio.timeout(5):
        return await run_rollout(
            setting, RolloutId(0, 0, 0), 0, dispatch_version=0, deadline_version=0
        )


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (Reply(outcome=float("inf")), "grader_error", "outcome must be a finite number, not inf"),
        (Reply(outcome=float("nan")), "grader_error", "outcome must be a finite number, not nan"),
        (Reply(outcome="good"), "grader_error", "not 'good'"),
        (Reply(outcome=lambda: 1), "grader_error", "outcome must be a finite number"),
        (Reply(outcome=1.0, rewards=None), "grader_error", "rewards must be a mapping"),
        (Reply(outcome=1.0, rewards={"a": "x"}), "grader_error", "a must be a finite number"),
        (Reply(outcome=10**400), "grader_error", "outcome must be a finite number"),
        (Reply(outcome=1.0, rewards={"outcome": None}), "grader_error", "must be a finite number"),
        (Reply(outcome=1.0, rewards={"a": 1e308, "b": 1e308}), "grader_error", "the sum of"),
        (Reply(outcome=float("nan"), rewards={"outcome": 1.0}), "grader_error", "not nan"),
        (Reply(observation={"role": "tool"}.items()), "env_error", "an observation is text, token"),
        (None, "env_error", "must return a Reply, not None"),
        ("text", "env_error", "must return a Reply, not 'text'"),
        (asyncio.CancelledError(), "env_error", "raised CancelledError by itself"),
        (SystemExit(3), "env_error", "SystemExit: 3 (test_violence.py, line "),
        (Odd("odd"), "env_error", "Odd: odd (test_violence.py, line "),
        (Unshown(), "env_error", "Unshown, which cannot be shown (test_violence.py, line "),
        (ValueError("x" * 5_000_000), "env_error", "x... (5000012 characters) (test_violence.py"),
    ],
)
async def test_what_is_no_result_is_a_failure_not_a_reward(
    reply: object, status: str, words: str
) -> None:
    class Hostile(ScriptedEnvironment):
        async def step(self, action: object) -> object:
            if isinstance(reply, BaseException):
                raise reply
            return reply

    trajectory = await play(Hostile("12", []))
    assert trajectory.status == status
    assert (trajectory.outcome, trajectory.reward) == (None, None)
    assert words in (trajectory.error or "")


async def test_an_environment_that_hangs_on_close_is_given_up() -> None:
    class Hanging(ScriptedEnvironment):
        async def close(self) -> None:
            await asyncio.sleep(60)

    trajectory = await play(Hanging("12", [Reply(outcome=1.0)]))
    assert trajectory.status == "env_error"
    assert "environment.close() did not answer" in (trajectory.error or "")


async def test_a_task_that_makes_nothing_is_a_failure() -> None:
    assert (await play(None)).status == "env_error"


def test_a_module_that_breaks_on_import_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("1 / 0\n")
    (tmp_path / "is_no_python.py").write_text("def (\n")
    (tmp_path / "leaves_on_import.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("breaks_on_import", "is_no_python", "leaves_on_import"):
        with pytest.raises(ConfigError, match=f"{module}.*cannot be imported"):
            build_task({"name": f"{module}:Task"})
        with pytest.raises(ConfigError, match=f"{module}.*cannot be imported"):
            build_correction([{"name": f"{module}:Correction"}])


class Faulty:
    """A correction that raises."""

    Options = make_dataclass("Options", [])
    needs = frozenset[str]()

    def __init__(self, options: object) -> None:
        pass

    def __call__(self, columns: object) -> object:
        raise self.error


class Leaving(Faulty):
    error: BaseException = SystemExit(3)


class Dividing(Faulty):
    error: BaseException = ZeroDivisionError("by 0")


@pytest.mark.parametrize(("name", "words"), [("Leaving", "SystemExit: 3"), ("Dividing", "by 0")])
def test_a_correction_that_raises_is_a_config_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} fails on one made-up token: .*{words}"):
        build_correction([{"name": f"test_violence:{name}"}])


def test_runs_that_cannot_be_made_are_errors_not_loops(tmp_path: Path) -> None:
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere" / "else")
    (tmp_path / "file").touch()
    for root in (dangling, tmp_path / "file"):
        with pytest.raises(DataError, match="cannot make run folder"):
            RunFolder.create(load_recipe(), root)


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe(), tmp_path)
    with folder.locked(), pytest.raises(DataError, match="in use by another"):
        train(load_recipe(), resume=folder.path)


def test_a_run_goes_on_only_as_itself(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe(), tmp_path)
    with pytest.raises(ConfigError, match="was started with seed = 0, not 3"):
        folder.changes(load_recipe(overrides=["seed=3"]))
    longer = load_recipe(overrides=["steps=300"])
    assert folder.changes(longer) == ["steps = 300 (was 200)"]
    slower = load_recipe(overrides=["trainer.lr=1e-9"])
    assert folder.changes(slower) == [f"trainer.lr = 1e-09 (was {load_recipe().trainer.lr})"]
    folder.update_recipe(longer)
    assert load_recipe(folder.path / "config.toml").steps == 300
    assert load_recipe(folder.path / "config.previous.toml").steps == 200


@pytest.mark.parametrize("manifest", ["{}", "[]", '{"state.json": 1}', "{", ""])
def test_a_manifest_that_leaves_files_out_is_torn(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is torn"):
        verify(tmp_path)


def _start(runs: Path, *overrides: str) -> subprocess.Popen[bytes]:
    sets = [word for o in (*SMALL, *overrides) for word in ("--set", o)]
    command = [sys.executable, "-m", "estr.cli", "train", "--plain", "--runs", str(runs), *sets]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.exists() and any(r["step"] >= step for r in read_metrics(file).records):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step}: {process.communicate(timeout=10)}")


def _workers_of(pid: int) -> dict[str, int]:
    """{first words of the host: pid} of the processes that a run has spawned."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(fields[1]) == pid and b"estr.worker" in words:
                found[words[4].decode() + words[3].decode()] = int(entry.name)
    return found


def test_a_killed_worker_ends_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    process = _start(tmp_path, "steps=400")
    _wait_for_step(tmp_path / "calculator", 4, process)
    workers = _workers_of(process.pid)
    assert len(workers) == 3
    os.kill(min(workers.values()), signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"killed by SIGKILL" in stderr
    assert b"estr train --resume" in stderr
    assert b"Traceback" not in stderr
    assert not _workers_of(process.pid)
    run = tmp_path / "calculator"
    shorter = load_recipe(run / "config.toml", ["steps=12"])
    summary = train(shorter, resume=run, accept_changes=True)
    assert summary.steps == 12
    steps = [r["step"] for r in read_metrics(run / "metrics.jsonl").records if "loss" in r]
    assert steps == list(range(1, 13))


def test_one_interrupt_saves_and_ends_with_130(tmp_path: Path) -> None:
    process = _start(tmp_path, "steps=400", "checkpoint.every_steps=0")
    _wait_for_step(tmp_path / "calculator", 3, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"estr train --resume" in stderr
    start, saved = sorted((tmp_path / "calculator" / "checkpoints").iterdir())
    assert verify(start)["step"] == 0
    assert verify(saved)["step"] >= 3
    assert json.loads((saved / "trainer.json").read_text())["step"] == verify(saved)["step"]


ON_A_TERMINAL = """
import fcntl, signal, termios
from estr.cli import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests themselves may run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that the kernel tells this process when it hangs up
main()
"""


def _read(terminal: int, until: threading.Event) -> None:
    """What nobody reads would stop who writes it. Then the terminal hangs up."""
    while not until.is_set():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)


@pytest.mark.parametrize("display", ["--live", "--plain"])
def test_a_terminal_that_hangs_up_saves_and_ends(tmp_path: Path, display: str) -> None:
    terminal, theirs = pty.openpty()
    sets = [f"--set={option}" for option in (*SMALL, "steps=400", "checkpoint.every_steps=0")]
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, "train", display, "--runs", str(tmp_path), *sets],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    hangup = threading.Event()
    reader = threading.Thread(target=_read, args=(terminal, hangup))
    reader.start()
    try:
        _wait_for_step(tmp_path / "calculator", 3, process)
    finally:
        hangup.set()
        reader.join()
    assert process.wait(timeout=60) == 130
    saved = max((tmp_path / "calculator" / "checkpoints").iterdir())
    assert verify(saved)["step"] >= 3
    assert not _workers_of(process.pid)


def _first_worker(process: subprocess.Popen[bytes]) -> int:
    """The pid of a process that is still starting."""
    deadline = time.monotonic() + 60
    while not (workers := _workers_of(process.pid)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return min(workers.values())


def test_a_process_that_an_interrupt_ends_while_it_starts_is_no_failure(tmp_path: Path) -> None:
    process = _start(tmp_path, "steps=400")
    worker = _first_worker(process)
    process.send_signal(signal.SIGINT)
    os.kill(worker, signal.SIGINT)  # as a terminal sends it, to all of them
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"stopped before training began" in stderr
    assert not _workers_of(process.pid)
    assert not (tmp_path / "calculator").exists(), "a run that never began takes no name"


def test_one_interrupt_stops_the_start_at_once(tmp_path: Path) -> None:
    process = _start(tmp_path, "steps=400")
    worker = _first_worker(process)
    os.kill(worker, signal.SIGSTOP)  # it would start for ever
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"stopped before training began" in stderr
    assert b"step in progress" not in stderr
    assert not _workers_of(process.pid)
    assert not (tmp_path / "calculator").exists()
