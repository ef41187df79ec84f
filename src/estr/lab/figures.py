"""Figures, drawn from the rows of a table alone; matplotlib (the extra `lab`) is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

_MOST_COLUMNS = 26


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def dots(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    path: Path,
    *,
    ylabel: str,
    lines: Mapping[str, float] | None = None,
) -> None:
    """One panel for each key, in it a column for each label: every value a dot, their mean a bar;
    as many rows of panels as it takes. lines: horizontal lines by name, in every panel."""
    pyplot = _pyplot()
    rows = _in_rows(panels)
    widths = [sum(0.45 * len(panels[key]) + 0.6 for key in row) for row in rows]
    figure = pyplot.figure(figsize=(1.5 + max(widths), 3.6 * len(rows)))
    top = 1.05 * max(
        v for columns in panels.values() for values in columns.values() for v in values
    )
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        ratios = [max(1, len(panels[key])) for key in row]
        axes = part.subplots(1, len(row), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for axis, key in zip(axes, row, strict=True):
            _columns(axis, panels[key])
            for name, y in (lines or {}).items():
                axis.axhline(y, linewidth=1, linestyle="--", color="black", label=name)
            axis.set_title(key, fontsize=9)
        axes[0].set_ylabel(ylabel)
        if top > 0:
            axes[0].set_ylim(top=top)
        if lines:
            axes[-1].legend(fontsize=7)
    _save(pyplot, figure, path)


def _in_rows(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """The keys, in rows of at most so many columns that a page shows them."""
    rows: list[list[str]] = [[]]
    for key, columns in panels.items():
        taken = sum(len(panels[other]) for other in rows[-1])
        if rows[-1] and taken + len(columns) > _MOST_COLUMNS:
            rows.append([])
        rows[-1].append(key)
    return rows


def _columns(axis: Any, columns: Mapping[str, Sequence[float]]) -> None:
    for x, values in enumerate(columns.values()):
        axis.bar(x, fmean(values), width=0.7, color="tab:blue", alpha=0.35)
        axis.plot([x] * len(values), list(values), "o", color="tab:blue", markersize=3)
    axis.set_xticks(range(len(columns)), list(columns), rotation=60, ha="right", fontsize=8)
    axis.grid(axis="y", alpha=0.3)


def grids(
    panels: Mapping[str, Mapping[tuple[Any, Any], float]], path: Path, *, xlabel: str, ylabel: str
) -> None:
    """One panel for each key: a colored field of values in [0, 1] over (x, y), written in."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1, len(panels), squeeze=False, figsize=(1 + 3.2 * len(panels), 3.0)
    )
    for axis, (title, cells) in zip(axes[0], panels.items(), strict=True):
        xs, ys = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
        field = [[cells.get((x, y), float("nan")) for x in xs] for y in ys]
        axis.imshow(field, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        for (x, y), value in cells.items():
            axis.text(
                xs.index(x), ys.index(y), f"{value:.2f}", ha="center", va="center", color="white"
            )
        axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    _save(pyplot, figure, path)


Points = tuple[Sequence[float], Sequence[float]]
"""(x, y)"""


def curves(
    panels: Mapping[str, Mapping[str, Points]],
    path: Path,
    *,
    xlabel: str,
    ylabel: str,
    logarithmic: bool = False,
    slope: float | None = None,
    joined: bool = True,
) -> None:
    """One panel for each key, in it a line for each label. joined: False leaves the points alone.
    slope: that of a dashed line through the middle of a logarithmic panel, for the eye."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        1, len(panels), squeeze=False, sharey=True, figsize=(1 + 3.4 * len(panels), 3.6)
    )
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for label, (x, y) in lines.items():
            axis.plot(x, y, "o-" if joined else "o", markersize=3, linewidth=1, label=label)
        if logarithmic:
            axis.set(xscale="log", yscale="log")
        if slope is not None and lines:
            low, high = axis.get_xlim()
            middle = (low * high) ** 0.5
            height = (axis.get_ylim()[0] * axis.get_ylim()[1]) ** 0.5
            ends = [height * (x / middle) ** slope for x in (low, high)]
            axis.plot([low, high], ends, "k--", linewidth=1, label=f"slope {slope:g}")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(xlabel)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(ylabel)
    axes[0][-1].legend(fontsize=7)
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
