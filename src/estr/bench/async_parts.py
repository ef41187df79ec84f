"""What `estr bench async` measures with: processes that stay up, and a loop that is watched.

All kinds of training that a small model is measured under share a `Pair` wherever its engine and
trainer are those that they need; every measurement begins at the same weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from ..buffer import TrainingGroup
from ..config import Recipe
from ..engines.process import EngineProcess
from ..errors import ConfigError
from ..loop import Instruments, Loop
from ..metrics import MetricsWriter
from ..progress import Row, SilentReporter
from ..rollout import RolloutSetting, run_rollout
from ..subject import model_folder, resolve_play
from ..trainer_process import TrainerProcess
from ..types import RolloutId, Trajectory
from ..weights import FileWeightStore
from ..worker import busy_share

Facts = dict[str, float]

_LARGE_MODEL_BYTES = 100_000_000


class Kind(NamedTuple):
    """A way to train. max_staleness None: that of the recipe; threads: of each process."""

    max_staleness: int | None = None
    in_flight: bool = True
    threads: int = 1

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe, trained in this way."""
        bound = recipe.max_staleness if self.max_staleness is None else self.max_staleness
        return dataclasses.replace(
            recipe,
            max_staleness=bound,
            in_flight=self.in_flight,
            engine=dataclasses.replace(recipe.engine, threads=self.threads),
            trainer=dataclasses.replace(recipe.trainer, threads=self.threads),
        )


class Step(NamedTuple):
    """An optimizer step: seconds of training until its end, its tokens, the version after it."""

    wall_s: float
    tokens: float
    version: int


class Measure(NamedTuple):
    """steps of one measurement, of which the first warmup_steps are not timed."""

    steps: int
    warmup_steps: int

    def check(self) -> None:
        """Raises ConfigError where too few steps are left to be timed."""
        if not 1 <= self.warmup_steps <= self.steps - 2:
            raise ConfigError(
                f"measure.warmup_steps = {self.warmup_steps} must be at least 1 and leave two of "
                f"measure.steps = {self.steps}"
            )


class Clock(SilentReporter):
    """Every optimizer step, and an event once the first `warmup_steps` are done."""

    def __init__(self, warmup_steps: int) -> None:
        self.steps: list[Step] = []
        self.warm = asyncio.Event()
        self._warmup_steps = warmup_steps

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        self.steps.append(Step(wall_s, row["eligible_tokens"] or 0.0, version))
        if step >= self._warmup_steps:
            self.warm.set()

    def rates(self) -> Facts:
        """Trained tokens per second and seconds per step, after the warm-up."""
        timed = self.steps[self._warmup_steps :]
        wall_s = timed[-1].wall_s - self.steps[self._warmup_steps - 1].wall_s
        return {
            "tokens_per_s": sum(step.tokens for step in timed) / wall_s,
            "step_s": wall_s / len(timed),
        }


@asynccontextmanager
async def open_pair(recipe: Recipe, keep: int | None = None) -> AsyncIterator[Pair]:
    """Engine and trainer of a recipe, and a state of the trainer to begin every measurement at.
    keep: how many versions of the weights to keep; None: as many as a run does."""
    model = model_folder(recipe)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folder = Path(scratch)
        store = FileWeightStore(folder / "weights", keep=keep or recipe.max_staleness + 2)
        engine, trainer = await asyncio.gather(
            EngineProcess.start(model, recipe.engine, in_flight=recipe.in_flight),
            TrainerProcess.start(model, recipe, store),
        )
        try:
            (folder / "start").mkdir()
            await trainer.save(folder / "start")
            play = resolve_play(model, recipe, temperature=recipe.sampling.temperature)
            setting = RolloutSetting(engine, *play, recipe.rollout)
            yield Pair(recipe, setting, engine, trainer, store, folder)
        finally:
            await asyncio.gather(engine.close(), trainer.close())


@asynccontextmanager
async def open_pairs(recipe: Recipe) -> AsyncIterator[PairFor]:
    """Pairs by the processes that a kind needs. They stay up until the end, shared by kinds of the
    same needs; with a large model, of which no four pairs fit into memory, each is opened anew
    whenever it is asked for and closed after it."""
    files = model_folder(recipe).glob("*.safetensors")
    is_large = sum(file.stat().st_size for file in files) > _LARGE_MODEL_BYTES
    opened: dict[Kind, Pair] = {}
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def pair_for(kind: Kind) -> AsyncIterator[Pair]:
            needs = Kind(in_flight=kind.in_flight, threads=kind.threads)
            if is_large:
                async with open_pair(needs.of(recipe)) as pair:
                    yield pair
                return
            if needs not in opened:
                opened[needs] = await stack.enter_async_context(open_pair(needs.of(recipe)))
            yield opened[needs]

        yield pair_for


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """An engine and a trainer that stay up between measurements."""

    recipe: Recipe
    setting: RolloutSetting
    engine: EngineProcess
    trainer: TrainerProcess
    store: FileWeightStore
    folder: Path

    async def reset(self) -> None:
        """Weights, optimizer and counters as at the start, in trainer and engine."""
        await self.trainer.restore(self.folder / "start")
        await self.engine.load(await self.trainer.publish(), self.store, self.recipe.kv)

    async def loop(self, recipe: Recipe, clock: Clock) -> Facts:
        """Train from the start, watched by the clock; what the whole loop did (`_facts`), the CPU
        time that all of it took, and how busy both processes were after the warm-up."""
        await self.reset()
        start = await self._statistics()
        before: list[dict[str, float]] = []

        async def when_warm() -> None:
            await clock.warm.wait()
            before.extend(await self._statistics())

        with (
            tempfile.TemporaryDirectory(dir=self.folder) as run,
            MetricsWriter(run, tensorboard=False) as writer,
        ):
            loop = Loop(
                recipe,
                [self.setting],
                self.trainer,
                self.store,
                reporter=clock,
                writer=writer,
                instruments=Instruments(watchers=[when_warm]),
            )
            await loop.run()
        after = await self._statistics()
        facts = _facts(loop.totals.to_row(), start[0], after[0])
        for place, name in enumerate(("engine", "trainer")):
            facts[f"{name}_busy"] = busy_share(before[place], after[place])
        facts["cpu_s"] = sum(a["cpu_s"] - s["cpu_s"] for s, a in zip(start, after, strict=True))
        return facts

    async def _statistics(self) -> list[Facts]:
        """Of engine, trainer, and the CPU time of this process, which holds the environments."""
        own = {"cpu_s": time.process_time()}
        return [await self.engine.statistics(), await self.trainer.statistics(), own]

    async def alone(self, measure: Measure) -> Facts:
        """Tokens per second of generation and of training, one after the other."""
        await self.reset()
        groups, generation = await _generate(self.recipe, self.setting, measure)
        training = await _train(self.recipe, self.trainer, groups, measure)
        return {"generation": generation, "training": training}


PairFor = Callable[[Kind], AbstractAsyncContextManager[Pair]]


def _facts(totals: Row, before: Facts, after: Facts) -> Facts:
    """Realized staleness, in versions, and work that nobody trained on: shares of the tokens that
    the engine drew. Tokens computed again are those of caches filled anew after a switch."""
    drawn = after["tokens"] - before["tokens"]
    trained = totals["eligible_tokens"] or 0.0
    again = after.get("recomputed_tokens", 0.0) - before.get("recomputed_tokens", 0.0)
    return {
        **{
            f"{name}_{what}": totals.get(f"{name}_{what}") or 0.0
            for name in ("intra", "inter")
            for what in ("mean", "max")
        },
        "discarded_share": (drawn - trained) / drawn,
        "recomputed_share": again / drawn,
        "length_mean": totals.get("length_mean") or 0.0,
        "outcome_mean": totals.get("outcome_mean") or 0.0,
        "failed_groups": totals.get("failed_groups") or 0.0,
        "leftover_groups": totals.get("leftover_groups") or 0.0,
    }


async def _generate(
    recipe: Recipe, setting: RolloutSetting, measure: Measure
) -> tuple[list[list[Trajectory]], float]:
    """All groups of the measurement, with as many at once as the loop may have outstanding."""
    room = asyncio.Semaphore((recipe.max_staleness + 1) * recipe.groups_per_step)
    ends: list[tuple[float, int]] = []

    async def one(group: int) -> list[Trajectory]:
        async with room:
            members = await asyncio.gather(
                *(
                    run_rollout(
                        setting,
                        RolloutId(recipe.seed, group, index),
                        group,
                        dispatch_version=0,
                        deadline_version=group,
                    )
                    for index in range(recipe.group_size)
                )
            )
        ends.append((time.monotonic(), sum(t.num_sampled_tokens for t in members)))
        return list(members)

    count = measure.steps * recipe.groups_per_step
    groups = await asyncio.gather(*(one(group) for group in range(count)))
    warm = measure.warmup_steps * recipe.groups_per_step
    tokens = sum(n for _, n in ends[warm:])
    return groups, tokens / (ends[-1][0] - ends[warm - 1][0])


async def _train(
    recipe: Recipe,
    trainer: TrainerProcess,
    groups: list[list[Trajectory]],
    measure: Measure,
) -> float:
    """The same groups, one batch after the other."""
    size = recipe.groups_per_step
    ends: list[tuple[float, int]] = []
    for step in range(measure.steps):
        members = groups[step * size : (step + 1) * size]
        batch = [
            TrainingGroup(
                step * size + place,
                step,
                tuple(group),
                tuple(1.0 if i % 2 else -1.0 for i in range(len(group))),
            )
            for place, group in enumerate(members)
        ]
        await trainer.train([batch])
        tokens = sum(t.num_sampled_tokens for group in members for t in group)
        ends.append((time.monotonic(), tokens))
    warm = measure.warmup_steps
    tokens = sum(n for _, n in ends[warm:])
    return float(tokens / (ends[-1][0] - ends[warm - 1][0]))
