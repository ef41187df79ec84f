"""The schedule: what happened in a run, in order, as a file that only grows.

runs/NAME/schedule.jsonl          the loop's events      {"event": "dispatch", "group": 7, ...}
runs/NAME/schedule.engine.jsonl   the engine's, only of deterministic runs

A resume appends {"event": "resume", "lines": n}: of what stands before it only the first n lines
belong to the lineage that survives; what a killed process did after its last checkpoint is still in
the file, and no reader of the lineage sees it. A checkpoint keeps the number of lines up to it and
their checksum: it belongs to the run whose lineage begins with just these.

    record    EventLog.write                     every run
    read      read_lineage -> [event, ...]       as it stands
              read_run_events                    the same, checked: estr runs verify, estr runs diff
    replay    Replay: the loop does each sequenced event when its turn has come

In a deterministic run the loop also notes what the environments answered and how each rollout
ended, so that a replay takes them by value and never from a clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .errors import DataError, ScheduleError
from .metrics import cut_torn_tail
from .types import RolloutId

Event = dict[str, Any]

LOOP_FILE = "schedule.jsonl"
ENGINE_FILE = "schedule.engine.jsonl"

SEQUENCED = frozenset({"dispatch", "fail", "train", "load", "checkpoint"})
"""Events of the loop whose order decides what a run computes."""

_BOUND = {"groups_per_step": Annotated[int, msgspec.Meta(ge=1)], "max_staleness": int}
_FIELDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    LOOP_FILE: {
        "start": _BOUND,
        "recipe": _BOUND,
        "dispatch": dict.fromkeys(("group", "problem", "issue", "version"), int) | {"task": str},
        "train": {"groups": list[int]},
        "step": dict.fromkeys(("step", "version", "target"), int),
        "fail": {"group": int},
        "filter": {"group": int},
        "load": {"version": int},
        "rollout": {"id": list[int], "status": str, "replies": list},
    },
    ENGINE_FILE: {
        "load": {"at": int, "version": int},
        "admit": {"at": int, "ids": list[list[int]]},
        "cancel": {"at": int, "id": list[int]},
        "refill": {"at": int},
    },
}
"""What the events of a run must say, by file and kind, to be verified, compared or replayed."""

REPLAY_TIMEOUT_S = 900.0
"""How long a replay waits for one event; a wait this long means that it cannot come any more."""


@dataclass(frozen=True, slots=True)
class EngineSchedule:
    """Files of a deterministic engine: the log that it writes, and the plan that it follows."""

    log: Path
    plan: Path | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a checkpoint stands in an engine's schedule. step: steps made. lines, crc: of its own
    log. planned: events done of the plan. running: requests in the order of their rows."""

    step: int = 0
    lines: int = 0
    crc: int = 0
    planned: int = 0
    running: tuple[RolloutId, ...] = ()

    def pack(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self) | {"running": [astuple(rollout_id) for rollout_id in self.running]}

    @classmethod
    def unpack(cls, data: Mapping[str, Any]) -> Position:
        """The inverse of pack."""
        running = tuple(RolloutId(*key) for key in data["running"])
        return cls(data["step"], data["lines"], data["crc"], data["planned"], running)


class EventLog:
    """Appends events to a file, one line each, handed to the system at once.

    keep_lines: the run goes on from a checkpoint that was taken after that many lines of the
    lineage; None: a fresh file, or the lineage as it stands. num_lines and crc are of the lineage.
    """

    def __init__(self, path: Path, *, keep_lines: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep_lines is not None:
            require_lines(path, keep_lines)
        cut_torn_tail(path)
        kept = [line for line, _ in _lineage(path)][:keep_lines] if path.exists() else []
        self.num_lines, self.crc = len(kept), _checksum(kept)
        self._file = path.open("ab")
        if keep_lines is not None:
            self._append({"event": "resume", "lines": keep_lines})

    def _append(self, event: Event) -> bytes:
        line = json.dumps(event, separators=(",", ":")).encode()
        self._file.write(line + b"\n")
        self._file.flush()
        return line

    def write(self, event: str, **values: Any) -> None:
        """One event."""
        line = self._append({"event": event, **values})
        self.num_lines += 1
        self.crc = _checksum([line], self.crc)

    def sync(self) -> None:
        """Returns when everything written is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def read_lineage(path: Path) -> list[Event]:
    """The events of the surviving lineage, oldest first; an unfinished last line is left out.

    Raises DataError naming the line that is no event.
    """
    return [event for _, event in _lineage(path)]


def read_run_events(path: Path) -> list[Event]:
    """The same of a run's LOOP_FILE or ENGINE_FILE, whose events must have all that is read of
    them; the loop's begin with its start. Raises DataError naming what is not so."""
    events = read_lineage(path)
    if path.name == LOOP_FILE and (not events or events[0]["event"] != "start"):
        raise DataError(f"{path} does not begin with the start of a run; it was cut or emptied")
    for number, event in enumerate(events, start=1):
        for name, kind in _FIELDS[path.name].get(event["event"], {}).items():
            try:
                msgspec.convert(event.get(name), kind)
            except msgspec.ValidationError as error:
                raise DataError(
                    f"{path}: event {number} of the lineage, {describe(event)}, has no {name} that "
                    "can be read; the file was changed by hand, or another estr wrote it"
                ) from error
    return events


def _checksum(lines: Iterable[bytes], crc: int = 0) -> int:
    """Of lines of a lineage, going on from that of the lines before them."""
    for line in lines:
        crc = zlib.crc32(line + b"\n", crc)
    return crc


def _lineage(path: Path) -> list[tuple[bytes, Event]]:
    """The surviving lineage as it stands in the file, and read."""
    events: list[tuple[bytes, Event]] = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            kind = event["event"]
            if not isinstance(kind, str):
                raise ValueError(f"its kind is {kind!r}")
            if kind == "resume":
                if not 0 <= event["lines"] <= len(events):
                    raise ValueError(f"it keeps {event['lines']} of {len(events)} lines")
                del events[event["lines"] :]
                continue
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is no event: {error}") from error
        events.append((line, event))
    return events


def require_lines(path: Path, lines: int, crc: int | None = None) -> None:
    """Raises DataError where the lineage has fewer than that many lines, or (crc) others."""
    found = [line for line, _ in _lineage(path)] if path.exists() else []
    if lines > len(found):
        raise DataError(
            f"{path} has {len(found)} lines, the checkpoint was taken after {lines}; it was cut or "
            "belongs to another run"
        )
    if crc is not None and _checksum(found[:lines]) != crc:
        raise DataError(
            f"{path} is not the schedule that the checkpoint was taken in: its first {lines} lines "
            "differ; one of the two belongs to another run, or was changed by hand"
        )


def last_recipe(path: Path) -> Event | None:
    """The recipe that a run was last started or resumed with, as its schedule has it; None where
    there is no schedule yet."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        events = [json.loads(line) for line in lines if line.startswith(b'{"event":"recipe"')]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} holds a recipe that cannot be read: {error}") from error
    return {k: v for k, v in events[-1].items() if k != "event"} if events else None


def require_whole_plan(loop: Sequence[Event], engine: Sequence[Event], path: Path) -> None:
    """Raises DataError where the engine's schedule, in `path`, lacks what the loop's says that the
    engine did: a replay would wait for it for ever."""
    begun = Counter(tuple(key[1:]) for event in engine for key in event.get("ids", ()))
    loaded = {event["version"] for event in engine if event["event"] == "load"}
    for event in loop:
        if event["event"] == "load" and event["version"] not in loaded:
            lacking = f"the load of version {event['version']}"
        elif event["event"] == "rollout" and begun[tuple(event["id"])] < len(event["replies"]):
            lacking = f"a turn of rollout {event['id']}"
        else:
            continue
        raise DataError(f"{path} was cut: it lacks {lacking}; the run cannot be replayed")


class Replay:
    """The recorded events of another run, done again one after the other.

    A task of the loop looks at `next`, or waits with `turn`, does the event when it is next, and
    the schedule's `note` advances. Events about single rollouts are looked up by id instead:
    their order follows.
    """

    def __init__(self, events: Iterable[Event], position: int = 0) -> None:
        every = list(events)
        self.events: Sequence[Event] = [e for e in every if e["event"] in SEQUENCED]
        self.rollouts = {tuple(e["id"]): e for e in every if e["event"] == "rollout"}
        if position > len(self.events):
            raise DataError(
                f"the schedule to replay has {len(self.events)} events in order, and {position} "
                "are done already: it was cut, or is of another run"
            )
        self.position = position
        self.on_advance: Callable[[], None] = lambda: None
        self._moved = asyncio.Event()

    @property
    def next(self) -> Event | None:
        """The next event, None at the end."""
        return self.events[self.position] if self.position < len(self.events) else None

    def upcoming(self, *kinds: str) -> Event | None:
        """The first event of these kinds that is still to come."""
        left = range(self.position, len(self.events))
        return next((self.events[i] for i in left if self.events[i]["event"] in kinds), None)

    async def turn(self, kind: str, **values: Any) -> None:
        """Wait until the next event is of that kind and has those values. Raises ScheduleError
        when that takes so long that it cannot happen any more."""
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                while not self._is_next(kind, values):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError as error:
            raise ScheduleError(
                f"the replay waits for {describe(self.next)} and cannot come to {kind} {values}"
            ) from error

    def _is_next(self, kind: str, values: Mapping[str, Any]) -> bool:
        due = self.next
        return (
            due is not None
            and due["event"] == kind
            and all(due.get(name) == value for name, value in values.items())
        )

    def advance(self) -> None:
        """The next event is done."""
        self.position += 1
        self._moved.set()
        self.on_advance()

    def expect(self, event: Event, **values: Any) -> None:
        """Raises ScheduleError where what is about to happen is not what was recorded."""
        for name, value in values.items():
            if event.get(name) != value:
                raise ScheduleError(
                    f"the replay parts from its schedule at {describe(event)}: {name} is {value} "
                    f"here, {event.get(name)} there"
                )


class Schedule:
    """What the loop tells and asks: the log of this run, and the run that it replays, if any.

    Without a log nothing is written; without a replay nothing is waited for.
    """

    def __init__(
        self,
        log: EventLog | None = None,
        replay: Replay | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.log = log
        self.replay = replay
        self.deterministic = deterministic
        self.on_rollout_end: Callable[[RolloutId], None] = lambda rollout_id: None
        """Told of every attempt of a deterministic run that has ended."""

    def note(self, event: str, **values: Any) -> None:
        """It has just happened. In a replay a sequenced event must be the next one and the same.
        Raises ScheduleError where it is not."""
        if self.replay is not None and event in SEQUENCED:
            due = self.replay.next
            if due is None or due["event"] != event:
                raise ScheduleError(
                    f"the replay parts from its schedule: {event} {values} happened, "
                    f"{describe(due)} was due"
                )
            self.replay.expect(due, **values)
            self.replay.advance()
        if self.log is not None:
            self.log.write(event, **values)

    def upcoming(self, *kinds: str) -> Event | None:
        """In a replay the first event of these kinds still to come; else None."""
        return None if self.replay is None else self.replay.upcoming(*kinds)

    async def turn(self, event: str, **values: Any) -> None:
        """In a replay: wait until this event is the next one. Raises ScheduleError when it cannot
        come any more."""
        if self.replay is not None:
            await self.replay.turn(event, **values)

    def rollout(self, rollout_id: RolloutId) -> Event | None:
        """In a replay: how that rollout ended."""
        if self.replay is None:
            return None
        return self.replay.rollouts.get((rollout_id.group, rollout_id.index, rollout_id.attempt))

    def on_advance(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the next event of a replay has changed."""
        if self.replay is not None:
            self.replay.on_advance = wake

    def position(self) -> dict[str, int]:
        """Where a resume goes on, for a checkpoint."""
        return {
            "lines": 0 if self.log is None else self.log.num_lines,
            "crc": 0 if self.log is None else self.log.crc,
            "replayed": 0 if self.replay is None else self.replay.position,
        }

    def sync(self) -> None:
        """Returns when the log is on disk."""
        if self.log is not None:
            self.log.sync()

    def close(self) -> None:
        """May be called twice."""
        if self.log is not None:
            self.log.close()


def describe(event: Mapping[str, Any] | None) -> str:
    """An event in words, for messages."""
    if event is None:
        return "the end of the schedule"
    rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("event", "replies"))
    return f"{event['event']} ({rest:.160})"
