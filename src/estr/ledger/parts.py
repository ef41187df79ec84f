"""The parts of a ledger on disk: one pair of Parquet files for each optimizer step.

    runs/NAME/ledger/
        tokens/00000001.parquet           written aside (.parquet.writing), then renamed;
        trajectories/00000001.parquet     the trajectories last: they complete the step
        .../00000009.parquet.superseded   what a run that was resumed from step 8 had beyond it

No reader sees anything but *.parquet, and a step exists exactly when both of its parts are whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from .schema import (
    SCHEMA_VERSION,
    SCHEMAS,
    TOKENS,
    TRAJECTORIES,
    StepRecord,
    tokens_table,
    trajectories_table,
)

_VERSION_KEY = b"estr.schema_version"

TORN = (OSError, ValueError, pa.ArrowException)
"""What reading a part raises that is absent, cut short or changed."""

# Chosen by measurement. Log-probs, entropies and token ids are noise in their low bytes, so bytes
# of one rank stand together; the other numbers repeat or rise by one. The few rows of trajectories
# have many columns, most of them constant: a zstd context for each costs more than it saves, and
# so does a dictionary for integers.
_FORMATS: dict[str, dict[str, Any]] = {
    "tokens": {
        "compression": "zstd",
        "use_dictionary": False,
        "column_encoding": {
            **{f.name: "BYTE_STREAM_SPLIT" for f in TOKENS if pa.types.is_floating(f.type)},
            **{f.name: "DELTA_BINARY_PACKED" for f in TOKENS if pa.types.is_integer(f.type)},
            "token_ids": "BYTE_STREAM_SPLIT",
        },
    },
    "trajectories": {
        "compression": "none",
        "use_dictionary": [f.name for f in TRAJECTORIES if not pa.types.is_integer(f.type)],
        "column_encoding": {
            f.name: "DELTA_BINARY_PACKED" for f in TRAJECTORIES if pa.types.is_integer(f.type)
        },
    },
}


def part_path(run_folder: Path, table: str, step: int) -> Path:
    """Where the part of a table ("trajectories" or "tokens") and a step lies."""
    return run_folder / "ledger" / table / f"{step:08d}.parquet"


def write_step(run_folder: Path, record: StepRecord) -> list[Path]:
    """Write the two parts of a step; returns their paths. They are renamed but not yet synced.

    Raises DataError where the step is in the ledger already, or a part cannot be written.
    """
    tables = {"tokens": tokens_table(record), "trajectories": trajectories_table(record)}
    return write_tables(run_folder, record.step, tables)


def write_tables(run_folder: Path, step: int, tables: Mapping[str, pa.Table]) -> list[Path]:
    """Write tables of SCHEMAS as the parts of a step, in this order; as `write_step`."""
    paths = [part_path(run_folder, name, step) for name in tables]
    for path, (name, table) in zip(paths, tables.items(), strict=True):
        if path.exists():
            raise DataError(f"{path} exists: a step is written to the ledger once")
        aside = path.with_name(f"{path.name}.writing")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(_part(name, table))
            aside.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise DataError(
                f"cannot write {path}: {error}; look at the space and the rights there, or train "
                "with ledger = false"
            ) from error
    return paths


def _part(name: str, table: pa.Table) -> pa.Buffer:
    """The bytes of a part: made in memory, since a part is small and a file would be slower."""
    stream = pa.BufferOutputStream()
    with pq.ParquetWriter(
        stream,
        table.schema,
        write_statistics=["step"],
        store_schema=False,  # which leaves out the metadata of the schema, too
        write_page_checksum=True,
        **_FORMATS[name],
    ) as writer:
        writer.add_key_value_metadata({_VERSION_KEY: str(SCHEMA_VERSION)})
        writer.write_table(table)
    return stream.getvalue()


def read_part(path: Path) -> pa.Table:
    """A part whole, its checksums looked at. Raises DataError where it is absent or torn."""
    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False)
    except TORN as error:
        raise DataError(
            f"ledger part {path} is absent or torn: {error}; move it away to leave out what it "
            "holds"
        ) from error


def damaged_parts(run_folder: str | Path) -> list[str]:
    """A line on each part whose content cannot be read: looks at every byte, where `find_parts`
    looks at the ends of files only."""
    lines = []
    for _, path in sorted(_parts(Path(run_folder) / "ledger")):
        try:
            read_part(path)
        except DataError as error:
            lines.append(str(error))
    return lines


def sync(paths: Iterable[Path]) -> None:
    """Bring these parts and their names to the disk."""
    paths = list(paths)
    for path in [*paths, *sorted({path.parent for path in paths})]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Parts(NamedTuple):
    """What lies in a ledger. steps: whose parts are both whole, ascending. torn: a line on each
    step that is not, which readers leave out. older: is a part of an older schema among them?"""

    steps: list[int]
    torn: list[str]
    older: bool


def find_parts(run_folder: str | Path) -> Parts:
    """Look at every part. Raises DataError where there is no ledger, or where a part was written
    by a later version of estr."""
    folder = Path(run_folder) / "ledger"
    if not folder.is_dir():
        raise DataError(f"{run_folder} has no ledger: no folder {folder} (recipe key ledger)")
    steps, torn, versions = [], [], set()
    for step in sorted({step for step, _ in _parts(folder)}):
        try:
            found = [_version(part_path(Path(run_folder), table, step)) for table in SCHEMAS]
        except TORN as error:
            torn.append(f"step {step} of {folder} is torn and left out: {error}")
            continue
        versions.update(found)
        steps.append(step)
    if versions and max(versions) > SCHEMA_VERSION:
        raise DataError(
            f"{folder} was written by a later estr (schema {max(versions)}, this one reads up to "
            f"{SCHEMA_VERSION}); update estr"
        )
    return Parts(steps, torn, min(versions, default=SCHEMA_VERSION) < SCHEMA_VERSION)


def _version(path: Path) -> int:
    metadata = pq.read_metadata(path).metadata or {}
    return int(metadata.get(_VERSION_KEY, 0))


def parts_up_to(run_folder: str | Path, step: int) -> list[str]:
    """The names of the parts up to and with a step, oldest first: what a checkpoint keeps."""
    folder = Path(run_folder) / "ledger"
    found = sorted((number, path) for number, path in _parts(folder) if number <= step)
    return [path.relative_to(folder).as_posix() for _, path in found]


def missing_parts(run_folder: str | Path, names: Iterable[str]) -> list[str]:
    """A line on each of these parts (as from `parts_up_to`) that is absent or torn."""
    lines = []
    for name in names:
        path = Path(run_folder) / "ledger" / name
        try:
            _version(path)
        except TORN as error:
            lines.append(f"ledger part {name} is absent or torn: {error}")
    return lines


def supersede_after(run_folder: str | Path, step: int) -> int:
    """A run goes on from `step`: the parts beyond it, and those half written, are renamed so that
    no reader sees them. Returns how many steps they were of."""
    folder = Path(run_folder) / "ledger"
    for table in SCHEMAS:
        for path in (folder / table).glob("*.parquet.writing"):
            path.unlink()
    later = [(number, path) for number, path in _parts(folder) if number > step]
    for _, path in later:
        path.rename(_free_name(path))
    return len({number for number, _ in later})


def _parts(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, path) of every part, whole or not."""
    for table in SCHEMAS:
        for path in (folder / table).glob("*.parquet"):
            if path.stem.isdigit():
                yield int(path.stem), path


def _free_name(path: Path) -> Path:
    """A name that no earlier resume has taken."""
    name = path.with_name(f"{path.name}.superseded")
    number = 2
    while name.exists():
        name = path.with_name(f"{path.name}.superseded-{number}")
        number += 1
    return name
