"""What `estr replay` prints: corrections are letters in all tables after the first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..display import printable
from ..replay.results import Example, Gradients, Part, Replay, by_part

Decode = Callable[[list[int]], str]

_PARTS: tuple[tuple[Part, str], ...] = (
    ("entropy_bin", "entropy from, nats"),
    ("lag", "lag"),
    ("signs", "sign of advantage, log_ratio"),
)


def print_replay(found: Replay, decode: Decode) -> None:
    console = _console()
    steps = found.steps
    for line in found.torn:
        _say(console, f"warning: {line}", "yellow")
    _say(
        console,
        f"{found.run}: {found.tokens:,} trained tokens of {len(steps)} optimizer steps "
        f"({steps[0]} to {steps[-1]})",
        "bold",
    )
    for text in found.own:
        _say(console, f"trained with {described(text)}")
    check = found.check
    if check.kept_differ or check.clipped_differ:
        _say(
            console,
            f"as trained, replayed: {check.kept_differ} kept and {check.clipped_differ} clipped of "
            f"{check.tokens:,} verdicts DIFFER from those recorded, first at {check.first}",
            "bold red",
        )
    else:
        _say(console, f"as trained, replayed: all {check.tokens:,} verdicts are those recorded")
    for label, reason in found.refused:
        _say(console, f"left out: {label}: {reason}", "yellow")
    _print_figures(console, found)
    letters = _letters(found.labels)
    agreement = [[f"{value:.2%}" for value in row] for row in found.agreement]
    _print_matrix(console, "agreement: same kept", letters, agreement)
    only = [[str(row[i] - both) for both in row] for i, row in enumerate(found.rejected_by_both)]
    _print_matrix(console, "tokens that the row rejects and the column keeps", letters, only)
    _print_cosines(console, "cosine of gradient coefficients", letters, found.cosine)
    for part, name in _PARTS:
        _print_part(console, found, part, name)
    for label, examples in groupby(found.examples, key=lambda example: example.correction):
        _print_examples(console, found, label, list(examples), decode)


def print_gradients(found: Gradients) -> None:
    console = _console()
    _say(
        console,
        f"{found.run}: step {found.step}, {found.tokens:,} trained tokens, version {found.version} "
        f"({found.weights})",
        "bold",
    )
    _say(
        console,
        "policy log-probs scored again agree with the logged ones within "
        f"{found.max_difference:.1e}",
    )
    table = Table(box=None, header_style="bold")
    for name in ("", "correction", "loss", "gradient norm"):
        table.add_column(name, justify="left" if name == "correction" else "right")
    for letter, gradient in zip(_letters(found.labels), found.gradients, strict=True):
        label = Text(printable(gradient.label))
        table.add_row(letter, label, f"{gradient.loss:+.6g}", f"{gradient.norm:.6g}")
    console.print(table)
    if found.recorded_loss is not None and found.recorded_norm is not None:
        _say(
            console,
            f"recorded at training: loss {found.recorded_loss:+.6g}, gradient norm "
            f"{found.recorded_norm:.6g}",
        )
    _print_cosines(console, "cosine of gradients", _letters(found.labels), found.cosine)


def described(text: str) -> str:
    """The JSON of a run's corrections in the command's own syntax."""
    parts = []
    for entry in json.loads(text):
        options = [f"{key}={value}" for key, value in entry.items() if key != "name"]
        parts.append(":".join([entry["name"], *([",".join(options)] if options else [])]))
    return " + ".join(parts)


def _console() -> Console:
    return Console(file=sys.stdout, soft_wrap=True, highlight=False)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style))


def _letters(labels: Sequence[str]) -> list[str]:
    return [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(labels))]


def _print_figures(console: Console, found: Replay) -> None:
    table = Table(box=None, header_style="bold")
    heads = ("", "correction", "rho_mask", "clipped", "weight", "mass", "loss", "log_ratio² kept")
    for name in heads:
        table.add_column(name, justify="left" if name == "correction" else "right")
    own = found.figures[0].mass
    for letter, figures in zip(_letters(found.labels), found.figures, strict=True):
        weight = f"{figures.weight_mean:.3g}, at most {figures.weight_max:.3g}"
        table.add_row(
            letter,
            Text(printable(figures.label)),
            f"{figures.rho_mask:.3%}",
            f"{figures.clipped / max(1, found.tokens):.3%}",
            "1" if figures.weight_mean == figures.weight_max == 1 else weight,
            f"{figures.mass / own:.4f}" if own else "-",
            f"{figures.loss:+.4g}",
            f"{figures.second_moment:.3g}",
        )
    console.print(table)
    _say(console, "mass: sum of |gradient coefficient|, that of A being 1; loss: mean over steps")


def _print_matrix(
    console: Console, title: str, letters: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    _say(console, title, "bold")
    table = Table(box=None, header_style="bold")
    for name in ("", *letters):
        table.add_column(name, justify="right")
    for letter, row in zip(letters, rows, strict=True):
        table.add_row(letter, *row)
    console.print(table)


def _print_cosines(
    console: Console,
    title: str,
    letters: Sequence[str],
    cosine: Sequence[Sequence[float | None]],
) -> None:
    rows = [["-" if value is None else f"{value:.4f}" for value in row] for row in cosine]
    _print_matrix(console, title, letters, rows)


def _print_part(console: Console, found: Replay, part: Part, name: str) -> None:
    """rho_mask and share of the gradient mass of every correction."""
    _say(console, f"rho_mask and share of the mass, by {name}", "bold")
    table = Table(box=None, header_style="bold")
    for head in (name, "tokens", *_letters(found.labels)):
        table.add_column(head, justify="right")
    totals = [figures.mass for figures in found.figures]
    for key, cell in by_part(found.cells, part).items():
        shown = [
            f"{1 - kept / cell.tokens:.2%} {mass / total if total else 0:4.0%}"
            for kept, mass, total in zip(cell.kept, cell.mass, totals, strict=True)
        ]
        table.add_row(_key(key), f"{cell.tokens:,}", *shown)
    console.print(table)


def _key(key: Any) -> str:
    return "unknown" if key is None else f"{key:g}" if isinstance(key, float) else str(key)


def _print_examples(
    console: Console, found: Replay, label: str, examples: Sequence[Example], decode: Decode
) -> None:
    """What the run and a correction judge differently, the largest change of the gradient first."""
    letter = _letters(found.labels)[found.labels.index(label)]
    _say(console, f"judged differently by A and {letter} ({label})", "bold")
    for example in examples:
        verdicts = " ".join(
            f"{name}:{'clipped' if clipped else 'kept' if kept else 'rejected'}"
            for name, kept, clipped in zip(
                _letters(found.labels), example.kept, example.clipped, strict=True
            )
        )
        _say(
            console,
            f"  step {example.step} group {example.group} trajectory {example.trajectory} position "
            f"{example.position}: entropy {example.entropy:.3g}, log_ratio {example.log_ratio:+.3g}"
            f", advantage {example.advantage:+.3g}, lag {example.lag}; {verdicts}",
            "dim",
        )
        console.print(
            Text.assemble(
                "    ",
                printable(decode(list(example.before))),
                (printable(decode([example.token_id])), "bold reverse"),
                printable(decode(list(example.after))),
            )
        )
