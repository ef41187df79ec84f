"""From a recipe to a finished run: bring everything up, run the loop, write the result, tear down.

train(recipe) -> Summary        the one entry, used by `estr train` and from Python
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints
from .config import Recipe
from .engines.process import EngineProcess
from .errors import EstrError, Interrupted
from .evaluator_process import EvaluatorProcess
from .ledger import LedgerWriter, missing_parts
from .ledger import supersede_after as supersede_ledger_after
from .loop import Loop
from .metrics import MetricsWriter, supersede_after
from .models import resolve_model
from .progress import Reporter, SilentReporter
from .rollout import RolloutSetting
from .run_folder import RunFolder, Summary, weights_folder
from .subject import resolve_play
from .trainer_process import TrainerProcess
from .weights import FileWeightStore
from .worker import busy_share

_BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2}


def train(
    recipe: Recipe,
    *,
    reporter: Reporter | None = None,
    runs: Path = Path("runs"),
    resume: Path | None = None,
) -> Summary:
    """Train as the recipe says; returns what came of it. The run folder is made under `runs`.

    resume: the run folder to go on with, from its newest whole checkpoint. Raises ConfigError
    before any compute is spent; Interrupted after Ctrl-C, with a checkpoint saved (a second Ctrl-C
    stops at once); other EstrErrors name what failed and leave the last checkpoint intact.
    """
    return asyncio.run(_train(recipe, reporter or SilentReporter(), runs, resume))


@dataclass(slots=True)
class _Processes:
    """The spawned processes of one run, closed together."""

    engine: EngineProcess
    trainer: TrainerProcess
    evaluator: EvaluatorProcess

    @classmethod
    async def start(
        cls, model: Path, recipe: Recipe, store: FileWeightStore, log: Path
    ) -> _Processes:
        """All at once; as soon as one does not come up, the others are given up."""
        engine = asyncio.create_task(
            EngineProcess.start(model, recipe.engine, in_flight=recipe.in_flight, log=log)
        )
        trainer = asyncio.create_task(TrainerProcess.start(model, recipe, store, log=log))
        evaluator = asyncio.create_task(EvaluatorProcess.start(model, recipe, store, log=log))
        try:
            await asyncio.gather(engine, trainer, evaluator)
        except BaseException:
            for task in (engine, trainer, evaluator):
                task.cancel()  # a start that is cancelled ends its process
            ended = await asyncio.gather(engine, trainer, evaluator, return_exceptions=True)
            up = [process for process in ended if not isinstance(process, BaseException)]
            await asyncio.gather(*(process.close() for process in up))
            raise
        return cls(engine.result(), trainer.result(), evaluator.result())

    def watchers(self, recipe: Recipe) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What notices the death of a process, or an engine that hangs."""
        return [
            lambda: self.engine.watch(recipe.engine.timeout_s),
            self.trainer.worker.alive,
            self.evaluator.worker.alive,
        ]

    def gauges(self) -> dict[str, float]:
        """Shares of wall time that the processes spent at work since the last step."""
        return {"engine_busy": self.engine.take_busy(), "trainer_busy": self.trainer.busy}

    async def close(self) -> None:
        await asyncio.gather(self.engine.close(), self.trainer.close(), self.evaluator.close())


async def _train(recipe: Recipe, reporter: Reporter, runs: Path, resume: Path | None) -> Summary:
    model = resolve_model(recipe.model)
    play = resolve_play(model, recipe, temperature=recipe.sampling.temperature)
    folder = RunFolder.create(recipe, runs) if resume is None else RunFolder.open(resume)
    with folder.locked(), _stopped_by_signals(reporter) as stop:
        saved = None if resume is None else _saved(folder, recipe, reporter)
        size = sum(p.stat().st_size for p in model.glob("*.safetensors"))
        keep = recipe.max_staleness + 2
        bytes_needed = keep * size * _BYTES_PER_WEIGHT[recipe.engine.dtype] // 4
        store = FileWeightStore(weights_folder(folder, bytes_needed), keep=keep)
        try:
            processes = await _Processes.start(model, recipe, store, folder.log)
            try:
                from_step = saved[1]["step"] if saved else 0
                with MetricsWriter(folder.path, from_step=from_step) as writer:
                    loop = Loop(
                        recipe,
                        RolloutSetting(processes.engine, *play, recipe.rollout, worker="engine"),
                        processes.trainer,
                        store,
                        reporter=reporter,
                        writer=writer,
                        evaluator=processes.evaluator,
                        checkpoints=Checkpoints(folder.checkpoints, recipe.checkpoint.keep),
                        ledger=_ledger(recipe, folder),
                        model_best=folder.model_best,
                        watchers=processes.watchers(recipe),
                        gauges=processes.gauges,
                        stop=stop,
                    )
                    if saved is not None:
                        await processes.trainer.restore(saved[0])
                        loop.restore(saved[1])
                    return await _run(loop, processes, recipe, folder)
            finally:
                await processes.close()
        finally:
            shutil.rmtree(store.folder, ignore_errors=True)


def _ledger(recipe: Recipe, folder: RunFolder) -> LedgerWriter | None:
    """What writes the run's ledger; None where the recipe wants none."""
    if not recipe.ledger:
        return None
    loss = recipe.loss
    return LedgerWriter(folder.path, correction=recipe.correction, aggregation=loss.aggregation)


def _saved(folder: RunFolder, recipe: Recipe, reporter: Reporter) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to go on from, with its state. What comes after it is set aside, a changed
    recipe is told and written down."""
    changed = folder.update_recipe(recipe)
    if changed:
        reporter.message(f"goes on with a changed recipe: {'; '.join(changed)}")
    path, state, torn = Checkpoints(folder.checkpoints).newest()
    for line in [*torn, *missing_parts(folder.path, state.get("ledger_parts", []))]:
        reporter.message(line)
    supersede_after(folder.path, state["step"])
    supersede_ledger_after(folder.path, state["step"])
    return path, state


async def _run(loop: Loop, processes: _Processes, recipe: Recipe, folder: RunFolder) -> Summary:
    """Everything between the start of the processes and their end."""
    try:
        version = await processes.trainer.publish()
        await processes.engine.load(version, loop.store, recipe.kv)
        loop.reporter.started(recipe, folder, loop.step)
        if not loop.accuracies and not loop.stopping:
            await loop.evaluate(version, recipe.eval.final_problems)
        before = [await processes.engine.statistics(), await processes.trainer.statistics()]
        await loop.run()
        after = [await processes.engine.statistics(), await processes.trainer.statistics()]
        shares = [busy_share(a, b) for a, b in zip(before, after, strict=True)]
        # What was learned is safe before anything else can fail.
        await loop.checkpoint()
        version = await processes.trainer.publish()
        await processes.trainer.export(folder.model_last)
        await loop.evaluate(version, recipe.eval.final_problems)
    except asyncio.CancelledError as error:
        if not loop.stopping:
            raise
        raise Interrupted(f"stopped at once after step {loop.step}{_hint(folder)}") from error
    except EstrError as error:
        raise type(error)(f"{error}{_hint(folder)}") from error
    summary = _summarize(loop, recipe, folder, shares)
    folder.write_summary(summary)
    loop.reporter.finished(summary, folder)
    return summary


def _hint(folder: RunFolder) -> str:
    whole = Checkpoints(folder.checkpoints).complete()
    return f"; go on with: estr train --resume {folder.path}" if whole else ""


def _summarize(loop: Loop, recipe: Recipe, folder: RunFolder, shares: list[float]) -> Summary:
    row = loop.totals.to_row()
    accuracies = [accuracy for _, accuracy, _ in loop.accuracies]
    best = max(loop.accuracies, key=lambda entry: entry[2], default=None)
    tokens = int(row.get("eligible_tokens") or 0)
    return Summary(
        name=folder.path.name,
        steps=loop.step,
        version=loop.version,
        start_accuracy=accuracies[0] if accuracies else None,
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=None if best is None else best[1],
        wall_s=round(loop.wall_s, 3),
        tokens_per_s=round(tokens / loop.wall_s, 1) if loop.wall_s else 0.0,
        trained_tokens=tokens,
        intra_max=int(row.get("intra_max") or 0),
        inter_max=int(row.get("inter_max") or 0),
        intra_mean=float(row.get("intra_mean") or 0.0),
        inter_mean=float(row.get("inter_mean") or 0.0),
        rho_mask=float(row.get("rho_mask") or 0.0),
        engine_busy=round(shares[0], 4),
        trainer_busy=round(shares[1], 4),
        dropped_groups=sum(int(row.get(f"{kind}_groups") or 0) for kind in ("failed", "leftover")),
        statuses={
            name.removeprefix("attempts/"): int(value or 0)
            for name, value in row.items()
            if name.startswith("attempts/")
        },
        seed=recipe.seed,
    )


@contextlib.contextmanager
def _stopped_by_signals(reporter: Reporter) -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second cancels the run at once."""
    running = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            task.cancel("stopped at once")
            return
        stop.set()
        reporter.message("stopping after the step in progress; once more stops at once")

    installed = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not the main thread, or no such thing on this platform: Python's own handling stays.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            running.add_signal_handler(number, on_signal)
            installed.append(number)
    try:
        yield stop
    except asyncio.CancelledError as error:
        if not stop.is_set():
            raise
        raise Interrupted("stopped before training began") from error
    finally:
        for number in installed:
            running.remove_signal_handler(number)
