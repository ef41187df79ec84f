"""What a run shows while it goes on, and how a rollout is printed.

    reporter_for(stdout)   LiveReporter on a terminal, PlainReporter elsewhere: one line every few
                           seconds, no control characters

Text that a model or a tool wrote is never trusted: control characters are shown as escapes, and
nothing in it is read as markup.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .evaluation_records import stretches
from .options.tasks import title
from .printable import printable
from .progress import Row
from .run_progress import RunProgress, duration, rate, sparkline
from .streams import careless

if TYPE_CHECKING:
    from .config import Recipe
    from .evaluation import EvalResult
    from .run_folder import RunFolder, Summary
    from .scores import Comparison
    from .types import Trajectory

PLAIN_EVERY_S = 5.0
_ROLLOUT_EVERY_S = 2.0
_ROLLOUT_CHARS = 400

Decode = Callable[[list[int]], str]


def result_lines(summary: Summary, folder: RunFolder) -> list[tuple[str, str]]:
    """The short table at the end of a run: (name, value)."""

    def accuracy(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    start, final, best = map(
        accuracy, (summary.start_accuracy, summary.final_accuracy, summary.best_accuracy)
    )
    return [
        ("held-out accuracy", f"{start} at the start, {final} at the end, {best} at best"),
        ("optimizer steps", f"{summary.steps} (version {summary.version})"),
        ("time", f"{duration(summary.wall_s)}, {rate(summary.tokens_per_s)} tokens/s"),
        ("trained tokens", f"{summary.trained_tokens:,}"),
        (
            "staleness",
            f"intra {summary.intra_mean:.2f}, at most {summary.intra_max}; "
            f"inter {summary.inter_mean:.2f}, at most {summary.inter_max}",
        ),
        ("rho_mask", f"{summary.rho_mask:.2g}"),
        (
            "busy",
            f"engine {100 * summary.engine_busy:.0f} %, trainer {100 * summary.trainer_busy:.0f} %",
        ),
        ("dropped groups", str(summary.dropped_groups)),
        ("results", f"{folder.path}: summary.json, metrics.jsonl, tensorboard/, log.txt"),
        ("model", f"{folder.model_best} and {folder.model_last.name}"),
        ("look at it", f"estr sample {shlex.quote(str(folder.path))}"),
    ]


def eval_lines(result: EvalResult) -> Iterator[tuple[str, str]]:
    """An evaluation as (name, value) lines."""
    version = "" if result.version is None else f", version {result.version}"
    yield (
        "task",
        f"{result.task} ({result.split}): {result.num_problems} problems x {result.k}, "
        f"temperature {result.temperature:g}, seed {result.seed}{version}",
    )
    low, high = result.avg_interval
    yield f"avg@{result.k}", f"{result.avg_at_k:.4f}  [{low:.4f}, {high:.4f}]"
    for size, value in result.pass_at_k.items():
        if size == 1:  # the same figure as avg@k, whatever k
            continue
        low, high = result.pass_intervals[size]
        yield f"pass@{size}", f"{value:.4f}  [{low:.4f}, {high:.4f}]"
    voted = result.k > 1  # one rollout is no vote
    if voted and result.majority_at_k is not None and result.majority_interval is not None:
        low, high = result.majority_interval
        yield f"majority@{result.k}", f"{result.majority_at_k:.4f}  [{low:.4f}, {high:.4f}]"
    if result.measures:
        yield "measures", ", ".join(f"{name} {v:.4g}" for name, v in result.measures.items())
    failures = ", ".join(f"{n} {status}" for status, n in result.failures.items())
    yield "failures", f"{failures or 'none'}; {result.unscored} of {result.num_rollouts} unscored"
    for status, message in result.errors.items():
        yield status, printable(message)
    found = f"; {result.num_found} rollouts were there already" if result.num_found else ""
    yield "time", f"{result.tokens:,} tokens in {result.wall_s:.1f} s{found}"


def comparison_lines(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """A paired comparison as (name, value) lines."""
    low, high = comparison.interval
    same = comparison.num_problems - comparison.better - comparison.worse
    yield "difference", f"{comparison.difference:+.4f}  [{low:+.4f}, {high:+.4f}]"
    yield "p-value", f"{comparison.p_value:.4g} (two-sided, paired by problem)"
    yield (
        "problems",
        f"better on {comparison.better}, worse on {comparison.worse}, alike on {same}",
    )
    needed = comparison.problems_for_one_point
    if needed is None:
        yield "one point", "cannot be told: no problem tells the two apart"
    else:
        yield "one point", f"a difference of 0.01 needs about {needed:,} such problems to show"


def starting_line(recipe: Recipe) -> str:
    """What is being started, and where; it may take minutes."""
    count, ranks = recipe.engine.count, recipe.trainer.ranks
    kind = "" if recipe.engine.name == "local" else f" ({recipe.engine.name})"
    engines = f"engine{kind}" if count == 1 else f"{count} engines{kind}"
    trainer = "trainer" if ranks == 1 else f"trainer of {ranks} ranks"
    where = "" if recipe.placement == "local" else f" on Ray ({recipe.ray.address})"
    return f"starting {engines}, {trainer} and evaluator{where}"


class PlainReporter:
    """Lines for files and pipes: ASCII but for what others wrote, no control characters."""

    def __init__(self, stream: IO[str], *, every_s: float = PLAIN_EVERY_S) -> None:
        self._stream = careless(stream)
        self._every_s = every_s
        self._said_at = -math.inf
        self._progress: RunProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def starting(self, recipe: Recipe) -> None:
        self._say(starting_line(recipe))

    def started(self, recipe: Recipe, folder: RunFolder, first_step: int) -> None:
        self._progress = _progress(recipe, folder, first_step)
        self._say(self._progress.title)

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        if self._progress is None:
            return
        self._progress.take(step, version, wall_s, row)
        if wall_s - self._said_at < self._every_s and step < self._progress.steps:
            return
        self._said_at = wall_s
        left = self._progress.left_s
        ending = [] if left is None else [f"{duration(left)} left"]
        figures = [f"{name} {value}" for name, value in self._progress.figures()]
        self._say(" | ".join([f"step {step}/{self._progress.steps}", *figures, *ending]))

    def evaluated(self, version: int, accuracy: float, num_problems: int) -> None:
        if self._progress is not None:
            self._progress.accuracies.append((version, accuracy, num_problems))
        problems = "1 problem" if num_problems == 1 else f"{num_problems} problems"
        self._say(f"version {version}: held-out accuracy {accuracy:.3f} on {problems}")

    def rolled_out(self, trajectory: Trajectory, text: str) -> None:
        pass

    def message(self, text: str) -> None:
        self._say(f"note: {text}")

    def finished(self, summary: Summary, folder: RunFolder) -> None:
        for name, value in result_lines(summary, folder):
            self._say(f"{name:<18} {value}")

    def _say(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


class LiveReporter:
    """A few lines on a terminal, drawn anew in place. What is drawn is built here, in the caller's
    thread; rich's own thread only repeats it, so it never sees anything half changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=6)
        self._progress: RunProgress | None = None
        self._rollout: Text | None = None
        self._rollout_at = -math.inf
        self._spinner = Spinner("line")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def starting(self, recipe: Recipe) -> None:
        self._spinner.update(text=Text(printable(starting_line(recipe))))
        self._live.update(self._spinner)

    def started(self, recipe: Recipe, folder: RunFolder, first_step: int) -> None:
        self._progress = _progress(recipe, folder, first_step)
        self._draw()

    def stepped(self, step: int, version: int, wall_s: float, row: Row) -> None:
        if self._progress is not None:
            self._progress.take(step, version, wall_s, row)
        self._draw()

    def evaluated(self, version: int, accuracy: float, num_problems: int) -> None:
        if self._progress is not None:
            self._progress.accuracies.append((version, accuracy, num_problems))
        self._draw()

    def rolled_out(self, trajectory: Trajectory, text: str) -> None:
        now = time.monotonic()
        if now - self._rollout_at < _ROLLOUT_EVERY_S:
            return
        self._rollout_at = now
        shown = printable(text)
        cut = shown if len(shown) <= _ROLLOUT_CHARS else f"...{shown[-_ROLLOUT_CHARS:]}"
        self._rollout = Text.assemble((f"{rollout_head(trajectory)}\n", "dim"), cut)
        self._draw()

    def message(self, text: str) -> None:
        self._console.print(Text(f"note: {printable(text)}", style="yellow"))

    def finished(self, summary: Summary, folder: RunFolder) -> None:
        self._live.stop()
        self._console.print(_grid(result_lines(summary, folder)))

    def _draw(self) -> None:
        if self._progress is not None:
            self._live.update(self._view(self._progress))

    def _view(self, progress: RunProgress) -> RenderableType:
        left = progress.left_s
        head = Table.grid(padding=(0, 1))
        self._spinner.update(text=f"step {progress.step}/{progress.steps}")
        bar = ProgressBar(total=progress.steps, completed=progress.step, width=40)
        head.add_row(self._spinner, bar, "" if left is None else f"{duration(left)} left")
        curves = {
            "reward": progress.rewards,
            "held-out": [accuracy for _, accuracy, _ in progress.accuracies],
        }
        lines = [
            (name, f"{value}  {sparkline(curves.get(name, []))}".rstrip())
            for name, value in progress.figures()
        ]
        parts: list[RenderableType] = [Text(progress.title, style="bold"), head, _grid(lines)]
        if self._rollout is not None:
            parts.append(self._rollout)
        return Group(*parts)


def reporter_for(stream: IO[str], *, live: bool | None = None) -> LiveReporter | PlainReporter:
    """The display that suits the stream (live: None), or the one asked for."""
    if live if live is not None else stream.isatty():
        return LiveReporter(Console(file=careless(stream), force_terminal=True if live else None))
    return PlainReporter(stream)


def rollout_head(trajectory: Trajectory) -> str:
    """One line on a rollout: its name, what came of it, and the versions that wrote it."""
    reward = "unscored" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    versions = ", ".join(f"{n} of version {v}" for v, n in trajectory.version_runs) or "none"
    status = "" if trajectory.status == "ok" else f"{trajectory.status}, "
    return f"problem {trajectory.problem}: {status}{reward}; tokens: {versions}"


def rollout_lines(trajectory: Trajectory, decode: Decode) -> Text:
    """A whole rollout, one labelled block for each stretch that the model read or wrote."""
    text = Text()
    for written, ids in stretches(trajectory):
        shown = printable(decode(ids), newlines=True)
        label, style = ("wrote", "bold green") if written else ("read", "dim")
        for i, line in enumerate(shown.removesuffix("\n").split("\n")):
            text.append(f"  {label if i == 0 else '':<5} | ", style="dim")
            text.append(f"{line}\n", style=style)
    if trajectory.error is not None:
        text.append(f"  {printable(trajectory.error)}\n", style="red")
    return text


def _progress(recipe: Recipe, folder: RunFolder, first_step: int) -> RunProgress:
    corrections = " + ".join(str(entry["name"]) for entry in recipe.correction)
    heading = f"{folder.path}: {recipe.model} on {title(recipe.task)}, correction {corrections}"
    return RunProgress(printable(heading), recipe.steps, recipe.max_staleness, step=first_step)


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in lines:
        table.add_row(Text(name, style="cyan"), Text(value))
    return table
