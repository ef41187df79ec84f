"""The folder of one run: where everything lies, and that no run ever writes over another.

runs/NAME/
    config.toml        the resolved recipe
    summary.json       what came of it (written at the end)
    metrics.jsonl      one line per optimizer step, one per evaluation
    schedule.jsonl     every event of the loop, in order (estr.schedule)
    tensorboard/       the same for TensorBoard; wandb/ for Weights & Biases, where asked for
    ledger/            every trained token; see estr.ledger
    report.html        all of it to look at (`estr report`)
    checkpoints/       see estr.checkpoint
    model/best, last   Hugging Face folders
    log.txt            output of the spawned processes, warnings
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .config import Recipe, load_recipe, recipe_from_table
from .errors import ConfigError, DataError
from .own_folders import own_folder, remove_abandoned
from .schedule import LOOP_FILE, last_recipe, read_run_events

FIXED_KEYS = ("model", "task", "seed", "deterministic")
"""Keys of a recipe that no resume may change."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a run. Accuracies are held-out (None: not measured); best_accuracy is that of
    model/best, which has the highest lower end of its interval; staleness is over the
    trained trajectories; engine_busy and trainer_busy are shares of the training's wall time;
    guard_share is the guard's of the CPU time of engine, trainer and controller during it;
    findings: how often the guard found what, by check and kind."""

    name: str
    steps: int
    version: int
    start_accuracy: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    wall_s: float
    tokens_per_s: float
    trained_tokens: int
    intra_max: int
    inter_max: int
    intra_mean: float
    inter_mean: float
    rho_mask: float
    engine_busy: float
    trainer_busy: float
    guard_share: float
    dropped_groups: int
    statuses: dict[str, int]
    findings: dict[str, int]
    seed: int


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @classmethod
    def create(cls, recipe: Recipe, root: Path = Path("runs")) -> RunFolder:
        """A new folder runs/NAME, or runs/NAME-2, -3, ... where that is taken."""
        path = root / recipe.name
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(2):
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    path = root / f"{recipe.name}-{number}"
        except OSError as error:
            raise DataError(f"cannot make run folder {path}: {error.strerror}") from error
        folder = cls(path)
        try:
            (path / "config.toml").write_text(recipe.to_toml(), encoding="utf-8")
            folder.log.touch()
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise DataError(f"cannot write into run folder {path}: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run. Raises DataError naming the path if it is none."""
        folder = cls(Path(path))
        if not (folder.path / "config.toml").is_file():
            raise DataError(f"{path} is not a run folder: it holds no config.toml")
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run, so that no second process writes to it. Raises DataError if one does."""
        import fcntl

        try:
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise DataError(
                f"cannot write to {self.path}: {error.strerror}; free the disk, change the "
                "folder's permissions, or copy the run to where you may write"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"{self.path} is in use by another estr process; wait for it, or stop it"
                ) from error
            except OSError as error:
                raise DataError(f"cannot lock {self.path}: {error.strerror}") from error
            yield

    def is_in_use(self) -> bool:
        """Is a process at work on it? Needs no right to write here."""
        import fcntl

        try:
            with (self.path / ".lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # nobody has locked what cannot be locked
        return False

    def recipe(self) -> Recipe:
        """What the run was last started or resumed with: its schedule keeps it, so that an edited
        config.toml is noticed. Of a run without a schedule, its config.toml."""
        kept = last_recipe(self.path / LOOP_FILE)
        if kept is None:
            return load_recipe(self.path / "config.toml")
        try:
            return recipe_from_table(kept)
        except ConfigError as error:
            raise DataError(f"{self.path / LOOP_FILE} holds a wrong recipe: {error}") from error

    def recipes(self) -> dict[int, Recipe]:
        """What each optimizer step was taken with, which a resume may change: of the steps in the
        schedule, so of none where there is no schedule."""
        path = self.path / LOOP_FILE
        found: dict[int, Recipe] = {}
        recipe = None
        for event in read_run_events(path) if path.is_file() else ():
            try:
                if event["event"] == "recipe":
                    recipe = recipe_from_table({k: v for k, v in event.items() if k != "event"})
            except ConfigError as error:
                raise DataError(f"{path} holds a wrong recipe: {error}") from error
            if event["event"] == "step" and recipe is not None:
                found[event["step"]] = recipe
        return found

    def changes(self, recipe: Recipe) -> list[str]:
        """Keys in which a recipe differs from the run's own, in words. Raises ConfigError where
        one of FIXED_KEYS does: that would be another run."""
        before, after = dataclasses.asdict(self.recipe()), dataclasses.asdict(recipe)
        for key in FIXED_KEYS:
            if after[key] != before[key]:
                raise ConfigError(
                    f"{self.path} was started with {key} = {before[key]!r}, not {after[key]!r}; "
                    "start a new run for that"
                )
        return recipe_changes(before, after)

    def update_recipe(self, recipe: Recipe) -> None:
        """Write down the recipe that the run goes on with, the one before beside it."""
        config = self.path / "config.toml"
        aside = self.path / "config.toml.writing"
        aside.write_text(recipe.to_toml(), encoding="utf-8")
        shutil.copyfile(config, self.path / "config.previous.toml")
        aside.replace(config)  # at no instant is the run without its recipe

    def replays(self, run: Path | None = None) -> Path | None:
        """The run that this one replays, if any: `run` is written down, else it is read."""
        note = self.path / "replays.json"
        if run is not None:
            note.write_text(json.dumps({"run": str(run.resolve())}), encoding="utf-8")
        if not note.is_file():
            return None
        try:
            replayed = Path(json.loads(note.read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{note} does not say which run is replayed: {error!r}") from error
        if not (replayed / "config.toml").is_file():
            raise DataError(
                f"{self.path} replays {replayed}, where no run is now; put it back there, or write "
                f"where it is into {note}"
            )
        return replayed

    def set_summary_aside(self) -> None:
        """The run goes on, so it is not finished any more."""
        if self.is_finished():
            (self.path / "summary.json").replace(self.path / "summary.previous.json")

    def summary(self) -> Summary:
        """What came of a finished run. Raises DataError where that is not readable."""
        path = self.path / "summary.json"
        try:
            return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), Summary)
        except (OSError, ValueError, msgspec.ValidationError, RecursionError) as error:
            raise DataError(f"{path} is not the summary of a run: {error}") from error

    def is_finished(self) -> bool:
        """Has the run come to its end and written its summary?"""
        return (self.path / "summary.json").is_file()

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_best(self) -> Path:
        return self.path / "model" / "best"

    @property
    def model_last(self) -> Path:
        return self.path / "model" / "last"

    def write_summary(self, summary: Summary) -> None:
        aside = self.path / ".summary.json"
        aside.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
        aside.replace(self.path / "summary.json")


def recipe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Keys in which two recipes differ, as tables, in words; a key of a table as "table.key"."""
    changes = []
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changes += [f"{key}.{change}" for change in recipe_changes(old, value)]
        elif value != old:
            changes.append(f"{key} = {value} (was {old})")
    return changes + [f"{key} is gone (was {before[key]})" for key in before if key not in after]


def weights_folder(otherwise: Path, bytes_needed: int) -> Path:
    """A fresh folder for the exchange of weights: in memory where there is room, else in the folder
    `otherwise`. What was left in either is removed first."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    for place in (memory, otherwise) if usable else (otherwise,):
        remove_abandoned("weights", place)
    roomy = usable and shutil.disk_usage(memory).free >= bytes_needed * 1.5
    return own_folder("weights", memory if roomy else otherwise)
