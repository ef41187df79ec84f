"""What a run goes on from: its newest whole checkpoint, checked before anything is changed.

saved = find_saved(folder, ...)     reads and refuses; the run folder stays as it is
set_aside(saved, folder, recipe)    what came after the checkpoint no longer counts
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints
from .config import Recipe
from .errors import CheckpointError, ConfigError
from .ledger import missing_parts
from .ledger import supersede_after as supersede_ledger_after
from .metrics import supersede_after
from .options.tasks import title
from .run_folder import RunFolder
from .schedule import ENGINE_FILE, LOOP_FILE, Position, require_lines


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint to go on from. notes: what was passed over or is missing, and how the recipe
    has changed; for the person who resumes."""

    folder: Path
    state: dict[str, Any]
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def position(self) -> Position | None:
        """Where the engine's schedule goes on, of a deterministic run."""
        engine = self.state["engine"]
        return None if engine is None else Position.unpack(engine)


def find_saved(folder: RunFolder, recipe: Recipe, *, data: str, accept_changes: bool) -> Saved:
    """The newest whole checkpoint of the run. Changes nothing.

    data: fingerprint of the training data now. Raises CheckpointError where there is no whole
    checkpoint, the data are not those of the run, or its schedule was cut; ConfigError where the
    run is finished, or the recipe has changed and accept_changes is not given.
    """
    path, state, torn = Checkpoints(folder.checkpoints).newest()
    if state["data"] != data:
        raise CheckpointError(
            f"the training data of {title(recipe.task)} is not what it was at {path}: its order "
            "would mean other problems now. Restore it, or start a new run with "
            f"--set model={folder.model_last}"
        )
    if folder.is_finished() and state["step"] >= recipe.steps:
        raise ConfigError(
            f"{folder.path} is finished: {state['step']} of {recipe.steps} steps are made; to go "
            "on, say more with --set steps=... --accept-changes"
        )
    changed = folder.changes(recipe)
    if changed and not accept_changes:
        raise ConfigError(
            f"{folder.path} would go on with a changed recipe: {'; '.join(changed)}. "
            "Say --accept-changes if that is meant"
        )
    notes = [*torn, *missing_parts(folder.path, state.get("ledger_parts", []))]
    if changed:
        notes.append(f"goes on with a changed recipe: {'; '.join(changed)}")
    saved = Saved(path, state, tuple(changed), tuple(notes))
    require_lines(folder.path / LOOP_FILE, state["schedule"]["lines"])
    if saved.position is not None:
        require_lines(folder.path / ENGINE_FILE, saved.position.lines)
    return saved


def set_aside(saved: Saved, folder: RunFolder, recipe: Recipe) -> None:
    """The run goes on: records and ledger parts beyond the checkpoint are set aside, and a changed
    recipe is written down."""
    if saved.changed:
        folder.update_recipe(recipe)
    supersede_after(folder.path, saved.state["step"])
    supersede_ledger_after(folder.path, saved.state["step"])
