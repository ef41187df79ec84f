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

from ..printable import printable
from ..replay.results import Example, Gradients, Part, Replay, by_part

Decode = Callable[[list[int]], str]

_PARTS: tuple[tuple[Part, str, str], ...] = (
    ("entropy_bin", "entropy (nats, lower border)", "from"),
    ("lag", "lag", "lag"),
    ("signs", "signs of advantage and log_ratio", "signs"),
)


def print_replay(found: Replay, decode: Decode) -> None:
    console = _console(len(found.labels))
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
    agreement = [[f"{100 * value:.2f}" for value in row] for row in found.agreement]
    _print_matrix(console, "agreement: tokens with the same kept, %", letters, agreement)
    only = [[str(row[i] - both) for both in row] for i, row in enumerate(found.rejected_by_both)]
    _print_matrix(console, "tokens that the row rejects and the column keeps", letters, only)
    _print_cosines(console, "cosine of gradient coefficients", letters, found.cosine)
    for part, name, head in _PARTS:
        _print_part(console, found, part, name, head)
    for label, examples in groupby(found.examples, key=lambda example: example.correction):
        _print_examples(console, found, label, list(examples), decode)


def print_gradients(found: Gradients) -> None:
    console = _console(len(found.labels))
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
    table = _table("", "correction", "loss", "gradient norm")
    for letter, gradient in zip(_letters(found.labels), found.gradients, strict=True):
        label = Text(printable(gradient.label))
        table.add_row(letter, label, f"{gradient.loss:+.6g}", f"{gradient.norm:.6g}")
    console.print(table)
    for reason in found.passed_over:
        _say(console, f"passed over, so not among the weights to choose from: {reason}")
    if found.largest_lag == 0:
        _say(
            console,
            "all tokens of this step are of the weights that are trained (lag 0), so corrections "
            "hardly differ; a run with checkpoint.every_steps and a larger checkpoint.keep has the "
            "weights of later steps, which --step names",
        )
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


def _console(num_corrections: int) -> Console:
    """As wide as the tables need, whatever the terminal says: nothing is cut off."""
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    console.width = max(console.width, 24 + 8 * num_corrections)
    return console


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style))


def _letters(labels: Sequence[str]) -> list[str]:
    return [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(labels))]


def _print_figures(console: Console, found: Replay) -> None:
    names = ("rho_mask", "clipped", "weight", "max", "mass", "loss", "log_ratio²")
    table = _table("", "correction", *names)
    own = found.figures[0].mass
    for letter, figures in zip(_letters(found.labels), found.figures, strict=True):
        table.add_row(
            letter,
            Text(printable(figures.label)),
            f"{figures.rho_mask:.3%}",
            f"{figures.clipped / max(1, found.tokens):.3%}",
            f"{figures.weight_mean:.3g}",
            f"{figures.weight_max:.3g}",
            f"{figures.mass / own:.4f}" if own else "-",
            f"{figures.loss:+.4g}",
            f"{figures.second_moment:.3g}",
        )
    console.print(table)
    _say(
        console,
        "weight, max: of kept tokens; mass: sum of |gradient coefficient|, that of A being 1; "
        "loss: mean over steps; log_ratio²: mean over kept tokens",
        "dim",
    )


def _table(*heads: str) -> Table:
    table = Table(box=None, header_style="bold")
    for head in heads:
        is_label = head == "correction"
        table.add_column(head, justify="left" if is_label else "right", no_wrap=not is_label)
    return table


def _print_matrix(
    console: Console, title: str, letters: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    _say(console, title, "bold")
    table = _table("", *letters)
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


def _print_part(console: Console, found: Replay, part: Part, name: str, head: str) -> None:
    """What every correction rejects of each part, and how its mass is shared out."""
    letters = _letters(found.labels)
    rejected = _table(head, "tokens", *letters)
    shares = _table(head, "", *letters)
    totals = [figures.mass for figures in found.figures]
    for key, cell in by_part(found.cells, part).items():
        rho = (100 - 100 * kept / cell.tokens for kept in cell.kept)
        rejected.add_row(_key(key), f"{cell.tokens:,}", *(f"{share:.2f}" for share in rho))
        mass = zip(cell.mass, totals, strict=True)
        shares.add_row(_key(key), "", *(f"{100 * m / t if t else 0:.1f}" for m, t in mass))
    _say(console, f"rho_mask by {name}, %", "bold")
    console.print(rejected)
    _say(console, f"share of the mass by {name}, %", "bold")
    console.print(shares)


def _key(key: Any) -> str:
    return "unknown" if key is None else f"{key:g}" if isinstance(key, float) else str(key)


def _print_examples(
    console: Console, found: Replay, label: str, examples: Sequence[Example], decode: Decode
) -> None:
    """What the run and a correction judge differently, the largest change of the gradient first."""
    letter = _letters(found.labels)[found.labels.index(label)]
    left, right = ("", "") if console.is_terminal else "«»"
    _say(console, f"judged differently by A and {letter} ({label})", "bold")
    for example in examples:
        _say(
            console,
            f"  step {example.step} group {example.group} trajectory {example.trajectory} position "
            f"{example.position}: entropy {example.entropy:.3g}, log_ratio {example.log_ratio:+.3g}"
            f", advantage {example.advantage:+.3g}, lag {example.lag}; {_verdicts(example)}",
            "dim",
        )
        console.print(
            Text.assemble(
                "    ",
                printable(decode(list(example.before))),
                (f"{left}{printable(decode([example.token_id]))}{right}", "bold reverse"),
                printable(decode(list(example.after))),
            )
        )


def _verdicts(example: Example) -> str:
    """Who does what with the token: "rejected by A C, clipped by B"."""
    groups: dict[str, list[str]] = {"kept": [], "clipped": [], "rejected": []}
    letters = _letters([""] * len(example.kept))
    for letter, kept, clipped in zip(letters, example.kept, example.clipped, strict=True):
        groups["clipped" if clipped else "kept" if kept else "rejected"].append(letter)
    return ", ".join(f"{verdict} by {' '.join(by)}" for verdict, by in groups.items() if by)
