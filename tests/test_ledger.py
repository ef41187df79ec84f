"""The ledger: what goes in comes out, parts are whole or named, a resumed run shows a step once."""

from __future__ import annotations

import asyncio
import math
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from estr.errors import DataError
from estr.ledger import (
    LedgerWriter,
    find_parts,
    missing_parts,
    open_ledger,
    parts_up_to,
    read_step,
    supersede_after,
    target_versions,
)
from estr.ledger import writer as writer_module
from estr.ledger.parts import part_path, write_steps
from estr.ledger.schema import (
    SCHEMA_VERSION,
    SCHEMAS,
    TOKENS,
    StepRecord,
    tokens_table,
    trajectories_table,
)
from estr.types import COLUMNS, Consumption, RolloutId, Segment
from ledger_cases import (
    PROMPT,
    consumption,
    random_record,
    record,
    trajectory,
    write_random_ledger,
    write_step,
)

# -- rows ---------------------------------------------------------------------------------------


def rows(table: pa.Table, *names: str) -> list[tuple]:
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def test_facts_go_in_and_come_out(tmp_path: Path) -> None:
    own = trajectory(
        RolloutId(5, 3, 1, 2),
        logprobs=[-0.5, -0.25],
        entropies=[1.5, 0.0],
        versions=[4, 6],
        outcome=0.5,
        error=None,
    )
    made = consumption(own, [0.125, -1.0], advantage=-0.75, kept=[True, False])
    write_step(tmp_path, record(8, [(own, made)], target_version=6, version=7))
    ledger = open_ledger(tmp_path)
    tokens = ledger.query(
        "select step, trajectory, segment, position, token_ids, sampled, versions, "
        "behavior_logprobs, behavior_entropies, behavior_gini, policy_logprobs, kept, clipped, "
        "proximal_logprobs, ref_logprobs from tokens order by position"
    )
    unsampled = (False, *[None] * 9)
    assert tokens.rows == [
        (8, 0, 0, 0, PROMPT[0], *unsampled),
        (8, 0, 0, 1, PROMPT[1], *unsampled),
        (8, 0, 0, 2, 1, True, 4, -0.5, 1.5, None, -0.375, True, False, None, None),
        (8, 0, 0, 3, 2, True, 6, -0.25, 0.0, None, -1.25, False, False, None, None),
    ]
    (row,) = ledger.query("from trajectories").rows
    facts = dict(zip(ledger.tables()["trajectories"], row, strict=True))
    assert (facts["run"], facts["group_id"], facts["index"], facts["attempt"]) == (5, 3, 1, 2)
    assert (facts["target_version"], facts["version"], facts["dispatch_version"]) == (6, 7, 4)
    assert (facts["outcome"], facts["rewards"], facts["advantage"]) == (0.5, {"right": 0.5}, -0.75)
    assert facts["turns"] == [{"segment": 0, "start": 2, "stop": 4, "finish_reason": "stop"}]
    assert facts["stop_token_ids"] == [9]
    assert '"tau": 1.0' in facts["correction"]


def test_the_columns_are_those_of_the_types() -> None:
    names = [column.name for column in COLUMNS]
    place = TOKENS.get_field_index(names[0])
    assert TOKENS.names[place : place + len(names)] == names


def test_null_is_what_was_never_computed_and_nan_what_came_out() -> None:
    """An unscored member has no kept and no policy; a column that only one member lacks is NULL
    there alone; a NaN stays a NaN."""
    with_gini = trajectory(
        RolloutId(0, 0, 0), logprobs=[-1.0], entropies=[1.0], versions=[0], gini=[0.5]
    )
    failed = trajectory(
        RolloutId(0, 0, 1),
        logprobs=[math.nan],
        entropies=[1.0],
        versions=[0],
        outcome=None,
        status="env_error",
        error="it broke",
    )
    pairs = [
        (with_gini, consumption(with_gini, [0.0], proximal=[-2.0])),
        (failed, consumption(failed, [0.0], advantage=None)),
    ]
    table = tokens_table([record(1, pairs)]).slice(2)
    names = ("behavior_gini", "policy_logprobs", "proximal_logprobs", "kept", "clipped")
    assert rows(table, *names)[0] == (0.5, -1.0, -2.0, True, False)
    assert rows(table, *names)[3] == (None, None, None, None, None)
    assert math.isnan(table["behavior_logprobs"].to_pylist()[3])
    assert table["behavior_logprobs"].to_pylist()[2] is None, "a prompt has none"


def test_positions_run_through_segments() -> None:
    own = trajectory(RolloutId(0, 0, 0), logprobs=[-1.0], entropies=[1.0], versions=[0])
    (first,) = own.segments
    own = replace(own, segments=(first, Segment.context([5]), first))
    empty = replace(own, segments=(), turns=(), outcome=None, reward=None)
    pairs = [
        (own, consumption(own, [0.0, 1.0])),
        (empty, nothing_consumed()),
        (own, consumption(own, [2.0, 3.0])),
    ]
    table = tokens_table([record(1, pairs)])
    assert table["segment"].to_pylist() == [0, 0, 0, 1, 2, 2, 2] * 2
    assert table["position"].to_pylist() == [0, 1, 2, 3, 4, 5, 6] * 2
    assert table["trajectory"].to_pylist() == [0] * 7 + [2] * 7
    trained = table.filter(table["kept"].is_valid())
    assert trained["position"].to_pylist() == [2, 6, 2, 6]
    assert trained["policy_logprobs"].to_pylist() == [-1.0, 0.0, 1.0, 2.0]
    assert len(tokens_table([record(1, [(empty, nothing_consumed())])])) == 0


def nothing_consumed() -> Consumption:
    """What becomes of a trajectory without a token."""
    none = np.zeros(0, dtype=np.bool_)
    return Consumption(None, np.zeros(0, dtype=np.float32), none, none)


def test_a_column_of_another_length_is_refused() -> None:
    own = trajectory(RolloutId(0, 0, 0), logprobs=[-1.0], entropies=[1.0], versions=[0])
    made = consumption(own, [0.0])
    short = replace(made, policy_logprobs=made.policy_logprobs[:-1])
    with pytest.raises(ValueError, match="2 entries for 3 tokens"):
        tokens_table([record(1, [(own, short)])])


def test_half_a_character_in_what_a_program_said_stops_no_run(tmp_path: Path) -> None:
    """Python has such texts of the names of files that are no UTF-8; Parquet has none."""
    own = trajectory(
        RolloutId(0, 0, 0),
        logprobs=[-1.0],
        entropies=[1.0],
        versions=[0],
        error="no file 'a\udcff'",
        rewards={"r\udcff": 1.0},
    )
    write_step(tmp_path, record(1, [(own, consumption(own, [0.0]))]))
    (found,) = read_step(tmp_path, 1).trajectories
    assert found.error == r"no file 'a\udcff'"
    assert found.rewards == {r"r\udcff": 1.0}


# -- parts --------------------------------------------------------------------------------------


def test_a_part_is_written_once(tmp_path: Path) -> None:
    write_random_ledger(tmp_path, steps=1)
    with pytest.raises(DataError, match="written to the ledger once"):
        write_step(tmp_path, random_record(1))


def test_a_part_costs_few_bytes(tmp_path: Path) -> None:
    one = random_record(1, num_groups=16, size=8, longest=64)
    paths = write_step(tmp_path, one)
    num_tokens = sum(t.num_tokens for t in one.trajectories)
    assert sum(path.stat().st_size for path in paths) / num_tokens <= 24


def test_torn_parts_are_named_and_left_out(tmp_path: Path) -> None:
    write_random_ledger(tmp_path, steps=5)
    cut = part_path(tmp_path, "tokens", 2)
    cut.write_bytes(cut.read_bytes()[:-6])
    part_path(tmp_path, "trajectories", 3).unlink()
    part_path(tmp_path, "tokens", 4).write_bytes(b"")
    (tmp_path / "ledger" / "tokens" / "00000006.parquet.writing").write_bytes(b"half")
    (tmp_path / "ledger" / "tokens" / "notes.parquet").write_bytes(b"not ours")
    parts = find_parts(tmp_path)
    assert parts.steps == [1, 5]
    assert [line.partition(" of ")[0] for line in parts.torn] == ["step 2", "step 3", "step 4"]
    ledger = open_ledger(tmp_path)
    assert ledger.query("select distinct step from tokens order by step").rows == [(1,), (5,)]
    assert ledger.torn == parts.torn
    names = parts_up_to(tmp_path, 3)
    assert len(names) == 5
    assert [
        line.split()[2] for line in missing_parts(tmp_path, [*names, "tokens/00000009.parquet"])
    ] == ["tokens/00000002.parquet", "tokens/00000009.parquet"]


def test_a_part_of_several_steps_gives_each_of_them_back(tmp_path: Path) -> None:
    records = [random_record(step) for step in range(7, 12)]
    write_steps(tmp_path, records)
    write_step(tmp_path, random_record(12))
    assert find_parts(tmp_path).steps == [7, 8, 9, 10, 11, 12]
    for one in (*records, random_record(12)):
        found = read_step(tmp_path, one.step)
        assert tokens_table([found]).equals(tokens_table([one]))
        assert trajectories_table([found]).equals(trajectories_table([one]))
    assert target_versions(tmp_path) == {step: step - 1 for step in range(7, 13)}
    with pytest.raises(ValueError, match=r"follow each other, not \[13, 15\]"):
        write_steps(tmp_path, [random_record(13), random_record(15)])


def test_a_torn_part_takes_its_steps_with_it_and_none_is_seen_twice(tmp_path: Path) -> None:
    write_steps(tmp_path, [random_record(step) for step in (1, 2, 3)])
    write_steps(tmp_path, [random_record(step) for step in (4, 5)])
    part_path(tmp_path, "trajectories", 4, 5).unlink()
    write_steps(tmp_path, [random_record(step) for step in (3, 4)])
    parts = find_parts(tmp_path)
    assert parts.steps == [1, 2, 3]
    assert [line.partition(" of ")[0] for line in parts.torn] == ["steps 3 to 4", "steps 4 to 5"]
    assert "another part ends at step 3" in parts.torn[0]
    assert "torn" in parts.torn[1]
    assert open_ledger(tmp_path).query("select count(*) from trajectories").rows == [(24,)]
    assert supersede_after(tmp_path, 3) == 2


def test_what_comes_after_a_resume_replaces_what_came_before(tmp_path: Path) -> None:
    write_random_ledger(tmp_path, steps=4)
    assert parts_up_to(tmp_path, 2) == [
        "tokens/00000001.parquet",
        "trajectories/00000001.parquet",
        "tokens/00000002.parquet",
        "trajectories/00000002.parquet",
    ]
    (tmp_path / "ledger" / "tokens" / "00000005.parquet.writing").write_bytes(b"half")
    for seed in (1, 2):
        assert supersede_after(tmp_path, 2) == 2
        assert find_parts(tmp_path).steps == [1, 2]
        for step in (3, 4):
            write_step(tmp_path, random_record(step, seed=seed))
    runs = open_ledger(tmp_path).query(
        "select step, max(run) from trajectories group by 1 order by 1"
    )
    assert runs.rows == [(1, 0), (2, 0), (3, 2), (4, 2)]
    kept = {path.name for path in (tmp_path / "ledger" / "tokens").iterdir()}
    assert {"00000003.parquet.superseded", "00000003.parquet.superseded-2"} <= kept
    assert not [name for name in kept if name.endswith(".writing")]
    assert supersede_after(tmp_path / "elsewhere", 0) == 0


def test_a_later_schema_is_refused_and_an_older_one_is_read(tmp_path: Path) -> None:
    """An older part may lack columns that came later; they read as NULL beside newer parts."""
    write_random_ledger(tmp_path, steps=2)

    def rewrite(step: int, version: int, drop: tuple[str, ...] = ()) -> None:
        for table, names in (("tokens", drop), ("trajectories", ())):
            path = part_path(tmp_path, table, step)
            whole = pq.read_table(path).drop_columns(list(names))
            metadata = {b"estr.schema_version": str(version)}
            pq.write_table(whole.replace_schema_metadata(metadata), path)

    rewrite(1, SCHEMA_VERSION - 1, drop=("ref_logprobs", "behavior_gini"))
    ledger = open_ledger(tmp_path)
    assert ledger.tables()["tokens"] == TOKENS.names
    found = ledger.query(
        "select step, count(*), count(behavior_gini), count(ref_logprobs), count(policy_logprobs) "
        "from trained_tokens group by step order by step"
    ).rows
    assert [row[0] for row in found] == [1, 2]
    assert found[0][2:4] == (0, 0)
    assert found[0][1] == found[0][4] > 0
    assert found[1][2] == found[1][1] > 0
    rewrite(2, SCHEMA_VERSION - 1, drop=("ref_logprobs",))
    assert open_ledger(tmp_path).query("select count(ref_logprobs) from tokens").rows == [(0,)]
    rewrite(2, SCHEMA_VERSION + 1)
    with pytest.raises(DataError, match="written by a later estr"):
        open_ledger(tmp_path)


@pytest.mark.parametrize("name", ["it's [1]", "a*b", "q?", "step=5", "lr=3e-4", "~"])
def test_a_run_may_have_any_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_ledger(tmp_path / name, steps=2)
    write_random_ledger(tmp_path / "its 1", steps=1)
    for folder in (tmp_path / name, Path(name)):
        monkeypatch.chdir(tmp_path)
        ledger = open_ledger(folder)
        assert ledger.query("select distinct step from tokens order by step").rows == [(1,), (2,)]
        assert ledger.tables()["tokens"] == TOKENS.names
        assert read_step(folder, 2).step == 2
        assert target_versions(folder) == {1: 0, 2: 1}


def test_no_ledger_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no ledger"):
        open_ledger(tmp_path)
    (tmp_path / "ledger").mkdir()
    with pytest.raises(DataError, match="no whole step"):
        open_ledger(tmp_path)


def test_a_wrong_query_is_an_error_in_duckdbs_words(tmp_path: Path) -> None:
    write_random_ledger(tmp_path, steps=1)
    with pytest.raises(DataError, match="no_such_column"):
        open_ledger(tmp_path).query("select no_such_column from tokens")


def test_an_answer_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    write_random_ledger(tmp_path, steps=1)
    ledger = open_ledger(tmp_path)
    tracemalloc.start()
    try:
        names, batches = ledger.batches("select range as i from range(?)", [200_000])
        total = sum(row[0] for batch in batches for row in batch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (names, total) == (["i"], 199_999 * 100_000)
    assert peak < 5_000_000, "all rows at once are 20 MB"
    assert ledger.query("select range from range(25000)", most=3) == (
        ["range"],
        [(0,), (1,), (2,)],
        24_997,
    )


def test_parts_are_plain_parquet_for_anyone(tmp_path: Path) -> None:
    (one,) = write_random_ledger(tmp_path, steps=1)
    for table, schema in SCHEMAS.items():
        file = pq.ParquetFile(part_path(tmp_path, table, 1))
        assert file.schema_arrow.names == schema.names
        codec = file.metadata.row_group(0).column(4).compression
        assert codec == ("ZSTD" if table == "tokens" else "UNCOMPRESSED")
    trajectories = pq.read_metadata(part_path(tmp_path, "trajectories", 1))
    assert trajectories.num_rows == len(one.trajectories)


# -- the writer ---------------------------------------------------------------------------------


def writer(folder: Path) -> LedgerWriter:
    return LedgerWriter(folder, correction=[{"name": "estr", "tau": 0.5}], aggregation="group")


async def put(own: LedgerWriter, step: int) -> None:
    one = random_record(step)
    await own.write(
        one.trajectories, one.consumptions, step=step, target_version=step - 1, version=step
    )


async def test_the_writer_gives_a_checkpoint_its_parts(tmp_path: Path) -> None:
    own = writer(tmp_path)
    for step in (1, 2):
        await put(own, step)
    assert await own.sync(2) == parts_up_to(tmp_path, 2)
    assert find_parts(tmp_path).steps == [1, 2]
    await own.close()
    await own.close()
    settings = open_ledger(tmp_path).query("select step, aggregation, correction from settings")
    assert settings.rows[0][:2] == (1, "group")
    assert '"tau": 0.5' in settings.rows[0][2]


async def test_small_steps_become_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = writer(tmp_path)
    num_tokens = [sum(t.num_tokens for t in random_record(s).trajectories) for s in (1, 2)]
    monkeypatch.setattr(writer_module, "BURST_TOKENS", sum(num_tokens))
    await put(own, 1)
    assert not (tmp_path / "ledger").exists()
    for step in (2, 3):
        await put(own, step)
    await own.close()
    assert find_parts(tmp_path).whole == [(1, 2), (3, 3)]


async def test_a_step_that_has_waited_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = writer(tmp_path)
    await put(own, 1)
    monkeypatch.setattr(writer_module, "BURST_S", 0.0)
    await put(own, 2)
    monkeypatch.setattr(writer_module, "BURST_S", 3600.0)
    await put(own, 3)
    await own.close()
    assert find_parts(tmp_path).whole == [(1, 2), (3, 3)]


async def test_a_checkpoint_ends_the_burst_so_a_resume_parts_no_part(tmp_path: Path) -> None:
    """Steps 1 to 3 are counted by the checkpoint; a kill loses 6, a resume sets 4 and 5 aside."""
    own = writer(tmp_path)
    for step in (1, 2, 3):
        await put(own, step)
    names = await own.sync(3)
    assert names == ["tokens/00000001-00000003.parquet", "trajectories/00000001-00000003.parquet"]
    for step in (4, 5):
        await put(own, step)
    await own.close()
    await put(own, 6)
    assert find_parts(tmp_path).steps == [1, 2, 3, 4, 5]
    assert missing_parts(tmp_path, names) == []
    assert supersede_after(tmp_path, 3) == 2
    again = writer(tmp_path)
    for step in (4, 5, 6):
        await put(again, step)
    await again.close()
    found = open_ledger(tmp_path).query("select step, count(*) from trajectories group by 1")
    assert sorted(found.rows) == [(step, 8) for step in range(1, 7)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every step is a burst of its own, and none is written before the gate is opened."""
    opened = threading.Event()

    def slow(folder: Path, records: Sequence[StepRecord]) -> list[Path]:
        assert opened.wait(30)
        return write_steps(folder, records)

    monkeypatch.setattr(writer_module, "BURST_TOKENS", 1)
    monkeypatch.setattr(writer_module, "write_steps", slow)
    return opened


async def test_one_burst_is_written_at_a_time_and_the_loop_goes_on(
    tmp_path: Path, gate: threading.Event
) -> None:
    """The event loop is free while a burst is written; the next one waits for it."""
    own = writer(tmp_path)
    await put(own, 1)
    second = asyncio.create_task(put(own, 2))
    await asyncio.sleep(0.02)
    assert not second.done()
    gate.set()
    await second
    await own.close()
    assert find_parts(tmp_path).steps == [1, 2]


async def test_what_went_wrong_in_the_thread_is_raised_once(
    tmp_path: Path, gate: threading.Event
) -> None:
    gate.set()
    (tmp_path / "ledger").write_text("a file where a folder should be")
    own = writer(tmp_path)
    await put(own, 1)
    with pytest.raises(DataError, match=r"cannot write .*00000001.*ledger = false"):
        await put(own, 2)
    (tmp_path / "ledger").unlink()
    await own.close()
    assert find_parts(tmp_path).steps == [2]


async def test_a_cancelled_run_still_completes_its_parts(
    tmp_path: Path, gate: threading.Event
) -> None:
    own = writer(tmp_path)
    await put(own, 1)
    second = asyncio.create_task(put(own, 2))
    await asyncio.sleep(0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await own.close()
    assert find_parts(tmp_path).steps == [1, 2]


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: object) -> None:
        with path.open("wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match="No space left on device"):
            write_step(tmp_path, random_record(1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    write_step(tmp_path, random_record(1))
    assert find_parts(tmp_path).steps == [1]
