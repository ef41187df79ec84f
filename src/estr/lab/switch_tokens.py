"""The job of `switches`: what tokens look like around a switch of version.

What stands beside a token is the control: rollouts of the same problems that one version drew
alone. A token is matched to their tokens of its own version, turn and place in the turn, so neither
its place nor its lag can pass for an effect of the switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..corrections import build_correction
from ..corrections.base import TokenColumns
from ..types import Trajectory
from .archive import Archive, policy_logprobs, sampled_column
from .moments import Floats
from .staleness import IntArray, Staleness
from .table import Row
from .training import RunConfig

REACH = 3
"""Tokens before and after a switch that are told apart."""

FEWEST = 5
"""Control tokens that a match must have."""

CONDITIONS: tuple[tuple[Any, Any], ...] = (
    ("random", "recompute"),
    ("random", "keep"),
    ("turns", "recompute"),
    ("turns", "keep"),
)
"""(switches, kv)"""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens, flat. key: version, turn and place in the turn as one number; offset: places
    after the nearest switch (the later one of two as near), REACH + 1 where none is in reach;
    values: what is averaged, by name."""

    key: IntArray
    offset: IntArray
    values: dict[str, Floats]


def measure(table: Mapping[str, Any]) -> list[Row]:
    """table: run (a RunConfig), stride (optimizer steps that a switch jumps), intra, groups (of
    rollouts, for each condition), corrections (name -> list of tables). Rows carry switches, kv and
    offset ("rest" out of reach); measures are "tokens" (matched), "unmatched", and the sum of each
    value over the matched tokens, `control_` before the name: over their matches' means."""
    intra = table["intra"]
    archive = Archive(RunConfig.read(table["run"]), keep=intra + 1, stride=table["stride"])
    corrections = table["corrections"]

    def tokens(staleness: Staleness) -> Tokens:
        drawn = archive.draw(staleness, "float32", table["groups"])
        return tokens_of(archive, drawn, corrections)

    control = [tokens(Staleness(inter=lag)) for lag in range(intra + 1)]
    rows: list[Row] = []
    for switches, kv in CONDITIONS:
        found = tokens(Staleness(intra=intra, switches=switches, kv=kv))
        labels = {"switches": switches, "kv": kv}
        rows += [{**labels, **row} for row in matched_rows(found, control)]
    return rows


def tokens_of(
    archive: Archive, trajectories: Sequence[Trajectory], corrections: Mapping[str, Any]
) -> Tokens:
    """Entropy, |log pi - log mu| and, for every correction, whether it masks the token."""
    log_pi = archive.log_distributions(archive.newest, trajectories)
    policy = policy_logprobs(log_pi, trajectories)
    columns = _columns(archive, trajectories, policy)
    values = {
        "entropy": sampled_column(trajectories, "behavior_entropies"),
        "abs_delta": np.abs(policy - sampled_column(trajectories, "behavior_logprobs")),
    }
    for name, entries in corrections.items():
        keep = build_correction(entries)(columns).keep
        values[f"mask_{name}"] = (~keep).double().numpy()
    versions = sampled_column(trajectories, "versions").astype(np.int64)
    turn, place = (np.concatenate(c) for c in zip(*map(_places, trajectories), strict=True))
    offset = np.concatenate([switch_offsets(t.sampled_versions()) for t in trajectories])
    return Tokens((versions * 1000 + turn) * 1000 + place, offset, values)


def switch_offsets(versions: npt.NDArray[np.int32]) -> IntArray:
    """For each token of one trajectory, its places after the nearest switch: 0 is the first token
    of a new version, -1 the last of the old. Two as near: the later one. REACH + 1: none near."""
    places = np.arange(len(versions))
    switches = np.flatnonzero(np.diff(versions)) + 1
    offset = np.full(len(versions), REACH + 1)
    for switch in switches:
        own = places - switch
        nearer = (np.abs(own) <= REACH) & (np.abs(own) <= np.abs(offset))
        offset[nearer] = own[nearer]
    return offset


def matched_rows(found: Tokens, control: Sequence[Tokens]) -> list[Row]:
    """Sums by offset of the found tokens that have a match, and of their matches' means."""
    keys = np.concatenate([c.key for c in control])
    distinct, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    at = np.minimum(np.searchsorted(distinct, found.key), len(distinct) - 1)
    has_match = (distinct[at] == found.key) & (counts[at] >= FEWEST)
    pairs: dict[str, Floats] = {}
    for name, values in found.values.items():
        totals = np.bincount(inverse, np.concatenate([c.values[name] for c in control]))
        pairs[name] = values
        pairs[f"control_{name}"] = (totals / counts)[at]
    rows: list[Row] = []
    for offset in range(-REACH, REACH + 2):
        here = found.offset == offset
        chosen = here & has_match
        sums = {"tokens": chosen.sum(), "unmatched": (here & ~has_match).sum()}
        sums |= {name: values[chosen].sum() for name, values in pairs.items()}
        label = "rest" if offset > REACH else str(offset)
        rows += [
            {"offset": label, "measure": name, "step": 0, "value": float(value)}
            for name, value in sums.items()
        ]
    return rows


def _places(trajectory: Trajectory) -> tuple[IntArray, IntArray]:
    """Turn and place in the turn of each sampled token."""
    lengths = [turn.stop - turn.start for turn in trajectory.turns]
    return np.repeat(np.arange(len(lengths)), lengths), np.concatenate(
        [np.arange(n) for n in lengths]
    )


def _columns(archive: Archive, trajectories: Sequence[Trajectory], policy: Floats) -> TokenColumns:
    groups = archive.run.groups(list(trajectories), 0)
    advantages = [a or 0.0 for group in groups for a in group.advantages]
    counts = [t.num_sampled_tokens for t in trajectories]

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(sampled_column(trajectories, name)).float()

    return TokenColumns(
        policy_logprobs=torch.from_numpy(policy).float(),
        behavior_logprobs=column("behavior_logprobs"),
        advantages=torch.tensor(np.repeat(advantages, counts), dtype=torch.float32),
        loss_mask=torch.ones(len(policy), dtype=torch.bool),
        behavior_entropies=column("behavior_entropies"),
        behavior_gini=column("behavior_gini"),
        versions=column("versions").long(),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
    )
