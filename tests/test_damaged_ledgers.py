"""Ledgers that were changed since they were written: named with their place, never a traceback."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.config import load_recipe
from estr.errors import DataError
from estr.ledger import find_parts, open_ledger, read_step, target_versions
from estr.ledger.schema import SCHEMA_VERSION, logged_entries
from estr.replay import replay_corrections
from estr.report import Budget, build_report
from estr.schedule import LOOP_FILE, EventLog
from report_cases import make_run

BUDGET = Budget(trajectories=20, tokens=1000)


def part(run: Path, table: str) -> Path:
    """The first file of a table."""
    return min((run / "ledger" / table).glob("*.parquet"))


def rewrite(run: Path, table: str, column: str, row: int, value: Any) -> None:
    """Change one value. What is written has no checksum that would tell."""
    path = part(run, table)
    whole = pq.ParquetFile(path).read()
    place = whole.column_names.index(column)
    field = whole.schema.field(column)
    values = whole[column].to_pylist()
    values[row] = value
    changed = whole.set_column(place, field, pa.array(values, field.type))
    pq.write_table(changed, path)


def test_a_part_says_of_which_schema_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=2)
    for path in (run / "ledger").glob("*/*.parquet"):
        metadata = pq.read_metadata(path).metadata
        assert metadata[b"estr.schema_version"] == str(SCHEMA_VERSION).encode()
    assert not find_parts(run).older


def test_a_schema_version_that_is_no_number_is_torn(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=1)
    path = part(run, "tokens")
    whole = pq.ParquetFile(path).read()
    pq.write_table(whole.replace_schema_metadata({b"estr.schema_version": b"x"}), path)
    (line,) = find_parts(run).torn
    assert "step 1" in line


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_of_a_page_is_found(tmp_path: Path, seed: int) -> None:
    """Every page has a checksum, so a number that changed on disk is never taken for one that was
    recorded."""
    run = make_run(tmp_path, "run", steps=1)
    table = ("tokens", "trajectories")[seed % 2]
    path = part(run, table)
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    chunk = random.Random(seed).choice(chunks)
    content = bytearray(path.read_bytes())
    end = chunk.data_page_offset + chunk.total_compressed_size
    if chunk.has_dictionary_page:
        end = chunk.dictionary_page_offset + chunk.total_compressed_size
    content[end - 1] ^= 1 << seed % 8
    path.write_bytes(content)
    with pytest.raises(DataError, match="absent or torn"):
        read_step(run, 1)


def test_a_damaged_part_is_named_where_duckdb_fails_on_it(tmp_path: Path) -> None:
    """The end of the file is whole, so it is seen only when the pages are read."""
    run = make_run(tmp_path, "run", steps=1)
    path = part(run, "tokens")
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * (len(content) // 2) + content[4 + len(content) // 2 :])
    with pytest.raises(DataError, match=rf"(?s){path} is absent or torn.*move it away"):
        open_ledger(run).query("select sum(policy_logprobs) from tokens")
    with pytest.raises(DataError, match="the query failed") as told:
        open_ledger(run).query("select nothing from tokens")
    assert "torn" not in str(told.value)
    (seen,) = build_report([run], BUDGET).runs
    assert seen.facts is None
    assert seen.curves.x["step"] == [1]
    assert any("Nothing on its tokens" in note and str(path) in note for note in seen.notes)


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"PAR1")])
def test_a_part_that_goes_while_a_ledger_is_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any]
) -> None:
    """As when the run goes on from a checkpoint at this moment."""
    run = make_run(tmp_path, "run", steps=2)
    found = find_parts(run)
    damage(part(run, "tokens"))
    monkeypatch.setattr("estr.ledger.reader.find_parts", lambda folder: found)
    with pytest.raises(
        DataError, match=f"(?s)the query failed: .*{part(run, 'trajectories').name}"
    ):
        open_ledger(run)


BAD: list[tuple[str, str, int, Any]] = [
    ("tokens", "versions", 2, 2**31 - 1),
    ("tokens", "versions", 2, -(2**31)),
    ("tokens", "versions", 2, None),
    ("tokens", "segment", 2, 100_000),
    ("tokens", "segment", 2, -1),
    ("tokens", "segment", 2, None),
    ("tokens", "trajectory", 2, 2**31 - 1),
    ("tokens", "trajectory", 2, -1),
    ("tokens", "trajectory", 2, None),
    ("tokens", "sampled", 2, None),
    ("tokens", "token_ids", 2, None),
    ("trajectories", "target_version", 0, 2**31 - 1),
    ("trajectories", "target_version", 0, None),
    ("trajectories", "aggregation", 0, "weird"),
    ("trajectories", "aggregation", 0, None),
    ("trajectories", "correction", 0, None),
    ("trajectories", "correction", 0, "{not json"),
    ("trajectories", "correction", 0, "{}"),
    ("trajectories", "correction", 0, '[{"tau": 1}]'),
]


@pytest.mark.parametrize(("table", "column", "row", "value"), BAD)
def test_what_no_run_writes_is_named_with_its_step(
    tmp_path: Path, table: str, column: str, row: int, value: Any
) -> None:
    run = make_run(tmp_path, "run", steps=1)
    rewrite(run, table, column, row, value)
    with pytest.raises(DataError, match=r"(?s)step 1 of the ledger.*move its parts away"):
        replay_corrections(run, ["none"])
    (seen,) = build_report([run], BUDGET).runs
    assert seen.curves.x["step"] == [1]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, None])
@pytest.mark.parametrize("column", ["behavior_logprobs", "behavior_entropies", "policy_logprobs"])
def test_impossible_numbers_are_shown_or_refused(
    tmp_path: Path, column: str, value: float | None
) -> None:
    """Of a run that went wrong they are what one looks for, so a report counts and shows them."""
    run = make_run(tmp_path, "run", steps=1)
    rewrite(run, "tokens", column, 2, value)
    (seen,) = build_report([run], BUDGET).runs
    assert seen.facts is not None
    assert seen.microscope is not None


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"PAR1")])
def test_a_part_that_went_meanwhile_is_named(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    run = make_run(tmp_path, "run", steps=1)
    path = part(run, "trajectories")
    damage(path)
    assert target_versions(run) == {}
    with pytest.raises(DataError, match=str(path)):
        read_step(run, 1)


@pytest.mark.parametrize("text", [None, "", "null", "3", '"estr"', '["estr"]', '[{"name": 1}]'])
def test_what_is_no_list_of_corrections_is_named(text: str | None) -> None:
    with pytest.raises(DataError, match="not a list of corrections"):
        logged_entries(text)


@pytest.mark.parametrize(("sql", "number"), [("", 0), (" ;", 0), ("select 1; select 2", 2)])
def test_a_query_is_one_statement(tmp_path: Path, sql: str, number: int) -> None:
    run = make_run(tmp_path, "run", steps=1)
    with pytest.raises(DataError, match=f"a query is one statement, not {number}"):
        open_ledger(run).query(sql)


def test_a_word_that_is_no_shipped_query_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=1)
    told = CliRunner().invoke(cli, ["ledger", str(run), "mask-rat"])
    assert told.exit_code == 2
    assert "no shipped query mask-rat" in told.stderr
    assert "mask-rate" in told.stderr


def test_a_run_is_read_under_its_own_recipe(tmp_path: Path) -> None:
    """Not under the defaults that an emptied config.toml would stand for."""
    run = make_run(tmp_path, "run", "max_staleness=3", steps=1)
    log = EventLog(run / LOOP_FILE)
    log.write("recipe", **dataclasses.asdict(load_recipe(run / "config.toml")))
    log.close()
    (run / "config.toml").write_text("")
    (seen,) = build_report([run], BUDGET).runs
    assert (seen.max_staleness, seen.steps_planned) == (3, 1)
