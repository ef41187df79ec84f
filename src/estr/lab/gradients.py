"""The job of `fidelity`: the gradient of a rule on stale rollouts beside the on-policy gradient.

    weights --draw fresh, float32--> two halves A, B of the reference
            `-draw as the regime has it--> two halves r, s of every rule, on the very same rollouts

A gradient over a few hundred rollouts is mostly noise, and so is its plain cosine. But the noise
of independent halves is independent: A.B, r.s and the mean of r.A, r.B, s.A, s.B are unbiased for
the squared norms and the product of the expected gradients. Summed over seeds they give the cosine
and the norm ratio that infinitely many rollouts would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import make_batches
from ..config import read_options
from ..corrections import build_correction
from ..corrections.base import Correction
from ..logprobs import next_token, token_statistics
from ..losses import policy_loss
from ..trainer import token_columns
from ..types import Trajectory
from .archive import Archive
from .staleness import Staleness
from .table import Row
from .training import RunConfig

_ONE_BATCH = 10**9
"""Padded tokens: what reads a whole step or whole sequences then needs no second pass."""

ON_POLICY = "on-policy"


def measure(table: Mapping[str, Any]) -> list[Row]:
    """table: run (a RunConfig), regimes (name -> arithmetic and staleness), corrections (name ->
    list of tables), groups and reference_groups (of each half of a rule's and of the reference's
    rollouts).

    Rows carry regime and method; measures as in `products`, and kept (share of tokens). Regime
    "on-policy" holds fresh rollouts, as many as a rule's, with no correction. Products are divided
    by the reference's own mean square, so that seeds count alike."""
    regimes = {
        name: (its["arithmetic"], read_options(Staleness, its["staleness"], name))
        for name, its in table["regimes"].items()
    }
    keep = 1 + max(staleness.depth for _, staleness in regimes.values())
    archive = Archive(RunConfig.read(table["run"]), keep=keep)
    groups, reference_groups = table["groups"], table["reference_groups"]
    none = {"fresh": build_correction([{"name": "none"}])}

    def halves(
        regime: tuple[Any, Staleness], first: int, size: int, rules: Mapping[str, Correction]
    ) -> dict[str, list[tuple[Tensor, float]]]:
        arithmetic, staleness = regime
        found: dict[str, list[tuple[Tensor, float]]] = {name: [] for name in rules}
        for start in (first, first + size):
            drawn = archive.draw(staleness, arithmetic, size, first_group=start)
            own = gradients(archive, drawn, list(rules.values()))
            for name, gradient in zip(rules, own, strict=True):
                found[name].append(gradient)
        return found

    fresh = ("float32", Staleness())
    (a, _), (b, _) = halves(fresh, 0, reference_groups, none)["fresh"]
    rules = {n: build_correction(entries) for n, entries in table["corrections"].items()}
    rows: list[Row] = []
    for regime, its in {ON_POLICY: fresh, **regimes}.items():
        tried = none if regime == ON_POLICY else rules
        for method, ((r, kept), (s, also)) in halves(
            its, 2 * reference_groups, groups, tried
        ).items():
            found = {**products(r, s, a, b), "kept": (kept + also) / 2}
            rows += [
                {"regime": regime, "method": method, "measure": name, "step": 0, "value": value}
                for name, value in found.items()
            ]
    return rows


def products(r: Tensor, s: Tensor, a: Tensor, b: Tensor) -> dict[str, float]:
    """Of the halves r, s of a gradient and a, b of the reference, flat: own = r.s, cross = the mean
    of r.a, r.b, s.a, s.b, reference = a.b, size = the mean of r.r and s.s, all over the mean of a.a
    and b.b. Raises ValueError if that is 0."""
    unit = float(a @ a + b @ b) / 2
    if not unit > 0:
        raise ValueError("the on-policy gradient is 0: no group has rewards that differ")
    return {
        "own": float(r @ s) / unit,
        "cross": float((r + s) @ (a + b)) / 4 / unit,
        "reference": float(a @ b) / unit,
        "size": float(r @ r + s @ s) / 2 / unit,
    }


def gradients(
    archive: Archive, trajectories: Sequence[Trajectory], corrections: Sequence[Correction]
) -> list[tuple[Tensor, float]]:
    """(flat gradient of what is maximized, share of tokens kept) of each correction at the newest
    weights, over the same rollouts."""
    run = archive.run
    groups = run.groups(list(trajectories), 0)
    (batch,) = make_batches(
        trajectories,
        [a for g in groups for a in g.advantages],
        [g.id for g in groups for _ in g.trajectories],
        aggregation="batch",
        token_budget=_ONE_BATCH,
        whole_trajectories=True,
    )
    states = run.trainer.model(input_ids=batch.token_ids).logits
    logits, token_ids = next_token(states, batch.token_ids, batch.loss_mask)
    policy = token_statistics(logits, token_ids, gini=False).logprobs
    parameters = list(run.trainer.parameters.values())
    found = []
    for correction in corrections:
        columns = token_columns(batch, policy, None)
        result = policy_loss(columns, correction, denominators=batch.denominators)
        parts = torch.autograd.grad(result.loss, parameters, retain_graph=True)
        gradient = -torch.cat([part.flatten() for part in parts])
        found.append((gradient, float(result.kept.float().mean())))
    return found
