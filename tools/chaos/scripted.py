"""A long run of fakes: the real loop, log, checkpoints and metrics around a scripted engine, slow
environments and a trainer that only remembers. A life of it starts in half a second."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estr.buffer import StepResult
from estr.checkpoint import Checkpoints, saved_columns
from estr.config import Recipe, recipe_from_table
from estr.diagnostics import trajectory_diagnostics
from estr.engine import Request, ScriptedEngine
from estr.environment import Environment, Reply, ScriptedEnvironment
from estr.errors import CheckpointError
from estr.loop import Loop
from estr.metrics import MetricsWriter, supersede_after
from estr.progress import SilentReporter
from estr.rollout import RolloutSetting
from estr.schedule import LOOP_FILE, EventLog, Schedule
from estr.types import SamplingSettings
from estr.weights import MemoryWeightStore

STOP = 9
STEPS = 400


class DigitCodec:
    """Text is token ids, written as digits."""

    def encode_prompt(self, prompt: Any) -> list[int]:
        return [int(c) for c in prompt]

    def encode_observation(self, observation: Any, last_id: int | None) -> list[int]:
        return [int(c) for c in observation]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(str, token_ids))


class TwoTurns:
    """Two turns; the outcome is the parity of what was written."""

    name = "two-turns"
    stop = ("9",)
    max_turns = 4
    unfinished_outcome: float | None = 0.0

    def size(self, split: str) -> int | None:
        return None

    def make(self, split: str, index: int) -> Environment:
        replies = [Reply(observation="34"), Reply(outcome=float(index % 2))]
        environment = _Parity("12", replies, delay_s=0.002 * (1 + index % 5))
        return environment

    def gold(self, split: str, index: int) -> Sequence[str]:
        return []


class _Parity(ScriptedEnvironment):
    async def step(self, action: Any) -> Reply:
        reply = await super().step(action)
        if reply.observation is not None:
            return reply
        return Reply(outcome=float(sum(action.token_ids) % 2))


def script(request: Request) -> list[int]:
    """Tokens that depend on the rollout and the turn only."""
    key = f"{request.id} {request.first_position}".encode()
    digest = hashlib.sha256(key).digest()
    return [b % 9 for b in digest[: 3 + digest[0] % 12]] + [STOP]


class ChainTrainer:
    """Its weights are a digest of every token that it was trained on, in order."""

    def __init__(self, recipe: Recipe, store: MemoryWeightStore) -> None:
        self.recipe, self.store = recipe, store
        self.step = self.version = 0
        self.chain = ""

    async def train(self, minibatches: Sequence[Sequence[Any]]) -> list[StepResult]:
        results = []
        for groups in minibatches:
            await asyncio.sleep(0.004)
            metrics = trajectory_diagnostics(
                [t for g in groups for t in g.trajectories],
                target_version=self.version,
                max_staleness=self.recipe.max_staleness,
            )
            metrics.add_sum("loss", 0.0)
            metrics.add_max("lr", 0.1)
            for group in groups:
                for t in group.trajectories:
                    ids = t.segments[0].token_ids.tobytes()
                    self.chain = hashlib.sha256(self.chain.encode() + ids).hexdigest()
            target, self.version, self.step = self.version, self.version + 1, self.step + 1
            results.append(StepResult(self.step, target, self.version, metrics, self.chain))
        await self.publish()
        return results

    async def publish(self) -> int:
        self.store.publish(self.version, {})
        return self.version

    async def save(self, folder: Path) -> None:
        state = {"step": self.step, "version": self.version, "chain": self.chain}
        (folder / "trainer.json").write_text(json.dumps(state))

    async def restore(self, folder: Path) -> int:
        state = json.loads((folder / "trainer.json").read_text())
        self.step, self.version, self.chain = state["step"], state["version"], state["chain"]
        return self.version

    async def export(self, folder: Path) -> None:
        pass

    async def statistics(self) -> dict[str, float]:
        return {"busy_s": 0.0, "wall_s": 1.0}

    async def close(self) -> None:
        pass


def recipe() -> Recipe:
    """Small groups, many steps, a checkpoint every seventh."""
    return recipe_from_table(
        {
            "name": "scripted",
            "steps": STEPS,
            "groups_per_step": 3,
            "group_size": 2,
            "max_staleness": 3,
            "checkpoint": {"every_steps": 7},
        }
    )


def run(folder: Path) -> None:
    """One life: from the newest checkpoint in `folder`, or from nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_run(folder))


async def _run(folder: Path) -> None:
    the_recipe = recipe()
    (folder / "config.toml").write_text(the_recipe.to_toml())
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        saved, state, _ = checkpoints.newest()
    except CheckpointError:
        saved, state = None, None
        for path in (folder / LOOP_FILE, folder / "metrics.jsonl"):
            path.unlink(missing_ok=True)  # nothing was ever saved: it begins anew
    log = EventLog(folder / LOOP_FILE, keep_lines=state["schedule"]["lines"] if state else None)
    if state is None:
        log.write("start", seed=0, groups_per_step=3, num_minibatches=1, max_staleness=3)
    else:
        supersede_after(folder, state["step"])
    store = MemoryWeightStore(keep=the_recipe.max_staleness + 2)
    trainer = ChainTrainer(the_recipe, store)
    engine = ScriptedEngine(script, token_s=0.0005)
    sampling = SamplingSettings(stop_token_ids=(STOP,), max_new_tokens=20)
    setting = RolloutSetting(engine, TwoTurns(), DigitCodec(), sampling, the_recipe.rollout)
    with MetricsWriter(folder, tensorboard=False) as writer:
        loop = Loop(
            the_recipe,
            [setting],
            trainer,
            store,
            reporter=SilentReporter(),
            writer=writer,
            checkpoints=checkpoints,
            schedule=Schedule(log),
        )
        if saved is not None:
            await trainer.restore(saved)
            loop.restore(state, saved_columns(saved))
        await engine.load(await trainer.publish(), store, "recompute")
        await loop.run()
        await loop.checkpoint()
    log.close()
    (folder / "chain.json").write_text(json.dumps({"steps": loop.step, "chain": trainer.chain}))
