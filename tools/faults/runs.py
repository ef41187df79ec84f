"""Runs of the built-in task in one process: real loop, engine, trainer, a fault in one seam."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from injectors import Fault, Minibatches, State

import estr.engines.local
from estr.buffer import StepResult
from estr.config import Recipe, load_recipe
from estr.engine import KVPolicy, Request
from estr.engines.in_process import InProcessEngine
from estr.engines.local import LocalEngine
from estr.errors import GuardError, Interrupted
from estr.loop import Instruments, Loop
from estr.metrics import MetricsWriter
from estr.models import load_model, resolve_model, vocabulary_size
from estr.progress import SilentReporter
from estr.rollout import RolloutSetting
from estr.subject import resolve_play
from estr.trainer_process import TrainerHost
from estr.types import Finding, Segment
from estr.weights import MemoryWeightStore, WeightStore

ARMED_AFTER = 3
"""Optimizer steps before the fault begins."""


@dataclass(slots=True)
class Outcome:
    """What became of one run. first_hit: the step that would train on the first faulty data.
    caught: the step before which the first finding came, named by check and kind."""

    fault: str
    steps: int = 0
    first_hit: int | None = None
    caught: int | None = None
    check: str = ""
    kind: str = ""
    message: str = ""
    findings: dict[str, int] = field(default_factory=dict)
    rescored_tokens: int = 0
    gap: float = 0.0
    guard_s: float = 0.0
    cpu_s: float = 0.0
    switched: int = 0
    stopped: bool = False


class _Weights:
    """A store whose states a fault may change on their way to the engine."""

    def __init__(self, store: WeightStore, fault: Fault) -> None:
        self._store, self._fault = store, fault

    def fetch(self, version: int) -> State:
        state = self._store.fetch(version)
        self._fault.history.append(state)
        return self._fault.state(state) if self._fault.armed else state

    def publish(self, version: int, state: Any) -> str:
        return self._store.publish(version, state)

    def latest(self) -> int | None:
        return self._store.latest()


class FaultyEngine(InProcessEngine):
    """The engine with a fault in what it takes and gives."""

    def __init__(self, model: Any, engine: LocalEngine, fault: Fault) -> None:
        super().__init__(engine)
        self._model, self._fault = model, fault

    async def generate(self, request: Request, timeout_s: float) -> Segment:
        fault = self._fault
        asked = fault.request(request) if fault.armed else request
        segment = await super().generate(asked, timeout_s)
        return fault.answer(request, segment) if fault.armed else segment

    async def load(self, version: int, weights: WeightStore, kv: KVPolicy) -> None:
        fault = self._fault
        running = set(self._answers)
        await super().load(version, _Weights(weights, fault), fault.kv(kv) if fault.armed else kv)
        if fault.armed:
            fault.loaded(self._model, running)


class FaultyTrainer:
    """The trainer's host in this process, behind a fault in what it is given."""

    def __init__(self, host: TrainerHost, fault: Fault, outcome: Outcome) -> None:
        self._host, self._fault, self._outcome = host, fault, outcome
        self.loop: Loop

    async def train(self, minibatches: Minibatches) -> list[StepResult]:
        fault, outcome = self._fault, self._outcome
        step = self.loop.step + 1
        if fault.armed:
            before = fault.batches_hit
            minibatches = fault.batch(minibatches)
            ids = {t.id for group in minibatches[0] for t in group.trajectories}
            if outcome.first_hit is None and (ids & fault.hit or fault.batches_hit > before):
                outcome.first_hit = step
        outcome.switched += sum(t.intra > 0 for g in minibatches[0] for t in g.trajectories)
        try:
            results = self._host.train(minibatches)
        except GuardError:
            outcome.stopped = True
            raise
        for result in results:
            self.note(result.findings, step)
            row = result.metrics.to_row()
            outcome.guard_s += row.get("guard_s") or 0.0
            outcome.rescored_tokens += int(row.get("guard_rescored_tokens") or 0)
            outcome.gap = max(outcome.gap, row.get("guard_gap") or 0.0)
        outcome.steps = step
        fault.armed = fault.armed or (step >= ARMED_AFTER and fault.name != "clean")
        late = outcome.first_hit is not None and step >= outcome.first_hit + 2
        if outcome.first_hit is not None and (outcome.caught is not None or late):
            self.loop.stop()
        return results

    def note(self, findings: Sequence[Finding], step: int) -> None:
        outcome = self._outcome
        for finding in findings:
            name = f"{finding.check}/{finding.kind}"
            outcome.findings[name] = outcome.findings.get(name, 0) + 1
            if outcome.caught is None:
                outcome.caught = step
                outcome.check, outcome.kind = finding.check, finding.kind
                outcome.message = finding.message

    async def check_canaries(self, canaries: Sequence[Segment]) -> list[Finding]:
        found = self._host.check_canaries(canaries, {"cpu_s": 0.0, "guard_s": 0.0})
        self.note(found, self.loop.step + 1)
        return found

    async def publish(self) -> int:
        return self._host.publish()

    async def save(self, folder: Path) -> None:
        self._host.save(folder)

    async def restore(self, folder: Path) -> int:
        return self._host.restore(folder)

    async def export(self, folder: Path) -> None:
        self._host.export(folder)

    async def statistics(self) -> dict[str, float]:
        return self._host.statistics()

    async def close(self) -> None:
        pass


def recipe_of(seed: int, steps: int, overrides: Sequence[str] = ()) -> Recipe:
    """The built-in task with its defaults, in smaller steps."""
    small = ["groups_per_step=4", "group_size=4", f"seed={seed}", f"steps={steps}"]
    return load_recipe(overrides=[*small, *overrides])


def play(folder: Path, recipe: Recipe, fault: Fault, **loop_settings: Any) -> Outcome:
    """One run, up to its last step, or until the fault is caught, or should have been. With
    guard = "stop" it ends in the guard's error, which is noted and not raised."""
    clock = time.process_time()
    outcome = Outcome(fault.name)
    with _uniforms_of(fault):
        asyncio.run(_play(folder, recipe, fault, outcome, loop_settings))
    outcome.cpu_s = round(time.process_time() - clock, 3)
    return outcome


async def _play(
    folder: Path, recipe: Recipe, fault: Fault, outcome: Outcome, loop_settings: dict[str, Any]
) -> None:
    where = resolve_model(recipe.model)
    store = MemoryWeightStore(keep=recipe.max_staleness + 2)
    host = TrainerHost(where, recipe, store)
    if host._guard is not None:
        # Steps of an eighth of the default size leave an eighth of the time for a look at each.
        host._guard.budget.share *= 8.0
    model = load_model(where, dtype=recipe.engine.dtype)
    engine = LocalEngine(
        model, max_batch=recipe.engine.max_batch, vocab_size=vocabulary_size(where, model)
    )
    faulty = FaultyEngine(model, engine, fault)
    temperature = recipe.sampling.temperature
    play = resolve_play(where, recipe, temperature=temperature)
    trainer = FaultyTrainer(host, fault, outcome)

    async def canaries() -> list[Finding]:
        return await trainer.check_canaries(await faulty.probe(temperature))

    with MetricsWriter(folder, tensorboard=False) as writer:
        loop = trainer.loop = Loop(
            recipe,
            [RolloutSetting(faulty, *play, recipe.rollout)],
            trainer,
            store,
            writer=writer,
            instruments=Instruments(canaries=canaries),
            **{"reporter": SilentReporter(), **loop_settings},
        )
        await faulty.load(await trainer.publish(), store, recipe.kv)
        try:
            with contextlib.suppress(Interrupted, GuardError):
                await loop.run()
        finally:
            await faulty.close()


@contextlib.contextmanager
def _uniforms_of(fault: Fault) -> Iterator[None]:
    """Random numbers through the fault, where it has a say in them."""
    change = getattr(fault, "uniforms", None)
    if change is None:
        yield
        return
    real = estr.engines.local.uniforms

    def uniforms(*args: Any) -> np.ndarray:
        return change(real(*args))

    estr.engines.local.uniforms = uniforms
    try:
        yield
    finally:
        estr.engines.local.uniforms = real
