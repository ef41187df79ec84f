"""Rollouts of an evaluation on disk: what `estr eval --out FOLDER` keeps, and goes on from.

FOLDER/
    rollouts-DIGEST.jsonl       a first line that says what is evaluated, then one line a rollout
    transcripts-DIGEST.txt      the same to read
    runs-DIGEST/                run files of the task's own kind, if it has one

DIGEST stands for model, task, seed and sampling, so one folder may hold any number of evaluations,
and an evaluation finds its own rollouts again: those that are there are not played a second time,
whether it was stopped or is asked for more problems or more rollouts. Only what failed (engine,
environment, grader) is tried again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from .errors import DataError
from .output_files import write_whole
from .printable import printable
from .types import SCORED_STATUSES, Status, Trajectory

Decode = Callable[[list[int]], str]

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """What is kept of a rollout. example: the task's name of the problem; index: its number among
    the k; answer: what it votes for; tokens: sampled ones; turns: (read or wrote, text); replies:
    what each turn of the model's says, without the token that ended it."""

    example: str
    problem: int
    index: int
    status: Status
    outcome: float | None
    answer: str | None
    tokens: int
    error: str | None
    turns: tuple[tuple[str, str], ...] = ()
    replies: tuple[str, ...] = ()


def stretches(trajectory: Trajectory) -> Iterator[tuple[bool, list[int]]]:
    """The trajectory in stretches of tokens that the model wrote (True) or read (False)."""
    for segment in trajectory.segments:
        pairs = zip(segment.sampled.tolist(), segment.token_ids.tolist(), strict=True)
        for written, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
            yield written, [token for _, token in run]


def transcribe(trajectory: Trajectory, decode: Decode) -> tuple[tuple[str, str], ...]:
    """The turns of a RolloutRecord."""
    return tuple(
        ("wrote" if written else "read", decode(ids)) for written, ids in stretches(trajectory)
    )


def replies(trajectory: Trajectory, decode: Decode) -> tuple[str, ...]:
    """The replies of a RolloutRecord: as the environment got them."""
    stops = trajectory.sampling.stop_token_ids
    found = []
    for segment, start, stop, _ in trajectory.turns:
        ids = trajectory.segments[segment].token_ids[start:stop].tolist()
        found.append(decode(ids[:-1] if ids and ids[-1] in stops else ids))
    return tuple(found)


class RolloutFile:
    """The rollouts of one evaluation. Opened by `open_rollouts`."""

    def __init__(self, path: Path, file: IO[bytes], records: list[RolloutRecord]) -> None:
        self.path = path
        self._file = file
        self._records = {(record.example, record.index): record for record in records}

    def find(self, example: str, index: int) -> RolloutRecord | None:
        """The rollout that need not be played again; None: there is none, or it failed."""
        record = self._records.get((example, index))
        return record if record is not None and record.status in SCORED_STATUSES else None

    def add(self, record: RolloutRecord) -> None:
        """Keep one more; the system has it when this returns, so that a kill loses none."""
        self._records[record.example, record.index] = record
        self._file.write(json.dumps(dataclasses.asdict(record)).encode() + b"\n")
        self._file.flush()

    def write_transcripts(self) -> Path:
        """Everything that is kept, to read."""
        path = self._beside("transcripts", ".txt")
        write_whole(path, "\n".join(map(_transcript, self.records())))
        return path

    def records(self) -> list[RolloutRecord]:
        """Every rollout that is kept, in order."""
        return sorted(self._records.values(), key=lambda record: (record.problem, record.index))

    @property
    def runs_folder(self) -> Path:
        """Where a task writes run files of its own kind."""
        return self._beside("runs", "")

    def _beside(self, what: str, suffix: str) -> Path:
        return self.path.with_name(self.path.name.replace("rollouts", what, 1)).with_suffix(suffix)


@contextmanager
def open_rollouts(folder: Path, fingerprint: Mapping[str, Any]) -> Iterator[RolloutFile]:
    """The file of the evaluation that `fingerprint` describes, held by this process.

    Raises DataError if it cannot be written, is in use, or holds something else.
    """
    import fcntl

    head = json.dumps({"format": _FORMAT, "evaluation": fingerprint}, sort_keys=True).encode()
    path = folder / f"rollouts-{hashlib.sha256(head).hexdigest()[:12]}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise DataError(f"cannot keep rollouts in {folder}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{path} is in use by another estr process; wait for it") from error
        except OSError as error:
            raise DataError(f"cannot lock {path}: {error.strerror}") from error
        yield RolloutFile(path, file, _read(path, file, head))


def _read(path: Path, file: IO[bytes], head: bytes) -> list[RolloutRecord]:
    """What is there. A last line that was cut off by a kill is removed."""
    file.seek(0)
    whole, _, torn = file.read().rpartition(b"\n")
    if torn:
        file.truncate(len(whole) + 1 if whole else 0)
    if not whole:
        file.write(head + b"\n")
        file.flush()
        return []
    first, *lines = whole.split(b"\n")
    if first != head:
        raise DataError(f"{path} holds another evaluation; keep this one in another folder")
    decoder = msgspec.json.Decoder(RolloutRecord)
    records = []
    for number, line in enumerate(lines, start=2):
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"line {number} of {path} cannot be read: {error}; take it out and its rollout is "
                "played again, or move the file away"
            ) from error
    return records


def _transcript(record: RolloutRecord) -> str:
    outcome = "unscored" if record.outcome is None else f"outcome {record.outcome:g}"
    status = "" if record.status == "ok" else f", {record.status}"
    answer = "" if record.answer is None else f", answer {record.answer!r}"
    lines = [f"== {record.example}, rollout {record.index}: {outcome}{status}{answer}"]
    for who, text in record.turns:
        shown = text.removesuffix("\n").split("\n")
        lines += [f"  {who if i == 0 else '':<5} | {printable(t)}" for i, t in enumerate(shown)]
    if record.error is not None:
        lines.append(f"  error | {printable(record.error)}")
    return "\n".join(lines) + "\n"


def weights_digest(folder: Path) -> str:
    """Of everything in a model folder that has a say in what it writes."""
    digest = hashlib.sha256()
    # Chat templates and vocabularies may have files of their own.
    kinds = ("*.safetensors", "*.json", "*.jinja", "*/*.jinja", "*.model", "*.txt")
    for path in sorted(path for kind in kinds for path in folder.glob(kind)):
        if path.name == "record.json":
            continue
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
