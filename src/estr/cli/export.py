"""`estr export`: a model folder for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..errors import ConfigError
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
@click.option(
    "--adapter", is_flag=True, help="Of a run with lora.rank: the adapters alone, for peft."
)
@runs_option
def export(source: str, dest: Path, which: str, dtype: str, adapter: bool, runs: Path) -> None:
    """Write a model folder.

    The weights (safetensors) and the tokenizer of a run as a new Hugging Face folder DEST, which
    transformers, vLLM and others load. A DEST that exists is refused.

    \b
    Examples:
      estr export calculator my-model
      estr export runs/calculator my-model --which last --dtype bfloat16
      estr export my-lora-run my-adapter --adapter --which last
    """
    from ..api import export as export_model
    from ..api import export_adapter

    if adapter:
        if dtype != "float32":
            raise ConfigError(
                "adapters are exported in float32, as they were trained; leave out --dtype"
            )
        folder = export_adapter(source, dest, which=which, runs=runs)  # type: ignore[arg-type]
    else:
        folder = export_model(source, dest, which=which, dtype=dtype, runs=runs)  # type: ignore[arg-type]
    size = sum(path.stat().st_size for path in folder.iterdir())
    click.echo(f"results      {folder.absolute()} ({size / 1e6:,.1f} MB, {dtype})")
    load = (
        "PeftModel.from_pretrained(model, {})"
        if adapter
        else "AutoModelForCausalLM.from_pretrained({})"
    )
    click.echo(f"load it      {load.format(json.dumps(str(folder)))}")
