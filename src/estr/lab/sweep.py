"""Many runs: spread over processes, kept one by one, never made twice.

    jobs --digest--> in the cache?  --yes--> rows
                          `--no--> worker process (one thread) --> cache/DIGEST.json --> rows

What a job is and what its digest covers: `estr.lab.job`. A file of the cache is written aside and
renamed, so whatever ends a sweep, the same command goes on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .. import blocking
from ..errors import (
    ConfigError,
    DataError,
    EstrError,
    Interrupted,
    WorkerDied,
    WorkerError,
    first_raised,
)
from ..functions import import_object
from ..worker import Worker, last_lines
from .cache import Cache, as_json, checked
from .job import Job, require_unchanged
from .table import Row

_LOOK_AGAIN_S = 1.0
"""Between two looks at a job that another process is at."""


class Progress(Protocol):
    """Told of every job as it ends."""

    def begin(self, num_jobs: int, num_cached: int) -> None: ...

    def done(self, job: Job, seconds: float) -> None: ...

    def failed(self, job: Job, reason: str) -> None: ...

    def tell(self, line: str) -> None: ...


class Sweep:
    """Runs jobs under a folder. `processes`: how many at once, one thread each. elsewhere: rows of
    jobs that another machine has made, by digest; those that are asked for are kept here."""

    def __init__(
        self,
        folder: Path,
        *,
        processes: int,
        progress: Progress | None = None,
        elsewhere: Mapping[str, list[Row]] | None = None,
    ) -> None:
        if processes < 1:
            raise ConfigError(f"--jobs must be at least 1, not {processes}")
        self._cache = Cache(folder / "cache")
        self._processes = processes
        self._elsewhere = elsewhere or {}
        self._progress = progress or _Silent()
        cores = os.cpu_count() or 1
        if processes > cores:
            self._progress.tell(
                f"--jobs {processes} on {cores} cores: each run takes a core, and more at once "
                "only wait for each other"
            )

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """The rows of all jobs with their labels, in the order of the jobs; those that are not in
        the cache are run first.

        Raises WorkerError naming the first job that failed, after all others have ended; that job's
        ConfigError or DataError at once where it would be one of all (`Job.alike`); ConfigError
        where the cache cannot be written or the code behind the jobs is changed meanwhile;
        DataError where a file cannot be kept; Interrupted when the user stops it. What has finished
        is kept in any case.
        """
        digests = [job.digest for job in jobs]
        state = _State()
        for digest, job in zip(digests, jobs, strict=True):
            if digest in state.rows or digest in state.todo:
                continue
            rows = self._kept(job) or self._taken(digest, job)
            if rows is None:
                state.todo[digest] = job
            else:
                state.rows[digest] = rows
        if self._elsewhere and state.todo and not self._elsewhere.keys() & set(digests):
            self._progress.tell(
                f"none of these {len(set(digests))} runs is in the tables of --from: they are of "
                "other code, of another torch, or of another experiment"
            )
        self._progress.begin(len(set(digests)), len(state.rows))
        if state.todo:
            self._run_all(state)
        return [
            {**row, **job.labels, "job": digest}
            for digest, job in zip(digests, jobs, strict=True)
            for row in state.rows[digest]
        ]

    def _kept(self, job: Job) -> list[Row] | None:
        try:
            return self._cache.read(job)
        except DataError as error:
            self._progress.tell(f"{error}; this run is made anew")
            return None

    def _taken(self, digest: str, job: Job) -> list[Row] | None:
        """The rows of a job that was made elsewhere, kept as if it had been made here. Raises
        ConfigError where they are no rows."""
        if digest not in self._elsewhere:
            return None
        try:
            rows = checked(self._elsewhere[digest])
        except ValueError as error:
            raise ConfigError(
                f"a table that --from names holds no rows of a run: {error}"
            ) from error
        self._cache.keep(job, rows, 0.0)
        return rows

    def _run_all(self, state: _State) -> None:
        require_unchanged({job.module for job in state.todo.values()})
        try:
            with self._cache.logs() as logs:
                asyncio.run(self._serve_all(state, logs))
                if not state.failures:
                    return
                job, reason = state.failures[0]
                raise WorkerError(
                    f"{len(state.failures)} of {len(state.todo)} runs failed, first "
                    f"{dict(job.labels)}: {reason}; the others are kept in {self._cache.folder}"
                )
        except (KeyboardInterrupt, asyncio.CancelledError) as stop:
            raise Interrupted(
                f"stopped; finished runs are kept in {self._cache.folder}, the same command goes on"
            ) from stop
        except BaseExceptionGroup as group:
            raise first_raised(group) from None

    async def _serve_all(self, state: _State, logs: Path) -> None:
        queue = deque(state.todo.items())
        this = asyncio.current_task()
        assert this is not None
        with blocking.interrupts_go_to(this.cancel):
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._processes, len(queue))):
                    group.create_task(self._serve(_Seat(number, logs), queue, state))

    async def _serve(self, seat: _Seat, queue: deque[tuple[str, Job]], state: _State) -> None:
        """One process, job after job; a new one where it died or hung."""
        try:
            while queue:
                digest, job = queue.popleft()
                with self._cache.claim(job) as is_ours:
                    rows = self._kept(job) if is_ours else None
                    if rows is not None:  # another sweep has made it
                        state.rows[digest] = rows
                        self._progress.done(job, 0.0)
                    elif is_ours:
                        await self._make(seat, digest, job, state)
                if not is_ours:
                    queue.append((digest, job))
                    await self._wait_for_others(state)
        finally:
            await seat.leave()

    async def _wait_for_others(self, state: _State) -> None:
        if not state.waits:
            state.waits = True
            self._progress.tell("some of these runs are being made by another sweep; waiting")
        await asyncio.sleep(_LOOK_AGAIN_S)

    async def _make(self, seat: _Seat, digest: str, job: Job, state: _State) -> None:
        """Run one job and keep it; its failure is noted."""
        clock = time.monotonic()
        try:
            rows = await seat.result(job)
        except _JobFailed as failure:
            state.failures.append((job, str(failure)))
            self._progress.failed(job, str(failure))
            return
        seconds = time.monotonic() - clock
        require_unchanged([job.module])
        self._cache.keep(job, rows, seconds)
        state.rows[digest] = rows
        self._progress.done(job, seconds)


@dataclass(slots=True)
class _State:
    """Of one `Sweep.run`, by digest."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    todo: dict[str, Job] = field(default_factory=dict)
    failures: list[tuple[Job, str]] = field(default_factory=list)
    waits: bool = False
    """Whether it was told that other sweeps are waited for."""


class _JobFailed(Exception):
    """A job did not give rows; the others go on."""


class _Seat:
    """One worker process after another."""

    def __init__(self, number: int, logs: Path) -> None:
        self._number = number
        self._logs = logs
        self._started = 0
        self._worker: Worker | None = None

    async def result(self, job: Job) -> list[Row]:
        """The rows of a job. Raises _JobFailed; the process is given up where it died or hung.
        Raises the job's own error where it would be that of all."""
        worker = self._worker = self._worker or await self._start()
        try:
            async with asyncio.timeout(job.limit_s):
                rows: list[Row] = await worker.call(
                    "run", job.function, dict(job.config), timeout_s=None
                )
                return rows
        except TimeoutError as error:
            await self.leave(timeout_s=0.0)
            log = last_lines(self._log)
            raise _JobFailed(f"no result within {job.limit_s:g} s{log}") from error
        except WorkerDied as error:
            await self.leave()
            raise _JobFailed(str(error)) from error
        except (ConfigError, DataError) as error:
            if job.alike:
                raise type(error)(f"run {dict(job.labels)}: {error}") from error
            raise _JobFailed(f"{type(error).__name__}: {error}") from error
        except EstrError as error:
            raise _JobFailed(f"{type(error).__name__}: {error}") from error

    @property
    def _log(self) -> Path:
        return self._logs / f"lab-{self._number}-{self._started}.log"

    async def _start(self) -> Worker:
        self._started += 1
        # As nice as this process is, also where Linux weighs whole sessions (autogroup).
        return await Worker.start(
            f"lab {self._number}",
            "estr.lab.sweep:Host",
            {},
            threads=1,
            nice=os.nice(0),
            log=self._log,
        )

    async def leave(self, timeout_s: float = 5.0) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close(timeout_s)


class _Silent:
    """No progress is shown."""

    def begin(self, num_jobs: int, num_cached: int) -> None:
        pass

    def done(self, job: Job, seconds: float) -> None:
        pass

    def failed(self, job: Job, reason: str) -> None:
        pass

    def tell(self, line: str) -> None:
        pass


class Host:
    """What a worker process serves."""

    def run(self, function: str, config: dict[str, Any]) -> list[Row]:
        """The rows as a file of the cache gives them back, or an error where none could."""
        found: Callable[[dict[str, Any]], list[Row]] = import_object(function, "function")
        return checked(as_json(found(config)))


__all__ = ["Host", "Job", "Progress", "Sweep"]
