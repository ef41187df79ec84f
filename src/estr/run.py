"""From a recipe to a finished run: bring everything up, run the loop, write the result, tear down.

train(recipe) -> Summary        the one entry, used by `estr train` and from Python
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints
from .config import Recipe
from .engines.process import EngineProcess
from .errors import EstrError, Interrupted
from .evaluator_process import EvaluatorProcess
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
        """All at once; if one does not come up, the others are closed."""
        starts: list[Awaitable[EngineProcess | TrainerProcess | EvaluatorProcess]] = [
            EngineProcess.start(model, recipe.engine, in_flight=recipe.in_flight, log=log),
            TrainerProcess.start(model, recipe, store, log=log),
            EvaluatorProcess.start(model, recipe, store, log=log),
        ]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                up = [o for o in outcomes if not isinstance(o, BaseException)]
                await asyncio.gather(*(process.close() for process in up))
                raise outcome
        engine, trainer, evaluator = outcomes
        assert isinstance(engine, EngineProcess)
        assert isinstance(trainer, TrainerProcess)
        assert isinstance(evaluator, EvaluatorProcess)
        return cls(engine, trainer, evaluator)

    def watchers(self, recipe: Recipe) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What notices the death of a process, or an engine that hangs."""
        return [
            lambda: self.engine.watch(recipe.engine.timeout_s),
            self.trainer.worker.alive,
            self.evaluator.worker.alive,
        ]

    def gauges(self) -> dict[str, float]:
        """Shares of wall time that the processes spent at work, of late."""
        return {"engine_busy": self.engine.busy, "trainer_busy": self.trainer.busy}

    async def close(self) -> None:
        await asyncio.gather(self.engine.close(), self.trainer.close(), self.evaluator.close())


async def _train(recipe: Recipe, reporter: Reporter, runs: Path, resume: Path | None) -> Summary:
    model = resolve_model(recipe.model)
    task, codec, sampling = resolve_play(model, recipe, temperature=recipe.sampling.temperature)
    state, saved = None, None
    if resume is None:
        folder = RunFolder.create(recipe, runs)
    else:
        folder = RunFolder.open(resume)
        saved, state, torn = Checkpoints(folder.checkpoints).newest()
        for line in torn:
            reporter.message(line)
        supersede_after(folder.path, state["step"])
    size = sum(p.stat().st_size for p in model.glob("*.safetensors"))
    keep = recipe.max_staleness + 2
    bytes_needed = keep * size * _BYTES_PER_WEIGHT[recipe.engine.dtype] // 4
    store = FileWeightStore(weights_folder(folder, bytes_needed), keep=keep)
    try:
        processes = await _Processes.start(model, recipe, store, folder.log)
        try:
            with MetricsWriter(folder.path) as writer:
                setting = RolloutSetting(
                    processes.engine, task, codec, sampling, recipe.rollout, worker="engine"
                )
                loop = Loop(
                    recipe,
                    setting,
                    processes.trainer,
                    store,
                    reporter=reporter,
                    writer=writer,
                    evaluator=processes.evaluator,
                    checkpoints=Checkpoints(folder.checkpoints, recipe.checkpoint.keep),
                    model_best=folder.model_best,
                    watchers=processes.watchers(recipe),
                    gauges=processes.gauges,
                )
                if saved is not None and state is not None:
                    await processes.trainer.restore(saved)
                    loop.restore(state)
                with _stopped_by_signals(loop):
                    return await _run(loop, processes, recipe, folder, reporter)
        finally:
            await processes.close()
    finally:
        shutil.rmtree(store.folder, ignore_errors=True)


async def _run(
    loop: Loop,
    processes: _Processes,
    recipe: Recipe,
    folder: RunFolder,
    reporter: Reporter,
) -> Summary:
    """Everything between the start of the processes and their end."""
    version = await processes.trainer.publish()
    await processes.engine.load(version, loop.store, recipe.kv)
    reporter.started(recipe, folder, loop.step)
    if not loop.accuracies:
        await loop.evaluate(version, recipe.eval.final_problems)
    busy = [await processes.engine.statistics(), await processes.trainer.statistics()]
    try:
        await loop.run()
    except EstrError as error:
        hint = f"; go on with: estr train --resume {folder.path}"
        kept = hint if loop.checkpoints and loop.checkpoints.complete() else ""
        raise type(error)(f"{error}{kept}") from error
    after = [await processes.engine.statistics(), await processes.trainer.statistics()]
    shares = [busy_share(a, b) for a, b in zip(busy, after, strict=True)]
    version = await processes.trainer.publish()
    await processes.trainer.export(folder.model_last)
    await loop.evaluate(version, recipe.eval.final_problems)
    await loop.checkpoint()
    summary = _summarize(loop, recipe, folder, shares)
    folder.write_summary(summary)
    reporter.finished(summary, folder)
    return summary


def _summarize(loop: Loop, recipe: Recipe, folder: RunFolder, shares: list[float]) -> Summary:
    row = loop.totals.to_row()
    accuracies = [accuracy for _, accuracy, _ in loop.accuracies]
    tokens = int(row.get("eligible_tokens") or 0)
    return Summary(
        name=folder.path.name,
        steps=loop.step,
        version=loop.version,
        start_accuracy=accuracies[0] if accuracies else None,
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
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
def _stopped_by_signals(loop: Loop) -> Iterator[None]:
    """First SIGINT or SIGTERM: stop after the step in progress. Second: cancel at once."""
    running = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if loop.stopping:
            task.cancel("stopped at once")
        loop.stop()

    installed = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not the main thread, or no such thing on this platform: Python's own handling stays.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            running.add_signal_handler(number, on_signal)
            installed.append(number)
    try:
        yield
    except asyncio.CancelledError as error:
        if not loop.stopping:
            raise
        raise Interrupted(f"stopped at once after step {loop.step}") from error
    finally:
        for number in installed:
            running.remove_signal_handler(number)
