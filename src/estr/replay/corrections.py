"""The logged tokens of a run under other corrections; no model needed.

    replay_corrections("runs/calculator", ["estr:tau=0.5", "icepop"])  -> Replay

Goes through the ledger step by step and holds one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config import Recipe, correction_entries
from ..corrections import Correction, build_correction
from ..errors import DataError, EstrError, NumericsError
from ..ledger import find_parts, read_step
from ..ledger.schema import StepRecord, logged_entries
from ..options.corrections import CORRECTION_OPTIONS
from ..run_folder import RunFolder
from ..subject import torch_threads
from .judging import Cut, Judged, cut_step, judge
from .results import OWN, Replay
from .tally import Tally

Tell = Callable[[int, int], None]
"""Called after each step with how many of how many are done."""


def replay_corrections(
    run_folder: str | Path,
    corrections: Sequence[str] | None = None,
    *,
    steps: Iterable[int] | None = None,
    num_examples: int = 3,
    tell: Tell = lambda done, total: None,
) -> Replay:
    """What the run's own correction and each of these keep of the same logged tokens, how they
    weigh them, and what enters the gradient.

    corrections: as `estr.config.correction_entries` reads them; None: every registered name with
    its default options, leaving out (and naming, in `refused`) those that the ledger has not what
    they need for. steps: those of them that are in the ledger; None: all. num_examples: of each
    correction, tokens that it judges differently.

    Raises ConfigError on a correction that is unknown or wrong, DataError where there is no ledger,
    no such step, or not what a correction needs in it, NumericsError on impossible values.
    """
    run = RunFolder.open(run_folder)
    every = corrections is None
    candidates = build_candidates(CORRECTION_OPTIONS if corrections is None else corrections)
    parts = find_parts(run.path)
    chosen = chosen_steps(run.path, parts.steps, steps)
    refused: list[tuple[str, str]] = []
    judges = Judges.of(run)
    with torch_threads(judges.recipe.trainer.threads):
        if every:
            candidates, refused = judges.usable(judges.telling(run.path, chosen), candidates)
        tally = Tally([OWN, *candidates], num_examples=num_examples)
        for done, step in enumerate(chosen, start=1):
            record = read_step(run.path, step)
            own = judges.own(record)
            every_one = [(OWN, own), *candidates.items()]
            judged = [judges.judge(record, label, one) for label, one in every_one]
            tally.add(judges.cut(record, own), judged)
            tell(done, len(chosen))
    return Replay(
        run=str(run.path),
        own=tuple(judges.descriptions),
        steps=tuple(chosen),
        tokens=tally.tokens,
        check=tally.check,
        figures=tally.figures(),
        rejected_by_both=tally.rejected_by_both(),
        cosine=tally.cosine(),
        cells=tally.cells(),
        examples=tally.examples(),
        refused=tuple(refused),
        torn=tuple(parts.torn),
    )


def build_candidates(texts: Iterable[str]) -> dict[str, Correction]:
    """The corrections by their text. Raises ConfigError."""
    return {text.strip(): build_correction(correction_entries(text)) for text in texts}


def chosen_steps(run: Path, there: Sequence[int], wanted: Iterable[int] | None) -> list[int]:
    """Those of the ledger's steps that are wanted. Raises DataError where there is none."""
    # A range is asked as it is: one without an end would not fit into a set.
    among = wanted if wanted is None or isinstance(wanted, range) else set(wanted)
    chosen = [step for step in there if among is None or step in among]
    if not chosen:
        held = f"steps {there[0]} to {there[-1]}" if there else "no whole step"
        which = "nothing to replay" if among is None else "none of those that were asked for"
        raise DataError(f"the ledger of {run} holds {held}: {which}")
    return chosen


@dataclass(slots=True)
class Judges:
    """Judges logged steps of one run. recipe: its last one; recipes: of single steps, where they
    are known; descriptions: JSON of the run's own corrections, as met."""

    recipe: Recipe
    recipes: Mapping[int, Recipe] = field(default_factory=dict)
    descriptions: dict[str, Correction] = field(default_factory=dict)
    _record: StepRecord | None = None
    _cuts: dict[bool, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunFolder) -> Judges:
        return cls(run.recipe(), run.recipes())

    def recipe_of(self, step: int) -> Recipe:
        """What the step was taken with."""
        return self.recipes.get(step, self.recipe)

    def telling(self, run: Path, steps: Sequence[int]) -> Iterator[StepRecord]:
        """Steps that show which columns a run has: the first of each of its recipes that trained on
        a token."""
        seen: list[Recipe] = []
        for step in steps:
            recipe = self.recipe_of(step)
            if recipe in seen:
                continue
            record = read_step(run, step)
            pairs = zip(record.trajectories, record.consumptions, strict=True)
            if any(t.num_sampled_tokens and c.advantage is not None for t, c in pairs):
                seen.append(recipe)
                yield record

    def own(self, record: StepRecord) -> Correction:
        """The correction that the step was taken with."""
        if record.correction not in self.descriptions:
            entries = logged_entries(record.correction)
            self.descriptions[record.correction] = build_correction(entries)
        return self.descriptions[record.correction]

    def cut(self, record: StepRecord, correction: Correction) -> Cut:
        """The micro-batches that the trainer would make of the step under this correction."""
        if record is not self._record:
            self._record, self._cuts = record, {}
        whole = "sequence_ids" in correction.needs
        if whole not in self._cuts:
            budget = self.recipe_of(record.step).trainer.token_budget
            self._cuts[whole] = cut_step(record, token_budget=budget, whole_trajectories=whole)
        return self._cuts[whole]

    def judge(self, record: StepRecord, label: str, correction: Correction) -> Judged:
        """Raises DataError or NumericsError that name correction and step."""
        cut = self.cut(record, correction)
        try:
            number = self.recipe_of(record.step).num_minibatches
            return judge(correction, cut, num_minibatches=number)
        except (DataError, NumericsError) as error:
            raise type(error)(f"step {record.step} under {label}: {error}") from error

    def usable(
        self, records: Iterable[StepRecord], candidates: dict[str, Correction]
    ) -> tuple[dict[str, Correction], list[tuple[str, str]]]:
        """Those that these steps hold all columns for, and label and reason of the others."""
        usable, refused = dict(candidates), []
        for record in records:
            for label, correction in list(usable.items()):
                try:
                    self.judge(record, label, correction)
                except EstrError as error:
                    refused.append((label, str(error)))
                    del usable[label]
        return usable, refused
