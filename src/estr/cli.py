"""The command line. Each command imports what it needs when it runs, so that `estr --help` is
immediate; errors raised on purpose become one line and an exit code.

    0    done
    2    the recipe, a flag or an option is wrong
    130  stopped by the user
    1    anything else
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .errors import ConfigError, EstrError, Interrupted

if TYPE_CHECKING:
    from .subject import Subject

F = TypeVar("F", bound=Callable[..., Any])

BENCHMARKS = {
    "engine": "estr.bench.engine",
    "trainer": "estr.bench.trainer",
    "async": "estr.bench.async_loop",
    "recording": "estr.bench.recording",
}
"""What `estr bench` knows: name -> the module with run(quick) -> dict."""


class _Commands(click.Group):
    """Where errors become a line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EstrError as error:
            if ctx.params["debug"]:
                raise
            ctx.exit(_report(error))
        except KeyboardInterrupt:
            ctx.exit(_report(Interrupted("stopped")))


def _report(error: EstrError) -> int:
    from .display import printable

    click.echo(f"error: {printable(str(error), newlines=True)}", err=True)
    return 2 if isinstance(error, ConfigError) else 130 if isinstance(error, Interrupted) else 1


def _set_option(command: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the recipe, such as trainer.lr=3e-4; may be given again and again.",
    )(command)


def _runs_option(command: F) -> F:
    return click.option(
        "--runs",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("runs"),
        show_default=True,
        help="The folder that run folders are in.",
    )(command)


def _task_option(command: F) -> F:
    return click.option(
        "--task", metavar="NAME", help="The task to play, if it is not that of the recipe."
    )(command)


def _seed_option(command: F) -> F:
    return click.option(
        "--seed", type=click.IntRange(min=0), help="Of the draws; the recipe's if absent."
    )(command)


@click.group(cls=_Commands)
@click.version_option(package_name="estr")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Asynchronous reinforcement learning of language models with the Entropy-Scaled Trust Region.

    \b
    estr train                        train the built-in model on the built-in task
    estr sample calculator            what it wrote before, and what it writes now
    estr eval calculator --k 4        held-out accuracy, with intervals
    """


@cli.command()
@click.argument("recipe", required=False)
@_set_option
@click.option("--resume", metavar="RUN", help="Go on with this run, from its last checkpoint.")
@_runs_option
@click.option("--live/--plain", default=None, help="Display; by default live on a terminal only.")
def train(
    recipe: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    runs: Path,
    live: bool | None,
) -> None:
    """Train a model.

    RECIPE is a TOML file or the name of a shipped recipe. Without one, the built-in model learns
    the built-in calculator task on this machine, in a few minutes. The result is a run folder,
    runs/NAME: summary.json, metrics.jsonl, the model.

    \b
    Examples:
      estr train
      estr train recipes/calculator.toml --set max_staleness=0
      estr train --resume runs/calculator
    """
    from .config import load_recipe

    if resume is None:
        file, folder = find_recipe(recipe), None
    elif recipe is None:
        folder = _run_folder(resume, runs)
        file = folder / "config.toml"
    else:
        raise ConfigError("--resume goes on with the run's own recipe; give either it or RECIPE")
    resolved = load_recipe(file, overrides)
    from .display import reporter_for
    from .run import train as train_recipe

    with reporter_for(sys.stdout, live=live) as reporter:
        train_recipe(resolved, reporter=reporter, runs=runs, resume=folder)


@cli.command("eval")
@click.argument("source", metavar="RUN|MODEL")
@_task_option
@click.option("--k", type=click.IntRange(min=1), help="Rollouts of each problem.")
@click.option("--problems", type=click.IntRange(min=1), help="Held-out problems to play.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: argmax.")
@_seed_option
@click.option(
    "--weights",
    type=click.Choice(["start", "best", "last"]),
    default="best",
    show_default=True,
    help="Which weights of a run.",
)
@_set_option
@_runs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(source: str, runs: Path, as_json: bool, **request: Any) -> None:
    """Measure held-out accuracy.

    avg@k and pass@k, with 95 % intervals, of one pinned version of the weights. RUN is a run folder
    or the name of one under runs/; MODEL is "builtin", the name of a known model, or a Hugging Face
    folder. Rollouts that fail count as not solved and are named. What is found about a run is also
    added to its eval.jsonl.

    \b
    Examples:
      estr eval calculator --k 4
      estr eval builtin --task calculator --problems 64 --json
    """
    from .evaluate import evaluate_model
    from .subject import find_run

    result = evaluate_model(source, runs=runs, **request)
    run = find_run(source, runs)
    record = {"source": source, "weights": None if run is None else request["weights"]}
    line = json.dumps({**record, **result.to_json()})
    if run is not None:
        with (run.path / "eval.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    if as_json:
        click.echo(line)
        return
    from .display import eval_lines

    for name, value in eval_lines(result):
        click.echo(f"{name:<12} {value}")
    click.echo(f"{'results':<12} {'above only' if run is None else run.path / 'eval.jsonl'}")


@cli.command()
@click.argument("source", metavar="RUN|MODEL")
@_task_option
@click.option("-n", "num", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--before", is_flag=True, help="Only with the weights that the run started from.")
@click.option("--after", is_flag=True, help="Only with the weights of the run's end.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: argmax.")
@_seed_option
@_set_option
@_runs_option
def sample(
    source: str,
    task: str | None,
    num: int,
    before: bool,
    after: bool,
    temperature: float | None,
    seed: int | None,
    overrides: tuple[str, ...],
    runs: Path,
) -> None:
    """Show a few rollouts.

    Of a run, before and after training, or of a model: what it read and what it wrote. The same
    held-out problems with the same random numbers each time. Rollouts are printed only; redirect
    the output to keep them.

    \b
    Examples:
      estr sample calculator
      estr sample builtin --task calculator -n 4
    """
    from .subject import find_run, find_subject

    chosen = {"eval.temperature": temperature, "seed": seed}
    keys = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    is_run = find_run(source, runs) is not None
    if not is_run and (before or after):
        raise ConfigError(f"{source} is no run, so it has no --before and no --after")
    both = before == after
    if not is_run:
        wanted = [("model", "best")]
    else:
        wanted = [("before", "start")] if before or both else []
        wanted += [("after", "last")] if after or both else []
    for title, weights in wanted:
        subject = find_subject(
            source,
            task=task,
            overrides=[*overrides, *keys],
            weights=weights,  # type: ignore[arg-type]
            runs=runs,
        )
        _print_rollouts(title, subject, num)


def _print_rollouts(title: str, subject: Subject, num: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from .display import printable, rollout_head, rollout_lines
    from .evaluate import sample_rollouts

    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(Text(printable(f"{title}: {subject.folder}"), style="bold cyan"))
    trajectories, decode = sample_rollouts(subject, num)
    for trajectory in trajectories:
        console.print(Text(rollout_head(trajectory)))
        console.print(rollout_lines(trajectory, decode))


@cli.command()
@click.argument("recipe", required=False)
@_set_option
def check(recipe: str | None, overrides: tuple[str, ...]) -> None:
    """Check a recipe, spend no compute.

    Prints it as resolved, and everything that is wrong with it: model, task, stop tokens and
    correction are looked up, and the gold answers of a few problems are played through tokenizer,
    budgets and grader. The output is TOML, itself a recipe.

    \b
    Example:
      estr check recipes/calculator.toml --set correction.tau=0.5
    """
    from .check import check_recipe
    from .display import printable

    findings = check_recipe(find_recipe(recipe), overrides)
    if findings.recipe is not None:
        click.echo(findings.recipe.to_toml(), nl=False)
    for note in findings.notes:
        click.echo(f"# {printable(note)}")
    for error in findings.errors:
        click.echo(f"error: {printable(error)}", err=True)
    if findings.errors:
        sys.exit(2)


@cli.command()
@click.argument("name", metavar="NAME")
@click.option("--quick", is_flag=True, help="Less of everything; the figures mean less, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(name: str, quick: bool, as_json: bool) -> None:
    """Measure the speed of one part.

    NAME is engine, trainer, async or recording. Figures are of this machine and are printed only;
    redirect the output of --json to keep them.

    \b
    Example:
      estr bench engine --quick --json
    """
    import importlib

    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    figures = importlib.import_module(BENCHMARKS[name]).run(quick)
    if as_json:
        click.echo(json.dumps(figures))
        return
    for key, value in figures.items():
        click.echo(f"{key:<16} {value if isinstance(value, str) else json.dumps(value)}")


@cli.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def warmstart(out: Path, seed: int) -> None:
    """Make the built-in model anew.

    It is a small decoder, trained on poor demonstrations. The result is a Hugging Face folder with
    record.json beside the weights.

    \b
    Example:
      estr warmstart --out my-model
    """
    from .warmstart import WarmStart, make

    record = make(WarmStart(seed=seed), out)
    click.echo(f"held-out accuracy {record['accuracy']:.3f}, {record['parameters']} parameters")
    click.echo(f"results: {out}, {out / 'record.json'}")


def find_recipe(name: str | None) -> Path | None:
    """A recipe file, or the shipped recipe of that name. Raises ConfigError naming those."""
    if name is None or Path(name).is_file():
        return None if name is None else Path(name)
    shipped = {path.stem: path for place in _recipe_folders() for path in place.glob("*.toml")}
    if name in shipped:
        return shipped[name]
    raise ConfigError(
        f"recipe {name} is neither a file nor a shipped recipe ({', '.join(sorted(shipped))})"
    )


def _recipe_folders() -> list[Path]:
    """Where recipes are: beside the package's sources, or inside an installed package."""
    package = Path(__file__).parent
    return [package.parents[1] / "recipes", package / "recipes"]


def _run_folder(source: str, runs: Path) -> Path:
    from .subject import find_run

    run = find_run(source, runs)
    if run is None:
        raise ConfigError(f"--resume: neither {source} nor {runs / source} is a run folder")
    return run.path


def main() -> None:
    """Entry of the `estr` command."""
    # Closed streams (`>&-`) are None; whoever closed them does not want to read.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli()


if __name__ == "__main__":
    main()
