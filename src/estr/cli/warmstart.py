"""`estr warmstart`: a small model to start from."""

from __future__ import annotations

from pathlib import Path

import click

from .options import set_option


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Supervised steps; more: a better start.")
@click.option("--task", default="calculator", show_default=True, help="A task with demonstrations.")
@set_option
def warmstart(
    out: Path, seed: int, steps: int | None, task: str, overrides: tuple[str, ...]
) -> None:
    """Make a small model to start from.

    A decoder of 0.1M parameters learns from poor demonstrations of a task: calculator (which gives
    the built-in model), countdown or lookup. The result is a Hugging Face folder with record.json
    beside the weights.

    \b
    Examples:
      estr warmstart --out my-model
      estr warmstart --out my-model --task lookup --set task.num_hops=3
    """
    import json

    from ..config import load_recipe
    from ..warmstart import WarmStart, make

    table = load_recipe(None, [f"task={json.dumps(task)}", *overrides]).task
    setting = WarmStart(seed=seed, steps=steps)
    record = make(setting, out, task=table)
    click.echo(f"held-out accuracy {record['accuracy']:.3f}, {record['parameters']} parameters")
    click.echo(f"results: {out}, {out / 'record.json'}")
