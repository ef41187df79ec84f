"""What README and docs show: examples run, recipes load, commands exist, references are whole."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from estr.check import check_recipe
from estr.cli import cli
from estr.cli.options import find_recipe
from estr.config import Recipe, load_recipe, recipe_from_table
from estr.lab.table import write_table
from estr.models import resolve_model
from estr.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TUTORIAL = ROOT / "docs" / "tutorial.md"
"""One story from its first line to its last: test_tutorial.py plays it."""
DOCUMENTS = [path for path in DOCUMENTS if path.is_file() and path != TUTORIAL]

EXECUTED = {"check", "eval", "sample"}
"""Commands whose examples are run; those of the others take minutes and are only read closely."""

OTHER_PROGRAMS = {"cd", "git", "pip", "python", "python3", "source", "tensorboard"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    language: str
    line: int
    text: str
    file: str | None
    """The file that the paragraph before it names, `like_this.py`."""

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks_of(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = re.findall(r"`(\w+\.py)`", paragraph)
        line = text.count("\n", 0, match.start(2))
        yield Block(document, match[1], line, match[2], named[-1] if named else None)


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def commands(program: str) -> list[tuple[Block, list[str]]]:
    """Every command line of that program in the documents, split into words."""
    found = []
    for block in BLOCKS:
        lines = block.text.replace("\\\n", " ").split("\n")
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif block.language not in ("sh", "bash"):
            continue
        for line in lines:
            words = shlex.split(line, comments=True)
            if words[:1] == [program] or (words and program == "*"):
                found.append((block, words))
    return found


def shown(case: tuple[Block, list[str]]) -> str:
    return f"{case[0]} {' '.join(case[1])}"


# -- Python -------------------------------------------------------------------------------------

RUNNER = """
import json, sys
names = {"__name__": "__main__"}
for document, line, text in json.load(sys.stdin):
    exec(compile("\\n" * line + text, document, "exec"), names)
"""


LABELS = {"regime": "M", "method": "estr", "option": "tau 1", "lr": 5e-4, "phase": "judge"}
LAB_ROWS = [
    {**LABELS, "seed": 10, "job": "a", "measure": measure, "step": 120, "value": 0.5}
    for measure in ("accuracy_end", "rho_mask")
]
"""What stands for a finished `estr lab compare` where a page reads its table."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_run_one_after_the_other(document: Path, tmp_path: Path) -> None:
    blocks = [b for b in BLOCKS if b.document == document and b.language == "python"]
    for block in blocks:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    if not blocks:
        return
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    if document.parent.name == "lab":
        write_table(LAB_ROWS, tmp_path / "lab" / "compare" / "table.parquet")
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([(str(b.document), b.line, b.text) for b in blocks]),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- command lines ------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the recipes, an example, and a finished run of the built-in model."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(ROOT / "examples" / "own-data", tmp_path, dirs_exist_ok=True)
    run = RunFolder.create(Recipe(), tmp_path / "runs")
    for place in (run.model_best, run.model_last):
        shutil.copytree(resolve_model("builtin"), place)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_program_of_the_examples_is_known() -> None:
    programs = {words[0] for _, words in commands("*")}
    assert programs - OTHER_PROGRAMS <= {"estr", "make"}
    assert "estr" in programs


@pytest.mark.parametrize("case", commands("estr"), ids=shown)
def test_estr_examples_are_right(case: tuple[Block, list[str]], project: Path) -> None:
    _, [_, *words] = case
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None:
        assert CliRunner().invoke(cli, words).exit_code == 0
        return
    if name in EXECUTED:
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output
        return
    command = cli.commands[name]
    with command.make_context(name, words[words.index(name) + 1 :]) as context:
        given = context.params
    if name == "train":
        load_recipe(find_recipe(given["recipe"]), given["overrides"])


@pytest.mark.parametrize("case", commands("make"), ids=shown)
def test_make_examples_are_right(case: tuple[Block, list[str]]) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(case[1][1:]) <= set(targets)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_recipes_of_the_examples_load(block: Block) -> None:
    recipe_from_table(tomllib.loads(block.text))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_recipes_load(path: Path) -> None:
    assert load_recipe(path).name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "paper").glob("*.toml")), ids=lambda p: p.name
)
def test_recipes_at_the_size_of_the_paper_are_right(path: Path) -> None:
    shipped = {
        "dapo-math": ["task.train=deepscaler", "task.test=math500"],
        "browsecomp-plus": ["task.data=hotpot", "task.password=", "task.num_test=40"],
    }
    for correction in ("estr", "none", "icepop", "kpop"):
        overrides = [*shipped.get(path.stem, []), f"correction={correction}"]
        assert check_recipe(path, overrides).errors == []


# -- references ---------------------------------------------------------------------------------


def test_the_reference_of_keys_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "config_docs.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_key_has_a_meaning() -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    rows = [line for line in text.split("\n") if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_and_option_is_described(name: str) -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = next(s for s in text.split("\n## ") if s.startswith(f"`estr {name}"))
    general = text.split("\n## ")[0]
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option):
            for flag in [*parameter.opts, *parameter.secondary_opts]:
                assert flag in section + general, f"{flag} of estr {name}"


def test_links_lead_somewhere() -> None:
    dead = [
        f"{document.name}: {target}"
        for document in [*DOCUMENTS, TUTORIAL, *ROOT.glob("examples/**/*.md")]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text("utf-8"))
        if not (document.parent / target).exists()
    ]
    assert dead == []


def test_the_page_on_own_data_shows_the_example() -> None:
    folder = ROOT / "examples" / "own-data"
    page = [b for b in BLOCKS if b.document.name == "own-data.md"]
    shown = tomllib.loads(next(b.text for b in page if b.language == "toml"))
    kept = tomllib.loads((folder / "my.toml").read_text())
    assert shown == {key: value for key, value in kept.items() if key != "steps"}
    function = next(b.text for b in page if b.language == "python")
    assert function in (folder / "my_reward.py").read_text()
