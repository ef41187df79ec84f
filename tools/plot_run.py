"""Draws a run: reward and held-out accuracy, staleness, masked share and entropy by step.

python tools/plot_run.py runs/calculator docs/run.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from estr.config import load_recipe
from estr.metrics import read_metrics


def column(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric where it was recorded."""
    found = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def plot(run: Path, target: Path) -> None:
    records = read_metrics(run / "metrics.jsonl").records
    bound = load_recipe(run / "config.toml").max_staleness
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(7, 7), sharex=True, constrained_layout=True
    )
    top.plot(*column(records, "reward_mean"), color="0.75", label="training reward")
    top.plot(*column(records, "eval/accuracy"), "o-", color="C0", label="held-out accuracy")
    top.set_ylim(0, 1.02)
    top.legend(loc="lower right")
    middle.plot(*column(records, "inter_mean"), color="C1", label="inter, mean")
    middle.plot(*column(records, "intra_mean"), color="C2", label="intra, mean")
    middle.plot(*column(records, "staleness_max"), color="0.6", lw=0.8, label="realized, max")
    middle.axhline(bound, color="k", ls=":", lw=1, label="max_staleness")
    middle.set_ylabel("versions")
    middle.legend(loc="upper right", ncols=2, fontsize="small")
    bottom.plot(*column(records, "rho_mask"), color="C3", label="rho_mask")
    bottom.set_ylabel("share of tokens masked", color="C3")
    bottom.set_xlabel("optimizer step")
    entropy = bottom.twinx()
    entropy.plot(*column(records, "behavior_entropy"), color="C4", lw=1)
    entropy.set_ylabel("behavior entropy, nats", color="C4")
    top.set_title(f"{run.name}: {records[-1]['wall_s']:.0f} s")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
