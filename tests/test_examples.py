"""Every example, in a short form: its README, its check, its run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from estr.check import check_recipe
from estr.config import load_recipe
from estr.results import read_run
from estr.run import train

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
WITH_RECIPE = [path for path in FOLDERS if list(path.glob("*.toml"))]
SHORT = ["steps=1", "groups_per_step=2", "group_size=2", "eval.every=0", "eval.final_problems=4"]


def name(folder: Path) -> str:
    return folder.name


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example, as the working folder."""
    folder = tmp_path / request.param.name
    shutil.copytree(request.param, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def script(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_every_example_has_a_readme_that_names_its_files(folder: Path) -> None:
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for file in folder.iterdir():
        if file.suffix in (".py", ".toml", ".jsonl"):
            assert f"]({file.name})" in readme
    assert f"({folder.name}/README.md)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\$ cd examples/{folder.name}$", readme, re.MULTILINE)


@pytest.mark.parametrize(
    "here",
    [path for path in FOLDERS if list(path.glob("*.toml"))],
    ids=name,
    indirect=True,
)
def test_recipes_of_examples_check_and_train(here: Path) -> None:
    (file,) = here.glob("*.toml")
    findings = check_recipe(file)
    assert findings.errors == []
    assert len(findings.shown) == 3
    recipe = load_recipe(file, SHORT)
    assert train(recipe).steps == 1
    assert read_run(recipe.name).folder.is_dir()


@pytest.mark.parametrize("here", [EXAMPLES / "another-trainer"], ids=name, indirect=True)
def test_the_loop_of_another_trainer_learns(here: Path) -> None:
    lines = script("loop.py", "--steps", "60").splitlines()
    assert [line.split()[0] for line in lines] == ["none", "estr", "icepop"]
    for line in lines:
        right = re.search(r"right arm ([0-9.]+)", line)
        assert right is not None
        assert float(right[1]) > 0.5  # it began at 1/32


@pytest.mark.parametrize("here", [EXAMPLES / "two-models"], ids=name, indirect=True)
def test_two_models_are_compared(here: Path) -> None:
    printed = script("compare.py", "--steps", "1", "--problems", "8")
    assert "1 steps, version 1" in printed
    assert "trained " in printed
    assert re.search(r"difference [+-]0\.\d{3} \[.*\], p = [01]\.\d{4}", printed)
