"""Runs as a report sees them: each by itself, and those together that differ in their seed only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Recipe
from ..errors import DataError
from ..ledger import open_ledger
from ..ledger.schema import described
from ..metrics import RECORD_KEYS, read_metrics
from ..options.tasks import title
from ..records import require_whole_text
from ..run_folder import RunFolder
from ..schedule import LOOP_FILE
from .curves import SERIES, Curves, Record, curves_of, over_seeds, statuses_of, stride_for
from .microscope import Budget, Microscope, microscope, tau_of
from .texts import texts_of_run
from .token_facts import TokenFacts, prepare, token_facts

_NO_DIFFERENCE = ("name", "seed")
"""Keys of a recipe in which two seeds of it may differ."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that is shown of one run. notes: what is missing, torn or unfinished, in words;
    recipe: index into Report.recipes; summary: summary.json, None of an unfinished run; facts and
    microscope: None of a run without ledger."""

    name: str
    seed: int
    model: str
    task: str
    correction: str
    tau: float | None
    max_staleness: int
    steps_planned: int
    steps_done: int
    recipe: int
    curves: Curves
    statuses: dict[str, int]
    summary: dict[str, Any] | None
    facts: TokenFacts | None
    microscope: Microscope | None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecipeReport:
    """Runs of one recipe. label: in what it differs from the others; curves: the means over its
    seeds, None of a single run."""

    label: str
    runs: list[int]
    curves: Curves | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a page shows. stride: consecutive steps that are one point of a curve."""

    title: str
    runs: list[RunReport]
    recipes: list[RecipeReport]
    stride: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A run folder with what is small in it."""

    name: str
    folder: RunFolder
    recipe: Recipe
    records: list[Record]
    notes: list[str]


def build_report(folders: Sequence[str | Path], budget: Budget) -> Report:
    """Read runs, in this order. The budget is shared evenly among them. Raises DataError where
    one of them is no run, or its files are malformed."""
    names = _names([Path(folder) for folder in folders])
    sources = [_source(name, folder) for name, folder in zip(names, folders, strict=True)]
    stride = stride_for(max((_last_step(source.records) for source in sources), default=0))
    keys = [_recipe_key(source.recipe) for source in sources]
    distinct = list(dict.fromkeys(keys))
    number = len(sources)
    share = Budget(max(1, budget.trajectories // number), budget.tokens // number)
    runs = [
        _run(source, stride, distinct.index(key), share)
        for source, key in zip(sources, keys, strict=True)
    ]
    labels = _labels([sources[keys.index(key)] for key in distinct])
    recipes = []
    for number, label in enumerate(labels):
        members = [i for i, run in enumerate(runs) if run.recipe == number]
        together = over_seeds([runs[i].curves for i in members]) if len(members) > 1 else None
        recipes.append(RecipeReport(label, members, together))
    return Report(" · ".join(names), runs, recipes, stride)


def _source(name: str, path: str | Path) -> _Source:
    folder = RunFolder.open(path)
    recipe = folder.recipe()
    file = folder.path / "metrics.jsonl"
    if not file.is_file():
        return _Source(name, folder, recipe, [], ["It has no metrics.jsonl."])
    records, torn = read_metrics(file)
    for number, record in enumerate(records, start=1):
        _require_drawable(record, f"{file}, line {number}")
    return _Source(name, folder, recipe, list(records), [] if torn is None else [torn])


def _require_drawable(record: Record, place: str) -> None:
    """Raises DataError where a line of the metrics has no place on an axis, or is no accuracy."""
    for name in RECORD_KEYS:
        if record.get(name) is None:
            raise DataError(f"{place} has no {name}")
    for name, value in record.items():
        drawn = name in (*RECORD_KEYS, *SERIES) or name.startswith(("status/", "eval/"))
        if drawn and not isinstance(value, int | float | None):
            raise DataError(f"{place}: {name} is no number: {value!r:.80}")
    if not 0.0 <= (record.get("eval/accuracy") or 0.0) <= 1.0:
        raise DataError(f"{place}: eval/accuracy is no share: {record['eval/accuracy']}")


def _run(source: _Source, stride: int, recipe_number: int, budget: Budget) -> RunReport:
    folder, recipe, notes = source.folder, source.recipe, list(source.notes)
    steps_done = _last_step(source.records)
    summary = _summary(folder)
    if not steps_done:
        notes.append("No optimizer step is finished yet.")
    elif summary is None:
        notes.append(f"Unfinished: {steps_done} of {recipe.steps} steps.")
    facts = seen = None
    try:
        facts, seen, found = _tokens(folder, recipe, budget)
        notes += found
    except DataError as error:
        notes.append(f"Nothing on its tokens: {error}")
    return RunReport(
        name=source.name,
        seed=recipe.seed,
        model=recipe.model,
        task=title(recipe.task),
        correction=" + ".join(str(entry["name"]) for entry in recipe.correction),
        tau=tau_of(described(recipe.correction)),
        max_staleness=recipe.max_staleness,
        steps_planned=recipe.steps,
        steps_done=steps_done,
        recipe=recipe_number,
        curves=curves_of(source.records, stride),
        statuses=statuses_of(source.records),
        summary=summary,
        facts=facts,
        microscope=seen,
        notes=[_text(note) for note in notes],
    )


def _tokens(
    folder: RunFolder, recipe: Recipe, budget: Budget
) -> tuple[TokenFacts, Microscope, list[str]]:
    """What the ledger of a run holds, and what is odd about it. Raises DataError where there is
    none, or it cannot be read."""
    ledger = open_ledger(folder.path)
    with closing(ledger.connection), ledger.asked():
        facts = token_facts(ledger, prepare(ledger), schedule=folder.path / LOOP_FILE)
        seen = microscope(ledger, texts_of_run(folder, recipe), budget)
    notes = list(ledger.torn)
    if facts.num_without_entropy:
        notes.append(
            f"{facts.num_without_entropy} trained tokens have no entropy; no entropy bin counts "
            "them."
        )
    return facts, seen, notes


def _last_step(records: Sequence[Record]) -> int:
    return max((int(record["step"]) for record in records), default=0)


def _summary(folder: RunFolder) -> dict[str, Any] | None:
    if not folder.is_finished():
        return None
    path = folder.path / "summary.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        require_whole_text(found)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not the summary of a run")
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with that of the one above where two are alike."""
    resolved = [folder.resolve() for folder in folders]
    names = [folder.name for folder in resolved]
    told = [
        name if names.count(name) == 1 else f"{folder.parent.name}/{name}"
        for name, folder in zip(names, resolved, strict=True)
    ]
    return [_text(name) for name in told]


def _text(text: str) -> str:
    """A file name may hold bytes that are no text; they become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Every key of a recipe, tables spelled as "a.b"."""
    found: dict[str, Any] = {}

    def walk(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")
            elif prefix + key not in _NO_DIFFERENCE:
                found[prefix + key] = value

    walk(dataclasses.asdict(recipe), "")
    return found


def _recipe_key(recipe: Recipe) -> str:
    return json.dumps(_flat(recipe), sort_keys=True, default=str)


def _labels(sources: Sequence[_Source]) -> list[str]:
    """One for each recipe: the keys in which they differ; the name where there is one only, or
    too much differs."""
    flat = [_flat(source.recipe) for source in sources]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    differing = [key for key in keys if len({repr(one.get(key)) for one in flat}) > 1]
    if not 1 <= len(differing) <= 3:
        return [source.name for source in sources]
    return [", ".join(f"{key} = {_said(one.get(key))}" for key in differing) for one in flat]


def _said(value: Any) -> str:
    if isinstance(value, list | tuple) and all(isinstance(entry, dict) for entry in value):
        return " + ".join(
            " ".join([str(e.get("name")), *(f"{k}={v}" for k, v in e.items() if k != "name")])
            for e in value
        )
    return str(value)
