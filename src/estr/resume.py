"""What a run goes on from: its newest whole checkpoint, checked before anything is changed.

saved = find_saved(folder, ...)     reads and refuses; the run folder stays as it is
find_replayed(folder, saved, run)   the run that a replay follows
set_aside(saved, folder, recipe)    what came after the checkpoint no longer counts
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints
from .config import Recipe, load_recipe
from .errors import CheckpointError, ConfigError, DataError
from .ledger import missing_parts
from .ledger import supersede_after as supersede_ledger_after
from .metrics import missing_steps, supersede_after
from .models import tidy_models
from .options.tasks import title
from .run_folder import RunFolder
from .schedule import ENGINE_FILE, LOOP_FILE, Position, require_lines
from .types import RolloutId


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint to go on from. notes: what was passed over or is missing, and how the recipe
    has changed; for the person who resumes."""

    folder: Path
    state: dict[str, Any]
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def position(self, under_way: Container[RolloutId]) -> Position | None:
        """Where the engine's schedule goes on, of a deterministic run. The engine waits for what
        ran then: for those that are under_way again, for no other would come."""
        if self.state["engine"] is None:
            return None
        position = Position.unpack(self.state["engine"])
        running = tuple(rollout_id for rollout_id in position.running if rollout_id in under_way)
        return replace(position, running=running)


def find_saved(folder: RunFolder, recipe: Recipe, *, data: str, accept_changes: bool) -> Saved:
    """The newest whole checkpoint of the run. Changes nothing.

    data: fingerprint of the training data now. Raises CheckpointError where there is no whole
    checkpoint of this run's schedule, or the data are not those of the run; DataError where its
    metrics cannot be read; ConfigError where the run is finished, or the recipe has changed and
    accept_changes is not given.
    """
    path, state, passed = Checkpoints(folder.checkpoints).newest(
        lambda state: require_own_schedule(folder, state)
    )
    if state["data"] != data:
        raise CheckpointError(
            f"the training data of {title(recipe.task)} is not what it was at {path}: its order "
            "would mean other problems now. Restore it, or start a new run with "
            f"--set model={shlex.quote(str(folder.model_last))}"
        )
    if folder.is_finished() and state["step"] >= recipe.steps:
        raise ConfigError(
            f"{folder.path} is finished: {state['step']} of {recipe.steps} steps are made; to go "
            "on, say more with --set steps=... --accept-changes"
        )
    changed = _accepted_changes(folder, recipe, accept_changes)
    notes = [*passed, *missing_parts(folder.path, state.get("ledger_parts", []))]
    notes += missing_steps(folder.path, state["step"])
    if changed:
        notes.append(f"goes on with a changed recipe: {'; '.join(changed)}")
    return Saved(path, state, tuple(changed), tuple(notes))


def find_replayed(folder: RunFolder, saved: Saved | None, run: Path | None) -> Path | None:
    """The run that this one replays, if any: `run`, which is written down, or the one that was.
    Raises DataError where the run that a checkpoint has followed so far is not known any more."""
    replayed = folder.replays(run)
    if replayed is None and saved is not None and saved.state["schedule"]["replayed"]:
        raise DataError(
            f"{folder.path} is a replay, and its replays.json, which names the run that it "
            'follows, is gone; write one: {"run": "FOLDER OF THAT RUN"}'
        )
    return replayed


def set_aside(saved: Saved, folder: RunFolder, recipe: Recipe) -> None:
    """The run goes on: checkpoints that were passed over, records and ledger parts beyond the one
    that it goes on from, and the summary of its end are set aside, and a changed recipe is written
    down."""
    if saved.changed:
        folder.update_recipe(recipe)
    folder.set_summary_aside()
    Checkpoints(folder.checkpoints).supersede_after(saved.folder)
    tidy_models(folder.model_best.parent)
    supersede_after(folder.path, saved.state["step"])
    supersede_ledger_after(folder.path, saved.state["step"])


def require_own_schedule(folder: RunFolder, state: Mapping[str, Any]) -> None:
    """Raises DataError where a checkpoint's state was not saved in this run's schedules."""
    try:
        loop, engine = state["schedule"], state["engine"]
        if not isinstance(state["step"], int) or not isinstance(state["data"], str):
            raise TypeError("step and data must be a number and a text")
        require_lines(folder.path / LOOP_FILE, loop["lines"], loop["crc"])
        if engine is not None:
            position = Position.unpack(engine)
            require_lines(folder.path / ENGINE_FILE, position.lines, position.crc)
    except (KeyError, TypeError) as error:
        raise DataError(f"its state.json is malformed: {error!r}") from error


def _accepted_changes(folder: RunFolder, recipe: Recipe, accept_changes: bool) -> list[str]:
    """How the recipe differs from the run's own. Raises ConfigError where that is not meant, or
    the run is a replay."""
    changed = folder.changes(recipe)
    if not changed:
        return changed
    said = "; ".join(changed)
    if (folder.path / "replays.json").is_file():
        raise ConfigError(f"{folder.path} is a replay and follows its recipe; changed: {said}")
    if not accept_changes:
        config = folder.path / "config.toml"
        where = " as config.toml now has it" if folder.changes(load_recipe(config)) else ""
        raise ConfigError(
            f"{folder.path} would go on with a changed recipe{where}: {said}. "
            "Say --accept-changes if that is meant"
        )
    return changed
