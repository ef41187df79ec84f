"""The figures of a run in flight: the row of every step and evaluation, the totals, the time.

step ---stepped----> row --> metrics.jsonl
                      ^
findings of the guard, seconds of checkpoints: in the row of the step that comes next
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .buffer import StepResult, TrainingGroup
from .diagnostics import task_diagnostics
from .evaluations import Accuracy, mean_and_interval
from .metrics import Metrics
from .problems import Problems
from .progress import Reporter
from .reducers import Row
from .types import Finding

if TYPE_CHECKING:
    from .evaluation import EvalResult
    from .metrics import MetricsWriter


class RunMetrics:
    """problems: whose pass rates are shown where there are several tasks. gauges: further figures
    of each row. totals are of all steps and groups, wall_s of the whole run, resumes and all."""

    def __init__(
        self,
        writer: MetricsWriter,
        reporter: Reporter,
        problems: Problems,
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._writer = writer
        self._reporter = reporter
        self._problems = problems
        self._gauges = gauges
        self.totals = Metrics()
        self.wall_s = 0.0
        self._clock = time.monotonic()
        self._checkpoint_s = 0.0
        self._found = Metrics()
        self._shown: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Training begins: time that nothing has accounted for yet is none of the run's."""
        self._clock = time.monotonic()

    def end(self) -> None:
        """No further step will come."""
        self.account_time()
        self.totals.merge(self._found)

    def account_time(self) -> None:
        """Bring wall_s up to now."""
        now = time.monotonic()
        self.wall_s += now - self._clock
        self._clock = now

    def stepped(self, groups: Sequence[TrainingGroup], result: StepResult) -> Row:
        """One optimizer step, on these groups: counted and written. Returns its row."""
        self.account_time()
        self.note_findings(result.findings, f"before step {result.step}")
        result.metrics.merge(self._found)
        self._found = Metrics()
        rates = self._problems.pass_rates()
        several = len(rates) > 1
        if several:
            result.metrics.merge(task_diagnostics([t for g in groups for t in g.trajectories]))
        self.totals.merge(result.metrics)
        if result.skipped:
            self._reporter.message(
                f"step {result.step} taught nothing and was skipped: within each of its groups all "
                "outcomes are equal (advantages compare outcomes, whatever the shaped rewards)"
            )
        row = {**result.metrics.to_row(), **self._gauges(), "checkpoint_s": self._checkpoint_s}
        if several:
            row |= {f"task/{name}/pass_rate": rate for name, rate in rates.items()}
        self._checkpoint_s = 0.0
        self._writer.write(step=result.step, version=result.version, wall_s=self.wall_s, values=row)
        return row

    def evaluated(self, step: int, accuracy: Accuracy, results: Sequence[EvalResult]) -> None:
        """An evaluation, one result for each task, that ended after optimizer step `step`: written
        and told."""
        self.account_time()
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
        self._writer.write(step=step, version=version, wall_s=self.wall_s, values=row)
        self._reporter.evaluated(version, accuracy.accuracy, problems)
        for result in results:
            for status, error in result.errors.items():
                number = f"{result.failures[status]} of {result.num_rollouts} held-out rollouts"
                self._reporter.message(
                    f"{number} of {result.task} failed with {status}, which counts as not solved: "
                    f"{error}"
                )

    def note_findings(self, findings: Sequence[Finding], when: str) -> None:
        """Count what the guard has found; each kind is shown once."""
        for finding in findings:
            self._found.add_sum(f"guard/{finding.check}/{finding.kind}", 1.0)
            if (finding.check, finding.kind) not in self._shown:
                self._shown.add((finding.check, finding.kind))
                self._reporter.message(
                    f"guard, {when}: {finding.check}, {finding.kind}: {finding.message}"
                )

    def note_checkpoint(self, seconds: float) -> None:
        """A checkpoint took that long."""
        self._checkpoint_s += seconds
