"""Runs looked at from their files alone: is the lineage whole, and where do two runs part?

verify_run("runs/a")             -> Verdict    every group consumed exactly once, nothing jumps
first_difference("a", "b")       -> str | None the first event at which two runs part
where_one_ends("a", "b")         -> str | None where the shorter of two such runs ends
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints, verify
from .config import load_recipe
from .errors import CheckpointError, ConfigError, DataError
from .ledger import damaged_parts, missing_parts
from .metrics import read_metrics
from .resume import require_own_schedule
from .run_folder import RunFolder
from .schedule import ENGINE_FILE, LOOP_FILE, SEQUENCED, Event, describe, read_run_events


@dataclass(slots=True)
class Verdict:
    """What the files of a run say. faults: what is wrong, in words; empty: nothing."""

    run: Path
    steps: int = 0
    groups: int = 0
    consumed: int = 0
    failed: int = 0
    filtered: int = 0
    outstanding: int = 0
    resumes: int = 0
    lost: int = 0
    doubled: int = 0
    faults: list[str] = field(default_factory=list)


def verify_run(path: str | Path) -> Verdict:
    """Check a run's surviving lineage. Raises DataError where there is nothing to check, or the
    run is at work and its files are not of one moment."""
    folder = RunFolder.open(path)
    if folder.is_in_use():
        raise DataError(f"{folder.path} is in use by another estr process; verify it when it ends")
    events = read_run_events(folder.path / LOOP_FILE)
    verdict = Verdict(folder.path)
    raw = (folder.path / LOOP_FILE).read_bytes()
    verdict.resumes = raw.count(b'{"event":"resume"')
    _check_groups(events, verdict, may_skip=folder.recipe().curriculum.skip > 0)
    _check_steps(events, verdict)
    _check_staleness(events, verdict)
    _check_metrics(folder, events, verdict)
    listed = _check_checkpoints(folder, verdict)
    _check_ledger(folder, listed, verdict)
    _check_recipe(folder, verdict)
    if folder.is_finished():
        try:
            folder.summary()
        except DataError as error:
            verdict.faults.append(str(error))
    return verdict


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _check_groups(events: Sequence[Event], verdict: Verdict, *, may_skip: bool) -> None:
    """Each group is dispatched once and leaves once; ids are dense; first issues keep the order of
    each task's data, unless a curriculum may pass over some."""
    dispatched = _of(events, "dispatch")
    ids = Counter(event["group"] for event in dispatched)
    trained = Counter(group for event in _of(events, "train") for group in event["groups"])
    failed = Counter(event["group"] for event in _of(events, "fail"))
    filtered = Counter(event["group"] for event in _of(events, "filter"))
    verdict.groups, verdict.consumed = len(ids), len(trained)
    verdict.failed, verdict.filtered = len(failed), len(filtered)
    gone = trained + failed + filtered
    verdict.outstanding = len(set(ids) - set(gone))
    twice = sorted(group for group, count in gone.items() if count > 1)
    verdict.doubled = len(twice)
    for group in twice[:8]:
        verdict.faults.append(
            f"group {group} left {gone[group]} times: trained, failed or filtered twice"
        )
    unknown = sorted(set(gone) - set(ids))
    verdict.faults += [f"group {group} was trained, never dispatched" for group in unknown[:8]]
    missing = sorted(set(range(max(ids, default=-1) + 1)) - set(ids))
    verdict.lost = len(missing)
    verdict.faults += [f"group {group} is missing: ids have a gap" for group in missing[:8]]
    again = sorted(group for group, count in ids.items() if count > 1)
    verdict.faults += [f"group {group} was dispatched more than once" for group in again[:8]]
    first: dict[str, list[tuple[int, int]]] = {}
    for event in sorted(dispatched, key=lambda event: event["group"]):
        if event["issue"] == 0:
            first.setdefault(event.get("task", ""), []).append((event["group"], event["problem"]))
    jumps = [
        f"the data jumps: group {before} had problem {a}, group {after} has problem {b}"
        for own in first.values()
        for (before, a), (after, b) in pairwise(own)
        if b not in (a + 1, 0)
    ]
    if not may_skip:
        verdict.faults += jumps[:1]


def _check_steps(events: Sequence[Event], verdict: Verdict) -> None:
    """Steps count up by one; versions by one or, where a step was skipped, by none."""
    version = 0
    steps = _of(events, "step")
    verdict.steps = len(steps)
    for number, event in enumerate(steps, start=1):
        if event["step"] != number:
            verdict.faults.append(f"step {number} is missing; {event['step']} comes in its place")
            return
        if event["target"] != version or event["version"] - version not in (0, 1):
            verdict.faults.append(
                f"step {number} went from version {event['target']} to {event['version']}, after "
                f"version {version}"
            )
            return
        version = event["version"]


def _check_staleness(events: Sequence[Event], verdict: Verdict) -> None:
    """Every group is trained within max_staleness of the version that it was dispatched at."""
    size, bound = events[0]["groups_per_step"], events[0]["max_staleness"]
    dispatched = {event["group"]: event["version"] for event in _of(events, "dispatch")}
    targets = iter([event["target"] for event in _of(events, "step")])
    for event in events:
        if event["event"] == "recipe":
            size, bound = event["groups_per_step"], event["max_staleness"]
        if event["event"] != "train":
            continue
        for place in range(0, len(event["groups"]), size):
            target = next(targets, None)
            if target is None:
                return  # the run ended while this batch was with the trainer
            for group in event["groups"][place : place + size]:
                lag = target - dispatched.get(group, target)
                if not 0 <= lag <= bound:
                    verdict.faults.append(
                        f"group {group} was trained {lag} versions after its dispatch; "
                        f"max_staleness is {bound}"
                    )


def _check_metrics(folder: RunFolder, events: Sequence[Event], verdict: Verdict) -> None:
    """metrics.jsonl has one row for each step of the lineage, with the same loss and version."""
    path = folder.path / "metrics.jsonl"
    rows = [r for r in read_metrics(path).records if "loss" in r] if path.is_file() else []
    steps = _of(events, "step")
    for event, row in zip_longest(steps, rows):
        if event is None or row is None:
            verdict.faults.append(
                f"metrics.jsonl has {len(rows)} steps, the schedule has {len(steps)}"
            )
            return
        for name in ("step", "version", "loss", "lr"):
            if event.get(name) != row.get(name):
                verdict.faults.append(
                    f"step {event['step']}: {name} is {row.get(name)} in metrics.jsonl, "
                    f"{event.get(name)} in the schedule"
                )
                return


def _check_checkpoints(folder: RunFolder, verdict: Verdict) -> list[str]:
    """Checkpoints are whole and of this run's schedule. Returns the ledger parts that the newest
    one of these lists."""
    parts: list[str] = []
    for path in Checkpoints(folder.checkpoints).complete():
        try:
            state = verify(path)
            require_own_schedule(folder, state)
            parts = state.get("ledger_parts", [])
        except (CheckpointError, DataError) as error:
            verdict.faults.append(f"{path}: {error}")
    if verdict.steps and not Checkpoints(folder.checkpoints).complete():
        verdict.faults.append(f"no checkpoint is left in {folder.checkpoints}")
    return parts


def _check_ledger(folder: RunFolder, listed: Sequence[str], verdict: Verdict) -> None:
    """The parts that a checkpoint lists are there, and every part that is there can be read: each
    byte of it is looked at."""
    absent = [name for name in listed if not (folder.path / "ledger" / name).exists()]
    verdict.faults += missing_parts(folder.path, absent) + damaged_parts(folder.path)


def _check_recipe(folder: RunFolder, verdict: Verdict) -> None:
    """config.toml is the recipe that the run was started or resumed with."""
    try:
        changed = folder.changes(load_recipe(folder.path / "config.toml"))
    except ConfigError as error:
        changed = [str(error)]
    verdict.faults += [f"config.toml is not the recipe of the run: {line}" for line in changed]


def first_difference(a: str | Path, b: str | Path) -> str | None:
    """The first event at which two runs part, in words; None: all that both have is the same.

    Compared are the recipes, then the events that decide what a run computes and what came of
    them: dispatches, batches, loaded versions, checkpoints, losses, weights, and, of deterministic
    runs, the tokens and log-probs of every rollout and the steps of the engine. What only one of
    the two still goes on to do is no difference.
    """
    runs = RunFolder.open(a), RunFolder.open(b)
    recipe, other = (
        dataclasses.asdict(load_recipe(run.path / "config.toml")) | {"name": ""} for run in runs
    )
    if recipe != other:
        return f"recipes: {_where(recipe, other)}"
    for file, streams in ((LOOP_FILE, _loop_streams), (ENGINE_FILE, _engine_streams)):
        paths = [run.path / file for run in runs]
        if file == ENGINE_FILE and not any(path.is_file() for path in paths):
            continue
        for mine, theirs in zip(*(streams(read_run_events(path)) for path in paths), strict=True):
            for one, two in _pairs(mine, theirs):
                if one != two:
                    told = f"{file}: {describe(one)} here, {describe(two)} there"
                    same = one["event"] == two["event"]
                    return f"{told}; {_where(one, two)}" if same else told
    return None


def _where(mine: Any, theirs: Any, place: str = "") -> str:
    """The first place in which two pieces of JSON data differ, and what stands there, in words."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        dot = "." if place else ""
        pairs = [(f"{dot}{key}", mine.get(key), theirs.get(key)) for key in {**mine, **theirs}]
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip_longest(mine, theirs))]
    for step, a, b in pairs:
        if a != b:
            return _where(a, b, f"{place}{step}")
    if isinstance(mine, str) and isinstance(theirs, str):
        differ = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        alike = next(differ, min(len(mine), len(theirs)))
        if alike > 40:
            place, mine, theirs = (
                f"{place}, from character {alike} on",
                mine[alike:],
                theirs[alike:],
            )
    return f"{place} is {mine!r:.80} here, {theirs!r:.80} there"


def where_one_ends(a: str | Path, b: str | Path) -> str | None:
    """Of two runs without a `first_difference`: which one is a prefix of the other, and where it
    ends, in words; None: they are equally long."""
    steps, events = [], []
    for run in (a, b):
        loop = read_run_events(RunFolder.open(run).path / LOOP_FILE)
        steps.append(len(_of(loop, "step")))
        events.append([e for e in loop if e["event"] in SEQUENCED or e["event"] == "step"])
    lengths = [len(own) for own in events]
    if lengths[0] == lengths[1]:
        return None
    short, long = (0, 1) if lengths[0] < lengths[1] else (1, 0)
    names = (str(a), str(b))
    last = f" with {describe(events[short][-1])}" if events[short] else ""
    return (
        f"{names[short]} is a prefix of {names[long]}: it ends after step {steps[short]}{last}; "
        f"{names[long]} goes on to step {steps[long]}"
    )


def _pairs(mine: Sequence[Event], theirs: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Events in the same place, or rollouts of the same id: where one run ends early, rollouts that
    it had not finished are missing anywhere in the order of ids."""
    if mine and mine[0]["event"] == "rollout":
        others = {tuple(event["id"]): event for event in theirs}
        yield from ((one, others[key]) for one in mine if (key := tuple(one["id"])) in others)
    else:
        yield from zip(mine, theirs, strict=False)


def _loop_streams(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Events whose order decides the run, the steps, and rollouts by id, which may end in any
    order."""
    yield [e for e in events if e["event"] in SEQUENCED]
    yield [e for e in events if e["event"] == "step"]
    ended = [e for e in events if e["event"] == "rollout" and e["status"] != "leftover"]
    yield sorted(ended, key=lambda event: event["id"])


def _engine_streams(events: Sequence[Event]) -> Iterator[list[Event]]:
    yield list(events)
