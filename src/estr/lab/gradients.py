"""The job of `fidelity`: the gradient of a rule on stale rollouts beside the on-policy gradient.

    weights --draw fresh, float32--> v: the on-policy gradient of many rollouts (two halves)
            |-draw fresh, float32--> r.v of a fresh batch
            `-draw as the regime has it--> r.v of every rule, on the very same rollouts

A rule turns each token's log-prob into a coefficient c_t, and its gradient is the sum of c_t times
the gradient of that log-prob. Its product with v therefore needs no gradient of its own: it is the
sum of c_t times the change of the log-prob along v, two forward passes for all rules together. Only
the norms of the rules' gradients are taken by backward passes, on a small part of the rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, make_batches
from ..config import read_options
from ..corrections import build_correction
from ..corrections.base import Correction
from ..logprobs import next_token, token_statistics
from ..losses import policy_loss
from ..token_results import token_columns
from ..types import Trajectory
from .archive import Archive
from .staleness import Staleness
from .table import Row
from .training import RunConfig

_ONE_BATCH = 10**9
"""Padded tokens: what reads a whole step or whole sequences then needs no second pass."""
_PART = 2**15
"""Padded tokens of a backward pass for v, of which there may be many."""

_STEP = 0.02
"""How far the weights are moved along v, either way: the log-probs change by some hundredths."""

ON_POLICY = "on-policy"


def measure(table: Mapping[str, Any]) -> list[Row]:
    """table: run (a RunConfig), regimes (name -> arithmetic and staleness), corrections (name ->
    list of tables), groups (of a rule's rollouts), norm_groups (of those that norms are taken on),
    reference_groups (of each half of v).

    Rows carry regime and method; measures: progress = r.v / v.v with noise in it, square = r.r on
    the small part, kept (share of tokens). Regime "on-policy" holds the fresh batch and, as method
    "half", the cosine of v's halves."""
    regimes = {
        name: (its["arithmetic"], read_options(Staleness, its["staleness"], name))
        for name, its in table["regimes"].items()
    }
    keep = 1 + max(staleness.depth for _, staleness in regimes.values())
    archive = Archive(RunConfig.read(table["run"]), keep=keep)
    groups, reference = table["groups"], table["reference_groups"]
    none = {"fresh": build_correction([{"name": "none"}])}
    halves = [
        archive.draw(Staleness(), "float32", reference, first_group=first)
        for first in (0, reference)
    ]
    a, b = (gradient(archive, _batches(archive, drawn, _PART)) for drawn in halves)
    v = (a + b) / 2
    half = float(a @ b / (a.norm() * b.norm()))
    rows = [_row(ON_POLICY, "half", "cosine", half)]
    rules = {n: build_correction(entries) for n, entries in table["corrections"].items()}
    for regime, (arithmetic, staleness) in {ON_POLICY: ("float32", Staleness()), **regimes}.items():
        tried = none if regime == ON_POLICY else rules
        drawn = archive.draw(staleness, arithmetic, groups, first_group=2 * reference)
        batch = _batch(archive, drawn)
        part = _batch(archive, drawn[: table["norm_groups"] * archive.run.config.group_size])
        changes = changes_along(archive, batch, v)
        policy = _policy(archive, batch).detach()
        for method, rule in tried.items():
            coefficients, kept = coefficients_of(batch, policy, rule)
            progress = float(coefficients @ changes / (v @ v))
            square = float(gradient(archive, [part], rule).square().sum())
            rows += [
                _row(regime, method, "progress", progress),
                _row(regime, method, "square", square),
                _row(regime, method, "kept", kept),
            ]
    return rows


def coefficients_of(batch: Batch, policy: Tensor, rule: Correction) -> tuple[Tensor, float]:
    """(derivative of what the rule maximizes by each eligible token's log-prob [n], share kept)."""
    leaf = policy.detach().requires_grad_()
    result = policy_loss(token_columns(batch, leaf, None), rule, denominators=batch.denominators)
    (slope,) = torch.autograd.grad(result.loss, leaf)
    return -slope, float(result.kept.float().mean())


def changes_along(archive: Archive, batch: Batch, v: Tensor) -> Tensor:
    """The derivative of each eligible token's log-prob [n] along v (flat), by central
    differences."""
    move = v * (_STEP / v.norm())
    found = []
    for sign in (1.0, -1.0):
        with torch.no_grad(), _moved(archive, sign * move):
            found.append(_policy(archive, batch))
    changes: Tensor = (found[0] - found[1]) / (2 * _STEP) * v.norm()
    return changes


def gradient(archive: Archive, batches: Sequence[Batch], rule: Correction | None = None) -> Tensor:
    """The flat gradient of what a rule (no correction) maximizes, at the newest weights, over the
    micro-batches of one step."""
    rule = build_correction([{"name": "none"}]) if rule is None else rule
    parameters = list(archive.run.trainer.parameters.values())
    total = torch.zeros(sum(p.numel() for p in parameters))
    for batch in batches:
        columns = token_columns(batch, _policy(archive, batch), None)
        result = policy_loss(columns, rule, denominators=batch.denominators)
        parts = torch.autograd.grad(result.loss, parameters)
        total -= torch.cat([part.flatten() for part in parts])
    return total


@contextmanager
def _moved(archive: Archive, move: Tensor) -> Iterator[None]:
    """The weights moved by a flat vector, and put back exactly."""
    parameters = list(archive.run.trainer.parameters.values())
    before = [p.detach().clone() for p in parameters]
    pieces = torch.split(move, [p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.add_(piece.view_as(parameter))
    try:
        yield
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(old)


def _policy(archive: Archive, batch: Batch) -> Tensor:
    states = archive.run.trainer.model(input_ids=batch.token_ids).logits
    logits, token_ids = next_token(states, batch.token_ids, batch.loss_mask)
    return token_statistics(logits, token_ids, gini=False).logprobs


def _batch(archive: Archive, trajectories: Sequence[Trajectory]) -> Batch:
    (batch,) = _batches(archive, trajectories, _ONE_BATCH)
    return batch


def _batches(
    archive: Archive, trajectories: Sequence[Trajectory], token_budget: int
) -> list[Batch]:
    groups = archive.run.groups(list(trajectories), 0)
    return make_batches(
        trajectories,
        [a for g in groups for a in g.advantages],
        [g.id for g in groups for _ in g.trajectories],
        aggregation="batch",
        token_budget=token_budget,
        whole_trajectories=True,
    )


def _row(regime: str, method: str, measure: str, value: float) -> Row:
    return {"regime": regime, "method": method, "measure": measure, "step": 0, "value": value}
