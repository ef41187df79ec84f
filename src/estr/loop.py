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

One task dispatches, one trains, one brings new versions to the engine, one watches; each group's
rollouts are a task of their own. Synchronous training is the same code with max_staleness = 0: F
then admits B groups at a version, and no more until the engine has the next one. The proof of the
bound stands in docs/the-loop.md; it is asserted again at every consumption.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .buffer import MIN_SCORED, Buffer, StepResult, TrainingGroup
from .config import Recipe
from .diagnostics import task_diagnostics
from .errors import EngineError, EstrError, Interrupted, WeightsError
from .evaluations import Accuracy, Evaluations, mean_and_interval
from .group import Group
from .groups import Groups
from .members import Members, finished_trajectories, unpack_members
from .metrics import Metrics
from .options.tasks import entries
from .problems import Problems
from .progress import Reporter
from .rollout import RolloutSetting
from .rollout_state import Columns, SegmentPool
from .schedule import Position, Schedule
from .types import Finding, RolloutId, Segment, Trajectory
from .weights import WeightStore

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .evaluation import EvalResult
    from .ledger import LedgerWriter
    from .metrics import MetricsWriter
    from .trainer_process import TrainerClient


NAMED_FAILURES = 3
"""Failed groups that are told one by one, of those with one reason."""

MORE_FAILURES = " (more groups that fail in this way are only counted, as failed_groups)"


class Loop:
    """One training run in flight, over an engine, a trainer and a task that are up already."""

    def __init__(
        self,
        recipe: Recipe,
        setting: RolloutSetting,
        trainer: TrainerClient,
        store: WeightStore,
        *,
        other_settings: Sequence[RolloutSetting] = (),
        reporter: Reporter,
        writer: MetricsWriter,
        evaluations: Evaluations | None = None,
        checkpoints: Checkpoints | None = None,
        ledger: LedgerWriter | None = None,
        watchers: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
        gauges: Callable[[], dict[str, float]] = dict,
        canaries: Callable[[], Coroutine[Any, Any, list[Finding]]] | None = None,
        stop: asyncio.Event | None = None,
        schedule: Schedule | None = None,
        engine_position: Callable[[], Position | None] = lambda: None,
    ) -> None:
        self.recipe = recipe
        self.setting = setting
        self.settings = {s.task.name: s for s in (setting, *other_settings)}
        self.engine = setting.engine
        self.trainer = trainer
        self.store = store
        self.reporter = reporter
        self.writer = writer
        self.evaluations = evaluations or Evaluations(recipe.eval)
        self.evaluations.on_result = self._evaluated
        self.checkpoints = checkpoints
        self.ledger = ledger
        self.watchers = watchers
        self.gauges = gauges
        self.canaries = canaries
        """Asks the guard whether the engine computes with the weights that it claims."""
        self.schedule = schedule or Schedule()
        self.engine_position = engine_position
        self.groups = Groups(
            groups_per_step=recipe.groups_per_step,
            max_staleness=recipe.max_staleness,
            steps=recipe.steps,
            steps_per_batch=recipe.num_minibatches,
        )
        self.buffer = Buffer(
            self.groups,
            recipe.loss.advantage,
            recipe.loss.variance_of,
            max_filtered=recipe.rollout.max_filtered_groups,
        )
        self.step = 0
        self.version = 0
        self.totals = Metrics()
        self.wall_s = 0.0
        self.problems = Problems(
            {name: s.task for name, s in self.settings.items()},
            split=setting.split,
            weights={entry.label: entry.weight for entry in entries(recipe.task)},
            epochs=recipe.epochs,
            curriculum=recipe.curriculum,
        )
        self._failed_in_a_row = 0
        self._reasons: Counter[str] = Counter()
        self._clock = time.monotonic()
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._found = Metrics()
        self._shown: set[tuple[str, str]] = set()
        self._checkpoint_s = 0.0
        self._stop = stop or asyncio.Event()
        self._woken = asyncio.Event()
        self._published = asyncio.Event()
        self._loaded = asyncio.Event()
        self._running = False
        self._members = Members(recipe, self.settings, self.schedule, self.totals)
        self._tasks: asyncio.TaskGroup
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._evaluation: asyncio.Task[None] | None = None

    # -- running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step, the end of the data, or stop(). Raises what went wrong, never an
        ExceptionGroup; Interrupted after stop(), with a checkpoint saved."""
        self._clock = self._saved_at = time.monotonic()
        self._running = True
        self.schedule.on_advance(self._woken.set)
        try:
            if self.step == 0:
                await self.checkpoint()  # whatever is killed from here on can be resumed
            async with asyncio.TaskGroup() as self._tasks:
                for group in self.groups:
                    if group.state == "running":
                        self._start_group(group)
                self._ask_canaries()
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
            self._running = False
            self._account_time()
            self.totals.merge(self._found)
            if self.ledger is not None:
                await self.ledger.close()
        self._members.note_leftover()
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
                self._members.begin(group.id)
                self._start_group(group)
            await self._woken.wait()

    def _start_group(self, group: Group) -> None:
        task = self._spawn(self._run_group(group), f"group {group.id}")
        self._group_tasks[group.id] = task

    def _next_group(self) -> Group | None:
        """A new lease, if the steps left need one and F admits it at the engine's version."""
        version = self.engine.version
        if self.schedule.replay is not None:
            event = self.schedule.replay.next
            if event is None or event["event"] != "dispatch":
                return None
            version = event["version"]
        if self.groups.remaining() == 0 or not self.groups.can_dispatch(version):
            return None
        group = self.groups.reissue(version) or self._new_group(version)
        if group is not None:
            self.schedule.note(
                "dispatch",
                group=group.id,
                task=group.task,
                problem=group.problem,
                issue=group.issue,
                version=version,
            )
        return group

    def _new_group(self, version: int) -> Group | None:
        """The next problem; at the end of the data None, and no more will come."""
        upcoming = self.problems.next()
        if upcoming is None:
            if not self.groups.closed:
                self.groups.close()
            return None
        return self.groups.dispatch(*upcoming, version)

    async def _run_group(self, group: Group) -> None:
        trajectories = await self._members.play(group)
        scored = sum(t.reward is not None for t in trajectories)
        if scored < MIN_SCORED:
            await self.schedule.turn("fail", group=group.id)
        del self._group_tasks[group.id]
        self._members.end(group.id)
        self.buffer.add(group.id, trajectories)
        if group.state != "failed":
            self._failed_in_a_row = 0
            if group.state == "filtered":
                self.schedule.note("filter", group=group.id)
                self.problems.record(trajectories)
                self.totals.add_sum("filtered_groups", 1.0)
        else:
            self.schedule.note("fail", group=group.id)
            self._note_failure(group, trajectories)
        self._woken.set()

    def _note_failure(self, group: Group, trajectories: list[Trajectory]) -> None:
        self._failed_in_a_row += 1
        self.totals.add_sum("failed_groups", 1.0)
        errors = [t.error for t in trajectories if t.error]
        reason = errors[0] if errors else "fewer than two members were scored"
        # The numbers in a message often differ where the fault is one.
        alike = re.sub(r"\d+", "N", reason)
        self._reasons[alike] += 1
        if self._reasons[alike] <= NAMED_FAILURES:
            more = "" if self._reasons[alike] < NAMED_FAILURES else MORE_FAILURES
            self.reporter.message(
                f"group {group.id} (problem {group.problem}) failed: {reason}{more}"
            )
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
            planned = self.schedule.upcoming("train")
            only = None if planned is None else planned["groups"]
            batch = self.buffer.take(self.version, only=only)
            if batch is None:
                break
            self.schedule.note("train", step=self.step, groups=[g.id for m in batch for g in m])
            for group in (g for minibatch in batch for g in minibatch):
                self.problems.record(group.trajectories)
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
        ready = asyncio.ensure_future(self._wait_for_batch())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
            return ready.done() and ready.result() and not self.stopping
        finally:
            ready.cancel()
            stop.cancel()

    async def _wait_for_batch(self) -> bool:
        limits = self.recipe.rollout
        patience_s = 2.0 * limits.timeout_s * limits.max_attempts
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
        self._account_time()
        self._note_findings(result.findings, f"before step {result.step}")
        result.metrics.merge(self._found)
        self._found = Metrics()
        if len(self.settings) > 1:
            result.metrics.merge(task_diagnostics([t for g in groups for t in g.trajectories]))
        self.totals.merge(result.metrics)
        if result.skipped:
            self.reporter.message(
                f"step {result.step} taught nothing and was skipped: within each of its groups all "
                "outcomes are equal (advantages compare outcomes, whatever the shaped rewards)"
            )
        row = {**result.metrics.to_row(), **self.gauges(), "checkpoint_s": self._checkpoint_s}
        if len(self.settings) > 1:
            rates = self.problems.pass_rates()
            row |= {f"task/{name}/pass_rate": rate for name, rate in rates.items()}
        self._checkpoint_s = 0.0
        self.writer.write(step=result.step, version=result.version, wall_s=self.wall_s, values=row)
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
            while (version := self._version_due()) is not None:
                async with self._members.quiet():
                    await self.engine.load(version, self.store, self.recipe.kv)
                await self.schedule.turn("load", version=version)
                self.schedule.note("load", version=version)
                self._woken.set()
                self._loaded.set()
                self._ask_canaries()

    def _version_due(self) -> int | None:
        """The version that the engine should have and has not; None: it is up to date."""
        newest = self.store.latest()
        if newest is None or newest <= self.engine.version:
            return None
        if self.schedule.replay is None:
            return newest
        planned = self.schedule.upcoming("load")
        return None if planned is None or planned["version"] > newest else planned["version"]

    # -- guard --------------------------------------------------------------------------------

    def _ask_canaries(self) -> None:
        if self.canaries is not None:
            self._spawn(self._check_canaries(self.canaries), "canaries")

    async def _check_canaries(
        self, canaries: Callable[[], Coroutine[Any, Any, list[Finding]]]
    ) -> None:
        self._note_findings(await canaries(), f"after step {self.step}")

    def _note_findings(self, findings: Sequence[Finding], when: str) -> None:
        """Count them; each kind is shown once."""
        for finding in findings:
            self._found.add_sum(f"guard/{finding.check}/{finding.kind}", 1.0)
            if (finding.check, finding.kind) not in self._shown:
                self._shown.add((finding.check, finding.kind))
                self.reporter.message(
                    f"guard, {when}: {finding.check}, {finding.kind}: {finding.message}"
                )

    # -- evaluation ---------------------------------------------------------------------------

    def _evaluate_if_due(self, steps_made: int) -> None:
        newest = self.store.latest()
        idle = self._evaluation is None or self._evaluation.done()
        due = self.evaluations.due(self.step, steps_made, self.recipe.steps)
        if due and idle and newest is not None:
            self._evaluation = self._spawn(self._evaluate_beside(newest), "evaluate")

    async def _evaluate_beside(self, version: int) -> None:
        try:
            await self.evaluations.evaluate(version, self.recipe.eval.problems)
        except WeightsError as error:
            self.reporter.message(f"evaluation of version {version} left out: {error}")

    def _evaluated(self, accuracy: Accuracy, results: Sequence[EvalResult]) -> None:
        self._account_time()
        problems, version = sum(result.num_problems for result in results), accuracy.version
        mean, low, high = mean_and_interval(results)
        row = {
            "eval/accuracy": mean,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/problems": float(problems),
        }
        if len(results) > 1:
            row |= {f"eval/{result.task}/accuracy": result.avg_at_k for result in results}
        self.writer.write(step=self.step, version=version, wall_s=self.wall_s, values=row)
        self.reporter.evaluated(version, accuracy.accuracy, problems)
        for result in results:
            for status, error in result.errors.items():
                number = f"{result.failures[status]} of {result.num_rollouts} held-out rollouts"
                self.reporter.message(
                    f"{number} of {result.task} failed with {status}, which counts as not solved: "
                    f"{error}"
                )

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
                await self._load_now(await self.trainer.publish())
            drawn = await self.engine.snapshot()
        # No await between the snapshot and this: what the engine had drawn and what the rollouts
        # had taken from it are of one moment.
        state, columns = self.state(drawn)
        position = self.engine_position()
        state["engine"] = None if position is None else position.pack()
        self.schedule.sync()
        if self.ledger is not None:
            state["ledger_parts"] = await self.ledger.sync(self.step)
        await self.checkpoints.write(self.step, state, columns, self.trainer.save)
        self._saved_at, self._saved_step = time.monotonic(), self.step
        self._checkpoint_s += self._saved_at - began

    async def _load_now(self, version: int) -> None:
        self._published.set()
        while self.engine.version < version:
            self._loaded.clear()
            await self._loaded.wait()

    def state(self, drawn: Mapping[RolloutId, Segment]) -> tuple[dict[str, Any], Columns]:
        """The controller's part of a checkpoint, as JSON data and columns of tokens. drawn: what
        the engine had drawn of the turns under way, in the order of its rows."""
        self._account_time()
        pool = SegmentPool()
        state = {
            "step": self.step,
            "version": self.version,
            "problems": self.problems.state(),
            "groups": self.groups.snapshot(self.version),
            "num_filtered": self.buffer.num_filtered,
            "members": self._members.pack(self.groups, drawn, pool),
            "totals": self.totals.to_state(),
            "accuracies": self.evaluations.found,
            "wall_s": self.wall_s,
            "schedule": self.schedule.position(),
        }
        return state, pool.columns()

    def restore(self, state: dict[str, Any], columns: Columns) -> None:
        """Go on from a checkpoint: every outstanding group as it was, unless S or B have changed so
        that the bound would not hold: then they are dispatched anew, under their old ids."""
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
        self.evaluations.found = [Accuracy(*entry) for entry in state["accuracies"]]
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
