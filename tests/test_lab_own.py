"""`estr lab compare --recipe`: which runs are made, what is concluded, and one of them for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.config import recipe_from_table
from estr.errors import ConfigError
from estr.lab.lab import Lab, read_table
from estr.lab.own import (
    METHODS,
    compare_recipe,
    corrections,
    data_digest,
    jobs,
    train_own,
)
from estr.own_folders import own_folder
from lab_sweep_cases import FakeSweep

TABLE = {
    "name": "mine",
    "correction": {"name": "estr", "tau": 0.3},
    "steps": 7,
    "num_minibatches": 2,
    "wandb": {"project": "p"},
}


def test_every_method_and_the_recipes_own_on_every_seed():
    made = jobs(Lab(FakeSweep(None), num_seeds=3), recipe_from_table(TABLE))
    cells = [(job.labels["regime"], job.labels["method"]) for job in made]
    assert cells[::3] == [("sync", "none"), *(("own", name) for name in (*METHODS, "recipe"))]
    assert [job.labels["seed"] for job in made[:3]] == [10, 11, 12]
    recipes = [recipe_from_table(job.config["recipe"]) for job in made]
    assert [r.max_staleness for r in recipes] == [0] * 3 + [4] * 21
    assert {r.steps for r in recipes} == {7}
    assert {r.eval.every for r in recipes} == {0}
    assert not any(r.wandb.project for r in recipes)
    assert recipes[-1].correction == ({"name": "estr", "tau": 0.3},)
    assert [r.seed for r in recipes[:3]] == [10, 11, 12]


def test_the_recipes_own_is_not_run_twice():
    own = corrections(recipe_from_table(TABLE))["estr"]
    found = corrections(recipe_from_table({**TABLE, "correction": list(own)}))
    assert tuple(found) == tuple(METHODS)


def test_changed_data_is_trained_on_anew(tmp_path):
    file = tmp_path / "mine.jsonl"
    task = {"name": "data", "path": str(file), "grader": "integer"}
    recipe = recipe_from_table({**TABLE, "task": task})
    digests = []
    for text in ("a", "b"):
        file.write_text(text)
        digests.append(data_digest(recipe))
        assert jobs(Lab(FakeSweep(None)), recipe)[0].config["data"] == digests[-1]
    assert digests[0] != digests[1]


def digest_with(**changed) -> str:
    return data_digest(recipe_from_table({**TABLE, **changed}))


def test_changed_code_of_ones_own_is_trained_on_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_reward.py").write_text("from own_help import half\ndef score(reply): return half\n")
    Path("own_help.py").write_text("half = 0.5\n")
    Path("own_pkg/deep").mkdir(parents=True)
    for name in ("__init__", "masks", "deep/tasks", "deep/data"):
        Path(f"own_pkg/{name}.py").write_text("")
    Path("rows.jsonl").write_text("{}\n")
    settings = (
        {"task": {"name": "data", "path": "rows.jsonl", "reward": "own_reward:score"}},
        {"task": {"name": "own_pkg.deep.tasks:Task"}},
        {"correction": {"name": "own_pkg.masks:Mask"}},
    )
    changes = {
        "own_reward.py": [0],
        "own_help.py": [0],
        "rows.jsonl": [0],
        "own_pkg/deep/tasks.py": [1, 2],
        "own_pkg/deep/data.py": [1, 2],
    }
    before = [digest_with(**its) for its in settings]
    for file, expected in changes.items():
        Path(file).write_text(Path(file).read_text() + "changed = 1\n")
        after = [digest_with(**its) for its in settings]
        assert [i for i in range(3) if after[i] != before[i]] == expected, file
        before = after
    Path("own_reward.py").write_text("# a word\n" + Path("own_reward.py").read_text())
    assert [digest_with(**its) for its in settings] == before
    assert "own_reward" not in sys.modules
    assert "own_pkg" not in sys.modules


def test_a_changed_folder_is_trained_on_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("rows").mkdir()
    settings = ({"model": "model"}, {"task": {"name": "gsm8k", "folder": "rows"}})
    seen = [{digest_with(**its)} for its in settings]
    for folder, found in zip(("model", "rows"), seen, strict=True):
        small, large = Path(folder, "config.json"), Path(folder, "model.safetensors")
        its = settings[seen.index(found)]
        small.write_text("{}")
        found.add(digest_with(**its))
        small.write_text("[]")
        found.add(digest_with(**its))
        os.utime(small, ns=(0, 0))
        assert digest_with(**its) in found
        large.write_bytes(bytes(2**20 + 1))
        found.add(digest_with(**its))
        os.utime(large, ns=(0, 0))
        found.add(digest_with(**its))
        assert len(found) == 5


def test_texts_that_name_no_file_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = {"name": "data", "path": "rows.jsonl", "grader": "integer", "system": "x" * 360}
    plain = digest_with(task=task)
    assert digest_with(task={**task, "system": "never:seen and /none/such"}) == plain
    Path("data").mkdir()
    Path("data/file").write_text("")
    assert digest_with(task=task) == plain


def test_what_changes_under_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    task = {"name": "data", "path": "rows.jsonl", "grader": "integer"}
    job = jobs(Lab(FakeSweep(None)), recipe_from_table({**TABLE, "task": task}))[0]
    assert (job.alike, job.limit_s) == (True, None)
    Path("rows.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match="changed since this command started"):
        train_own(job.config)


def test_a_synchronous_recipe_is_not_compared_with_itself():
    sync = {**TABLE, "max_staleness": 0, "num_minibatches": 1}
    made = jobs(Lab(FakeSweep(None), num_seeds=1), recipe_from_table(sync))
    assert [job.labels["method"] for job in made] == ["none", *list(METHODS)[1:], "recipe"]
    assert len({job.digest for job in made}) == len(made)
    none = corrections(recipe_from_table(sync))["none"]
    recipe = recipe_from_table({**sync, "correction": list(none)})
    plain = jobs(Lab(FakeSweep(None), num_seeds=1), recipe)
    assert [job.labels["method"] for job in plain] == ["none", *list(METHODS)[1:]]
    report = compare_recipe(
        Lab(FakeSweep(lambda labels: 0.5), num_seeds=5), recipe_from_table(sync)
    )
    assert {claim.claim for claim in report.claims} == {
        f"{name} keeps up with synchronous training" for name in (*list(METHODS)[1:], "recipe")
    }


def test_verdicts_speak_of_sync_and_of_no_correction():
    values = {"none": 0.3, "estr": 0.5, "recipe": 0.6}

    def rule(labels):
        sync = labels["regime"] == "sync"
        return (0.6 if sync else values[labels["method"]]) + 0.001 * labels["seed"]

    only = {"method": list(values)}
    report = compare_recipe(Lab(FakeSweep(rule), only=only), recipe_from_table(TABLE))
    assert {claim.claim: claim.answer for claim in report.claims} == {
        "recipe keeps up with synchronous training": "holds",
        "recipe is better than no correction": "holds",
        "estr keeps up with synchronous training": "not here",
        "estr is better than no correction": "holds",
        "none keeps up with synchronous training": "not here",
    }
    few = compare_recipe(Lab(FakeSweep(rule), num_seeds=3, only=only), recipe_from_table(TABLE))
    assert {claim.answer for claim in few.claims} == {"undecided"}
    assert "--seeds 5" in few.claims[0].why
    part = Lab(FakeSweep(rule), only={"seed": ["x"]})
    part.strict = False
    none = compare_recipe(part, recipe_from_table(TABLE))
    assert none.claims == []


def test_the_command_refuses_what_does_not_go_together():
    runner = CliRunner()
    for arguments, message in (
        (["staleness", "--recipe", "calculator"], "goes with `estr lab compare` alone"),
        (["compare", "--quick", "--recipe", "calculator"], "without --quick"),
        (["compare", "--recipe", "nothing"], "neither a file nor a shipped recipe"),
        (["compare", "--set", "steps=3"], "there is none"),
        (["compare", "--recipe", "calculator", "--set", "step=3"], "unknown key step"),
    ):
        result = runner.invoke(cli, ["lab", *arguments])
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_recipe_of_ones_own_is_compared_for_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    ended = subprocess.Popen(["true"])
    ended.wait(timeout=60)
    own_folder("lab-run", temporary).rename(
        temporary / f"estr-lab-run-{os.stat('/proc/self/ns/pid').st_ino}-{ended.pid}-x"
    )
    (tmp_path / "tiny.toml").write_text(
        'name = "tiny"\nsteps = 1\ngroups_per_step = 1\ngroup_size = 2\nmax_staleness = 1\n'
        '[correction]\nname = "kpop"\n[eval]\nfinal_problems = 4\n'
    )
    arguments = [
        "lab",
        "compare",
        "--recipe",
        "tiny.toml",
        "--seeds",
        "1",
        "--only",
        "method=recipe",
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "undecided  recipe keeps up with synchronous training" in result.output
    folder = tmp_path / "lab" / "compare-tiny-method=recipe"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["experiment"] == "compare-tiny"
    rows = read_table(folder / "table.parquet")
    assert {(row["regime"], row["method"]) for row in rows} == {("sync", "none"), ("own", "recipe")}
    assert {"accuracy", "accuracy_start", "rho_mask"} <= {row["measure"] for row in rows}
    assert len(list((tmp_path / "lab" / "cache").glob("*.json"))) == 2
    assert list(tmp_path.glob("runs")) == []
    assert list(temporary.glob("estr-lab-run*")) == []


@pytest.mark.parametrize("name", ["calculator", "smollm2-arithmetic"])
def test_shipped_recipes_can_be_compared(name):
    from estr.config import load_recipe
    from estr.recipe_files import find_recipe

    for job in jobs(Lab(FakeSweep(None), num_seeds=1), load_recipe(find_recipe(name))):
        recipe_from_table(job.config["recipe"])
        assert job.digest
