"""Everything about a recipe that can be wrong, found before any compute is spent.

    recipe file --read--> Recipe --resolve--> model folder, task, stop tokens, correction
                                 --play----> the gold answers of a few problems, graded
                                 --show----> three prompts as the model reads them

Nothing is drawn and no weights are loaded: gold answers are played by a scripted engine, through
the very path that a rollout takes (tokenizer, budgets, stop tokens, grader).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from . import blocking
from .chat import Codec
from .config import Recipe, Table, read_table, recipe_from_table
from .engine import ScriptedEngine
from .environment import Task
from .errors import ConfigError, EstrError
from .machine import check_devices, check_packages
from .options.tasks import entries
from .problems import check_curriculum
from .rollout import RolloutSetting, run_rollout
from .subject import require_renderable
from .types import RolloutId, SamplingSettings, Segment, Trajectory

T = TypeVar("T")

NUM_GOLD_PROBLEMS = 4
NUM_SHOWN = 3
_GOLD_OUTCOME = 1.0


@dataclass(slots=True)
class Findings:
    """given: what file and overrides set. recipe: that and the defaults; None: it is wrong. notes:
    what was resolved, a line each. errors: what is wrong, each with its remedy. shown: the first
    training problems of each task with their gold answers, or only their prompts where there are
    none; decode turns their token ids into text."""

    given: Table = field(default_factory=dict)
    recipe: Recipe | None = None
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    shown: list[Trajectory] = field(default_factory=list)
    decode: Callable[[list[int]], str] = str

    def attempt(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None, and one more error, where it raises an EstrError."""
        try:
            return work()
        except EstrError as error:
            if str(error) not in self.errors:
                self.errors.append(str(error))
            return None


def check_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Findings:
    """Check a recipe file (None: the defaults) with overrides. Never raises for what it finds."""
    findings = Findings()
    given = findings.attempt(lambda: read_table(path, overrides))
    if given is not None:
        findings.given = given
        findings.recipe = findings.attempt(lambda: recipe_from_table(given))
    if findings.recipe is None:
        _check_tables(path, findings)
        return findings
    recipe = findings.recipe
    findings.attempt(partial(check_packages, recipe))
    tasks = findings.attempt(lambda: _tasks(recipe, findings)) or []
    codec = None
    if not _is_elsewhere(recipe.model, findings):
        findings.attempt(partial(check_devices, recipe))
        codec = findings.attempt(lambda: _codec(recipe, findings))
    findings.attempt(lambda: _correction(recipe, findings))
    if codec is None:
        return findings
    for task in tasks:
        stops = findings.attempt(partial(codec.resolve_stops, task.stop))
        if stops is not None:
            shown = " or ".join(f"{codec.decode([stop])!r} (token {stop})" for stop in stops)
            findings.notes.append(f"a turn ends at {shown}")
            findings.decode = codec.decode
            known = len(findings.errors)
            findings.attempt(partial(require_renderable, task, codec, recipe))
            if len(findings.errors) > known:
                continue  # the same would be said of every problem
            _play_gold_answers(recipe, task, codec, stops, findings)
    return findings


def _check_tables(path: Path | None, findings: Findings) -> None:
    """A recipe that cannot be read as a whole: what each of its tables has to say by itself."""
    if path is None:
        return
    try:
        table = read_table(path)
    except ConfigError:
        return  # the whole has said so already
    known = Recipe.__dataclass_fields__
    for key, value in table.items():
        if isinstance(value, dict) or key not in known:
            findings.attempt(partial(recipe_from_table, {key: value}))


def _tasks(recipe: Recipe, findings: Findings) -> list[Task]:
    from .environments import build_tasks

    tasks = list(build_tasks(recipe.task).values())
    for task in tasks:
        _note_sizes(task, findings)
    check_curriculum(recipe, tasks)
    if len(tasks) > 1:
        weights = [entry.weight for entry in entries(recipe.task)]
        shares = zip(tasks, weights, strict=True)
        shown = ", ".join(f"{task.name} {w / sum(weights):.0%}" for task, w in shares)
        findings.notes.append(f"groups are mixed by weight: {shown}")
    return tasks


def _note_sizes(task: Task, findings: Findings) -> None:
    sizes = {split: task.size(split) for split in ("train", "test")}
    shown = ", ".join(f"{'endless' if n is None else n} {split}" for split, n in sizes.items())
    turns = "one turn" if task.max_turns == 1 else f"at most {task.max_turns} turns"
    findings.notes.append(f"task {task.name}: {shown} problems, {turns}")
    for split, size in sizes.items():
        if size == 0:
            raise ConfigError(f"task {task.name} has no problem in its {split!r} split")


def _is_elsewhere(model: str, findings: Findings) -> bool:
    """Is it a model of a hub, "owner/name", that another machine is to load? A recipe for a cluster
    can be checked without it, as far as that goes."""
    owner, slash, name = model.partition("/")
    if not (owner and slash and name) or "/" in name or Path(owner).exists():
        return False
    findings.notes.append(
        f"model {model} is not on this machine: stop texts, prompts and gold answers were not "
        "checked; download it and name its folder to train"
    )
    return True


def _codec(recipe: Recipe, findings: Findings) -> Codec:
    from .models import ignored_sampling_settings, load_tokenizer, resolve_model
    from .warmstart import cached_folder, make_tokenizer, parse_warm_start

    warm = parse_warm_start(recipe.model)
    if warm is not None:
        folder = cached_folder(recipe.task, warm)
        made = "" if folder.is_dir() else "; it is made at its first use, in a minute or two"
        findings.notes.append(f"warm start {folder}{made}")
        return Codec(make_tokenizer())
    folder = resolve_model(recipe.model)
    findings.notes.append(f"model folder {folder}")
    ignored = ignored_sampling_settings(folder)
    if ignored:
        findings.notes.append(f"its generation_config is not applied: {ignored}")
    codec = Codec(load_tokenizer(folder))
    findings.notes += codec.habits()
    return codec


def _correction(recipe: Recipe, findings: Findings) -> None:
    from .corrections import build_correction

    needs = sorted(build_correction(recipe.correction).needs)
    names = " + ".join(str(entry["name"]) for entry in recipe.correction)
    if recipe.kl.coefficient and (recipe.kl.place, recipe.kl.estimator) == ("reward", "k3"):
        findings.notes.append(
            "kl.estimator = 'k3' in the reward hardly holds the policy back near the reference; "
            "'k1' does (docs/mathematics.md)"
        )
    findings.notes.append(f"correction {names} reads {', '.join(needs) or 'nothing but log-probs'}")


def _play_gold_answers(
    recipe: Recipe, task: Task, codec: Codec, stops: tuple[int, ...], findings: Findings
) -> None:
    sampling = SamplingSettings(
        temperature=recipe.sampling.temperature,
        max_new_tokens=recipe.sampling.max_new_tokens,
        max_tokens=recipe.sampling.max_tokens,
        stop_token_ids=stops,
    )
    played = 0
    for split in ("train", "test"):
        size = task.size(split)
        problems = range(NUM_GOLD_PROBLEMS if size is None else min(NUM_GOLD_PROBLEMS, size))
        golds = [task.gold(split, problem) for problem in problems]
        settings = [_setting(recipe, task, codec, sampling, split, turns) for turns in golds]
        for problem, turns, trajectory in zip(problems, golds, _played(settings), strict=True):
            if split == "train" and problem < NUM_SHOWN:
                findings.shown.append(trajectory if turns else _prompt_of(trajectory))
            complaint = _complaint(trajectory, played=bool(turns))
            if complaint:
                whose = "the gold answer of " if turns else ""
                said = f" ({' '.join(map(repr, turns))})" if turns else ""
                findings.errors.append(
                    f"{whose}{split} problem {problem} of task {task.name}{said} {complaint}"
                )
                return
            played += bool(turns)
    findings.notes.append(
        f"gold answers of {played} problems are graded {_GOLD_OUTCOME:g}"
        if played
        else f"task {task.name} has no gold answers to play"
    )
    _play_empty_reply(_setting(recipe, task, codec, sampling, "train", ()), findings)


def _play_empty_reply(setting: RolloutSetting, findings: Findings) -> None:
    """A model that learns writes all sorts of things: what a reward makes of nothing at all."""
    (trajectory,) = _played([setting])
    what = f"an empty reply to train problem 0 of task {setting.task.name}"
    if trajectory.error is not None:
        findings.notes.append(f"{what} fails with {trajectory.status}: {trajectory.error}")
    elif trajectory.outcome == _GOLD_OUTCOME and "".join(setting.task.gold("train", 0)).strip():
        findings.notes.append(f"{what} is graded 1, like the gold answer: is that meant?")


def _played(settings: Sequence[RolloutSetting]) -> list[Trajectory]:
    """Problem i in setting i, all at once, as in training: a reward function of many gets many."""

    async def play() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                run_rollout(s, RolloutId(0, i, 0), i, dispatch_version=0, deadline_version=0)
                for i, s in enumerate(settings)
            )
        )

    return blocking.run(play)


def _setting(
    recipe: Recipe,
    task: Task,
    codec: Codec,
    sampling: SamplingSettings,
    split: str,
    turns: Sequence[str],
) -> RolloutSetting:
    """With an engine that writes these turns, and empty ones behind them."""
    left = iter(turns)
    end = list(sampling.stop_token_ids[:1])
    engine = ScriptedEngine(lambda request: codec.encode_observation(next(left, "")) + end)
    return RolloutSetting(engine, task, codec, sampling, recipe.rollout, split=split)


def _prompt_of(trajectory: Trajectory) -> Trajectory:
    """What was read before the first turn, if anything was."""
    segment = trajectory.segments[0]
    stop = trajectory.turns[0].start if trajectory.turns else len(segment)
    prompt = Segment.context(segment.token_ids[:stop])
    return dataclasses.replace(trajectory, segments=(prompt,), turns=(), outcome=None, reward=None)


def _complaint(trajectory: Trajectory, *, played: bool) -> str | None:
    """What is wrong with a played gold answer; without one, only what fails whatever is said."""
    if trajectory.error is not None:
        return f"fails with {trajectory.status}: {trajectory.error}"
    if not trajectory.turns:
        return "has a prompt that fills sampling.max_tokens; raise it or shorten the prompt"
    if not played:
        return None
    if trajectory.status == "truncated" or any(
        turn.finish_reason == "length" for turn in trajectory.turns
    ):
        return (
            "does not fit; raise sampling.max_new_tokens or sampling.max_tokens, "
            "or the task's number of turns"
        )
    if trajectory.outcome != _GOLD_OUTCOME:
        return f"is graded {trajectory.outcome}, not {_GOLD_OUTCOME:g}: task and grader disagree"
    return None
