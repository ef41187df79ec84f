"""Many runs: spread over processes, kept one by one, never made twice.

    jobs --digest--> in the cache?  --yes--> rows
                          `--no--> worker process (one thread) --> cache/DIGEST.json --> rows

A job is a function by name and its configuration. Its digest also covers the source of everything
that its figures come from, so a figure is never that of older code; comments do not count. A file
of the cache is written aside and renamed, so whatever ends a sweep, the same command goes on.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, DataError, Interrupted, WorkerDied, WorkerError, first_raised
from ..functions import import_object
from ..worker import Worker
from .table import Row

CODE = (
    "advantages.py",
    "batch.py",
    "builtin",
    "corrections",
    "diagnostics.py",
    "engines/sampler.py",
    "environments/__init__.py",
    "environments/calculator.py",
    "environments/countdown.py",
    "environments/demonstrations.py",
    "environments/lookup.py",
    "heads.py",
    "lab/arithmetic.py",
    "lab/controls.py",
    "lab/decoder.py",
    "lab/entropy_masks.py",
    "lab/rollouts.py",
    "lab/scoring.py",
    "lab/staleness.py",
    "lab/training.py",
    "logprobs.py",
    "losses.py",
    "options/corrections.py",
    "quantization.py",
    "trainer.py",
    "warmstart.py",
)
"""What the figures of a run come from, under the package's folder; the module of the job's own
function comes on top."""

_WHOLE_RUN = (
    "buffer.py",
    "deadlines.py",
    "dispatcher.py",
    "engine_versions.py",
    "engines",
    "evaluation.py",
    "evaluation_rollouts.py",
    "group.py",
    "group_endings.py",
    "groups.py",
    "groups_snapshot.py",
    "loop.py",
    "members.py",
    "problems.py",
    "rollout.py",
    "run.py",
    "run_metrics.py",
    "trainer_process.py",
)

MORE_CODE = {
    "estr.lab.natural": _WHOLE_RUN,
    "estr.lab.own": (*_WHOLE_RUN, "environments", "lab/natural.py"),
    "estr.lab.token_noise": ("lab/archive.py", "lab/moments.py"),
    "estr.lab.switch_tokens": ("lab/archive.py",),
    "estr.lab.gradients": ("lab/archive.py",),
    "estr.lab.noise_floor": ("lab/archive.py",),
}
"""What else stands behind the functions of a module."""

TIMEOUT_S = 3 * 3600.0
"""A single job that takes longer has hung."""


@dataclass(frozen=True, slots=True)
class Job:
    """labels: columns of the table that tell this job's rows from others'. function:
    "module:function" of a function that takes `config` (JSON data) and returns rows with measure,
    step and value, and further labels of their own if need be."""

    labels: Mapping[str, Any]
    config: Mapping[str, Any]
    function: str = "estr.lab.training:train_once"

    @property
    def digest(self) -> str:
        """Names the job's figures: the same whenever they would be the same."""
        content = [self.function, self.config, code_digest(self.function.partition(":")[0])]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def code_digest(module: str) -> str:
    """Of the source behind a job, formatting and comments aside, and of torch's version."""
    root = Path(__file__).parents[1]
    files = [
        file
        for name in (*CODE, *MORE_CODE.get(module, ()))
        for file in ([root / name] if "." in name else sorted((root / name).iterdir()))
        if file.is_file()
    ]
    own = root.parent.joinpath(*module.split(".")).with_suffix(".py")
    if own.is_file() and own not in files:
        files.append(own)
    digest = hashlib.sha256(version("torch").encode())
    for file in files:
        digest.update(file.relative_to(root.parent).as_posix().encode())
        data = file.read_bytes()
        digest.update(ast.dump(ast.parse(data)).encode() if file.suffix == ".py" else data)
    return digest.hexdigest()


class Progress(Protocol):
    """Told of every job as it ends."""

    def begin(self, num_jobs: int, num_cached: int) -> None: ...

    def done(self, job: Job, seconds: float) -> None: ...


class Sweep:
    """Runs jobs under a folder. `processes`: how many at once, one thread each."""

    def __init__(self, folder: Path, *, processes: int, progress: Progress | None = None) -> None:
        if processes < 1:
            raise ConfigError(f"--jobs must be at least 1, not {processes}")
        self.cache = folder / "cache"
        self._processes = processes
        self._progress = progress

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """The rows of all jobs with their labels, in the order of the jobs; those that are not in
        the cache are run first.

        Raises WorkerError naming the first job that failed, after all others have ended;
        Interrupted when the user stops it. What has finished is kept in either case.
        """
        todo = {job.digest: job for job in jobs if not self._path(job).is_file()}
        if self._progress is not None:
            self._progress.begin(len({job.digest for job in jobs}), len(jobs) - len(todo))
        if todo:
            self.cache.mkdir(parents=True, exist_ok=True)
            try:
                failures = asyncio.run(self._run(list(todo.values())))
            except KeyboardInterrupt as stop:
                raise Interrupted(
                    f"stopped; finished runs are kept in {self.cache}, the same command goes on"
                ) from stop
            if failures:
                job, error = failures[0]
                raise WorkerError(
                    f"{len(failures)} of {len(todo)} runs failed, first {dict(job.labels)}: "
                    f"{error}; the others are kept in {self.cache}"
                )
        return [row for job in jobs for row in self._rows(job)]

    def _path(self, job: Job) -> Path:
        return self.cache / f"{job.digest}.json"

    def _rows(self, job: Job) -> list[Row]:
        path = self._path(job)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            measured = kept["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is torn or foreign ({error}); delete it and go on") from error
        own = {**job.labels, "job": job.digest}
        return [{**own, **row} for row in measured]

    async def _run(self, jobs: list[Job]) -> list[tuple[Job, str]]:
        queue = list(reversed(jobs))
        failures: list[tuple[Job, str]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(self._processes, len(jobs))):
                    group.create_task(self._serve(number, queue, failures))
        except BaseExceptionGroup as raised:
            raise first_raised(raised) from raised
        return failures

    async def _serve(self, number: int, queue: list[Job], failures: list[tuple[Job, str]]) -> None:
        """One process, job after job; a new one where it died."""
        while queue:
            # As nice as this process is, also where Linux weighs whole sessions (autogroup).
            worker = await Worker.start(
                f"lab {number}", "estr.lab.sweep:Host", {}, threads=1, nice=os.nice(0)
            )
            try:
                while queue:
                    job = queue.pop()
                    clock = time.monotonic()
                    try:
                        rows = await worker.call(
                            "run", job.function, dict(job.config), timeout_s=TIMEOUT_S
                        )
                    except WorkerDied as error:
                        failures.append((job, str(error)))
                        break
                    except Exception as error:  # noqa: BLE001 - one job must not end the others
                        failures.append((job, f"{type(error).__name__}: {error}"))
                        continue
                    seconds = time.monotonic() - clock
                    self._keep(job, rows, seconds)
                    if self._progress is not None:
                        self._progress.done(job, seconds)
            finally:
                await worker.close()

    def _keep(self, job: Job, rows: list[Row], seconds: float) -> None:
        path = self._path(job)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        kept = {"function": job.function, "config": job.config, "seconds": seconds, "rows": rows}
        aside.write_text(json.dumps(kept), encoding="utf-8")
        aside.replace(path)


class Host:
    """What a worker process serves."""

    def run(self, function: str, config: dict[str, Any]) -> list[Row]:
        found: Callable[[dict[str, Any]], list[Row]] = import_object(function, "function")
        return found(config)
