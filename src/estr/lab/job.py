"""A job of a sweep, and the name of its figures: a digest of all that they come from.

    function, configuration, torch's version, source of the function's module
                                              and of what that imports, and so on

Comments and formatting do not count. Not followed are the modules of EXEMPT, which move, keep or
show figures and make none.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .sources import closure, digest_of

PACKAGE = Path(__file__).parents[1]

BY_NAME = (
    "builtin",
    "corrections",
    "environments/calculator.py",
    "environments/countdown.py",
    "environments/lookup.py",
    "lab/controls.py",
    "lab/entropy_masks.py",
    "warmstart.py",
)
"""Behind every run, though no import leads there: files and folders under the package's folder."""

_WHOLE_RUN = (
    "engines/local.py",
    "engines/pool.py",
    "engines/process.py",
    "evaluation.py",
    "evaluator_process.py",
    "run.py",
    "trainer_process.py",
)

MORE_BY_NAME = {
    "estr.lab.natural": _WHOLE_RUN,
    "estr.lab.own": (
        *_WHOLE_RUN,
        "data/gsm8k",
        "data/math",
        "data/multihop",
        "engines",
        "environments",
        "reward.py",
        "tools.py",
    ),
}
"""The same for the functions of one module."""

EXEMPT = {
    # names, errors and words
    "__init__.py",
    "lab/__init__.py",
    "errors.py",
    "options/suggest.py",
    "progress.py",
    "run_progress.py",
    "display.py",
    "printable.py",
    "streams.py",
    # processes, and how they and their weights find each other
    "blocking.py",
    "calls.py",
    "cluster",
    "engines/interpreter.py",
    "functions.py",
    "killable.py",
    "machine.py",
    "options/placement.py",
    "own_folders.py",
    "own_loop.py",
    "processes.py",
    "rank_workers.py",
    "ray_head.py",
    "worker.py",
    # where things lie, and what is kept of a run
    "checkpoint.py",
    "guard",
    "ledger",
    "output_files.py",
    "recipe_files.py",
    "recorded.py",
    "resume.py",
    "run_folder.py",
    "subject.py",
    "wandb_log.py",
    # what is made of rows, and how jobs come to be run
    "lab/cache.py",
    "lab/figures.py",
    "lab/job.py",
    "lab/lab.py",
    "lab/methods.py",
    "lab/only.py",
    "lab/protocol.py",
    "lab/sources.py",
    "lab/statistics.py",
    "lab/sweep.py",
    "lab/table.py",
    "student.py",
}
"""Files and folders under the package's folder that change no figure of a run that ends."""

TIMEOUT_S = 3 * 3600.0
"""A run of the laboratory that takes longer has hung."""


@dataclass(frozen=True, slots=True)
class Job:
    """labels: columns of the table that tell this job's rows from others'. function:
    "module:function" of a function that takes `config` (JSON data) and returns rows with measure,
    step and value, and further labels of their own if need be. limit_s: None where the function
    has time limits of its own. alike: a ConfigError or DataError of this job would be one of all,
    and the sweep ends with it."""

    labels: Mapping[str, Any]
    config: Mapping[str, Any]
    function: str = "estr.lab.training:train_once"
    limit_s: float | None = TIMEOUT_S
    alike: bool = False

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @property
    def digest(self) -> str:
        """Names the job's figures: the same whenever they would be the same."""
        content = [self.function, self.config, code_digest(self.module)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def code_digest(module: str) -> str:
    """Of the source behind a job's module and of torch's version, as it was when this process
    first asked."""
    return _digest_now(module)


def require_unchanged(modules: Iterable[str]) -> None:
    """Raises ConfigError if source behind one of these modules is no longer what `code_digest` said
    of it: worker processes that start now would run other code than those before."""
    for module in modules:
        if _digest_now(module) != code_digest(module):
            raise ConfigError(
                f"the source behind {module} has been changed since this command started, so that "
                "its figures would be of two codes; give the command again"
            )


def code_files(module: str) -> list[Path]:
    """The files that `code_digest` covers. A module outside of the package stands for itself."""
    names = [*BY_NAME, *MORE_BY_NAME.get(module, ())]
    own = [PACKAGE.parent.joinpath(*m.split(".")) for m in ("estr.lab.training", module)]
    start = [file for path in own if (file := path.with_suffix(".py")).is_file()]
    for name in names:
        place = PACKAGE / name
        start += [f for f in place.iterdir() if f.is_file()] if place.is_dir() else [place]
    found = closure(start, PACKAGE.parent, lambda f: PACKAGE in f.parents and not is_exempt(f))
    return [file for file in found if not is_exempt(file)]


def is_exempt(file: Path) -> bool:
    """Whether a file of the package is one of EXEMPT, or in a folder that is."""
    name = file.relative_to(PACKAGE).as_posix()
    return name in EXEMPT or any(name.startswith(f"{entry}/") for entry in EXEMPT)


def _digest_now(module: str) -> str:
    return f"{version('torch')} {digest_of(code_files(module), PACKAGE)}"
