"""What a sweep shows while it goes on: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..printable import printable
from ..streams import careless
from .job import Job

_LINE_EVERY_S = 30.0
_MAX_REASON = 500
"""Characters of a failure's reason that are shown as it happens; the end of the sweep tells all."""


class SweepProgress:
    """Implements `estr.lab.sweep.Progress`."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream and careless(stream))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("runs", total=0)
        self._total = self._done = 0
        self._told = time.monotonic()

    def begin(self, num_jobs: int, num_cached: int) -> None:
        self._total += num_jobs
        self._done += num_cached
        self._bar.update(self._task, total=self._total, completed=self._done)
        self._say(f"{num_jobs} runs, {num_cached} of them kept from before")

    def done(self, job: Job, seconds: float) -> None:
        self._done += 1
        words = " ".join(f"{k} {v}" for k, v in job.labels.items())
        self._bar.update(self._task, completed=self._done, description=words[:60])
        if time.monotonic() - self._told >= _LINE_EVERY_S:
            self._told = time.monotonic()
            self._say(f"{self._done} of {self._total} runs done, last ({seconds:.0f} s): {words}")

    def failed(self, job: Job, reason: str) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        words = " ".join(f"{k} {v}" for k, v in job.labels.items())
        short = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        self.tell(f"failed: {words}: {short}")

    def tell(self, line: str) -> None:
        """One line, shown on a terminal, too, above the bar; what is not visible is escaped."""
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self.tell(line)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
