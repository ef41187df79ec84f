"""From a recipe to a finished run: bring everything up, run the loop, write the result, tear down.

train(recipe) -> Summary        the one entry, used by `estr train` and from Python
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import blocking
from .checkpoint import Checkpoints, saved_columns
from .cluster.placement import RayProcesses
from .config import Recipe
from .errors import CheckpointError, ConfigError, DataError, EstrError, Interrupted, WorkerError
from .evaluations import Evaluations
from .ledger import LedgerWriter
from .loop import Instruments, Loop
from .machine import check_devices, check_packages
from .metrics import MetricsWriter, read_metrics
from .problems import check_curriculum
from .processes import LocalProcesses, Processes
from .progress import Reporter, SilentReporter
from .resume import Saved, find_replayed, find_saved, set_aside
from .rollout import RolloutSetting
from .run_folder import RunFolder, Summary, recipe_changes
from .schedule import (
    ENGINE_FILE,
    LOOP_FILE,
    Event,
    EventLog,
    Replay,
    Schedule,
    read_run_events,
    require_whole_plan,
)
from .subject import data_fingerprint, model_folder, resolve_plays, stamped_version
from .wandb_log import WandbLog
from .worker import busy_share, guard_share

_NEVER_BEGAN = "stopped before training began"


def train(
    recipe: Recipe,
    *,
    reporter: Reporter | None = None,
    runs: Path = Path("runs"),
    resume: Path | None = None,
    accept_changes: bool = False,
    replay: Path | None = None,
) -> Summary:
    """Train as the recipe says; returns what came of it. The run folder is made under `runs`.

    resume: the run folder to go on with, from its newest whole checkpoint; a recipe that differs
    from the run's own is refused unless accept_changes. replay: the folder of a deterministic run
    to do again, bit for bit; a resume of such a replay goes on with it.

    Raises ConfigError before any compute is spent; Interrupted after Ctrl-C, with a checkpoint
    saved (a second Ctrl-C stops at once); other EstrErrors name what failed and leave the last
    checkpoint intact.
    """
    if replay is not None:
        _replayable(recipe, RunFolder.open(replay))
    going_on = None if resume is None else _Resume(resume, accept_changes)
    return blocking.run(
        lambda: _train(recipe, reporter or SilentReporter(), runs, going_on, replay)
    )


@dataclass(frozen=True, slots=True)
class _Resume:
    run: Path
    accept_changes: bool


def _replayable(recipe: Recipe, recorded: RunFolder) -> list[Event]:
    """What the loop of `recorded` did. Raises ConfigError unless it has a schedule of this recipe
    and of no other, DataError where that is not whole."""
    if not (recorded.path / ENGINE_FILE).is_file():
        raise ConfigError(
            f"{recorded.path} keeps no schedule of its engine; only a run with deterministic = "
            "true can be replayed"
        )
    changed = [line for line in recorded.changes(recipe) if not line.startswith("name =")]
    if changed:
        raise ConfigError(f"a replay follows the recipe of its run; changed: {'; '.join(changed)}")
    loop = read_run_events(recorded.path / LOOP_FILE)
    recipes = [event for event in loop if event["event"] == "recipe"]
    for before, after in pairwise(recipes):
        if after != before:
            raise ConfigError(
                f"{recorded.path} was resumed with another recipe, so that none leads to all of "
                f"it: {'; '.join(recipe_changes(before, after))}; replay a run of one recipe"
            )
    path = recorded.path / ENGINE_FILE
    require_whole_plan(loop, read_run_events(path), path)
    return loop


async def _train(
    recipe: Recipe, reporter: Reporter, runs: Path, resume: _Resume | None, replay: Path | None
) -> Summary:
    check_packages(recipe)
    check_devices(recipe)
    model = model_folder(recipe, reporter.message)
    plays = resolve_plays(model, recipe, temperature=recipe.sampling.temperature)
    check_curriculum(recipe, [task for task, _, _ in plays])
    folder = RunFolder.create(recipe, runs) if resume is None else RunFolder.open(resume.run)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disk_errors_named(folder))
        stack.enter_context(folder.locked())
        stack.enter_context(_gone_if_never_begun(folder, new=resume is None))
        stop = stack.enter_context(_stopped_by_signals(reporter))
        data = " ".join(data_fingerprint(task) for task, _, _ in plays)
        saved = None if resume is None else _saved(folder, recipe, resume, data, reporter)
        replay = find_replayed(folder, saved, replay)
        planned = None if replay is None else _replayable(recipe, RunFolder.open(replay))
        if saved is not None:
            set_aside(saved, folder, recipe)
        schedule = _schedule(folder, recipe, saved, planned)
        stack.callback(schedule.close)
        also = _logs(recipe, folder)
        for log in also:
            stack.callback(log.close)
        reporter.starting(recipe)
        with _stop_goes_first(stop):
            processes = await _start(model, recipe, folder, reporter, replay)
        stop.at_once = False
        try:
            settings = [
                RolloutSetting(processes.engine, *play, recipe.rollout, worker="engine")
                for play in plays
            ]
            from_step = saved.state["step"] if saved else None
            writer = stack.enter_context(MetricsWriter(folder.path, from_step=from_step, also=also))
            loop = Loop(
                recipe,
                settings,
                processes.trainer,
                processes.store,
                reporter=reporter,
                writer=writer,
                evaluations=Evaluations(recipe.eval, processes.evaluator, folder.model_best),
                checkpoints=Checkpoints(folder.checkpoints, recipe.checkpoint.keep, data=data),
                ledger=_ledger(recipe, folder),
                instruments=Instruments(
                    watchers=processes.watchers(recipe),
                    gauges=processes.gauges,
                    canaries=None if recipe.guard == "off" else processes.canaries(recipe),
                    engine_position=lambda: processes.position,
                ),
                stop=stop,
                schedule=schedule,
            )
            schedule.on_rollout_end = processes.forget
            if saved is not None:
                await _restore(saved, loop, folder)
            return await _run(loop, processes, folder, saved)
        finally:
            await processes.close()


def _saved(
    folder: RunFolder, recipe: Recipe, resume: _Resume, data: str, reporter: Reporter
) -> Saved:
    """The checkpoint to go on from; what is to be said of it has been said."""
    saved = find_saved(folder, recipe, data=data, accept_changes=resume.accept_changes)
    for note in saved.notes:
        reporter.message(note)
    reporter.message(f"goes on after step {saved.state['step']} of {recipe.steps}")
    return saved


async def _start(
    model: Path, recipe: Recipe, folder: RunFolder, reporter: Reporter, replay: Path | None
) -> Processes:
    """Engine, trainer and evaluator, where the recipe places them."""
    if recipe.placement == "ray":
        return await RayProcesses.start(model, recipe, folder, reporter.message)
    return await LocalProcesses.start(model, recipe, folder, replay)


def _logs(recipe: Recipe, folder: RunFolder) -> list[WandbLog]:
    """What is told the metrics besides the run's own files."""
    return [WandbLog(folder.path, recipe)] if recipe.wandb.project else []


async def _restore(saved: Saved, loop: Loop, folder: RunFolder) -> None:
    """Trainer and loop as the checkpoint has them. Raises CheckpointError where it is malformed, or
    its parts are of different moments."""
    version = await loop.trainer.restore(saved.folder)
    try:
        exported = _exported(folder)
        _add_recorded(saved.state, folder, exported)
        loop.restore(saved.state, saved_columns(saved.folder), exported=exported)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{saved.folder}/state.json is malformed: {error!r}") from error
    if version != loop.version:
        raise CheckpointError(
            f"checkpoint {saved.folder} holds weights of version {version} and groups of version "
            f"{loop.version}; remove it to go on from the one before"
        )


def _exported(folder: RunFolder) -> int | None:
    """The version of the best model so far; None where there is none that could be read."""
    try:
        return stamped_version(folder.model_best)
    except DataError:
        return None


def _add_recorded(state: dict[str, Any], folder: RunFolder, exported: int | None) -> None:
    """The evaluation of the best model, where it ended after the checkpoint that it belongs to (the
    last of a run does), as the metrics tell it."""
    found = state["accuracies"]
    if exported is None or exported > state["version"] or exported in (v for v, *_ in found):
        return
    for row in read_metrics(folder.path / "metrics.jsonl").records:
        if "eval/accuracy" in row and row["version"] == exported:
            accuracy = row["eval/accuracy"]
            found.append([exported, accuracy, row.get("eval/accuracy_low", accuracy)])
            return


def _ledger(recipe: Recipe, folder: RunFolder) -> LedgerWriter | None:
    """What writes the run's ledger; None where the recipe wants none."""
    if not recipe.ledger:
        return None
    loss = recipe.loss
    return LedgerWriter(folder.path, correction=recipe.correction, aggregation=loss.aggregation)


def _schedule(
    folder: RunFolder, recipe: Recipe, saved: Saved | None, planned: list[Event] | None
) -> Schedule:
    """The log of this run and the events of the run that it replays (planned), each from where
    the checkpoint stands."""
    at: dict[str, int] = saved.state["schedule"] if saved else {}
    replay = None if planned is None else Replay(planned, at.get("replayed", 0))
    log = EventLog(folder.path / LOOP_FILE, keep_lines=at.get("lines"))
    if saved is None:
        log.write(
            "start",
            seed=recipe.seed,
            steps=recipe.steps,
            groups_per_step=recipe.groups_per_step,
            num_minibatches=recipe.num_minibatches,
            max_staleness=recipe.max_staleness,
        )
    log.write("recipe", **dataclasses.asdict(recipe))
    return Schedule(log, replay, deterministic=recipe.deterministic)


async def _run(loop: Loop, processes: Processes, folder: RunFolder, saved: Saved | None) -> Summary:
    """Everything between the start of the processes and their end."""
    recipe = loop.recipe
    try:
        version = await processes.trainer.publish()
        await processes.engine.load(version, loop.store, recipe.kv)
        if recipe.deterministic:
            await processes.begin(None if saved is None else saved.position(loop.under_way()))
        loop.reporter.started(recipe, folder, loop.step)
        if not loop.evaluations.found and not loop.stopping:
            await loop.evaluations.evaluate(version, recipe.eval.final_problems)
        before = await processes.statistics()
        await loop.run()
        if loop.schedule.replay is not None and loop.step < recipe.steps:
            loop.reporter.message(
                f"the run that is replayed was recorded up to step {loop.step} of {recipe.steps}; "
                "so far goes this one"
            )
        after = await processes.statistics()
        shares = [busy_share(a, b) for a, b in zip(before[:2], after[:2], strict=True)]
        shares.append(guard_share(before, after))
        # What was learned is safe before anything else can fail.
        await loop.checkpoint()
        version = await processes.trainer.publish()
        await processes.trainer.export(folder.model_last)
        await loop.evaluations.evaluate(version, recipe.eval.final_problems)
    except asyncio.CancelledError as error:
        if not loop.stopping:
            raise
        raise Interrupted(f"stopped at once after step {loop.step}{_hint(folder)}") from error
    except EstrError as error:
        what, newline, log = str(error).partition("\n")
        raise type(error)(f"{what}{_hint(folder)}{newline}{log}") from error
    summary = _summarize(loop, recipe, folder, shares)
    folder.write_summary(summary)
    loop.reporter.finished(summary, folder)
    return summary


@contextlib.contextmanager
def _disk_errors_named(folder: RunFolder) -> Iterator[None]:
    """A disk that is full or may not be written to ends the run with an error of its own."""
    try:
        yield
    except (TimeoutError, ConnectionError):
        raise
    except OSError as error:
        raise DataError(
            f"{folder.path}: {error}; look at the space and the rights there{_hint(folder)}"
        ) from error


@contextlib.contextmanager
def _gone_if_never_begun(folder: RunFolder, *, new: bool) -> Iterator[None]:
    """A new run that is refused or stopped before its first checkpoint leaves no folder: its name
    is free for the next try. One that failed leaves its logs."""
    try:
        yield
    except (ConfigError, Interrupted):
        if new and not Checkpoints(folder.checkpoints).complete():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def _stop_goes_first(stop: asyncio.Event) -> Iterator[None]:
    """A process that is ended while it starts, by the signal that is to stop the run, has not
    failed."""
    try:
        yield
    except WorkerError as error:
        if not stop.is_set():
            raise
        raise Interrupted(_NEVER_BEGAN) from error


def _hint(folder: RunFolder) -> str:
    whole = Checkpoints(folder.checkpoints).complete()
    return f"; go on with: estr train --resume {shlex.quote(str(folder.path))}" if whole else ""


def _summarize(loop: Loop, recipe: Recipe, folder: RunFolder, shares: list[float]) -> Summary:
    row = loop.totals.to_row()
    accuracies = [accuracy for _, accuracy, _ in loop.evaluations.found]
    best = loop.evaluations.best
    tokens, wall_s = int(row.get("eligible_tokens") or 0), loop.metrics.wall_s
    return Summary(
        name=folder.path.name,
        steps=loop.step,
        version=loop.version,
        start_accuracy=accuracies[0] if accuracies else None,
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=None if best is None else best.accuracy,
        wall_s=round(wall_s, 3),
        tokens_per_s=round(tokens / wall_s, 1) if wall_s else 0.0,
        trained_tokens=tokens,
        intra_max=int(row.get("intra_max") or 0),
        inter_max=int(row.get("inter_max") or 0),
        intra_mean=float(row.get("intra_mean") or 0.0),
        inter_mean=float(row.get("inter_mean") or 0.0),
        rho_mask=float(row.get("rho_mask") or 0.0),
        engine_busy=round(shares[0], 4),
        trainer_busy=round(shares[1], 4),
        guard_share=round(shares[2], 5),
        dropped_groups=sum(int(row.get(f"{kind}_groups") or 0) for kind in ("failed", "leftover")),
        statuses={
            name.removeprefix("attempts/"): int(value or 0)
            for name, value in row.items()
            if name.startswith("attempts/")
        },
        findings={
            name.removeprefix("guard/"): int(value or 0)
            for name, value in row.items()
            if name.startswith("guard/")
        },
        seed=recipe.seed,
    )


class _Stop(asyncio.Event):
    """Set by the first signal. at_once: nothing has been learned that could be saved."""

    at_once = True


@contextlib.contextmanager
def _stopped_by_signals(reporter: Reporter) -> Iterator[_Stop]:
    """What the first signal sets; the second cancels the run at once, and so does the
    first while its processes start."""
    task = asyncio.current_task()
    assert task is not None
    stop = _Stop()

    def on_signal() -> None:
        if stop.at_once or stop.is_set():
            stop.set()
            task.cancel("stopped at once")
            return
        stop.set()
        reporter.message("stopping after the step in progress; once more stops at once")

    try:
        with blocking.interrupts_go_to(on_signal):
            yield stop
    except asyncio.CancelledError as error:
        if not stop.is_set():
            raise
        raise Interrupted(_NEVER_BEGAN) from error
