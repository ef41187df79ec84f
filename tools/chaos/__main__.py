"""Kill a run again and again, resume it each time, and look whether anything was lost.

    python tools/chaos --kills 200            (make chaos KILLS=200)

A fifth of the kills go to a deterministic run of the built-in task, which replays an undisturbed
one, so that at its end every token, loss and weight can be compared to the bit; the others to a
long run of fakes. Each life is killed at a random instant or at one of the points of child.py: at
a file's sync, at a rename, at a line of the schedule or of the metrics, at a message to another
process. Lives of the built-in run lose their controller, engine, trainer or evaluator. Some lives
have a full disk, a slow disk or a jumping clock. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from estr.errors import EstrError
from estr.runs import first_difference, verify_run

CHILD = Path(__file__).with_name("child.py")
POINTS = {"fsync": 12, "rename": 4, "event": 120, "metrics": 12, "message": 60}
"""Where a life may be killed, and up to which occurrence."""
FAULTS = ("", "", "", "", "slow", "clock", "full:4")
LIFE_LIMIT_S = 600.0
BUILTIN = [
    "name=reference",
    "deterministic=true",
    "steps=40",
    "groups_per_step=4",
    "group_size=4",
    "checkpoint.every_steps=4",
    "eval.every=0",
    "eval.final_problems=8",
]


@dataclass(slots=True)
class Tally:
    """What came of all lives. places: kills by what was killed and where."""

    kills: int = 0
    resumed: int = 0
    begun_anew: int = 0
    lost: int = 0
    doubled: int = 0
    faults: list[str] = field(default_factory=list)
    bit_equal: bool | None = None
    places: dict[str, int] = field(default_factory=dict)

    def count(self, place: str) -> None:
        """One more kill."""
        self.kills += 1
        self.places[place] = self.places.get(place, 0) + 1


@dataclass(slots=True)
class Chaos:
    """One of the two runs: where, how many kills are left of its share, what came of it."""

    folder: Path
    kills_left: int
    rng: random.Random
    tally: Tally

    @property
    def log(self) -> Path:
        """What the lives printed."""
        return self.folder / "log.txt"


def live(arguments: list[str], log: Path, kill: str, fault: str, rng: random.Random) -> str:
    """One life. Returns what ended it: "end", "error", or the place of the kill."""
    env = os.environ | {"CHAOS_FAULT": fault}
    if ":" in kill:
        env["CHAOS_KILL"] = kill
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if kill and ":" not in kill:
        kill_at_random(process, kill, rng)
    try:
        code = process.wait(LIFE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "hung"
    if code == 0:
        return "end"
    return kill.rpartition(":")[0] or kill if code == -signal.SIGKILL or kill else "error"


def kill_at_random(process: subprocess.Popen[bytes], whom: str, rng: random.Random) -> None:
    """SIGKILL the controller, or one of its workers, after a random time."""
    scripted = whom == "scripted"
    wait_until = time.monotonic() + (rng.uniform(0.3, 3.0) if scripted else rng.uniform(4.0, 30.0))
    while time.monotonic() < wait_until and process.poll() is None:
        time.sleep(0.05)
    if process.poll() is not None:
        return
    target = process.pid
    if whom.startswith("worker"):
        children = workers_of(process.pid)
        if children:
            target = rng.choice(children)
    try:
        os.kill(target, signal.SIGKILL)
    except ProcessLookupError:
        return


def workers_of(pid: int) -> list[int]:
    """Process ids of the workers of a controller."""
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def until_it_ends(
    run: Path,
    next_life: Callable[[], list[str]],
    next_kill: Callable[[], str],
    chaos: Chaos,
) -> bool:
    """Live after life of one run: killed until the share of kills is used up, then left to end.
    False where a life failed or hung though nobody had broken anything."""
    while True:
        kill = next_kill() if chaos.kills_left else ""
        arguments = next_life()
        fault = chaos.rng.choice(FAULTS)
        ended = live(arguments, chaos.log, kill, fault, chaos.rng)
        if ended != "end" and (run / "summary.json").exists():
            chaos.kills_left -= 1  # killed while it closed: there is nothing left to resume
            chaos.tally.count(f"{run.name.partition('-')[0]} {ended}")
            ended = "end"
        if ended == "end":
            judge(run, chaos.tally)
            return True
        if ended == "hung" or (ended == "error" and not fault.startswith("full")):
            chaos.tally.faults.append(f"{run.name}: a life ended as {ended}, see {chaos.log}")
            return False
        if ended != "error":
            chaos.kills_left -= 1
            chaos.tally.count(f"{run.name.partition('-')[0]} {ended}")


def is_resumable(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*"))


def chaos_scripted(chaos: Chaos) -> None:
    """The run of fakes, begun again as often as it ends."""
    round_ = 0
    while chaos.kills_left:
        round_ += 1
        run = chaos.folder / f"scripted-{round_}"

        def next_life(run: Path = run) -> list[str]:
            chaos.tally.resumed += is_resumable(run)
            return ["scripted", str(run)]

        if not until_it_ends(
            run, next_life, lambda: pick(chaos.rng, "scripted", "scripted"), chaos
        ):
            return


def chaos_builtin(chaos: Chaos) -> None:
    """The built-in task: an undisturbed deterministic run, then replays of it under kills."""
    runs = chaos.folder / "runs"
    train = ["train", "--plain", "--runs", str(runs)]
    sets = [word for key in BUILTIN for word in ("--set", key)]
    if live([*train, *sets], chaos.log, "", "", chaos.rng) != "end":
        chaos.tally.faults.append(f"the undisturbed run failed, see {chaos.log}")
        return
    reference = runs / "reference"
    round_ = 0
    while chaos.kills_left:
        round_ += 1
        run = runs / f"replay-{round_}"

        def next_life(run: Path = run) -> list[str]:
            if is_resumable(run):
                chaos.tally.resumed += 1
                return [*train, "--resume", str(run)]
            chaos.tally.begun_anew += run.exists()
            shutil.rmtree(run, ignore_errors=True)
            return [*train, "--replay-schedule", str(reference), "--set", f"name={run.name}"]

        next_kill = partial(pick, chaos.rng, "controller", "worker", "worker", "worker")
        if not until_it_ends(run, next_life, next_kill, chaos):
            return
        compare(reference, run, chaos.tally)


def pick(rng: random.Random, *others: str) -> str:
    """What the next life is killed by: a point of child.py, or one of `others` at some instant."""
    point = rng.choice([*POINTS, *others])
    if point not in POINTS:
        return point
    return f"{point}:{rng.randint(1, POINTS[point])}:{rng.choice(['before', 'after'])}"


def compare(reference: Path, run: Path, tally: Tally) -> None:
    """Is the replay equal to the bit?"""
    difference = first_difference(reference, run)
    same_model = digest(reference) == digest(run)
    tally.bit_equal = tally.bit_equal is not False and difference is None and same_model
    if difference:
        tally.faults.append(f"{run.name}: {difference}")


def digest(run: Path) -> str:
    """Of the final weights."""
    import hashlib

    data = (run / "model" / "last" / "model.safetensors").read_bytes()
    return hashlib.sha256(data).hexdigest()


def judge(run: Path, tally: Tally) -> None:
    """Add what the files of a finished run say."""
    try:
        verdict = verify_run(run)
    except EstrError as error:
        tally.faults.append(f"{run.name}: {error}")
        return
    tally.lost += verdict.lost + verdict.outstanding
    tally.doubled += verdict.doubled
    tally.faults += [f"{run.name}: {fault}" for fault in verdict.faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["builtin", "scripted"], help="one of the two runs")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="estr-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    builtin = {"builtin": options.kills, "scripted": 0}.get(options.only, options.kills // 5)
    if builtin:
        chaos_builtin(Chaos(folder, builtin, rng, tally))
    chaos_scripted(Chaos(folder, options.kills - builtin, rng, tally))
    print(json.dumps(asdict(tally)))
    if options.keep is None and not tally.faults:
        shutil.rmtree(folder)
    sys.exit(1 if tally.faults or tally.lost or tally.doubled or tally.bit_equal is False else 0)


if __name__ == "__main__":
    main()
