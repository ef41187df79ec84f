"""`estr lab compare --recipe`: which runs are made, what is concluded, and one of them for real."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.config import recipe_from_table
from estr.lab.lab import Lab, read_table
from estr.lab.own import METHODS, compare_recipe, corrections, data_digest, jobs
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


@pytest.mark.parametrize("name", ["calculator", "smollm2-arithmetic"])
def test_shipped_recipes_can_be_compared(name):
    from estr.config import load_recipe
    from estr.recipe_files import find_recipe

    for job in jobs(Lab(FakeSweep(None), num_seeds=1), load_recipe(find_recipe(name))):
        recipe_from_table(job.config["recipe"])
        assert job.digest
