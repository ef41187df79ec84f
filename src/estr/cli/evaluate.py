"""`estr eval`: held-out accuracy of a run or a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .options import runs_option, seed_option, set_option, task_option


@click.command("eval")
@click.argument("source", metavar="RUN|MODEL")
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
@set_option
@runs_option
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
    from ..evaluation import evaluate_model
    from ..subject import find_run

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
    from ..display import eval_lines

    for name, value in eval_lines(result):
        click.echo(f"{name:<12} {value}")
    click.echo(f"{'results':<12} {'above only' if run is None else run.path / 'eval.jsonl'}")
