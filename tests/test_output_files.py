"""Places that cannot be written to are refused by name, and files that were there stay whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.config import correction_entries
from estr.errors import ConfigError, DataError
from estr.evaluation_records import RolloutRecord, open_rollouts
from estr.output_files import require_writable, write_whole
from estr.replay.corrections import chosen_steps
from report_cases import make_run


@pytest.fixture
def blocked(tmp_path: Path) -> list[Path]:
    """Places where no file can be made, whoever asks."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    return [
        tmp_path / "no" / "x.json",
        tmp_path / "file" / "x.json",
        tmp_path / "folder",
        tmp_path / ("n" * 300),
        link(tmp_path / "itself", tmp_path / "itself"),
        link(tmp_path / "nowhere", tmp_path / "no" / "x.json"),
    ]


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def test_what_cannot_be_written_is_refused_before_and_after(blocked: list[Path]) -> None:
    for path in blocked:
        with pytest.raises(ConfigError, match=f"--out {path} cannot be written: .*another place"):
            require_writable(path)
        with pytest.raises(DataError, match=f"cannot write {path}: .*--out"):
            write_whole(path, "x")


def test_asking_leaves_no_trace(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    (tmp_path / "old").write_text("kept")
    require_writable(tmp_path / "old")
    os.mkfifo(tmp_path / "pipe")
    require_writable(tmp_path / "pipe")
    require_writable(link(tmp_path / "link", tmp_path / "later"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "pipe"]
    assert (tmp_path / "old").read_text() == "kept"


def test_a_file_is_replaced_whole_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "a b").write_text("old")
    (tmp_path / "link").symlink_to("a b")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a b").read_text() == "new"
    longest = tmp_path / ("\N{CJK UNIFIED IDEOGRAPH-5831}" * 83 + ".html")
    write_whole(longest, "x")
    assert longest.read_text() == "x"
    write_whole(Path("/dev/null"), "x")
    with pytest.raises(DataError, match="/dev/full: No space left"):
        write_whole(Path("/dev/full"), "x")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "link", "\ud800")
    assert (tmp_path / "a b").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("command", [["replay", "-c", "none"], ["report"]])
def test_commands_refuse_such_a_place_before_they_compute(
    tmp_path: Path, blocked: list[Path], command: list[str]
) -> None:
    run = make_run(tmp_path, "a 'run' of 100 %", steps=1)
    for path in blocked:
        result = CliRunner().invoke(cli, [*command, str(run), "--out", str(path)])
        assert result.exit_code == 2, result.output
        assert path.name in result.stderr
        assert result.stdout == ""
    assert (tmp_path / "file").read_text() == "kept"


def test_a_range_without_end_takes_no_memory(tmp_path: Path) -> None:
    assert chosen_steps(tmp_path, [1, 2, 3], range(2, 2**62)) == [2, 3]
    assert chosen_steps(tmp_path, [1, 2, 3], iter([3, 9])) == [3]
    with pytest.raises(DataError, match="holds steps 1 to 3: none of those that were asked for"):
        chosen_steps(tmp_path, [1, 2, 3], range(7, 2**62))


@pytest.mark.parametrize("steps", ["3:1", "0:2", "-1:2", "0"])
def test_steps_that_cannot_be_are_refused(tmp_path: Path, steps: str) -> None:
    run = make_run(tmp_path, "run", steps=1)
    result = CliRunner().invoke(cli, ["replay", str(run), f"--steps={steps}"])
    assert result.exit_code == 2, result.output
    assert f"--steps {steps!r} holds no step: steps count from 1" in result.stderr


@pytest.mark.parametrize("text", ["estr:tau", "none + estr:", "icepop:beta:edge=B"])
def test_an_option_without_a_value_is_no_module(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form key=value; an option of"):
        correction_entries(text)


def test_a_class_may_live_in_a_module_of_a_known_name() -> None:
    assert correction_entries("tis:Mine:edge=1") == ({"name": "tis:Mine", "edge": 1},)


@pytest.mark.parametrize("damage", [b'{"example": "1', b"", b"\xff\xfe", b"[]"])
def test_a_damaged_line_of_kept_rollouts_is_named(tmp_path: Path, damage: bytes) -> None:
    record = RolloutRecord("p", 0, 0, "ok", 1.0, "4", 3, None)
    with open_rollouts(tmp_path, {"seed": 0}) as kept:
        kept.add(record)
        path = kept.path
    whole = path.read_bytes()
    path.write_bytes(whole + damage + b"\n" + whole.split(b"\n")[1] + b"\n")
    with (
        pytest.raises(DataError, match=f"line 3 of {path} cannot be read.*played again"),
        open_rollouts(tmp_path, {"seed": 0}),
    ):
        pass
    path.write_bytes(whole + damage)  # the last line, cut by a kill
    with open_rollouts(tmp_path, {"seed": 0}) as kept:
        assert kept.records() == [record]
    assert path.read_bytes() == whole
