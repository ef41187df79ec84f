"""What a run tells while it goes on. The loop speaks to a Reporter; displays implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .config import Recipe
    from .run_folder import RunFolder, Summary
    from .types import Trajectory

Row = Mapping[str, float | None]


class Reporter(Protocol):
    """Called from the loop; must return at once and never raise."""

    def starting(self, recipe: Recipe) -> None:
        """Everything that can be refused has been looked at; the processes are being started."""
        ...

    def started(self, recipe: Recipe, folder: RunFolder, first_step: int) -> None:
        """Training begins (first_step > 0: goes on from a checkpoint)."""
        ...

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        """One optimizer step is done; row holds its metrics under the names of metrics.jsonl."""
        ...

    def evaluated(self, version: int, accuracy: float, num_problems: int) -> None:
        """A held-out evaluation of `version` is done."""
        ...

    def rolled_out(self, trajectory: Trajectory, text: str) -> None:
        """A trajectory was trained on; text is it decoded, tool output included."""
        ...

    def message(self, text: str) -> None:
        """Something that the user should read."""
        ...

    def finished(self, summary: Summary, folder: RunFolder) -> None:
        """The run is over and everything is written."""
        ...


class SilentReporter:
    """Says nothing."""

    def starting(self, recipe: Recipe) -> None:
        pass

    def started(self, recipe: Recipe, folder: RunFolder, first_step: int) -> None:
        pass

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        pass

    def evaluated(self, version: int, accuracy: float, num_problems: int) -> None:
        pass

    def rolled_out(self, trajectory: Trajectory, text: str) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finished(self, summary: Summary, folder: RunFolder) -> None:
        pass
