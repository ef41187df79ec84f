"""Load and soak: many groups and many rollouts at once through the real loop, with faults.

    python tools/soak.py --groups 100000            flat throughput, bounded memory?
    python tools/soak.py --minutes 30 --faults 0.05 no leak of memory, handles, tasks or leases?

The engine is the scripted fake and the trainer only counts, so what is loaded is the loop: groups,
members, buffer, schedule, metrics, checkpoints. 2,000 rollouts are under way at a time. With
faults, that share of environment calls raises, hangs, floods or cannot be graded, and as many
engine calls fail. Ends in one JSON line: per tenth of the run groups/s, resident memory, open
files and tasks, and what was left over.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "chaos"))

from scripted import STOP, ChainTrainer, DigitCodec, script

from estr.checkpoint import Checkpoints
from estr.config import Recipe, recipe_from_table
from estr.engine import Request, ScriptedEngine
from estr.environment import Environment, Reply, ScriptedEnvironment
from estr.errors import EngineError, GraderError
from estr.loop import Loop
from estr.metrics import MetricsWriter
from estr.progress import Row, SilentReporter
from estr.rollout import RolloutSetting
from estr.schedule import LOOP_FILE, EventLog, Schedule
from estr.types import SamplingSettings, Segment
from estr.weights import MemoryWeightStore

GROUP_SIZE = 8
GROUPS_PER_STEP = 50
MAX_STALENESS = 4
"""(S + 1) * B * G = 2,000 rollouts at once."""


class FaultyTask:
    """One turn; a share of the environments fails, in every way there is."""

    name = "faulty"
    stop = ("9",)
    max_turns = 2
    unfinished_outcome: float | None = 0.0

    def __init__(self, faults: float, rng: random.Random) -> None:
        self._faults, self._rng = faults, rng
        self._coin = itertools.cycle([0.0, 1.0])

    def size(self, split: str) -> int | None:
        return None

    def make(self, split: str, index: int) -> Environment:
        reply: Reply | Exception = Reply(outcome=next(self._coin))
        delay_s = 0.0
        if self._rng.random() < self._faults:
            kind = self._rng.choice(["raise", "hang", "flood", "grade"])
            if kind == "raise":
                reply = ValueError("the tool broke")
            elif kind == "grade":
                reply = GraderError("cannot be graded")
            elif kind == "flood":
                reply = Reply(observation="1" * 100_000)
            else:
                delay_s = 3600.0
        return ScriptedEnvironment("12", [reply, Reply(outcome=0.0)], delay_s=delay_s)

    def gold(self, split: str, index: int) -> Sequence[str]:
        return []


class FaultyEngine(ScriptedEngine):
    """Fails on a share of the requests."""

    def __init__(self, faults: float, rng: random.Random) -> None:
        super().__init__(script, token_s=0.003)
        self._faults, self._rng = faults, rng

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        if self._rng.random() < self._faults / 4:
            raise EngineError(f"{request.id}: a fault")
        return await super().generate(request, timeout_s)


class Gauge(SilentReporter):
    """Looks at the process after every step; stops the loop when the time is over."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.rows: list[tuple[float, float, int, int]] = []
        self.loop: Loop

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory_mb = pages * resource.getpagesize() / 2**20
        handles = len(os.listdir("/proc/self/fd"))
        self.rows.append((time.monotonic(), memory_mb, handles, len(asyncio.all_tasks())))
        if time.monotonic() > self.until_s:
            self.loop.stop()


def recipe(steps: int) -> Recipe:
    """2,000 rollouts at once, short limits."""
    return recipe_from_table(
        {
            "name": "soak",
            "steps": steps,
            "groups_per_step": GROUPS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_staleness": MAX_STALENESS,
            "rollout": {"timeout_s": 20.0, "step_timeout_s": 5.0, "max_failed_groups": 10_000},
            "sampling": {"max_tokens": 256, "max_new_tokens": 20},
            "checkpoint": {"every_s": 20.0},
        }
    )


async def soak(folder: Path, groups: int, minutes: float, faults: float) -> dict[str, Any]:
    """One run; the figures."""
    steps = -(-groups // GROUPS_PER_STEP) if groups else 10**7
    the_recipe = recipe(steps)
    rng = random.Random(0)
    store = MemoryWeightStore(keep=MAX_STALENESS + 2)
    trainer = ChainTrainer(the_recipe, store)
    engine = FaultyEngine(faults, rng)
    sampling = SamplingSettings(stop_token_ids=(STOP,), max_tokens=256, max_new_tokens=20)
    setting = RolloutSetting(
        engine, FaultyTask(faults, rng), DigitCodec(), sampling, the_recipe.rollout
    )
    gauge = Gauge(time.monotonic() + minutes * 60 if minutes else float("inf"))
    log = EventLog(folder / LOOP_FILE)
    start = time.monotonic()
    with MetricsWriter(folder, tensorboard=False) as writer:
        loop = Loop(
            the_recipe,
            [setting],
            trainer,
            store,
            reporter=gauge,
            writer=writer,
            checkpoints=Checkpoints(folder / "checkpoints"),
            schedule=Schedule(log),
        )
        gauge.loop = loop
        await engine.load(await trainer.publish(), store, "recompute")
        try:
            await loop.run()
        except Exception as error:  # noqa: BLE001 - told in the figures
            ended = f"{type(error).__name__}: {error}"
        else:
            ended = "all steps made"
    log.close()
    return {
        "ended": ended,
        "wall_s": round(time.monotonic() - start, 1),
        "groups": loop.groups.counters["consumed"].total(),
        "failed_groups": loop.groups.counters["failed"].total(),
        "leases_left": len(loop.groups),
        "tasks_left": len(asyncio.all_tasks()) - 1,
        "tenths": tenths(gauge.rows, start),
        "statuses": {
            name.removeprefix("attempts/"): value
            for name, value in loop.totals.to_row().items()
            if name.startswith("attempts/")
        },
    }


def tenths(rows: list[tuple[float, float, int, int]], start: float) -> list[dict[str, float]]:
    """Groups/s, and the most memory, files and tasks, in each tenth of the steps."""
    size = max(1, len(rows) // 10)
    found = []
    for first in range(0, size * 10, size):
        part = rows[first : first + size]
        if not part:
            break
        begin = rows[first - 1][0] if first else start
        found.append(
            {
                "groups_per_s": round(len(part) * GROUPS_PER_STEP / (part[-1][0] - begin), 1),
                "memory_mb": round(max(row[1] for row in part), 1),
                "handles": max(row[2] for row in part),
                "tasks": max(row[3] for row in part),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=0, help="stop after so many")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--faults", type=float, default=0.0, help="share of calls that fail")
    options = parser.parse_args()
    if not options.groups and not options.minutes:
        parser.error("say --groups or --minutes")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(soak(Path(folder), options.groups, options.minutes, options.faults))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
