"""Held-out evaluation: avg@k, pass@k and majority@k of one version, with intervals.

    problems x k --run_rollout--> RolloutRecord --> avg@k, pass@k, majority@k --> intervals
                                      |
                                      +--> RolloutFile, from which an evaluation goes on

It runs here (`estr eval`), or inside the low-priority process beside a training run
(`EvaluatorHost`), which takes the version that it is asked for out of the weight store.

A rollout is solved iff its outcome is at least 1, the full outcome. Rollouts that failed or could
not be graded count as not solved, so they lower every figure, and they are named beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import blocking
from .calls import portable
from .config import Recipe
from .environment import Task
from .errors import ConfigError, EngineError, EstrError, WeightsError
from .evaluation_records import (
    RolloutFile,
    RolloutRecord,
    open_rollouts,
    replies,
    transcribe,
    weights_digest,
)
from .evaluation_result import EvalResult as EvalResult
from .evaluation_result import Request, compare, summarize
from .rollout import RolloutSetting, run_rollout
from .scores import Comparison
from .subject import (
    Subject,
    WhichWeights,
    build_setting,
    build_settings,
    find_subject,
    stamp_version,
    torch_threads,
)
from .types import RolloutId, Trajectory
from .weights import WeightStore

EVALUATION_RUNS = 1 << 63
"""Added to the seed in the names of evaluation rollouts. A training run is named by its seed, which
is smaller, so no evaluation ever draws a training rollout's random numbers."""

_MAX_K = 1 << 16

_SLICE_S = 0.2
"""So long the host evaluates between two looks for messages."""


async def evaluate(
    setting: RolloutSetting,
    *,
    problems: Sequence[int],
    k: int,
    seed: int,
    concurrency: int = 128,
    kept: RolloutFile | None = None,
) -> EvalResult:
    """Play every problem k times, `concurrency` rollouts at once, under one version.

    The random numbers of a rollout depend on seed, problem and its number among the k only. kept:
    where rollouts are found that need not be played again, and where every other one is put.
    Raises ConfigError for an impossible request; WeightsError if the engine changed its weights
    meanwhile; EngineError if it failed in every rollout, so that there is nothing to report. Other
    failures of engine, environment and grader are counted, not raised.
    """
    _check_request(problems, k, seed, concurrency)
    version = setting.engine.version
    records: list[RolloutRecord] = []
    versions: set[int] = set()
    clock = time.monotonic()
    left: list[tuple[str, int, int]] = []
    for problem in problems:
        example = _example(setting.task, setting.split, problem)
        for index in range(k):
            found = None if kept is None else kept.find(example, index)
            if found is None:
                left.append((example, problem, index))
            else:
                records.append(found)
    num_found = len(records)
    pending = iter(left)

    async def play(names: Iterator[tuple[str, int, int]]) -> None:
        for example, problem, index in names:
            trajectory = await _rollout(setting, seed, problem, index)
            record = _record(setting, example, trajectory, keep_text=kept is not None)
            versions.update(trajectory.sampled_versions().tolist())
            records.append(record)
            if kept is not None:
                kept.add(record)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(left))):
            tasks.create_task(play(pending))
    if {record.status for record in records} == {"engine_error"}:
        raise EngineError(f"no rollout got an answer: {records[0].error}")
    if versions - {version}:
        raise WeightsError(
            f"the engine went from version {version} to {sorted(versions)} "
            "during an evaluation; evaluate on an engine of its own"
        )
    return summarize(
        setting,
        Request(version, k, seed),
        records,
        wall_s=time.monotonic() - clock,
        num_found=num_found,
    )


def _example(task: Task, split: str, problem: int) -> str:
    name = getattr(task, "example_id", None)
    return f"{split}/{problem}" if name is None else str(name(split, problem))


def _record(
    setting: RolloutSetting, example: str, trajectory: Trajectory, *, keep_text: bool
) -> RolloutRecord:
    decode = setting.codec.decode
    said = replies(trajectory, decode)
    return RolloutRecord(
        example=example,
        problem=trajectory.problem,
        index=trajectory.id.index,
        status=trajectory.status,
        outcome=trajectory.outcome,
        answer=_answer(setting.task, said[-1]) if trajectory.status == "ok" and said else None,
        tokens=trajectory.num_sampled_tokens,
        error=trajectory.error,
        turns=transcribe(trajectory, decode) if keep_text else (),
        replies=said,
    )


def _answer(task: Task, reply: str) -> str | None:
    """What a rollout votes for: of its last turn, what the task says."""
    answer = getattr(task, "answer", None)
    found = None if answer is None else answer(reply)
    return None if found is None else str(found)


def _check_request(problems: Sequence[int], k: int, seed: int, concurrency: int) -> None:
    if not problems:
        raise ConfigError("there is no problem to evaluate")
    if len(set(problems)) != len(problems):
        raise ConfigError("a problem is named twice; its rollouts would be the same ones")
    if not 1 <= k <= _MAX_K:
        raise ConfigError(f"k must be in [1, {_MAX_K}], not {k}")
    if not 0 <= seed < EVALUATION_RUNS:
        raise ConfigError(f"seed must be in [0, 2^63), not {seed}")
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")


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
    runs: Path = Path("runs"),
    out: Path | None = None,
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
        source, task=task, overrides=[*overrides, *keys], weights=weights, runs=runs
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
    runs: Path = Path("runs"),
    out: Path | None = None,
) -> tuple[EvalResult, EvalResult, Comparison]:
    """Evaluate two models as `evaluate_model` does, the second one on the task and with the
    settings of the first, and compare them problem by problem."""
    keys = _overrides(k=k, problems=problems, temperature=temperature, seed=seed)
    first = find_subject(
        source, task=task, overrides=[*overrides, *keys], weights=weights, runs=runs
    )
    recipe = first.recipe
    same_task = [
        f"task{'' if key == 'name' else f'.{key}'}={json.dumps(value)}"
        for key, value in sorted(recipe.task.items(), key=lambda item: item[0] != "name")
    ]
    second = find_subject(against, overrides=same_task, weights=weights, runs=runs)
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


def _evaluate_subject(subject: Subject, out: Path | None) -> EvalResult:
    recipe = subject.recipe
    with torch_threads(recipe.engine.threads), _rollouts_in(out, subject) as kept:
        setting = _setting(subject)
        try:
            result = blocking.run(
                lambda: _evaluate_first(setting, recipe, recipe.eval.problems, recipe.eval.k, kept)
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
        problems = _first_problems(setting, num_problems)

        async def play() -> list[Trajectory]:
            return list(
                await asyncio.gather(*(_rollout(setting, recipe.seed, p) for p in problems))
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


async def _rollout(setting: RolloutSetting, seed: int, problem: int, index: int = 0) -> Trajectory:
    version = setting.engine.version
    return await run_rollout(
        setting,
        RolloutId(EVALUATION_RUNS + seed, problem, index),
        problem,
        dispatch_version=version,
        deadline_version=version,
    )


async def _evaluate_first(
    setting: RolloutSetting,
    recipe: Recipe,
    num_problems: int,
    k: int,
    kept: RolloutFile | None = None,
) -> EvalResult:
    return await evaluate(
        setting,
        problems=_first_problems(setting, num_problems),
        k=k,
        seed=recipe.seed,
        concurrency=recipe.engine.max_batch,
        kept=kept,
    )


def _first_problems(setting: RolloutSetting, num_problems: int) -> range:
    """The first problems of the split, as many as there are."""
    size = setting.task.size(setting.split)
    return range(num_problems if size is None else min(num_problems, size))


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
        return [await _evaluate_first(s, self._recipe, num_problems, k) for s in self._settings]

    def export(self, folder: Path) -> None:
        """The weights evaluated last as a Hugging Face folder, which remembers their version."""
        from .models import load_tokenizer, save_model

        stamp_version(self._model, self._settings[0].engine.version)
        save_model(self._model, load_tokenizer(self._folder), folder)
