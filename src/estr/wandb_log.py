"""The metrics of a run at Weights & Biases, by the extra `wandb`.

    MetricsWriter --record--> WandbLog --> RUN_FOLDER/wandb  (--> the site, unless mode = "offline")

A resumed run goes on under its own id. Steps are a value of each record and not wandb's own
counter, so that steps done again after a kill replace what was drawn of them.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import Recipe
from .errors import ConfigError

_ID_FILE = "wandb.id"


class WandbLog:
    """One run at Weights & Biases. Raises ConfigError where wandb will not begin."""

    def __init__(self, run_folder: Path, recipe: Recipe) -> None:
        import wandb

        options = recipe.wandb
        note = run_folder / _ID_FILE
        if not note.exists():
            note.write_text(secrets.token_hex(4), encoding="utf-8")
        try:
            self._run: Any = wandb.init(
                project=options.project,
                entity=options.entity or None,
                mode=options.mode,
                dir=str(run_folder),
                id=note.read_text(encoding="utf-8"),
                resume="allow",
                name=run_folder.name,
                config=dataclasses.asdict(recipe),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb does not begin: {error}. Run `wandb login`, or set wandb.mode = 'offline' "
                "and `wandb sync` the folder later"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        """One record of metrics.jsonl; what has no value is left out."""
        self._run.log({name: value for name, value in record.items() if value is not None})

    def close(self) -> None:
        """Write out what is left. May be called twice."""
        self._run.finish()
