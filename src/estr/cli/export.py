"""`estr export`: a model folder for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from .options import runs_option


@click.command()
@click.argument("source", metavar="RUN|MODEL")
@click.argument("dest", type=click.Path(path_type=Path))
@click.option(
    "--which",
    type=click.Choice(["best", "last", "start"]),
    default="best",
    show_default=True,
    help="Which weights of a run.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the exported weights; training keeps float32.",
)
@runs_option
def export(source: str, dest: Path, which: str, dtype: str, runs: Path) -> None:
    """Write a model folder.

    The weights (safetensors) and the tokenizer of a run as a new Hugging Face folder DEST, which
    transformers, vLLM and others load. A DEST that exists is refused.

    \b
    Examples:
      estr export calculator my-model
      estr export runs/calculator my-model --which last --dtype bfloat16
    """
    from ..api import export as export_model

    folder = export_model(source, dest, which=which, dtype=dtype, runs=runs)  # type: ignore[arg-type]
    size = sum(path.stat().st_size for path in folder.iterdir())
    click.echo(f"results      {folder.absolute()} ({size / 1e6:,.1f} MB, {dtype})")
    click.echo(f'load it      AutoModelForCausalLM.from_pretrained("{folder}")')
