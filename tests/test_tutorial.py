"""docs/tutorial.md from its first line to its last, with fewer optimizer steps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.results import read_run
from test_docs import TUTORIAL

SHORT = {"train": ["--set", "steps=2", "--set", "eval.final_problems=8", "--plain"]}
NOT_PLAYED = {"python3", "pip", "mkdir", "."}
"""Installing, which has been done."""


def pieces() -> Iterator[tuple[str, str, str]]:
    """(language, the file that the paragraph before it names, text) of every block, in order."""
    text = TUTORIAL.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = re.findall(r"`(\w+\.(?:py|toml))`", paragraph)
        yield match[1], named[-1] if named else "", match[2]


def python(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def play(line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    if program in NOT_PLAYED:
        return
    if program == "python":
        python(*words)
        return
    assert program == "estr"
    result = CliRunner().invoke(cli, [*words, *SHORT.get(words[0], [])])
    assert result.exit_code == 0, result.output


@pytest.mark.timeout(900)  # two short runs and three other programs, on whatever else runs there
def test_the_tutorial_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # An example has a module of the same name, which its own test may have imported.
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    played = set()
    for language, file, text in pieces():
        if language == "console":
            for line in text.split("\n"):
                if line.startswith("$ "):
                    play(line.removeprefix("$ "))
                    played.add(line.split()[1:3][-1])
        elif file:
            Path(file).write_text(text)
        elif language == "python":
            python("-c", text)
    assert {"check", "train", "sample", "ledger", "eval", "export"} <= played
    assert read_run("rows").steps == 2
    assert read_run("again").steps == 2
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
