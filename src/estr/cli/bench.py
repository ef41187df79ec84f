"""`estr bench`: the speed of one part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError

BENCHMARKS = {
    "engine": "estr.bench.engine",
    "trainer": "estr.bench.trainer",
    "async": "estr.bench.async_loop",
    "recording": "estr.bench.recording",
    "ledger": "estr.bench.ledger",
    "logprobs": "estr.bench.logprobs",
    "switch": "estr.bench.switch",
    "trl": "estr.bench.trl",
}
"""What `estr bench` knows: name -> the module with run(quick) -> dict."""

OPTIONS = {"peers": ("logprobs", "trl"), "vllm": ("switch",), "ray": ("switch",)}
"""What only some of them take."""


@click.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--peers",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of other packages' environments to compare with (logprobs, trl).",
)
@click.option(
    "--vllm",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="An interpreter that has vLLM, to be measured as well (switch only).",
)
@click.option("--ray", is_flag=True, help="Measure under a local Ray as well (switch only).")
@click.option("--quick", is_flag=True, help="Less of everything; the figures mean less, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    name: str, peers: Path | None, vllm: Path | None, ray: bool, quick: bool, as_json: bool
) -> None:
    """Measure the speed of one part.

    NAME is engine, trainer, async, recording, ledger, logprobs, switch or trl. Figures are of this
    machine and are printed only; redirect the output of --json to keep them. logprobs is compared
    with TRL and verl as well where --peers names their environments, made by
    conformance/install.py; trl needs it.

    \b
    Example:
      estr bench engine --quick --json
    """
    import importlib

    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    options: dict[str, Any] = {}
    for option, value in (("peers", peers), ("vllm", vllm), ("ray", ray or None)):
        if value is None:
            continue
        if name not in OPTIONS[option]:
            raise ConfigError(f"--{option} is of {' and '.join(OPTIONS[option])}, not of {name}")
        options[option] = value
    figures = importlib.import_module(BENCHMARKS[name]).run(quick, **options)
    if as_json:
        click.echo(json.dumps(figures))
        return
    for key, value in figures.items():
        click.echo(f"{key:<16} {value if isinstance(value, str) else json.dumps(value)}")
