"""The asynchronous loop: who waits for whom.

                    problems (cursor)
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

One task dispatches, one trains, one brings new versions to the engine, one watches; each group's
rollouts are a task of their own. Synchronous training is the same code with max_staleness = 0: F
then admits B groups at a version, and no more until the engine has the next one. The proof of the
bound stands in docs/the-loop.md; it is asserted again at every consumption.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .buffer import Buffer, TrainingGroup
from .config import Recipe
from .errors import EngineError, EstrError, Interrupted, WeightsError
from .groups import Group, Groups
from .metrics import Metrics
from .progress import Reporter
from .rollout import RolloutSetting, run_rollout
from .types import SCORED_STATUSES, RolloutId, Trajectory
from .weights import WeightStore

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .evaluation import EvalResult
    from .ledger import LedgerWriter
    from .metrics import MetricsWriter
    from .trainer import StepResult
    from .trainer_process import TrainerClient


class EvaluatorClient(Protocol):
    """What the loop asks of an evaluator."""

    async def evaluate(self, version: int, num_problems: int) -> EvalResult:
        """Held-out accuracy of a version that the store still has. Raises WeightsError if not."""
        ...

    async def export(self, folder: Path) -> None:
        """The weights evaluated last as a Hugging Face folder."""
        ...


class Loop:
    """One training run in flight, over an engine, a trainer and a task that are up already."""

    def __init__(
        self,
        recipe: Recipe,
        setting: RolloutSetting,
        trainer: TrainerClient,
        store: WeightStore,
        *,
        reporter: Reporter,
        writer: MetricsWriter,
        evaluator: EvaluatorClient | None = None,
        checkpoints: Checkpoints | None = None,
        ledger: LedgerWriter | None = None,
        model_best: Path | None = None,
        watchers: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
        gauges: Callable[[], dict[str, float]] = dict,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.recipe = recipe
        self.setting = setting
        self.engine = setting.engine
        self.trainer = trainer
        self.store = store
        self.reporter = reporter
        self.writer = writer
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.ledger = ledger
        self.model_best = model_best
        self.watchers = watchers
        self.gauges = gauges
        self.groups = Groups(
            groups_per_step=recipe.groups_per_step,
            max_staleness=recipe.max_staleness,
            steps=recipe.steps,
            steps_per_batch=recipe.num_minibatches,
        )
        self.buffer = Buffer(self.groups, advantage=recipe.loss.advantage)
        self.step = 0
        self.version = 0
        self.totals = Metrics()
        self.accuracies: list[tuple[int, float, float]] = []
        """(version, held-out accuracy, lower end of its interval) of every evaluation."""
        self.wall_s = 0.0
        self._cursor = 0
        self._failed_in_a_row = 0
        self._clock = time.monotonic()
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._stop = stop or asyncio.Event()
        self._woken = asyncio.Event()
        self._published = asyncio.Event()
        self._tasks: asyncio.TaskGroup
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._evaluation: asyncio.Task[None] | None = None

    # -- running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step, the end of the data, or stop(). Raises what went wrong, never an
        ExceptionGroup; Interrupted after stop(), with a checkpoint saved."""
        self._clock = self._saved_at = time.monotonic()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                endless = [
                    self._spawn(self._dispatch_groups(), "dispatch"),
                    self._spawn(self._bring_versions(), "bring versions"),
                    *(self._spawn(watch(), "watch") for watch in self.watchers),
                ]
                await self._train_steps()
                for task in [*endless, *self._group_tasks.values()]:
                    task.cancel()
                if self._evaluation is not None and self.stopping:
                    self._evaluation.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        finally:
            self._account_time()
            if self.ledger is not None:
                await self.ledger.close()
        self.totals.add_sum("leftover_groups", len(self.groups))
        self.buffer.leftover()
        if self.stopping:
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

    # -- dispatch and rollouts ----------------------------------------------------------------

    async def _dispatch_groups(self) -> None:
        while True:
            self._woken.clear()
            while group := self._next_group():
                self.groups.start(group)
                task = self._spawn(self._run_group(group), f"group {group.id}")
                self._group_tasks[group.id] = task
            await self._woken.wait()

    def _next_group(self) -> Group | None:
        """A new lease, if the steps left need one and F admits it at the engine's version."""
        version = self.engine.version
        if self.groups.remaining() == 0 or not self.groups.can_dispatch(version):
            return None
        if again := self.groups.reissue(version):
            return again
        size = self.setting.task.size(self.setting.split)
        if size is not None and self._cursor >= size * self.recipe.epochs:
            if not self.groups.closed:
                self.groups.close()
            return None
        problem = self._cursor if size is None else self._cursor % size
        self._cursor += 1
        return self.groups.dispatch(self.setting.task.name, problem, version)

    async def _run_group(self, group: Group) -> None:
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(self._run_member(group, index))
                for index in range(self.recipe.group_size)
            ]
        trajectories = [run.result() for run in runs]
        del self._group_tasks[group.id]
        self.buffer.add(group.id, trajectories)
        if group.state == "finished":
            self._failed_in_a_row = 0
        else:
            self._note_failure(group, trajectories)
        self._woken.set()

    async def _run_member(self, group: Group, index: int) -> Trajectory:
        """One member; what engine, environment or grader failed at is tried again in a fresh
        environment."""
        for attempt in range(self.recipe.rollout.max_attempts):
            trajectory = await run_rollout(
                self.setting,
                RolloutId(self.recipe.seed, group.id, index, attempt),
                group.problem,
                dispatch_version=group.dispatch_version,
                deadline_version=group.deadline,
            )
            self.totals.add_sum(f"attempts/{trajectory.status}", 1.0)
            if trajectory.status in SCORED_STATUSES:
                break
        return trajectory

    def _note_failure(self, group: Group, trajectories: list[Trajectory]) -> None:
        self._failed_in_a_row += 1
        self.totals.add_sum("failed_groups", 1.0)
        errors = [t.error for t in trajectories if t.error]
        reason = errors[0] if errors else "fewer than two members were scored"
        self.reporter.message(f"group {group.id} (problem {group.problem}) failed: {reason}")
        if group.issue + 1 >= self.groups.max_issues:
            self.totals.add_sum("abandoned_problems", 1.0)
            self.reporter.message(
                f"problem {group.problem} is given up: {self.groups.max_issues} groups of it failed"
            )
        if self._failed_in_a_row >= self.recipe.rollout.max_failed_groups:
            raise EngineError(
                f"{self._failed_in_a_row} groups in a row failed "
                f"(rollout.max_failed_groups); the last one: {reason}"
            )

    # -- training -----------------------------------------------------------------------------

    async def _train_steps(self) -> None:
        while await self._batch_is_ready():
            batch = self.buffer.take(self.version)
            if batch is None:
                break
            self._woken.set()
            results = await self.trainer.train(batch)
            if skipped := sum(result.skipped for result in results):
                self.groups.skip(skipped)
            self.version = results[-1].version
            for groups, result in zip(batch, results, strict=True):
                self._record(groups, result)
                await self._enter(groups, result)
            self._published.set()
            self._woken.set()
            self._evaluate_if_due(len(results))
            await self._checkpoint_if_due()
        if self.stopping:
            await self.checkpoint()

    async def _batch_is_ready(self) -> bool:
        """Wait for a batch; False when there will be none, or on stop()."""
        if self.stopping or self.groups.done:
            return False
        limits = self.recipe.rollout
        patience_s = 2.0 * limits.timeout_s * limits.max_attempts
        ready = asyncio.ensure_future(self.buffer.wait_for_batch(patience_s))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
            return ready.done() and ready.result() and not self.stopping
        finally:
            ready.cancel()
            stop.cancel()

    def _record(self, groups: list[TrainingGroup], result: StepResult) -> None:
        self.step = result.step
        self._account_time()
        self.totals.merge(result.metrics)
        if result.skipped:
            self.reporter.message(
                f"step {result.step} taught nothing and was skipped: within each of its groups all "
                "outcomes are equal (advantages compare outcomes, whatever the shaped rewards)"
            )
        row = {**result.metrics.to_row(), **self.gauges()}
        self.writer.write(step=result.step, version=result.version, wall_s=self.wall_s, values=row)
        self.reporter.stepped(result.step, result.version, self.wall_s, row)
        shown = groups[0].trajectories[0]
        ids = [int(t) for s in shown.segments for t in s.token_ids]
        self.reporter.rolled_out(shown, self.setting.codec.decode(ids))

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

    async def _bring_versions(self) -> None:
        """Give the engine the newest published version, again and again."""
        while True:
            await self._published.wait()
            self._published.clear()
            newest = self.store.latest()
            if newest is not None and newest > self.engine.version:
                await self.engine.load(newest, self.store, self.recipe.kv)
                self._woken.set()

    # -- evaluation and checkpoints -----------------------------------------------------------

    def _evaluate_if_due(self, steps: int) -> None:
        every = self.recipe.eval.every
        due = every > 0 and self.step % every < steps and self.step < self.recipe.steps
        idle = self._evaluation is None or self._evaluation.done()
        newest = self.store.latest()
        if due and idle and newest is not None:
            self._evaluation = self._spawn(self._evaluate_beside(newest), "evaluate")

    async def _evaluate_beside(self, version: int) -> None:
        try:
            await self.evaluate(version, self.recipe.eval.problems)
        except WeightsError as error:
            self.reporter.message(f"evaluation of version {version} left out: {error}")

    async def evaluate(self, version: int, num_problems: int) -> float | None:
        """Held-out accuracy of a version, recorded; the best one so far is exported."""
        if self.evaluator is None:
            return None
        result = await self.evaluator.evaluate(version, num_problems)
        accuracy, surely = float(result.avg_at_k), float(result.avg_interval[0])
        # Evaluations differ in size, so the best one is that of the highest lower end.
        best = max((lower for _, _, lower in self.accuracies), default=-1.0)
        self.accuracies.append((version, accuracy, surely))
        self._account_time()
        row = {"eval/accuracy": accuracy, "eval/problems": float(result.num_problems)}
        self.writer.write(step=self.step, version=version, wall_s=self.wall_s, values=row)
        self.reporter.evaluated(version, accuracy, result.num_problems)
        if surely > best and self.model_best is not None:
            await self.evaluator.export(self.model_best)
        return accuracy

    async def _checkpoint_if_due(self) -> None:
        options = self.recipe.checkpoint
        steps = self.step - self._saved_step
        by_steps = options.every_steps > 0 and steps >= options.every_steps
        if by_steps or time.monotonic() - self._saved_at >= options.every_s:
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Save the whole state now, between two optimizer steps."""
        if self.checkpoints is None or (self._saved_step == self.step and self.step > 0):
            return
        state = self.state()
        if self.ledger is not None:
            state["ledger_parts"] = await self.ledger.sync(self.step)
        await self.checkpoints.write(self.step, state, self.trainer.save)
        self._saved_at, self._saved_step = time.monotonic(), self.step

    def state(self) -> dict[str, Any]:
        """The controller's part of a checkpoint, as JSON."""
        self._account_time()
        return {
            "step": self.step,
            "version": self.version,
            "cursor": self._cursor,
            "groups": self.groups.snapshot(self.version),
            "totals": self.totals.to_state(),
            "accuracies": self.accuracies,
            "wall_s": self.wall_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: outstanding groups are dispatched anew, under their old ids."""
        self.step, self.version = state["step"], state["version"]
        self._saved_step = self.step
        self._cursor = state["cursor"]
        self.groups.restore(state["groups"])
        self.totals = Metrics.from_state(state["totals"])
        self.accuracies = [(int(v), float(a), float(low)) for v, a, low in state["accuracies"]]
        self.wall_s = state["wall_s"]

    def _account_time(self) -> None:
        now = time.monotonic()
        self.wall_s += now - self._clock
        self._clock = now


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first one raised on purpose, else the first of all."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [failures]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, EstrError)), leaves[0])
