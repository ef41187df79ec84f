"""Draws what each correction does to a token over its log-ratio and the entropy it was drawn at.

python tools/plot_corrections.py docs/corrections.png

Each panel asks the code itself, point by point: a token of advantage +1 under the loss, drawn with
the probability exp(-entropy). Color: the size of its gradient, |weight * d surrogate / d log pi|;
gray: dropped; blue: kept without a gradient (a bound of the surrogate is active); white: no such
token, its probability under pi would exceed 1.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

from estr.corrections import TokenColumns, build_correction
from estr.losses import policy_loss

PANELS: dict[str, list[dict[str, Any]]] = {
    "none": [{"name": "none"}],
    "estr": [{"name": "estr"}],
    "estr, side outward": [{"name": "estr", "side": "outward"}],
    "estr, mask soft": [{"name": "estr", "mask": "soft"}],
    "icepop": [{"name": "icepop"}],
    "kpop": [{"name": "kpop"}],
    "tis": [{"name": "tis"}],
    "mis": [{"name": "mis"}],
    "dppo, tv": [{"name": "dppo"}],
    "dppo, kl": [{"name": "dppo", "divergence": "kl"}],
    "dppo, scale entropy": [{"name": "dppo", "scale": "entropy"}],
    "m2po": [{"name": "m2po"}],
    "dual_clip": [{"name": "dual_clip"}],
    "decoupled": [{"name": "decoupled"}],
}
SIZE = 120
MOST_LOG_RATIO, MOST_ENTROPY, MOST_GRADIENT = 3.0, 3.0, 5.0
DROPPED, BOUNDED = -1.0, 2 * MOST_GRADIENT


def columns(advantage: float) -> TokenColumns:
    """A grid [entropy, log-ratio] of tokens drawn with probability exp(-entropy): as likely as a
    token of a flat distribution of that entropy."""
    log_ratio = torch.linspace(-MOST_LOG_RATIO, MOST_LOG_RATIO, SIZE).expand(SIZE, SIZE)
    entropies = torch.linspace(0.0, MOST_ENTROPY, SIZE)[:, None].expand(SIZE, SIZE)
    behavior = -entropies.clamp(min=0.01)
    # A token cannot be likelier than 1: those places stay empty.
    possible = behavior + log_ratio <= 0
    policy = torch.where(possible, behavior + log_ratio, 0.0)
    return TokenColumns(
        policy_logprobs=policy.clone().requires_grad_(),
        behavior_logprobs=behavior,
        advantages=torch.full((SIZE, SIZE), advantage),
        loss_mask=possible,
        behavior_entropies=entropies,
        behavior_gini=-torch.expm1(-entropies),
        sequence_ids=torch.arange(SIZE * SIZE).reshape(SIZE, SIZE),
    )


def gradient_size(entries: list[dict[str, Any]], advantage: float) -> Any:
    """|gradient| on the grid, at most MOST_GRADIENT; DROPPED, BOUNDED, or NaN where impossible."""
    grid = columns(advantage)
    result = policy_loss(grid, build_correction(entries), denominators=1.0)
    (gradient,) = torch.autograd.grad(result.loss, grid.policy_logprobs)
    size = gradient.abs().clamp(max=MOST_GRADIENT)
    size = size.masked_fill(result.clipped, BOUNDED).masked_fill(~result.kept, DROPPED)
    return size.masked_fill(~grid.loss_mask, math.nan).numpy()


def plot(target: Path) -> None:
    colors = pyplot.get_cmap("viridis").copy()
    colors.set_bad("white")
    colors.set_under("0.8")
    colors.set_over("lightblue")
    rows, each = 4, len(PANELS)
    width = math.ceil(each / 2)
    figure, axes = pyplot.subplots(
        rows, width, figsize=(2 * width, 2.1 * rows), sharex=True, sharey=True, layout="constrained"
    )
    for i, (title, entries) in enumerate(PANELS.items()):
        for j, advantage in enumerate((1.0, -1.0)):
            axis = axes[2 * (i // width) + j, i % width]
            size = gradient_size(entries, advantage)
            image = axis.imshow(
                size,
                origin="lower",
                aspect="auto",
                cmap=colors,
                vmin=0.0,
                vmax=MOST_GRADIENT,
                interpolation="nearest",
                extent=(-MOST_LOG_RATIO, MOST_LOG_RATIO, 0.0, MOST_ENTROPY),
            )
            axis.set_title(f"{title}, A {'> 0' if advantage > 0 else '< 0'}", fontsize=7)
            axis.tick_params(labelsize=6)
    figure.supxlabel("log-ratio, log pi - log mu", fontsize=8)
    figure.supylabel("entropy of mu, nats", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, pad=0.01)
    bar.set_label("size of the gradient", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    figure.savefig(target, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    plot(Path(sys.argv[1]))
