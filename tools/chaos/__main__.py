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
from dataclasses import asdict, dataclass, field
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


def chaos_scripted(folder: Path, kills: int, rng: random.Random, tally: Tally) -> None:
    """The run of fakes: killed until it has had its share, begun anew as often as it finishes."""
    done, round_ = 0, 0
    while done < kills:
        round_ += 1
        run = folder / f"scripted-{round_}"
        while True:
            if done < kills:
                point = rng.choice([*POINTS, "scripted", "scripted"])
                if point in ("message", "scripted"):
                    kill = "scripted"
                else:
                    at = rng.randint(1, POINTS[point])
                    kill = f"{point}:{at}:{rng.choice(['before', 'after'])}"
            else:
                kill = ""
            existed = any((run / "checkpoints").glob("step-*"))
            fault = rng.choice(FAULTS)
            ended = live(["scripted", str(run)], folder / "log.txt", kill, fault, rng)
            tally.resumed += existed
            if ended == "end":
                break
            if ended != "error":
                done += 1
                tally.count(f"scripted {ended}")
            elif not fault.startswith("full"):
                tally.faults.append(f"{run.name}: a life ended in an error, see {folder}/log.txt")
                return
        judge(run, tally)


def chaos_builtin(folder: Path, kills: int, rng: random.Random, tally: Tally) -> None:
    """The built-in task: an undisturbed deterministic run, then replays of it under kills."""
    runs = folder / "runs"
    sets = [word for key in BUILTIN for word in ("--set", key)]
    base = ["train", "--plain", "--runs", str(runs)]
    if live([*base, *sets], folder / "log.txt", "", "", rng) != "end":
        tally.faults.append(f"the undisturbed run failed, see {folder}/log.txt")
        return
    reference = runs / "reference"
    done, round_ = 0, 0
    while done < kills:
        round_ += 1
        run = runs / f"replay-{round_}"
        while True:
            kill = pick_builtin(rng) if done < kills else ""
            whole = any((run / "checkpoints").glob("step-*"))
            if whole:
                arguments = ["train", "--plain", "--runs", str(runs), "--resume", str(run)]
                tally.resumed += 1
            else:
                tally.begun_anew += run.exists()
                shutil.rmtree(run, ignore_errors=True)
                arguments = [
                    *base,
                    "--replay-schedule",
                    str(reference),
                    "--set",
                    f"name={run.name}",
                ]
            fault = rng.choice(FAULTS)
            ended = live(arguments, folder / "log.txt", kill, fault, rng)
            if ended == "end":
                break
            if ended != "error":
                done += 1
                tally.count(f"builtin {ended}")
            elif not fault.startswith("full"):
                tally.faults.append(f"{run.name}: a life ended in an error, see {folder}/log.txt")
                return
        judge(run, tally)
        difference = first_difference(reference, run)
        same_model = digest(reference) == digest(run)
        tally.bit_equal = tally.bit_equal is not False and difference is None and same_model
        if difference:
            tally.faults.append(f"{run.name}: {difference}")


def pick_builtin(rng: random.Random) -> str:
    point = rng.choice([*POINTS, "controller", "worker", "worker", "worker"])
    if point not in POINTS:
        return point
    return f"{point}:{rng.randint(1, POINTS[point])}:{rng.choice(['before', 'after'])}"


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
        chaos_builtin(folder, builtin, rng, tally)
    chaos_scripted(folder, options.kills - builtin, rng, tally)
    print(json.dumps(asdict(tally)))
    if options.keep is None and not tally.faults:
        shutil.rmtree(folder)
    sys.exit(1 if tally.faults or tally.lost or tally.doubled or tally.bit_equal is False else 0)


if __name__ == "__main__":
    main()
