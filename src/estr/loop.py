"""The asynchronous loop: who waits for whom.

                    problems (estr.problems)
                        |  dispatch, while the bound F admits a group at the engine's version
                        v
      +-------> rollouts of a group ---- Request ---> engine process  (never waits for the trainer)
      |                 |                                   ^
      |                 | finished, >= 2 scored             | load(version), between two tokens
      |                 v                                   |
      |              buffer                             weight store
      |                 |  B groups, oldest deadline first, ^
      |                 |  only if F still holds after      | publish(version)
      |                 v                                   |
      +-- slot -- trainer process -- optimizer step --------+
          freed                      (never waits for rollouts that F does not name)

One task dispatches (`estr.dispatcher`), one trains (here), one brings new versions to the engine
(`estr.engine_versions`), one watches; each group's rollouts are a task of their own. Synchronous
training is the same code with max_staleness = 0: F then admits B groups at a version, and no more
until the engine has the next one. The proof of the bound stands in docs/the-loop.md; it is asserted
again at every consumption.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .buffer import StepResult, TrainingGroup, build_buffer
from .config import Recipe
from .dispatcher import Dispatcher
from .engine_versions import EngineVersions
from .errors import Interrupted, WeightsError, first_raised
from .evaluations import Accuracy, Evaluations
from .group_endings import GroupEndings
from .members import Members, finished_trajectories, unpack_members
from .metrics import Metrics
from .problems import build_problems
from .progress import Reporter
from .rollout import RolloutSetting
from .rollout_state import Columns, SegmentPool
from .run_metrics import RunMetrics
from .schedule import Position, Schedule
from .types import Finding, RolloutId, Segment
from .weights import WeightStore

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .evaluation import EvalResult
    from .ledger import LedgerWriter
    from .metrics import MetricsWriter
    from .trainer_process import TrainerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What watches the processes around the loop; all of it may be left out.

    watchers: each runs as long as the loop and raises when something has died. gauges: further
    figures of each step. canaries: asks the guard whether the engine computes with the weights that
    it claims. engine_position: where the schedule of a deterministic engine stood at the last
    snapshot.
    """

    watchers: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    gauges: Callable[[], dict[str, float]] = dict
    canaries: Callable[[], Coroutine[Any, Any, list[Finding]]] | None = None
    engine_position: Callable[[], Position | None] = lambda: None


class Loop:
    """One training run in flight, over an engine, a trainer and tasks that are up already.

    settings: one for each task, all over one engine.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: Sequence[RolloutSetting],
        trainer: TrainerClient,
        store: WeightStore,
        *,
        reporter: Reporter,
        writer: MetricsWriter,
        evaluations: Evaluations | None = None,
        checkpoints: Checkpoints | None = None,
        ledger: LedgerWriter | None = None,
        instruments: Instruments | None = None,
        stop: asyncio.Event | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.recipe = recipe
        self.engine = settings[0].engine
        self.trainer = trainer
        self.store = store
        self.reporter = reporter
        self.writer = writer
        self.evaluations = evaluations or Evaluations(recipe.eval)
        self.evaluations.on_result = self._evaluated
        self.checkpoints = checkpoints
        self.ledger = ledger
        self.instruments = instruments or Instruments()
        self.schedule = schedule or Schedule()
        self.step = 0
        self.version = 0
        self.problems = build_problems(recipe, [s.task for s in settings], settings[0].split)
        self.metrics = RunMetrics(writer, reporter, self.problems, self.instruments.gauges)
        self.totals = self.metrics.totals
        self.buffer = build_buffer(recipe)
        self.groups = self.buffer.groups
        self._decode = settings[0].codec.decode
        self._members = Members(
            recipe, {s.task.name: s for s in settings}, self.schedule, self.totals
        )
        self._dispatcher = Dispatcher(
            self.engine,
            self.problems,
            self._members,
            self.buffer,
            endings=GroupEndings(
                recipe.rollout.max_failed_groups, self.groups.max_issues, self.totals, reporter
            ),
            schedule=self.schedule,
        )
        self._versions = EngineVersions(
            self.engine, store, self._members, self.schedule, kv=recipe.kv, on_load=self._loaded
        )
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._stop = stop or asyncio.Event()
        self._running = False
        self._tasks: asyncio.TaskGroup
        self._evaluation: asyncio.Task[None] | None = None

    # -- running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step, the end of the data, or stop(). Raises what went wrong, never an
        ExceptionGroup; Interrupted after stop(), with a checkpoint saved."""
        self.metrics.begin()
        self._saved_at = time.monotonic()
        self._running = True
        self.schedule.on_advance(self._dispatcher.wake)
        try:
            if self.step == 0:
                await self.checkpoint()  # whatever is killed from here on can be resumed
            async with asyncio.TaskGroup() as self._tasks:
                self._dispatcher.begin(self._tasks)
                self._ask_canaries()
                endless = [
                    self._spawn(self._dispatcher.run(), "dispatch"),
                    self._spawn(self._versions.run(), "bring versions"),
                    *(self._spawn(watch(), "watch") for watch in self.instruments.watchers),
                ]
                await self._train_steps()
                for task in endless:
                    task.cancel()
                self._dispatcher.cancel()
                if self._evaluation is not None:
                    await self._until_stop(self._evaluation)
                    if self.stopping:
                        self._evaluation.cancel()
        except BaseExceptionGroup as failures:
            raise first_raised(failures) from failures
        finally:
            self._running = False
            self.metrics.end()
            if self.ledger is not None:
                await self.ledger.close()
        self._members.note_leftover()
        self.totals.add_sum("leftover_groups", len(self.groups))
        self.buffer.leftover()
        if self.stopping:
            await self.checkpoint()  # of a run that was stopped after its last step
            raise Interrupted(f"stopped after step {self.step} of {self.recipe.steps}")

    @property
    def stopping(self) -> bool:
        """Has stop() been called?"""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the run to end after the optimizer step in progress."""
        self._stop.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(work, name=name)

    # -- training -----------------------------------------------------------------------------

    async def _train_steps(self) -> None:
        while await self._batch_is_ready():
            planned = self.schedule.upcoming("train")
            only = None if planned is None else planned["groups"]
            batch = self.buffer.take(self.version, only=only)
            if batch is None:
                break
            self.schedule.note("train", step=self.step, groups=[g.id for m in batch for g in m])
            for group in (g for minibatch in batch for g in minibatch):
                self.problems.record(group.trajectories)
            self._dispatcher.wake()
            results = await self.trainer.train(batch)
            if skipped := sum(result.skipped for result in results):
                self.groups.skip(skipped)
            self.version = results[-1].version
            for groups, result in zip(batch, results, strict=True):
                self._record(groups, result)
                await self._enter(groups, result)
            self._versions.published()
            self._dispatcher.wake()
            self._evaluate_if_due(len(results))
            await self._checkpoint_if_due()
        if self.stopping:
            await self.checkpoint()

    async def _batch_is_ready(self) -> bool:
        """Wait for a batch; False when there will be none, or on stop()."""
        if self.stopping or self.groups.done:
            return False
        ready = asyncio.ensure_future(self._wait_for_batch())
        try:
            await self._until_stop(ready)
            return ready.done() and ready.result() and not self.stopping
        finally:
            ready.cancel()

    async def _until_stop(self, work: asyncio.Future[Any]) -> None:
        """Returns when it has ended, or on stop()."""
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _wait_for_batch(self) -> bool:
        limits = self.recipe.rollout
        # An attempt ends within timeout_s, and its environment is closed within step_timeout_s.
        patience_s = 2.0 * (limits.timeout_s + limits.step_timeout_s) * limits.max_attempts
        if self.schedule.replay is None:
            return await self.buffer.wait_for_batch(patience_s)
        planned = self.schedule.upcoming("train")
        if planned is None:
            return False
        await self.buffer.wait_for_groups(planned["groups"], patience_s)
        await self.schedule.turn("train")
        return True

    def _record(self, groups: list[TrainingGroup], result: StepResult) -> None:
        self.step = result.step
        row = self.metrics.stepped(groups, result)
        self.schedule.note(
            "step",
            step=result.step,
            version=result.version,
            target=result.target_version,
            loss=row.get("loss"),
            grad_norm=row.get("grad_norm"),
            lr=row.get("lr"),
            weights=result.digest,
        )
        self.reporter.stepped(result.step, result.version, self.metrics.wall_s, row)
        shown = groups[0].trajectories[0]
        ids = [int(t) for s in shown.segments for t in s.token_ids]
        self.reporter.rolled_out(shown, self._decode(ids))

    async def _enter(self, groups: list[TrainingGroup], result: StepResult) -> None:
        """The step into the ledger; written beside what follows."""
        if self.ledger is not None:
            await self.ledger.write(
                [t for g in groups for t in g.trajectories],
                result.consumptions,
                step=result.step,
                target_version=result.target_version,
                version=result.version,
            )

    # -- guard --------------------------------------------------------------------------------

    def _loaded(self) -> None:
        """The engine has another version."""
        self._dispatcher.wake()
        self._ask_canaries()

    def _ask_canaries(self) -> None:
        if self.instruments.canaries is not None:
            self._spawn(self._check_canaries(self.instruments.canaries), "canaries")

    async def _check_canaries(
        self, canaries: Callable[[], Coroutine[Any, Any, list[Finding]]]
    ) -> None:
        self.metrics.note_findings(await canaries(), f"after step {self.step}")

    # -- evaluation ---------------------------------------------------------------------------

    def _evaluate_if_due(self, steps_made: int) -> None:
        newest = self.store.latest()
        idle = self._evaluation is None or self._evaluation.done()
        due = self.evaluations.due(self.step, steps_made, self.recipe.steps)
        if due and not idle:
            self.reporter.message(
                f"the evaluation due after step {self.step} is left out: the one before is not "
                "done; raise eval.every, or lower eval.problems or eval.k"
            )
        elif due and newest is not None:
            self._evaluation = self._spawn(self._evaluate_beside(newest), "evaluate")

    async def _evaluate_beside(self, version: int) -> None:
        try:
            await self.evaluations.evaluate(version, self.recipe.eval.problems)
        except WeightsError as error:
            self.reporter.message(f"evaluation of version {version} left out: {error}")

    def _evaluated(self, accuracy: Accuracy, results: Sequence[EvalResult]) -> None:
        self.metrics.evaluated(self.step, accuracy, results)

    # -- checkpoints --------------------------------------------------------------------------

    async def _checkpoint_if_due(self) -> None:
        if self.schedule.replay is not None:
            while (planned := self.schedule.upcoming("train", "checkpoint")) is not None:
                if planned["event"] == "train":
                    return
                await self.schedule.turn("checkpoint")
                await self.checkpoint()
            return
        options = self.recipe.checkpoint
        steps = self.step - self._saved_step
        by_steps = options.every_steps > 0 and steps >= options.every_steps
        if by_steps or time.monotonic() - self._saved_at >= options.every_s:
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Save the whole state now, between two optimizer steps. In a deterministic run it is an
        event of its own: the engine is brought to the trainer's version and rebuilds its caches,
        as it would after a resume."""
        if self.checkpoints is None or self._saved_step == self.step:
            return
        began = time.monotonic()
        drawn: dict[RolloutId, Segment] = {}
        if self._running:
            self.schedule.note("checkpoint", step=self.step)
            if self.schedule.deterministic and self.step:
                await self._versions.reach(await self.trainer.publish())
            drawn = await self.engine.snapshot()
        # No await between the snapshot and this: what the engine had drawn and what the rollouts
        # had taken from it are of one moment.
        state, columns = self.state(drawn)
        position = self.instruments.engine_position()
        state["engine"] = None if position is None else position.pack()
        self.schedule.sync()
        if self.ledger is not None:
            state["ledger_parts"] = await self.ledger.sync(self.step)
        await self.checkpoints.write(self.step, state, columns, self.trainer.save)
        self._saved_at, self._saved_step = time.monotonic(), self.step
        self.metrics.note_checkpoint(self._saved_at - began)

    def state(self, drawn: Mapping[RolloutId, Segment]) -> tuple[dict[str, Any], Columns]:
        """The controller's part of a checkpoint, as JSON data and columns of tokens. drawn: what
        the engine had drawn of the turns under way, in the order of its rows."""
        self.metrics.account_time()
        pool = SegmentPool()
        state = {
            "step": self.step,
            "version": self.version,
            "problems": self.problems.state(),
            "groups": self.groups.snapshot(self.version),
            "num_filtered": self.buffer.num_filtered,
            "members": self._members.pack(self.groups, drawn, pool),
            "totals": self.totals.to_state(),
            "accuracies": list(self.evaluations.found),
            "wall_s": self.metrics.wall_s,
            "schedule": self.schedule.position(),
        }
        return state, pool.columns()

    def restore(
        self, state: dict[str, Any], columns: Columns, *, exported: int | None = None
    ) -> None:
        """Go on from a checkpoint: every outstanding group as it was, unless S or B have changed so
        that the bound would not hold: then they are dispatched anew, under their old ids.
        exported: the version of the best model so far, as it lies in the run folder."""
        self.step, self.version = state["step"], state["version"]
        self._saved_step = self.step
        self.problems.restore(state["problems"])
        self.buffer.num_filtered = state["num_filtered"]
        members = unpack_members(state["members"], SegmentPool(columns))
        if self.groups.restore(state["groups"], finished_trajectories(members)):
            self._members.restore(self.groups, members)
        else:
            self.reporter.message(
                "groups_per_step or max_staleness have changed: groups under way are begun anew"
            )
        if not self.recipe.in_flight:
            self._members.restart_other_versions(self.version)
        self.totals.merge(Metrics.from_state(state["totals"]))
        self.evaluations.resume([Accuracy(*entry) for entry in state["accuracies"]], exported)
        self.metrics.wall_s = state["wall_s"]

    def under_way(self) -> set[RolloutId]:
        """The rollouts that go on as soon as the run does."""
        return {rollout_id for rollout_id, member in self._members if member.trajectory is None}
