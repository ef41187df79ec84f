"""Which problem is dispatched next: tasks mixed by weight, problems passed over by pass rate.

    next() --> (task, problem) --> group --> consumed --record()--> pass rates --> next()

The order is a function of the weights, the data and the order in which groups were trained on; no
clock and no random number has a say, so it is the same however fast rollouts end, and a checkpoint
of a few numbers continues it exactly.

A task's turn: every open task gains credit by its share of the weights, the one with most credit is
next (ties: the first listed) and pays 1 (smooth weighted round robin). So after n dispatches each
task has had its share of n within less than the number of tasks. A task at the end of its epochs
leaves, and the others go on by their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import Recipe
from .environment import Task
from .errors import ConfigError
from .options.run import CurriculumOptions
from .options.tasks import entries
from .types import Trajectory

_MEMORY = 0.9
"""Part that a task's pass rate keeps of what it was, at each group."""


@dataclass(slots=True)
class _Source:
    """The problems of one task. size None: endless. rates: problem -> its last pass rate.
    passed: problem -> how often in a row it has been passed over since."""

    name: str
    size: int | None
    weight: float
    cursor: int = 0
    credit: float = 0.0
    pass_rate: float = 0.5
    rates: dict[int, float] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)

    def is_open(self, epochs: int) -> bool:
        return self.size is None or self.cursor < self.size * epochs


def check_curriculum(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Raises ConfigError where the recipe's curriculum could not act on its tasks."""
    options, names = recipe.curriculum, ", ".join(task.name for task in tasks)
    if options.skip and all(task.size("train") is None for task in tasks):
        raise ConfigError(
            f"curriculum.skip = {options.skip} passes over problems that come again; those of "
            f"{names} are endless and never do. Leave it at 0; several tasks of different "
            "difficulty can be weighed by curriculum.floor"
        )
    if options.floor < 1 and len(tasks) == 1:
        raise ConfigError(
            f"curriculum.floor = {options.floor} weighs several tasks against each other; there is "
            f"one, {names}. Write several [[task]] tables, or leave it at 1"
        )


class Problems:
    """The training problems of all tasks of a run, in the order of their dispatch.

    tasks: by label. weights: by label, 1 where one is missing. epochs: how often a finite task is
    gone through, at most.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        *,
        split: str = "train",
        weights: Mapping[str, float] | None = None,
        epochs: int = 1,
        curriculum: CurriculumOptions | None = None,
    ) -> None:
        known = weights or {}
        self._sources = {
            name: _Source(name, task.size(split), known.get(name, 1.0))
            for name, task in tasks.items()
        }
        self._epochs = epochs
        self._options = curriculum or CurriculumOptions()

    def next(self) -> tuple[str, int] | None:
        """(task, problem) of the next dispatch; None at the end of the data."""
        while source := self._turn():
            problem = self._take(source)
            if problem is not None:
                return source.name, problem
        return None

    def _turn(self) -> _Source | None:
        """The task whose turn it is; None where all have come to their end."""
        open_ones = [s for s in self._sources.values() if s.is_open(self._epochs)]
        if not open_ones:
            return None
        weights = {s.name: s.weight * self._interest(s) for s in open_ones}
        total = sum(weights.values())
        for source in open_ones:
            source.credit += weights[source.name] / total
        chosen = max(open_ones, key=lambda source: source.credit)
        chosen.credit -= 1.0
        return chosen

    def _interest(self, source: _Source) -> float:
        """4 p (1 - p), the part of the greatest variance that outcomes can have, from the floor."""
        p = source.pass_rate
        return max(self._options.floor, 4.0 * p * (1.0 - p))

    def _take(self, source: _Source) -> int | None:
        """The task's next problem that is not passed over; None where its data end before one.
        Every pass counts, so this looks at size * (skip + 1) places at most."""
        while source.is_open(self._epochs):
            problem = source.cursor if source.size is None else source.cursor % source.size
            source.cursor += 1
            if not self._is_passed_over(source, problem):
                source.passed.pop(problem, None)
                return problem
            source.passed[problem] = source.passed.get(problem, 0) + 1
        return None

    def _is_passed_over(self, source: _Source, problem: int) -> bool:
        options, rate = self._options, source.rates.get(problem)
        if rate is None or options.low < rate < options.high:
            return False
        return source.passed.get(problem, 0) < options.skip

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        """Note how often one group's problem was solved: the mean of its outcomes, each cut to
        [0, 1]. Unscored members are left out."""
        outcomes = [min(1.0, max(0.0, t.outcome)) for t in trajectories if t.outcome is not None]
        if not outcomes:
            return
        source, problem = self._sources[trajectories[0].task], trajectories[0].problem
        rate = sum(outcomes) / len(outcomes)
        source.pass_rate = _MEMORY * source.pass_rate + (1.0 - _MEMORY) * rate
        if self._options.skip and source.size is not None:
            source.rates[problem] = rate

    def pass_rates(self) -> dict[str, float]:
        """The running pass rate of every task: 0.5 at the start, then 0.9 of what it was and 0.1 of
        each group's."""
        return {name: source.pass_rate for name, source in self._sources.items()}

    def state(self) -> dict[str, Any]:
        """Everything as JSON data, for a checkpoint."""
        return {
            source.name: {
                "cursor": source.cursor,
                "credit": source.credit,
                "pass_rate": source.pass_rate,
                "rates": sorted(source.rates.items()),
                "passed": sorted(source.passed.items()),
            }
            for source in self._sources.values()
        }

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put a state back: of the same tasks, which a resume has made sure of."""
        for name, saved in state.items():
            source = self._sources[name]
            source.cursor, source.credit = saved["cursor"], saved["credit"]
            source.pass_rate = saved["pass_rate"]
            source.rates, source.passed = _table(saved["rates"]), _table(saved["passed"])


def build_problems(recipe: Recipe, tasks: Sequence[Task], split: str) -> Problems:
    """Those of these tasks, as the recipe weighs and repeats them."""
    return Problems(
        {task.name: task for task in tasks},
        split=split,
        weights={entry.label: entry.weight for entry in entries(recipe.task)},
        epochs=recipe.epochs,
        curriculum=recipe.curriculum,
    )


def _table(pairs: Iterable[Sequence[Any]]) -> dict[int, Any]:
    return {int(problem): value for problem, value in pairs}
