"""`estr warmstart`: the built-in model, made anew."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
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
    from ..warmstart import WarmStart, make

    record = make(WarmStart(seed=seed), out)
    click.echo(f"held-out accuracy {record['accuracy']:.3f}, {record['parameters']} parameters")
    click.echo(f"results: {out}, {out / 'record.json'}")
