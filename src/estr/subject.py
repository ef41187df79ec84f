"""What is played: a run or a model, found by name and brought up without training.

find_subject("calculator")   runs/calculator, its model/best and its recipe
find_subject("builtin")      a model, under the default recipe
model_folder(recipe)         where the model of a recipe lies; a warm start is made if need be
build_setting(...)           an engine on it in this process, ready for run_rollout
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import blocking
from .config import Recipe, as_override, load_recipe
from .errors import ConfigError, DataError
from .options.tasks import MIX, entries
from .rollout import RolloutSetting
from .run_folder import RunFolder
from .types import SamplingSettings

if TYPE_CHECKING:
    from .chat import Codec
    from .environment import Prompt, Task

WhichWeights = Literal["start", "best", "last"]
"""Of a run: those it started from, those of the best held-out evaluation, those of its end."""

_VERSION_KEY = "estr_version"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model folder and the recipe to play it under. run: None for a model of no run. version:
    None for a model folder that does not say. label: what one task of several is called by; None:
    by its own name."""

    folder: Path
    recipe: Recipe
    run: RunFolder | None
    version: int | None
    label: str | None = None

    def load_model(self) -> Any:
        """The model as the recipe's engine runs it."""
        from .models import load_model

        engine = self.recipe.engine
        return load_model(self.folder, dtype=engine.dtype, device=engine.device)


def find_subject(
    source: str | os.PathLike[str],
    *,
    task: str | None = None,
    overrides: Sequence[str] = (),
    weights: WhichWeights = "best",
    runs: Path = Path("runs"),
) -> Subject:
    """A run folder, a run's name under `runs`, or a model, in this order.

    task: plays that task with its default options, unless it is the recipe's own, or the label of
    one of several. Without it a recipe of several tasks keeps them all; it cannot be played then.
    overrides: keys of the recipe, as in load_recipe. A task that is not that of the run brings its
    `eval_settings` along; they stand above the recipe and below the overrides. Raises ConfigError
    naming what was looked for, or DataError where a run or a model cannot be used.
    """
    from .environments import TASKS

    source = os.fspath(source)
    run = find_run(source, runs)
    recipe_file = None if run is None else run.path / "config.toml"
    written = load_recipe(recipe_file)
    own = {e.label: e.table for e in entries(written.task)}
    chosen = "" if task is None else task
    label = None
    if chosen in own and len(own) > 1:
        label = chosen
        overrides = [*task_overrides(own[chosen]), *overrides]
    elif chosen and chosen not in own:
        if len(own) > 1 and chosen not in TASKS and ":" not in chosen:
            raise ConfigError(
                f"{chosen!r} is neither a task of {source} ({', '.join(own)}) nor a shipped one "
                f"({', '.join(TASKS)})"
            )
        overrides = [as_override("task", chosen), *overrides]
    recipe = load_recipe(recipe_file, overrides)
    known = {MIX, *(table["name"] for table in own.values())}
    if run is None or recipe.task["name"] not in known:
        recipe = load_recipe(recipe_file, [*_eval_settings(recipe), *overrides])
    if run is not None and weights != "start":
        folder = run.model_best if weights == "best" else run.model_last
        if not folder.is_dir():
            raise DataError(
                f"run {run.path} holds no model/{weights}: the run did not get that far; "
                "choose other weights of it (start, best, last)"
            )
        version = stamped_version(folder) if weights == "best" else _final_version(run)
        return Subject(folder, recipe, run, version, label)
    if run is not None:
        # A warm start is of a task: of the run's own, whatever task is played now.
        start = model_folder(dataclasses.replace(written, model=recipe.model))
        return Subject(start, recipe, run, 0, label)
    recipe = dataclasses.replace(recipe, model=source)
    try:
        folder = model_folder(recipe)
    except DataError as error:
        raise ConfigError(
            f"{source} is no run (neither {source} nor {runs / source} is a run folder) "
            f"and no model: {error}"
        ) from error
    return Subject(folder, recipe, None, stamped_version(folder))


def task_overrides(table: Mapping[str, Any]) -> list[str]:
    """A task table as overrides that replace whatever task there was."""
    options = [as_override(f"task.{key}", value) for key, value in table.items() if key != "name"]
    return [as_override("task", table["name"]), *options]


def _eval_settings(recipe: Recipe) -> list[str]:
    """What the recipe's task wants of an evaluation, as overrides."""
    from .environments import build_task

    settings = getattr(build_task(recipe.task), "eval_settings", {})
    return [as_override(key, value) for key, value in settings.items()]


def model_folder(recipe: Recipe, tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a recipe's model. What has to be made first (a warm start, a conversion) is
    made, and told. Raises ConfigError or DataError naming the model and the remedy."""
    from .models import resolve_model
    from .warmstart import parse_warm_start, warm_start

    setting = parse_warm_start(recipe.model)
    return (
        resolve_model(recipe.model, tell)
        if setting is None
        else warm_start(recipe.task, setting, tell)
    )


def find_run(source: str | os.PathLike[str], runs: Path) -> RunFolder | None:
    """The run folder at that path, or of that name under `runs`; None if there is none."""
    for path in (Path(source), runs / Path(source)):
        if os.path.isfile(path / "config.toml"):  # False for a name that no file can have, too
            return RunFolder.open(path)
    return None


def _final_version(run: RunFolder) -> int | None:
    """The version of model/last, which the summary tells."""
    path = run.path / "summary.json"
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not the summary of a run: {error}") from error


def resolve_play(
    folder: Path, recipe: Recipe, *, temperature: float
) -> tuple[Task, Codec, SamplingSettings]:
    """(task, codec, sampling settings) of a recipe on the model in `folder`; loads no weights.

    Raises ConfigError or DataError.
    """
    _require_one_task(recipe)
    (play,) = resolve_plays(folder, recipe, temperature=temperature)
    return play


def _require_one_task(recipe: Recipe) -> None:
    if len(found := entries(recipe.task)) > 1:
        names = ", ".join(entry.label for entry in found)
        raise ConfigError(f"this plays one task, not {len(found)} ({names}); say --task NAME")


def resolve_plays(
    folder: Path, recipe: Recipe, *, temperature: float
) -> list[tuple[Task, Codec, SamplingSettings]]:
    """As resolve_play, of every task of the recipe."""
    from .chat import Codec
    from .environments import build_tasks
    from .models import load_tokenizer

    codec = Codec(load_tokenizer(folder))
    plays = []
    for task in build_tasks(recipe.task).values():
        for split in ("train", "test"):
            if task.size(split) == 0:
                raise ConfigError(f"task {task.name} has no problem in its {split} split")
        if not isinstance(task.max_turns, int) or task.max_turns < 1:
            raise ConfigError(
                f"task {task.name} has max_turns = {task.max_turns!r}; it must be a whole number "
                "of at least 1"
            )
        require_renderable(task, codec, recipe)
        sampling = SamplingSettings(
            temperature=temperature,
            max_new_tokens=recipe.sampling.max_new_tokens,
            max_tokens=recipe.sampling.max_tokens,
            stop_token_ids=codec.resolve_stops(task.stop),
        )
        plays.append((task, codec, sampling))
    return plays


def require_renderable(task: Task, codec: Codec, recipe: Recipe) -> None:
    """Raises ConfigError where the task asks in chat messages and the model has no chat template.
    Of such a model, and of no other, the first problem's environment is started to see."""
    if codec.can_render([{"role": "user", "content": ""}]):
        return
    prompt = blocking.run(lambda: _first_prompt(task, recipe.rollout.step_timeout_s))
    if prompt is not None and not codec.can_render(prompt):
        raise ConfigError(
            f"task {task.name} asks in chat messages, and model = {recipe.model!r} has no chat "
            "template to write them with, so that every rollout would fail; name a model with one "
            '(an instruct model), or a task that gives plain text (task.style = "text", where '
            "a task knows that key)"
        )


async def _first_prompt(task: Task, timeout_s: float) -> Prompt | None:
    """What the first training problem asks; None where it cannot be had, which rollouts will say in
    their own way."""
    try:
        environment = task.make("train", 0)
        try:
            return await asyncio.wait_for(environment.start(), timeout_s)
        finally:
            await asyncio.wait_for(environment.close(), timeout_s)
    except (Exception, SystemExit):  # noqa: BLE001 - a user's environment may raise anything
        return None


def build_setting(
    model: Any, folder: Path, recipe: Recipe, *, version: int, temperature: float
) -> RolloutSetting:
    """An engine in this process on `model`, which holds the weights `version`, and the recipe's
    task, in its "test" split. folder: where the tokenizer is. Raises ConfigError or DataError, also
    where the recipe has several tasks."""
    _require_one_task(recipe)
    (setting,) = build_settings(model, folder, recipe, version=version, temperature=temperature)
    return setting


def build_settings(
    model: Any, folder: Path, recipe: Recipe, *, version: int, temperature: float
) -> list[RolloutSetting]:
    """As build_setting, one for each task of the recipe, over one engine."""
    from .engines.in_process import InProcessEngine
    from .engines.local import LocalEngine
    from .models import vocabulary_size

    plays = resolve_plays(folder, recipe, temperature=temperature)
    engine = LocalEngine(
        model,
        version=version,
        max_batch=recipe.engine.max_batch,
        gini=False,
        vocab_size=vocabulary_size(folder, model),
    )
    shared = InProcessEngine(engine)
    return [RolloutSetting(shared, *play, recipe.rollout, split="test") for play in plays]


def stamp_version(model: Any, version: int) -> None:
    """Make the folder that this model is saved to remember its version (in config.json)."""
    setattr(model.config, _VERSION_KEY, version)


def stamped_version(folder: Path) -> int | None:
    """The version that a model folder remembers. Raises DataError if its config is not JSON."""
    path = folder / "config.json"
    try:
        version = json.loads(path.read_text(encoding="utf-8")).get(_VERSION_KEY)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not the config of a model: {error}") from error
    return version if isinstance(version, int) else None


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many threads for torch, and what it had before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def data_fingerprint(task: Task, split: str = "train") -> str:
    """Tells one set of problems from another: a digest of their number and of the gold answers of
    a few, or the task's own `fingerprint`, where it has one."""
    own = getattr(task, "fingerprint", None)
    if own is not None:
        return str(own)
    size = task.size(split)
    last = 1000 if size is None else size - 1
    shown = [list(task.gold(split, i)) for i in sorted({0, last // 2, max(last, 0)}) if size != 0]
    return hashlib.sha256(json.dumps([task.name, size, shown]).encode()).hexdigest()
