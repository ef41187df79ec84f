"""Held-out evaluations of a run: when one is due, what they found, which version was best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .options.run import EvalOptions

if TYPE_CHECKING:
    from .evaluation import EvalResult


class EvaluatorClient(Protocol):
    """What the loop asks of an evaluator."""

    async def evaluate(self, version: int, num_problems: int) -> Sequence[EvalResult]:
        """What each task of the run says of a version that the store still has, on num_problems of
        its problems. Raises WeightsError if it has not."""
        ...

    async def export(self, folder: Path) -> None:
        """The weights evaluated last as a Hugging Face folder."""
        ...


class Accuracy(NamedTuple):
    """One evaluation: held-out accuracy of a version, and the lower end of its interval; of several
    tasks as in `mean_and_interval`."""

    version: int
    accuracy: float
    lower: float


def mean_and_interval(results: Sequence[EvalResult]) -> tuple[float, float, float]:
    """(accuracy, low, high). Of several tasks: the mean over them, whatever their weights, and the
    interval of that mean (the samples are independent: distances to the ends add as squares)."""
    if len(results) == 1:
        low, high = results[0].avg_interval
        return float(results[0].avg_at_k), float(low), float(high)
    averages = [float(result.avg_at_k) for result in results]
    ends = [result.avg_interval for result in results]
    below = math.hypot(*(a - low for a, (low, _) in zip(averages, ends, strict=True)))
    above = math.hypot(*(high - a for a, (_, high) in zip(averages, ends, strict=True)))
    number = len(results)
    mean = sum(averages) / number
    return mean, mean - below / number, mean + above / number


@dataclass(slots=True)
class Evaluations:
    """The evaluations of one run. model_best: where the best version so far is exported to;
    evaluations differ in size, so the best one is that of the highest lower end. in_question: how
    many of the first ones are not asked which was best, as model_best holds none of them."""

    options: EvalOptions
    evaluator: EvaluatorClient | None = None
    model_best: Path | None = None
    on_result: Callable[[Accuracy, Sequence[EvalResult]], None] = lambda accuracy, results: None
    found: list[Accuracy] = field(default_factory=list)
    in_question: int = 0

    @property
    def best(self) -> Accuracy | None:
        """That of model_best; None: there is none."""
        left = self.found[self.in_question :]
        return max(left, key=lambda entry: entry.lower, default=None)

    def resume(self, found: Sequence[Accuracy], exported: int | None) -> None:
        """Go on from what a checkpoint had found. exported: the version that model_best holds,
        which may be one that came after that checkpoint, or one from before that was to be
        replaced: the next evaluation then replaces it, whatever was found before."""
        self.found = list(found)
        versions = [entry.version for entry in found]
        self.in_question = versions.index(exported) if exported in versions else len(found)
        if self.best is not None and self.best.version != exported:
            self.in_question = len(found)

    def due(self, step: int, steps_made: int, total_steps: int) -> bool:
        """Is one due after optimizer step `step`, the last of `steps_made`?"""
        every = self.options.every
        return every > 0 and step % every < steps_made and step < total_steps

    async def evaluate(self, version: int, num_problems: int) -> float | None:
        """Held-out accuracy of a version, told and kept; the best one so far is exported."""
        if self.evaluator is None:
            return None
        results = await self.evaluator.evaluate(version, num_problems)
        entry = Accuracy(version, *mean_and_interval(results)[:2])
        best = self.best
        if self.model_best is not None and (best is None or entry.lower > best.lower):
            await self.evaluator.export(self.model_best)
        # Not before it is there: a checkpoint between the two would tell of a model that is not.
        self.found.append(entry)
        self.on_result(entry, results)
        return entry.accuracy
