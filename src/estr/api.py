"""The system from Python: what `estr train` and `estr export` do, with typed results.

    result = train("my.toml")                     a recipe file, or the name of a shipped recipe
    result = train({"steps": 20, "task": "countdown"})       a recipe as nested dicts
    export(result, "my-model", dtype="bfloat16")  a Hugging Face folder of one's own

These are ordinary functions that return when the work is done: in a script (no `if __name__ ==
"__main__"` is needed, the processes are fresh interpreters), in a notebook, and inside a running
event loop, which they hold up; `await asyncio.to_thread(estr.train, recipe)` does not. Modules that
a recipe names ("my_tasks:MyTask") are imported in those processes, too, so what they hold must lie
in a file, not in the script or the notebook itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .config import Recipe, load_recipe, recipe_from_table
from .errors import ConfigError, DataError
from .progress import Reporter
from .recipe_files import find_recipe
from .results import TrainResult, read_run
from .run import train as train_recipe
from .subject import WhichWeights, find_subject

RecipeLike = Recipe | Mapping[str, Any] | str | os.PathLike[str]


def train(
    recipe: RecipeLike | None = None,
    *,
    overrides: Sequence[str] = (),
    runs: str | os.PathLike[str] = "runs",
    progress: bool = False,
    reporter: Reporter | None = None,
) -> TrainResult:
    """Train as the recipe says.

    recipe: a Recipe, the same as nested dicts, the path of a TOML file, or the name of a shipped
    recipe; None: the built-in model on the built-in task. overrides: "key=value" strings for what
    is read from a file, as after `--set`. The run folder is made under `runs`. progress: print what
    `estr train --plain` prints; reporter: be told of it in another way. No report.html is written:
    `estr report RUN` makes one.

    Raises ConfigError or DataError before any compute is spent; Interrupted after Ctrl-C, with a
    checkpoint saved; other EstrErrors name what failed and leave the last checkpoint intact.
    """
    resolved = read_recipe(recipe, overrides)
    folder = Path(runs)
    if progress and reporter is None:
        from .display import reporter_for

        with reporter_for(sys.stdout, live=False) as plain:
            summary = train_recipe(resolved, reporter=plain, runs=folder)
    else:
        summary = train_recipe(resolved, reporter=reporter, runs=folder)
    return read_run(folder / summary.name)


def resume_run(
    run: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    accept_changes: bool = False,
    runs: str | os.PathLike[str] = "runs",
    reporter: Reporter | None = None,
) -> TrainResult:
    """Go on with a run from its last checkpoint, by its own recipe. overrides: changes of it, which
    are refused unless accept_changes. Raises DataError where there is no such run, else as `train`
    does."""
    from .subject import find_run

    found = find_run(run, Path(runs))
    if found is None:
        name = os.fspath(run)
        raise DataError(f"neither {name} nor {Path(runs) / name} is a run folder")
    recipe = load_recipe(found.path / "config.toml", overrides)
    train_recipe(recipe, reporter=reporter, resume=found.path, accept_changes=accept_changes)
    return read_run(found.path)


def read_recipe(recipe: RecipeLike | None, overrides: Sequence[str] = ()) -> Recipe:
    """Any of the ways to say a recipe, validated. Raises ConfigError."""
    if isinstance(recipe, Recipe | Mapping):
        if overrides:
            raise ConfigError(
                "overrides change a recipe file; change the recipe itself where it is given as "
                f"{type(recipe).__name__}"
            )
        return recipe if isinstance(recipe, Recipe) else recipe_from_table(recipe)
    if recipe is not None and not isinstance(recipe, str | os.PathLike):
        raise ConfigError(
            f"a recipe is a Recipe, a dict, or the path of a TOML file, not {recipe!r:.80}"
        )
    return load_recipe(find_recipe(None if recipe is None else os.fspath(recipe)), overrides)


def export(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    which: WhichWeights = "best",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    runs: str | os.PathLike[str] = "runs",
) -> Path:
    """Weights and tokenizer of a run, or of a model, as a new Hugging Face folder `dest`.

    which: of a run, the best version at held-out evaluation, the last, or the one it started from.
    dtype: of the weights in it. Returns `dest`. Raises ConfigError where there is something
    already, DataError where the run has no such weights.
    """
    from .models import load_model, load_tokenizer, save_model
    from .subject import stamp_version

    folder = _new_folder(dest)
    subject = find_subject(source, weights=which, runs=Path(runs))
    model = load_model(subject.folder, dtype=dtype)
    if subject.version is not None:
        stamp_version(model, subject.version)
    try:
        save_model(model, load_tokenizer(subject.folder), folder)
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def export_adapter(
    run: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    which: WhichWeights = "best",
    runs: str | os.PathLike[str] = "runs",
) -> Path:
    """The adapters of a run with lora.rank above 0 as a new folder `dest` of peft's own kind, which
    `peft.PeftModel.from_pretrained` puts beside the weights of the model that the run started from.

    They are taken out of the checkpoint of that version. Returns `dest`. Raises ConfigError where
    there is something already or the run has no adapters, DataError where no checkpoint has them.
    """
    from safetensors.torch import load_file

    from .adapters import save_adapter
    from .replay.gradients import weights_there
    from .subject import model_folder

    folder = _new_folder(dest)
    subject = find_subject(run, weights=which, runs=Path(runs))
    recipe = subject.recipe
    if subject.run is None or recipe.lora.rank == 0:
        raise ConfigError(f"{os.fspath(run)} has no adapters: it is no run with lora.rank above 0")
    found, passed_over = weights_there(subject.run)
    there = {v: path for v, path in found.items() if path is not None}
    if subject.version not in there:
        held = ", ".join(map(str, sorted(there))) or "none"
        raise DataError(
            f"the {which} weights of {subject.run.path} are version {subject.version}, and its "
            f"checkpoints hold {held}; take --which last, or train with a larger checkpoint.keep"
            + "".join(f"; passed over: {reason}" for reason in passed_over)
        )
    state = load_file(there[subject.version] / "model.safetensors")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        save_adapter(state, recipe.lora, base=model_folder(recipe), folder=aside)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DataError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def _new_folder(dest: str | os.PathLike[str]) -> Path:
    """Where an export goes. Raises ConfigError where there is something already."""
    folder = Path(dest)
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already; export to a new folder, or remove that one")
    return folder
