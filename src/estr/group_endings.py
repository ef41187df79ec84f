"""How the groups of a run end: filtered and failed ones are counted, failures are told, and too
many of them in a row end the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .errors import EngineError
from .group import Group
from .metrics import Metrics
from .progress import Reporter
from .types import Trajectory

NAMED_FAILURES = 3
"""Failed groups that are told one by one, of those with one reason."""

MORE_FAILURES = " (more groups that fail in this way are only counted, as failed_groups)"


class GroupEndings:
    """max_failed_groups: in a row, at which the run ends. max_issues: groups of one problem, at
    which it is given up. totals: where endings are counted."""

    def __init__(
        self, max_failed_groups: int, max_issues: int, totals: Metrics, reporter: Reporter
    ) -> None:
        self._max_failed_groups = max_failed_groups
        self._max_issues = max_issues
        self._totals = totals
        self._reporter = reporter
        self._failed_in_a_row = 0
        self._reasons: Counter[str] = Counter()

    def note(self, group: Group, trajectories: Sequence[Trajectory]) -> None:
        """The rollouts of a group have ended, and with them it is finished, filtered or failed.
        Raises EngineError where max_failed_groups in a row have failed."""
        if group.state == "failed":
            self._note_failure(group, trajectories)
            return
        self._failed_in_a_row = 0
        if group.state == "filtered":
            self._totals.add_sum("filtered_groups", 1.0)

    def _note_failure(self, group: Group, trajectories: Sequence[Trajectory]) -> None:
        self._failed_in_a_row += 1
        self._totals.add_sum("failed_groups", 1.0)
        unscored = [t.error for t in trajectories if t.error and t.reward is None]
        errors = unscored or [t.error for t in trajectories if t.error]
        reason = errors[0] if errors else "fewer than two members were scored"
        # The numbers in a message often differ where the fault is one.
        alike = re.sub(r"\d+", "N", reason)
        self._reasons[alike] += 1
        if self._reasons[alike] <= NAMED_FAILURES:
            more = "" if self._reasons[alike] < NAMED_FAILURES else MORE_FAILURES
            self._reporter.message(
                f"group {group.id} (problem {group.problem}) failed: {reason}{more}"
            )
        if group.issue + 1 >= self._max_issues:
            self._totals.add_sum("abandoned_problems", 1.0)
            self._reporter.message(
                f"problem {group.problem} is given up: {self._max_issues} groups of it failed"
            )
        if self._failed_in_a_row >= self._max_failed_groups:
            raise EngineError(
                f"{self._failed_in_a_row} groups in a row failed "
                f"(rollout.max_failed_groups); the last one: {reason}"
            )
