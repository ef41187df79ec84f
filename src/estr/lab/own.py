"""`estr lab compare --recipe mine.toml`: the comparison on one's own model and task.

    recipe x method x seed --estr train--> rows --> table, verdicts
    recipe, max_staleness = 0, no correction --'    (the reference)

Real runs: the recipe as it is but for seed and correction, lag and mismatch whatever the machine
makes of them. Two runs with one seed meet the same problems; they do not repeat to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config import Recipe, recipe_from_table
from ..errors import ConfigError
from . import figures
from .lab import Claim, Lab, Report
from .methods import ALL_METHODS, Corrections, Table
from .natural import train_naturally
from .protocol import SYNC_CELL, Cell, Standing, standing_lines, standings
from .sources import digest_of, files_of_module
from .statistics import MARGIN, MIN_PAIRS, Answer, Paired, compare_seeds, judge
from .sweep import Job
from .table import Row

REGIME = "own"
METHODS: Mapping[str, int] = {
    "none": 0,
    "icepop": 1,
    "tis": 1,
    "dppo": 2,
    "estr": 0,
    "estr_sequence": 0,
}
"""Which setting of its grid stands for each: nothing is tuned on one's own model, and these did
best under lag (docs/lab/which-correction.md), but for `estr`, which stands at its default. The
recipe's own correction comes beside them as OWN."""
OWN = "recipe"
NUM_SEEDS = 3

_SMALL_BYTES = 2**20
"""A file of a folder that is read whole; of a larger one the time of its last change counts."""


def compare_recipe(lab: Lab, recipe: Recipe) -> Report:
    """Methods and the recipe's own correction against synchronous training and no correction."""
    rows = lab.run(jobs(lab, recipe))
    found = standings(rows)
    panels = {
        regime: {m: list(s.accuracy.values()) for (r, m), s in found.items() if r == regime}
        for regime in dict.fromkeys(cell[0] for cell in found)
    }
    draw = functools.partial(figures.dots, panels, ylabel="held-out accuracy at the end")
    title = f"{recipe.name}, {recipe.steps} steps"
    lines = standing_lines(found, {})
    told = {name: as_text(entries) for name, entries in corrections(recipe).items()}
    for line in lines:
        line["chosen"] = told[line["method"]]
    return Report(rows, claims(found), {title: lines}, draw if panels else None)


def as_text(entries: Corrections) -> str:
    """Corrections in one line, as a table of TOML has them but for quotes."""
    return " + ".join(
        " ".join([str(entry["name"]), *(f"{k}={v}" for k, v in entry.items() if k != "name")])
        for entry in entries
    )


def corrections(recipe: Recipe) -> dict[str, Corrections]:
    """By method; OWN only where the recipe's is none of the others."""
    found = {name: ALL_METHODS[name].variants[i][1] for name, i in METHODS.items()}
    own = tuple(dict(entry) for entry in recipe.correction)
    return found if own in found.values() else {**found, OWN: own}


def jobs(lab: Lab, recipe: Recipe) -> list[Job]:
    """One run for each method and seed; the reference first, so that a fault of the recipe shows
    before much is spent. A synchronous recipe without a correction is the reference itself, and
    is left out."""
    table = plain_table(recipe)
    sync = {**table, "max_staleness": 0, "num_minibatches": 1, "publish_every": 1}
    cells: list[tuple[Cell, Table, Corrections]] = [(SYNC_CELL, sync, corrections(recipe)["none"])]
    cells += [((REGIME, name), table, entries) for name, entries in corrections(recipe).items()]
    cells = [cells[0], *(cell for cell in cells[1:] if cell[1:] != cells[0][1:])]
    data = data_digest(recipe)
    return [
        Job(
            {"regime": cell[0], "method": cell[1], "seed": seed, "phase": "judge"},
            {"recipe": {**its, "correction": list(entries), "seed": seed}, "data": data},
            function="estr.lab.own:train_own",
            limit_s=None,
            alike=True,
        )
        for cell, its, entries in cells
        for seed in lab.judge_seeds
    ]


def plain_table(recipe: Recipe) -> Table:
    """The recipe as plain data, without what costs time and changes no figure: checkpoints,
    evaluations on the way, records elsewhere."""
    table = dataclasses.asdict(recipe)
    table["eval"]["every"] = 0
    table["checkpoint"]["every_steps"] = 0
    table.pop("wandb")
    return table


def data_digest(recipe: Recipe) -> str:
    """Of what is the user's own: the files and folders that the recipe's task names, the source of
    each "module:attribute" in task and correction, the folder of the model. Where one of them has
    changed, the run is made anew."""
    digest = hashlib.sha256()
    for value in sorted(set(_texts([recipe.task, recipe.correction]))):
        module, colon, attribute = value.partition(":")
        if colon and module.replace(".", "").isidentifier() and attribute.isidentifier():
            if not module.startswith("estr."):  # the job's own digest covers those
                files, root = files_of_module(module)
                digest.update(b"" if root is None else digest_of(files, root).encode())
        elif (path := _path(value)) is not None:
            digest.update(_content(path).encode())
    model = _path(recipe.model)
    digest.update(b"" if model is None else _content(model).encode())
    return digest.hexdigest()[:24]


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested tables and lists, but for the names of what is shipped."""
    if isinstance(value, Mapping):
        value = [v for key, v in value.items() if key != "name" or ":" in str(v)]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _path(text: str) -> Path | None:
    """The file or folder of that name; None where there is none, as there is of a long text."""
    path = Path(text)
    try:
        return path if text and (path.is_file() or path.is_dir()) else None
    except OSError:
        return None


def _content(path: Path) -> str:
    """Digest of a file's bytes or of a folder's files: names, sizes, and bytes or, of the large
    ones, times."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(f for f in path.rglob("*") if f.is_file() and f.suffix != ".pyc"):
        status = file.stat()
        small = status.st_size <= _SMALL_BYTES
        its = _content(file) if small else str(status.st_mtime_ns)
        digest.update(f"{file.relative_to(path)}\n{status.st_size}\n{its}\n".encode())
    return digest.hexdigest()


def train_own(table: Mapping[str, Any]) -> list[Row]:
    """table: recipe, data (its `data_digest`, which tells the runs of other data apart). Raises
    ConfigError where that has changed since, before the run or in it."""
    recipe = recipe_from_table(table["recipe"])
    _require_data(recipe, table["data"])
    rows = train_naturally(table["recipe"])
    _require_data(recipe, table["data"])
    return rows


def _require_data(recipe: Recipe, expected: str) -> None:
    if data_digest(recipe) != expected:
        raise ConfigError(
            "the model, the data or the code that the recipe names has been changed since this "
            "command started; give the command again"
        )


def claims(found: Mapping[Cell, Standing]) -> list[Claim]:
    """For each method: does it keep up with synchronous training, is it better than nothing?"""
    own = {method: standing for (regime, method), standing in found.items() if regime == REGIME}
    none = own.get("none")
    pairs = {
        name: compare_seeds(standing.accuracy, none.accuracy)
        for name, standing in own.items()
        if none is not None and name != "none"
    }
    better = judge(pairs)
    made = []
    for name, standing in sorted(own.items(), key=lambda i: -fmean(i[1].accuracy.values())):
        made.append(
            Claim(
                f"{name} keeps up with synchronous training",
                "",
                _against(standing.against),
                _answer(standing.judgement, ("better", "non-inferior"), "inferior"),
                _why(len(standing.accuracy), f"non-inferior by {MARGIN:g}"),
            )
        )
        if name in pairs:
            pair = pairs[name]
            beaten = "inferior" if pair is not None and pair.high < MARGIN else ""
            judged = better[name] if better[name] != "non-inferior" else beaten
            made.append(
                Claim(
                    f"{name} is better than no correction",
                    "",
                    _against(pair),
                    _answer(judged, ("better",), "inferior"),
                    _why(len(standing.accuracy), f"better by more than {MARGIN:g}"),
                )
            )
    return made


def _answer(judgement: str, holds: Sequence[str], fails: str) -> Answer:
    return "holds" if judgement in holds else "not here" if judgement == fails else "undecided"


def _against(pair: Paired | None) -> str:
    if pair is None:
        return ""
    return f"{pair.told()} over {pair.num_pairs} seeds"


def _why(num_seeds: int, criterion: str) -> str:
    few = f"; nothing is decided below {MIN_PAIRS} seeds (--seeds {MIN_PAIRS})"
    return f"{criterion}, paired by seed, Holm-corrected" + (few if num_seeds < MIN_PAIRS else "")
