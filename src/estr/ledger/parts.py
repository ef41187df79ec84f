"""The parts of a ledger on disk: one pair of Parquet files for each burst of optimizer steps.

    runs/NAME/ledger/
        tokens/00000001-00000009.parquet  written aside (.parquet.writing), then renamed;
        trajectories/...                  the trajectories last: they complete the steps
        .../00000010.parquet              a burst of one step
        .../00000011.parquet.superseded   what a run that was resumed from step 10 had beyond it

No reader sees anything but *.parquet, and a step exists exactly when both of its parts are whole.
A checkpoint ends the burst, so no part reaches across one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


class Part(NamedTuple):
    """The steps that one pair of files holds, from the first to the last."""

    first: int
    last: int

    @property
    def named(self) -> str:
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}"


def part_path(run_folder: Path, table: str, first: int, last: int | None = None) -> Path:
    """Where the part of a table ("trajectories" or "tokens") with these steps lies; last = None:
    with this one step."""
    steps = f"{first:08d}" if last in (None, first) else f"{first:08d}-{last:08d}"
    return run_folder / "ledger" / table / f"{steps}.parquet"


def write_steps(run_folder: Path, records: Sequence[StepRecord]) -> list[Path]:
    """Write steps that follow each other as one pair of parts; returns the paths. They are renamed
    but not yet synced.

    Raises DataError where the parts are in the ledger already, or one cannot be written.
    """
    steps = [record.step for record in records]
    if not steps or steps != list(range(steps[0], steps[0] + len(steps))):
        raise ValueError(f"a part holds steps that follow each other, not {steps}")
    tables = {"tokens": tokens_table(records), "trajectories": trajectories_table(records)}
    return write_tables(run_folder, Part(steps[0], steps[-1]), tables)


def write_tables(run_folder: Path, part: Part, tables: Mapping[str, pa.Table]) -> list[Path]:
    """Write tables of SCHEMAS as the parts of these steps, in this order; as `write_steps`."""
    paths = [part_path(run_folder, name, *part) for name in tables]
    for path, (name, table) in zip(paths, tables.items(), strict=True):
        if path.exists():
            raise DataError(f"{path} exists: a step is written to the ledger once")
        aside = path.with_name(f"{path.name}.writing")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(_bytes(name, table))
            aside.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise DataError(
                f"cannot write {path}: {error}; look at the space and the rights there, or train "
                "with ledger = false"
            ) from error
    return paths


def _bytes(name: str, table: pa.Table) -> pa.Buffer:
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
        # Absolute, here and below: pyarrow takes a "~" in front for the home folder.
        file = pq.ParquetFile(path.absolute(), page_checksum_verification=True)
        return file.read(use_threads=False)
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
    """What lies in a ledger. whole: the parts of which both files are, ascending. torn: a line on
    each that is not, which readers leave out. older: is one of an older schema among them?"""

    whole: list[Part]
    torn: list[str]
    older: bool

    @property
    def steps(self) -> list[int]:
        """The steps in the whole parts, ascending."""
        return [step for part in self.whole for step in range(part.first, part.last + 1)]


def find_parts(run_folder: str | Path) -> Parts:
    """Look at every part. Raises DataError where there is no ledger, or where a part was written
    by a later version of estr."""
    folder = Path(run_folder) / "ledger"
    if not folder.is_dir():
        raise DataError(f"{run_folder} has no ledger: no folder {folder} (recipe key ledger)")
    whole: list[Part] = []
    torn, versions = [], set()
    for part in sorted({part for part, _ in _parts(folder)}):
        try:
            found = [_version(part_path(Path(run_folder), table, *part)) for table in SCHEMAS]
        except TORN as error:
            torn.append(f"{part.named} of {folder}: torn and left out: {error}")
            continue
        if whole and part.first <= whole[-1].last:
            torn.append(
                f"{part.named} of {folder}: left out, another part ends at step {whole[-1].last}"
            )
            continue
        versions.update(found)
        whole.append(part)
    if versions and max(versions) > SCHEMA_VERSION:
        raise DataError(
            f"{folder} was written by a later estr (schema {max(versions)}, this one reads up to "
            f"{SCHEMA_VERSION}); update estr"
        )
    return Parts(whole, torn, min(versions, default=SCHEMA_VERSION) < SCHEMA_VERSION)


def find_part(run_folder: str | Path, step: int) -> Part:
    """The part that is to hold a step; it need not be there, nor whole."""
    held = {part for part, _ in _parts(Path(run_folder) / "ledger")}
    return min((p for p in held if p.first <= step <= p.last), default=Part(step, step))


def _version(path: Path) -> int:
    metadata = pq.read_metadata(path.absolute()).metadata or {}
    return int(metadata.get(_VERSION_KEY, 0))


def parts_up_to(run_folder: str | Path, step: int) -> list[str]:
    """The names of the parts up to and with a step, oldest first: what a checkpoint keeps."""
    folder = Path(run_folder) / "ledger"
    found = sorted((part, path) for part, path in _parts(folder) if part.last <= step)
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
    later = [(part, path) for part, path in _parts(folder) if part.last > step]
    for _, path in later:
        path.rename(_free_name(path))
    return len({n for part, _ in later for n in range(max(part.first, step + 1), part.last + 1)})


def _parts(folder: Path) -> Iterator[tuple[Part, Path]]:
    """(steps, path) of every part, whole or not."""
    for table in SCHEMAS:
        for path in (folder / table).glob("*.parquet"):
            first, dash, last = path.stem.partition("-")
            if first.isdigit() and (last.isdigit() or not dash):
                yield Part(int(first), int(last or first)), path


def _free_name(path: Path) -> Path:
    """A name that no earlier resume has taken."""
    name = path.with_name(f"{path.name}.superseded")
    number = 2
    while name.exists():
        name = path.with_name(f"{path.name}.superseded-{number}")
        number += 1
    return name
