"""`estr eval`: held-out accuracy of a run or a model, alone or against another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import runs_option, seed_option, set_option, task_option

if TYPE_CHECKING:
    from ..evaluation import EvalResult
    from ..scores import Comparison


@click.command("eval")
@click.argument("source", metavar="RUN|MODEL")
@click.option(
    "--against", metavar="RUN|MODEL", help="Compare with this one on the same problems, paired."
)
@task_option
@click.option("--k", type=click.IntRange(min=1), help="Rollouts of each problem.")
@click.option("--problems", type=click.IntRange(min=1), help="Held-out problems to play.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: argmax.")
@seed_option
@click.option(
    "--weights",
    type=click.Choice(["start", "best", "last"]),
    default="best",
    show_default=True,
    help="Which weights of a run.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep every rollout there, with transcripts; the same command goes on from them.",
)
@set_option
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    source: str, against: str | None, runs: Path, out: Path | None, as_json: bool, **request: Any
) -> None:
    """Measure held-out accuracy.

    avg@k, pass@k and majority@k, with 95 % intervals, of one pinned version of the weights. RUN is
    a run folder or the name of one under runs/; MODEL is "builtin", "warmstart", the name of a
    known model, or a Hugging Face folder. Rollouts that fail count as not solved and are named.
    What is found about a run is also added to its eval.jsonl.

    \b
    Examples:
      estr eval calculator --k 4
      estr eval calculator --against builtin
      estr eval builtin --task calculator --problems 64 --json
    """
    from ..evaluation import compare_models, evaluate_model

    names = [source] if against is None else [source, against]
    comparison = None
    with contextlib.redirect_stdout(sys.stderr):  # what a user's own functions print is no result
        if against is None:
            results = [evaluate_model(source, runs=runs, out=out, **request)]
        else:
            *results, comparison = compare_models(source, against, runs=runs, out=out, **request)
    tables = [
        _kept(name, runs, request["weights"], result)
        for name, result in zip(names, results, strict=True)
    ]
    if not as_json:
        _print(names, results, comparison)
        _show([("results", _places(names, runs, out))])
    elif comparison is None:
        click.echo(json.dumps(tables[0]))
    else:
        sides = dict(zip(("first", "second"), tables, strict=True))
        click.echo(json.dumps({**sides, "comparison": dataclasses.asdict(comparison)}))


def _kept(name: str, runs: Path, weights: str, result: EvalResult) -> dict[str, Any]:
    """The result as JSON writes it; that of a run is also added to its eval.jsonl."""
    from ..printable import printable
    from ..subject import find_run

    run = find_run(name, runs)
    table = {"source": name, "weights": None if run is None else weights, **result.to_json()}
    if run is not None:
        path = run.path / "eval.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(table)}\n")
        except OSError as error:  # the run may be another's; what was found is printed all the same
            reason = f"{printable(str(path))} cannot be written: {error.strerror}"
            click.echo(f"warning: {reason}; the result is printed only", err=True)
    return table


def _print(names: list[str], results: list[EvalResult], comparison: Comparison | None) -> None:
    from ..display import comparison_lines, eval_lines

    for name, result in zip(names, results, strict=True):
        if comparison is not None:
            click.echo(f"-- {name}")
        _show(eval_lines(result))
    if comparison is not None:
        click.echo(f"-- {names[0]} against {names[1]}")
        _show(comparison_lines(comparison))


def _show(lines: Any) -> None:
    for name, value in lines:
        click.echo(f"{name:<12} {value}")


def _places(names: list[str], runs: Path, out: Path | None) -> str:
    from ..subject import find_run

    found = [run.path / "eval.jsonl" for name in names if (run := find_run(name, runs)) is not None]
    places = [*map(str, found), *([] if out is None else [f"{out} (rollouts, transcripts)"])]
    return ", ".join(places) or "above only"
