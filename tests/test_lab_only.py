"""`--only`: what it leaves in, what it refuses, where the result of a part lies; claims that a part
or a few seeds must not decide."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.errors import ConfigError, DataError
from estr.lab.experiments import find_experiment
from estr.lab.lab import Lab
from estr.lab.only import Only
from estr.lab.sweep import Job, Sweep
from lab_sweep_cases import FakeSweep

JOBS = [
    Job({"regime": regime, "method": method, "lr": 0.0005, "seed": seed}, {})
    for regime, method in (("sync", "none"), ("M", "estr"), ("M", "icepop"))
    for seed in (10, 11)
]


def left_in(**wanted):
    sweep = FakeSweep(lambda labels: 0.5)
    Lab(sweep, only={label: [value] for label, value in wanted.items()}).run(JOBS)
    return [(job.labels["method"], job.labels["seed"]) for job in sweep.seen]


def test_numbers_are_compared_as_numbers_and_the_reference_stays():
    assert left_in(lr="5e-4", method="estr") == [
        ("none", 10),
        ("none", 11),
        ("estr", 10),
        ("estr", 11),
    ]
    assert left_in(regime="sync") == [("none", 10), ("none", 11)]
    assert left_in(seed="10.0", regime="M")[-1] == ("icepop", 10)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regmie": "M"}, "--only regmie=M: no run has a label 'regmie'; did you mean 'regime'?"),
        ({"regime": "Q"}, "--only regime=Q: no run has it; there are M, sync"),
        ({"method": "icepo"}, "--only method=icepo: no run has it; did you mean 'icepop'?"),
        ({"lr": "0.1"}, "--only lr=0.1: no run has it; there are 0.0005"),
        ({"seed": "19"}, "--only seed=19 leaves out all 6 runs that come first.*seed is 10, 11"),
    ],
)
def test_a_word_that_no_run_has_is_refused_before_any_runs(wanted, message):
    sweep = FakeSweep(None)
    with pytest.raises(ConfigError, match=message):
        Lab(sweep, only={label: [value] for label, value in wanted.items()}).run(JOBS)
    assert sweep.seen == []


def test_one_wrong_word_beside_a_right_one_is_refused_too():
    with pytest.raises(ConfigError, match="--only method=foo"):
        Lab(FakeSweep(None), only={"method": ["estr", "foo"]}).run(JOBS)
    late = Only({"seed": ["10", "77"]})
    late.see(JOBS)
    late.check(but=("seed",))
    with pytest.raises(ConfigError, match="--only seed=77"):
        late.check()


@pytest.mark.parametrize("name", ["compare", "staleness", "controls", "sensitivity", "rules"])
def test_every_experiment_refuses_it(name):
    with pytest.raises(ConfigError, match="no run has a label 'regmie'"):
        find_experiment(name).run(Lab(FakeSweep(None), only={"regmie": ["M"]}))


def test_the_parts_of_paper_need_not_have_every_label(monkeypatch):
    sweep = FakeSweep(lambda labels: 0.5)
    bench = Lab(sweep, quick=True, only={"regime": ["M"]})
    find_experiment("paper").run(bench)
    bench.only.check()
    assert {job.labels.get("regime") for job in sweep.seen} == {"sync", "M", None}


def test_an_accuracy_that_is_no_number_is_no_result():
    with pytest.raises(DataError, match="has an accuracy of nan"):
        Lab(FakeSweep(lambda labels: math.nan)).run(JOBS)


# Parts decide nothing


@pytest.mark.parametrize("name", ["staleness", "sensitivity", "compare", "collapse"])
def test_one_seed_decides_nothing(name):
    sweep = FakeSweep(lambda labels: 0.5)
    report = find_experiment(name).run(Lab(sweep, num_seeds=1))
    assert {claim.answer for claim in report.claims} <= {"undecided", "not run"}


def test_one_cell_does_not_answer_for_the_grid():
    sweep = FakeSweep(lambda labels: 0.9 + 0.001 * labels["seed"])
    whole = find_experiment("staleness").run(Lab(sweep))
    part = find_experiment("staleness").run(Lab(sweep, only={"regime": ["inter 30"]}))
    assert [claim.answer for claim in whole.claims] == ["holds", "holds"]
    assert [claim.answer for claim in part.claims] == ["in part", "in part"]


# The command


@pytest.fixture
def no_runs(monkeypatch):
    monkeypatch.setattr(Sweep, "run", lambda self, jobs: FakeSweep(lambda labels: 0.5).run(jobs))


def test_a_part_does_not_take_the_place_of_the_whole(tmp_path, no_runs):
    arguments = ["lab", "controls", "--quick", "--out", str(tmp_path), "--jobs", "1"]
    for more in ([], ["--only", "regime=M"], ["--only", "method=random mask"]):
        result = CliRunner().invoke(cli, [*arguments, *more])
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "controls-quick",
        "controls-quick-method=random-mask",
        "controls-quick-regime=M",
    ]
    made = json.loads((tmp_path / "controls-quick" / "verdict.json").read_text())["made"]
    assert made["runs"] == 12
    assert made.keys() == {"command", "date", "estr", "machine", "runs"}


@pytest.mark.parametrize(
    "arguments",
    [["--only", "regmie=M"], ["--only", "regime=M", "--only", "method=foo"], ["--from", __file__]],
)
def test_a_refused_command_leaves_no_folder(tmp_path, no_runs, arguments):
    result = CliRunner().invoke(cli, ["lab", "controls", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(Sweep, "run", None)
    (tmp_path / "controls").write_text("")
    result = CliRunner().invoke(cli, ["lab", "controls", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "controls cannot be made: File exists; choose another --out" in result.output


def test_near_names_and_useless_options_are_told():
    runner = CliRunner()
    assert "did you mean compare?" in runner.invoke(cli, ["lab", "compar"]).output
    result = runner.invoke(cli, ["lab", "compare", "--recipe", "calculator", "--set", "seed=5"])
    assert (result.exit_code, "would change nothing" in result.output) == (2, True)
