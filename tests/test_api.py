"""From Python: runs out of scripts and loops, typed results, exported models."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import estr
from estr import blocking
from estr.api import read_recipe
from estr.config import Recipe, load_recipe
from estr.display import PlainReporter
from estr.errors import ConfigError, DataError
from estr.models import load_model, resolve_model
from estr.run_folder import RunFolder

SHORT: dict[str, Any] = {
    "name": "short",
    "steps": 2,
    "groups_per_step": 2,
    "group_size": 2,
    "eval": {"every": 0, "final_problems": 8},
}

# No guard, a module that lies beside the script, and a working directory elsewhere.
SCRIPT = """
import dataclasses, json, sys
import estr

result = estr.train(json.loads(sys.argv[1]), runs=sys.argv[2])
print(json.dumps([str(result.folder), dataclasses.asdict(result.before), result.metrics["loss"]]))
"""
NEIGHBOR = """
from estr.environments.calculator import CalculatorTask

class Neighbor(CalculatorTask):
    name = "neighbor"
"""


@pytest.fixture(scope="module")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """(run folder, what the script printed)"""
    place, elsewhere = (tmp_path_factory.mktemp(name) for name in ("scripts", "elsewhere"))
    (place / "plain.py").write_text(SCRIPT)
    (place / "neighbor.py").write_text(NEIGHBOR)
    recipe = {**SHORT, "task": "neighbor:Neighbor"}
    done = subprocess.run(
        [sys.executable, str(place / "plain.py"), json.dumps(recipe), str(elsewhere / "runs")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=elsewhere,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    return Path(printed[0]), printed


def test_a_script_without_a_guard_trains_with_its_own_modules(
    script_run: tuple[Path, list[Any]],
) -> None:
    folder, (_, before, loss) = script_run
    result = estr.read_run(folder)
    assert (result.steps, result.folder.name) == (2, "short")
    assert load_recipe(folder / "config.toml").task["name"] == "neighbor:Neighbor"
    assert before == json.loads(json.dumps(dataclasses.asdict(result.before)))  # type: ignore[call-overload]
    assert loss == result.metrics["loss"]


def test_a_result_says_what_the_run_folder_says(script_run: tuple[Path, list[Any]]) -> None:
    folder, _ = script_run
    result = estr.read_run("short", runs=folder.parent)
    assert result == estr.read_run(result)
    assert result.before is not None
    assert result.after is not None
    assert result.best is not None
    assert (result.before.step, result.before.version, result.before.num_problems) == (0, 0, 8)
    assert (result.after.step, result.after.version) == (2, result.version)
    for found in (result.before, result.after):
        assert found.interval is not None
        low, high = found.interval
        assert 0 <= low <= found.accuracy <= high <= 1
    assert result.before.accuracy == result.summary.start_accuracy
    assert result.after.accuracy == result.summary.final_accuracy
    assert result.best.accuracy == result.summary.best_accuracy
    assert result.metrics["eligible_tokens"] > 0
    assert "step" not in result.metrics
    for place in (result.model_best, result.model_last, result.metrics_file):
        assert place.exists()


def test_a_run_without_intervals_is_read(
    script_run: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    whole = estr.read_run(script_run[0])
    folder = tmp_path / "older"
    folder.mkdir()
    for name in ("config.toml", "summary.json"):
        (folder / name).write_bytes((whole.folder / name).read_bytes())
    ends = ("eval/accuracy_low", "eval/accuracy_high")
    rows = map(json.loads, whole.metrics_file.read_text().splitlines())
    kept = [{name: v for name, v in row.items() if name not in ends} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    older = estr.read_run(folder)
    assert whole.before is not None
    assert older.before == dataclasses.replace(whole.before, interval=None)
    assert older.best is not None
    assert older.best.accuracy == max(older.before.accuracy, older.after.accuracy)  # type: ignore[union-attr]


def test_a_run_can_be_evaluated_and_compared(
    script_run: tuple[Path, list[Any]],
) -> None:
    folder, _ = script_run
    result = estr.read_run(folder)
    task = ["task=calculator"]
    found = estr.evaluate(result, problems=4, k=2, weights="last", overrides=task)
    assert (found.version, found.num_problems, found.k) == (result.version, 4, 2)
    first, second, difference = estr.compare(result, "builtin", problems=4, overrides=task)
    assert isinstance(difference, estr.Comparison)
    assert isinstance(first, estr.EvalResult)
    assert (first.num_problems, second.num_problems) == (4, 4)


async def test_inside_a_running_loop_it_is_the_same(tmp_path: Path) -> None:
    """As in a notebook, whose cells run inside a loop."""
    asyncio.get_running_loop()
    recipe = read_recipe({**SHORT, "steps": 1, "ledger": False})
    result = estr.train(recipe, runs=tmp_path)
    assert (result.steps, result.folder) == (1, tmp_path / "short")
    said = io.StringIO()
    with pytest.raises(ConfigError, match="is finished: 1 of 1 steps are made"):
        estr.resume_run(result, reporter=PlainReporter(said))
    assert said.getvalue() == ""
    found = estr.evaluate("builtin", task="calculator", problems=2)
    assert found.num_rollouts == 2


# -- recipes -------------------------------------------------------------------------------------


def test_a_recipe_may_be_said_in_any_way(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("steps = 3\n")
    own = read_recipe(str(file))
    assert own == read_recipe(file) == read_recipe({"steps": 3}) == read_recipe(own)
    assert read_recipe(None) == Recipe()
    assert read_recipe("lookup").task["name"] == "lookup"
    assert read_recipe(file, ["steps=4"]).steps == 4


@pytest.mark.parametrize(
    ("recipe", "overrides", "match"),
    [
        ("unheard-of", [], "neither a file nor a shipped recipe"),
        ({"stepps": 3}, [], "unknown key stepps.*steps"),
        ({"steps": 3}, ["steps=4"], "change the recipe itself"),
        (3, [], "a recipe is a Recipe, a dict, or the path"),
        ({"task": "__main__:Mine"}, [], "what a script or a notebook defines"),
    ],
)
def test_a_wrong_recipe_starts_nothing(
    recipe: Any, overrides: list[str], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        estr.train(recipe, overrides=overrides, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_not_finished_has_no_result(tmp_path: Path) -> None:
    run = RunFolder.create(Recipe(), tmp_path)
    with pytest.raises(DataError, match=r"not finished.*--resume"):
        estr.read_run(run.path)
    with pytest.raises(DataError, match=r"neither nowhere nor .* is a run folder"):
        estr.read_run("nowhere", runs=str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere is no run .* and no model"):
        estr.evaluate("nowhere", runs=str(tmp_path))
    with pytest.raises(DataError, match=r"neither nowhere nor .* is a run folder"):
        estr.resume_run("nowhere", runs=tmp_path)
    (run.path / "summary.json").write_text('{"steps": 3}')
    (run.path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="is not the summary of a run"):
        estr.read_run(run.path)


# -- waiting and stopping ------------------------------------------------------------------------


async def _interrupted(stops: list[str]) -> str:
    """Work that is sent Ctrl-C as soon as it can take it."""
    done = asyncio.Event()
    with blocking.interrupts_go_to(done.set):
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(30):
            await done.wait()
    stops.append(threading.current_thread().name)
    return "stopped"


def test_ctrl_c_reaches_the_work_in_a_script() -> None:
    stops: list[str] = []
    assert blocking.run(lambda: _interrupted(stops)) == "stopped"
    assert stops == [threading.main_thread().name]


def test_the_handlers_of_the_program_are_its_own_again_afterwards() -> None:
    def own(number: int, frame: object) -> None: ...

    before = [signal.signal(number, own) for number in blocking.SIGNALS]
    try:
        assert blocking.run(lambda: _interrupted([])) == "stopped"
        assert [signal.getsignal(number) for number in blocking.SIGNALS] == [own] * 3
    finally:
        for number, handler in zip(blocking.SIGNALS, before, strict=True):
            signal.signal(number, handler)


async def _hung_up(calls: list[str]) -> None:
    """Work that is sent a hangup twice, then SIGTERM."""
    with blocking.interrupts_go_to(lambda: calls.append("called")):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            calls.append(number.name)


HUNG_UP = ["called", "SIGHUP", "SIGHUP", "called", "SIGTERM"]


@pytest.fixture
def hangup() -> Iterator[None]:
    """As a terminal starts programs, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_a_second_hangup_says_nothing_new() -> None:
    calls: list[str] = []
    blocking.run(lambda: _hung_up(calls))
    assert calls == HUNG_UP
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("hangup")
async def test_a_second_hangup_says_nothing_new_under_a_running_loop() -> None:
    calls: list[str] = []
    blocking.run(lambda: _hung_up(calls))
    assert calls == HUNG_UP
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_hangup_that_is_ignored_stays_so() -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        blocking.run(lambda: _hung_up(calls))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert calls == ["SIGHUP", "SIGHUP", "called", "SIGTERM"]


async def test_ctrl_c_reaches_the_work_under_a_running_loop() -> None:
    stops: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    assert blocking.run(lambda: _interrupted(stops)) == "stopped"
    assert stops != [threading.main_thread().name]
    assert signal.getsignal(signal.SIGINT) is before


async def test_ctrl_c_cancels_work_that_does_not_ask_for_it() -> None:
    async def deaf() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        blocking.run(deaf)


async def test_what_the_work_raises_is_raised() -> None:
    async def broken() -> None:
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        blocking.run(broken)


# -- models --------------------------------------------------------------------------------------


def test_models_of_a_run_load_in_plain_transformers(script_run: tuple[Path, list[Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = estr.read_run(script_run[0])
    for folder in (result.model_best, result.model_last):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("12+34=", return_tensors="pt", add_special_tokens=False).input_ids
        made = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        ours = load_model(folder)
        with torch.no_grad():
            assert ours(ids).logits.equal(model(ids).logits)
        assert tokenizer.decode(made[0]).startswith("12+34=")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_holds_the_weights_of_the_run(
    dtype: Any, script_run: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = estr.read_run(script_run[0])
    dest = estr.export(result, tmp_path / "mine", which="last", dtype=dtype)
    exported = AutoModelForCausalLM.from_pretrained(dest, dtype="auto")
    assert exported.dtype is getattr(torch, dtype)
    last = load_model(result.model_last).state_dict()
    for name, weights in exported.state_dict().items():
        assert weights.equal(last[name].to(weights.dtype))
    assert len(AutoTokenizer.from_pretrained(dest)) == 24
    assert estr.evaluate(dest, task="calculator", problems=1).version == result.version


def test_an_export_never_writes_over_anything(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        estr.export("builtin", there)
    assert list(there.iterdir()) == []
    dest = estr.export("builtin", tmp_path / "new" / "mine", which="start")
    assert (
        load_model(dest).state_dict().keys()
        == load_model(resolve_model("builtin")).state_dict().keys()
    )
    with pytest.raises(ConfigError, match="is no run"):
        estr.export("unheard-of", tmp_path / "other")
