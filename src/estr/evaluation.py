"""Held-out evaluation: avg@k, pass@k and majority@k of one version, with intervals.

    run or model folder --> Subject --+
                                      +--evaluate--> rollouts --> avg@k, pass@k, majority@k
    weight store --> EvaluatorHost ---+                |
                                                       +--> RolloutFile, to go on from

It runs here (`estr eval`), or inside the low-priority process beside a training run
(`EvaluatorHost`), which takes the version that it is asked for out of the weight store. What is
played and what counts as solved: `estr.evaluation_rollouts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import blocking
from .calls import portable
from .config import Recipe
from .errors import EstrError
from .evaluation_records import RolloutFile, open_rollouts, weights_digest
from .evaluation_result import EvalResult as EvalResult
from .evaluation_result import compare
from .evaluation_rollouts import evaluate_first, first_problems, play_held_out
from .rollout import RolloutSetting
from .scores import Comparison
from .subject import (
    Subject,
    WhichWeights,
    build_setting,
    build_settings,
    find_subject,
    stamp_version,
    task_overrides,
    torch_threads,
)
from .types import Trajectory
from .weights import WeightStore

_SLICE_S = 0.2
"""So long the host evaluates between two looks for messages."""


def evaluate_model(
    source: str | os.PathLike[str],
    *,
    task: str | None = None,
    k: int | None = None,
    problems: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    weights: WhichWeights = "best",
    overrides: Sequence[str] = (),
    runs: str | os.PathLike[str] = "runs",
    out: str | os.PathLike[str] | None = None,
) -> EvalResult:
    """Evaluate a run or a model on a task, in this process; exported as `estr.evaluate`.

    source: a run folder, the name of a run under `runs`, "builtin", or a model folder. weights:
    which ones of a run. What is left out comes from the run's recipe if the task is that of the
    run, else from the task's own `eval_settings`, else from the default recipe; overrides are
    recipe keys ("task.num_terms=3", "sampling.max_new_tokens=512"). out: the folder that keeps
    every rollout, see `estr.evaluation_records`; one that is there is not played again.
    Raises ConfigError or DataError before anything is computed.
    """
    keys = _overrides(k=k, problems=problems, temperature=temperature, seed=seed)
    subject = find_subject(
        source, task=task, overrides=[*overrides, *keys], weights=weights, runs=Path(runs)
    )
    return _evaluate_subject(subject, out)


def compare_models(
    source: str | os.PathLike[str],
    against: str | os.PathLike[str],
    *,
    task: str | None = None,
    k: int | None = None,
    problems: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    weights: WhichWeights = "best",
    overrides: Sequence[str] = (),
    runs: str | os.PathLike[str] = "runs",
    out: str | os.PathLike[str] | None = None,
) -> tuple[EvalResult, EvalResult, Comparison]:
    """Evaluate two models as `evaluate_model` does, the second one on the task and with the
    settings of the first, and compare them problem by problem."""
    keys = _overrides(k=k, problems=problems, temperature=temperature, seed=seed)
    first = find_subject(
        source, task=task, overrides=[*overrides, *keys], weights=weights, runs=Path(runs)
    )
    recipe = first.recipe
    second = find_subject(
        against, overrides=task_overrides(recipe.task), weights=weights, runs=Path(runs)
    )
    own = dataclasses.replace(recipe, model=second.recipe.model)
    second = dataclasses.replace(second, recipe=own, label=first.label)
    results = [_evaluate_subject(subject, out) for subject in (first, second)]
    return results[0], results[1], compare(results[0], results[1])


def _overrides(**chosen: float | None) -> list[str]:
    """Keys of the recipe for what was asked for by a flag."""
    keys = {"seed": "seed"}
    return [
        f"{keys.get(name, f'eval.{name}')}={value}"
        for name, value in chosen.items()
        if value is not None
    ]


def _evaluate_subject(subject: Subject, out: str | os.PathLike[str] | None) -> EvalResult:
    recipe = subject.recipe
    folder = None if out is None else Path(out)
    with torch_threads(recipe.engine.threads), _rollouts_in(folder, subject) as kept:
        setting = _setting(subject)
        try:
            result = blocking.run(
                lambda: evaluate_first(setting, recipe, recipe.eval.problems, recipe.eval.k, kept)
            )
        finally:
            if kept is not None:
                kept.write_transcripts()
                if hasattr(setting.task, "write_runs"):
                    setting.task.write_runs(kept.records(), kept.runs_folder)
    return dataclasses.replace(result, version=subject.version)


@contextlib.contextmanager
def _rollouts_in(out: Path | None, subject: Subject) -> Iterator[RolloutFile | None]:
    """The file of that evaluation in the folder `out`; None: nothing is kept."""
    if out is None:
        yield None
        return
    from .environments import build_task, resolved_options

    recipe = subject.recipe
    fingerprint = {
        "model": weights_digest(subject.folder),
        "task": resolved_options(recipe.task),
        "data": getattr(build_task(recipe.task), "fingerprint", None),
        "seed": recipe.seed,
        "temperature": recipe.eval.temperature,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "max_tokens": recipe.sampling.max_tokens,
        "dtype": recipe.engine.dtype,
        "timeout_s": recipe.rollout.timeout_s,
    }
    with open_rollouts(out, fingerprint) as kept:
        yield kept


def sample_rollouts(
    subject: Subject, num_problems: int
) -> tuple[list[Trajectory], Callable[[list[int]], str]]:
    """One rollout of each of the first held-out problems, as `evaluate_model` would draw them, and
    what turns token ids into text."""
    recipe = subject.recipe
    with torch_threads(recipe.engine.threads):
        setting = _setting(subject)
        problems = first_problems(setting, num_problems)

        async def play() -> list[Trajectory]:
            return list(
                await asyncio.gather(*(play_held_out(setting, recipe.seed, p) for p in problems))
            )

        return blocking.run(play), setting.codec.decode


def _setting(subject: Subject) -> RolloutSetting:
    setting = build_setting(
        subject.load_model(),
        subject.folder,
        subject.recipe,
        version=subject.version or 0,
        temperature=subject.recipe.eval.temperature,
    )
    if subject.label is not None:
        setting.task.name = subject.label
    return setting


class EvaluatorHost:
    """What runs inside the evaluator process: an engine of its own on the model in `folder`. It
    evaluates in slices between messages, so that it can be asked whether it still lives."""

    deferred = ("evaluate",)

    def __init__(self, folder: Path, recipe: Recipe, store: WeightStore) -> None:
        from .models import load_model

        self._folder = folder
        self._recipe = recipe
        self._store = store
        self._model = load_model(folder, dtype=recipe.engine.dtype, device=recipe.engine.device)
        self._settings = build_settings(
            self._model, folder, recipe, version=-1, temperature=recipe.eval.temperature
        )
        self._runner = asyncio.Runner()
        self._waiting: deque[tuple[int, int, int, int]] = deque()
        self._task: asyncio.Task[list[EvalResult]] | None = None

    def evaluate(self, number: int, version: int, num_problems: int, k: int) -> None:
        """Load that version and evaluate it on each task, one after the other. WeightsError if the
        store no longer has it."""
        self._waiting.append((number, version, num_problems, k))

    def num_waiting(self) -> int:
        """Evaluations that are not done."""
        return len(self._waiting)

    def busy(self) -> bool:
        """Is there an evaluation to go on with?"""
        return bool(self._waiting)

    def pump(self) -> list[tuple[int, list[EvalResult] | EstrError]]:
        """Go on for a moment; (number, what came of it) of an evaluation that is done."""
        return self._runner.run(self._go_on())

    async def _go_on(self) -> list[tuple[int, list[EvalResult] | EstrError]]:
        number, *asked = self._waiting[0]
        if self._task is None:
            self._task = asyncio.create_task(self._evaluate(*asked))
        task = self._task
        if not (await asyncio.wait([task], timeout=_SLICE_S))[0]:
            return []
        self._task = None
        self._waiting.popleft()
        error = task.exception()
        return [(number, task.result() if error is None else portable(error))]

    def close(self) -> None:
        """Give up what is not done."""
        self._runner.close()

    async def _evaluate(self, version: int, num_problems: int, k: int) -> list[EvalResult]:
        engine = self._settings[0].engine
        if engine.version != version:
            await engine.load(version, self._store, "recompute")
        return [await evaluate_first(s, self._recipe, num_problems, k) for s in self._settings]

    def export(self, folder: Path) -> None:
        """The weights evaluated last as a Hugging Face folder, which remembers their version."""
        from .models import load_tokenizer, save_model

        stamp_version(self._model, self._settings[0].engine.version)
        save_model(self._model, load_tokenizer(self._folder), folder)
