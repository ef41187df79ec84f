"""From trajectories to the padded micro-batches of one optimizer step.

    trajectories, advantages --> make_batches --> [Batch] --> trainer --> scatter_back --> ledger

One row per segment: a trajectory of several segments gives several rows that share its advantage.
The columns are those of `estr.types.COLUMNS`, padded with the same fills; the optimizer step is the
sum of the micro-batches' losses, because every denominator speaks of the whole step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .errors import NumericsError
from .types import COLUMNS, NOT_SAMPLED, Column, Segment, Trajectory

Aggregation = Literal["batch", "group"]

AnyArray = npt.NDArray[Any]


class Row(NamedTuple):
    """Where a row of a batch comes from: indices into the trajectories and their segments."""

    trajectory: int
    segment: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One micro-batch: the columns of `estr.types.COLUMNS` as tensors [rows, T], and what the loss
    needs beside them. Own-token alignment: entry t speaks about token_ids[:, t].

    token_ids: int64, padded on the right. attention_mask: bool, False on padding. loss_mask: bool,
    the column `sampled`: a token that a model drew, every row being of a scored trajectory.
    behavior_*: float32, NaN where not sampled. behavior_gini: None as soon as one row of the whole
    step lacks it.
    versions: int32, NOT_SAMPLED where not sampled. advantages: float32, sequence_ids: int64, the
    index of the row's trajectory; both are constant along a row, padding included.
    ref_logprobs: float32, NaN where not trained on; None where there is no reference.
    denominators: see make_batches. num_sampled_tokens, num_groups: of the whole optimizer step.
    rank: of the trainer's ranks, the one that computes it.
    No tensor requires a gradient.
    """

    token_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    behavior_entropies: Tensor
    versions: Tensor
    advantages: Tensor
    sequence_ids: Tensor
    denominators: float | Tensor
    num_sampled_tokens: int
    num_groups: int
    rows: tuple[Row, ...]
    behavior_gini: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rank: int = 0

    def token_denominators(self) -> float | Tensor:
        """The denominators of the eligible tokens alone, flat and in row order."""
        if isinstance(self.denominators, Tensor):
            return self.denominators.expand_as(self.loss_mask)[self.loss_mask]
        return self.denominators


def make_batches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | None],
    groups: Sequence[int],
    *,
    aggregation: Aggregation,
    token_budget: int,
    whole_trajectories: bool = False,
    pad_token_id: int = 0,
    device: str | torch.device = "cpu",
    ranks: int = 1,
) -> list[Batch]:
    """The micro-batches of one optimizer step, longest rows first; the same input always gives the
    same micro-batches.

    advantages[i] and groups[i] (a group id) belong to trajectories[i]. Trajectories without an
    advantage are unscored: they leave loss and counts and get no row, nor does a segment in which
    nothing was sampled. A micro-batch holds at most token_budget padded tokens, except that a row
    longer than the budget forms one of its own. The rows of a trajectory may fall into different
    micro-batches, except with whole_trajectories: then they stay together, in a micro-batch of
    their own where they exceed the budget (what corrections on sequences need, at more padding).

    With several ranks whole trajectories are dealt among them, longest first, each to the rank that
    has the fewest tokens so far; the micro-batches of all ranks are returned. Denominators speak of
    the step, not of a rank, and a rank may be left without a micro-batch.

    The denominator that divides each token's loss term, with n the sampled tokens of the scored
    trajectories (masked ones and those of zero-variance groups included) and n_g those of group g:

    - aggregation "batch": the float n: one token mean over the whole step
    - aggregation "group": a float32 tensor [rows, 1], num_groups * n_g: the mean over groups of
      the token mean within each (groups in which nothing was sampled are not counted)

    The list is empty when no scored trajectory holds a sampled token: there is nothing to learn.
    Raises ValueError on empty input, on sequences of unequal length, on an unknown aggregation, a
    budget below 1, and on a segment whose first token is sampled (nothing precedes it, so no
    logits predict it); NumericsError on an advantage that is not finite.
    """
    _check(trajectories, advantages, groups, aggregation, token_budget)
    rows, tokens_of_group = _learned_from(trajectories, advantages, groups)
    columns = _columns_of_all([_segment(trajectories, row) for row in rows])
    batches = []
    for rank, part in _parts(rows, trajectories, token_budget, whole_trajectories, ranks):
        owners = [row.trajectory for row in part]
        tensors = _pad([_segment(trajectories, row) for row in part], columns, pad_token_id, device)
        of_rows = {
            "advantages": _of_rows([advantages[i] for i in owners], torch.float32, device),
            "sequence_ids": _of_rows(owners, torch.int64, device),
        }
        tensors |= {name: t.expand_as(tensors["token_ids"]) for name, t in of_rows.items()}
        denominators: float | Tensor = float(tokens_of_group.total())
        if aggregation == "group":
            sizes = [len(tokens_of_group) * tokens_of_group[groups[i]] for i in owners]
            denominators = _of_rows(sizes, torch.float32, device)
        batches.append(
            Batch(
                **tensors,
                denominators=denominators,
                num_sampled_tokens=tokens_of_group.total(),
                num_groups=len(tokens_of_group),
                rows=tuple(part),
                rank=rank,
            )
        )
    return batches


def turn_ids(sampled: Tensor) -> Tensor:
    """sampled: bool [rows, T]. The number of each token's turn, int64 [rows, T], counted over all
    rows: a turn is a run of sampled tokens in a row, between tokens that were only read. What other
    places hold has no meaning."""
    before = torch.nn.functional.pad(sampled[:, :-1], (1, 0))
    return (sampled & ~before).flatten().cumsum(0).reshape(sampled.shape)


class Places(NamedTuple):
    """Where tokens stand among all tokens of the trajectories, joined. borders: where each
    trajectory begins, and at last where all end. eligible[b]: of the eligible tokens of
    micro-batch b, in row order, int64 [N]."""

    borders: list[int]
    eligible: list[npt.NDArray[np.int64]]


def token_places(batches: Sequence[Batch], trajectories: Sequence[Trajectory]) -> Places:
    """The places of the micro-batches' tokens. trajectories: as given to make_batches."""
    borders = [*itertools.accumulate((t.num_tokens for t in trajectories), initial=0)]
    eligible = []
    for batch in batches:
        segments = [_segment(trajectories, row) for row in batch.rows]
        lengths = [len(segment) for segment in segments]
        begins = [
            borders[row.trajectory]
            + sum(len(s) for s in trajectories[row.trajectory].segments[: row.segment])
            for row in batch.rows
        ]
        shifts = np.array(begins) - np.array([0, *itertools.accumulate(lengths[:-1])])
        drawn = np.flatnonzero(np.concatenate([segment.sampled for segment in segments]))
        eligible.append(drawn + np.repeat(shifts, lengths)[drawn])
    return Places(borders, eligible)


def scatter_back(
    batches: Sequence[Batch],
    tensors: Sequence[Tensor],
    trajectories: Sequence[Trajectory],
    *,
    places: Places | None = None,
) -> list[AnyArray]:
    """Per-token results of the micro-batches, back in the order of the trajectories.

    tensors[b]: [rows, T] of batches[b], or [N] with one entry for each place where its loss_mask
    holds, in row order; all of one dtype. trajectories: as given to make_batches. places: what
    `token_places` says of them, for who scatters more than once. Returns one array [num_tokens] per
    trajectory, its segments joined; places that are not trained on hold NaN (floats), False (bool)
    or NOT_SAMPLED (integers). Raises ValueError where a tensor is missing or does not fit its
    batch.
    """
    if len(batches) != len(tensors):
        raise ValueError(f"{len(batches)} batches but {len(tensors)} tensors")
    if places is None:
        places = token_places(batches, trajectories)
    dtype = tensors[0].detach().cpu().numpy().dtype if tensors else np.dtype(np.float32)
    fill = {"f": math.nan, "b": False}.get(dtype.kind, NOT_SAMPLED)
    joined: AnyArray = np.full(places.borders[-1], fill, dtype=dtype)
    for batch, tensor, where in zip(batches, tensors, places.eligible, strict=True):
        mask = batch.loss_mask
        if tensor.shape not in (mask.shape, where.shape):
            raise ValueError(
                f"a result of shape {tuple(tensor.shape)} does not fit its batch: expected "
                f"{tuple(mask.shape)}, or {where.shape} for its eligible tokens alone"
            )
        values = tensor if tensor.dim() == 1 else tensor[mask]
        joined[where] = values.detach().cpu().numpy()
    return [joined[start:stop] for start, stop in pairwise(places.borders)]


def _check(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | None],
    groups: Sequence[int],
    aggregation: str,
    token_budget: int,
) -> None:
    if not trajectories:
        raise ValueError("no trajectories: an optimizer step needs at least one")
    if not len(trajectories) == len(advantages) == len(groups):
        raise ValueError(
            f"{len(trajectories)} trajectories, {len(advantages)} advantages and "
            f"{len(groups)} group ids: every trajectory needs one of each"
        )
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation {aggregation!r} is unknown; known: batch, group")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, not {token_budget}")
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        if advantage is not None and not math.isfinite(advantage):
            raise NumericsError(f"the advantage of {trajectory.id} is {advantage}")
        for s, segment in enumerate(trajectory.segments):
            if len(segment) and segment.sampled[0]:
                raise ValueError(
                    f"segment {s} of {trajectory.id} begins with a sampled token: nothing precedes "
                    "it, so no logits predict it; a segment starts with what the model read"
                )


def _learned_from(
    trajectories: Sequence[Trajectory], advantages: Sequence[float | None], groups: Sequence[int]
) -> tuple[list[Row], Counter[int]]:
    """(the rows that hold something to learn, sampled tokens of each group that has any)."""
    rows: list[Row] = []
    tokens_of_group: Counter[int] = Counter()
    for i, trajectory in enumerate(trajectories):
        if advantages[i] is not None and trajectory.num_sampled_tokens:
            tokens_of_group[groups[i]] += trajectory.num_sampled_tokens
            rows += [Row(i, s) for s, seg in enumerate(trajectory.segments) if seg.sampled.any()]
    return rows, tokens_of_group


def _segment(trajectories: Sequence[Trajectory], row: Row) -> Segment:
    return trajectories[row.trajectory].segments[row.segment]


def _parts(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    token_budget: int,
    whole_trajectories: bool,
    ranks: int,
) -> list[tuple[int, list[Row]]]:
    """(rank, rows) of every micro-batch."""
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[row.trajectory] += len(_segment(trajectories, row))
    load = [0] * ranks
    owner = {}
    for trajectory, number in sorted(tokens.items(), key=lambda item: -item[1]):
        owner[trajectory] = load.index(min(load))
        load[owner[trajectory]] += number
    return [
        (rank, part)
        for rank in range(ranks)
        for part in _split(
            [row for row in rows if owner[row.trajectory] == rank],
            trajectories,
            token_budget,
            whole_trajectories,
        )
    ]


def _split(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    token_budget: int,
    whole_trajectories: bool,
) -> list[list[Row]]:
    """Rows of like length together, longest first, so that the first row sets the padded length
    (and a micro-batch too large for the device fails at once)."""
    length = {row: len(_segment(trajectories, row)) for row in rows}
    units: dict[Row | int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -length[row]):
        units.setdefault(row.trajectory if whole_trajectories else row, []).append(row)
    parts: list[list[Row]] = []
    for unit in units.values():
        if parts and (len(parts[-1]) + len(unit)) * length[parts[-1][0]] <= token_budget:
            parts[-1] += unit
        else:
            parts.append(list(unit))
    return parts


def _columns_of_all(segments: Sequence[Segment]) -> list[Column]:
    """The columns that every segment of the step has: whether an optional one exists must not
    depend on how the step is cut."""
    return [c for c in COLUMNS if all(getattr(s, c.name) is not None for s in segments)]


def _pad(
    segments: Sequence[Segment],
    columns: Sequence[Column],
    pad_token_id: int,
    device: str | torch.device,
) -> dict[str, Tensor]:
    """The recorded columns of the segments under their names in Batch, tensors [rows, T]."""
    lengths = np.array([len(segment) for segment in segments])
    shape = (len(segments), int(lengths.max()))
    padded: dict[str, AnyArray] = {
        "attention_mask": np.arange(shape[1]) < lengths[:, None],
    }
    for column in columns:
        is_ids = column.name == "token_ids"
        values: AnyArray = np.full(
            shape,
            pad_token_id if is_ids else column.fill,
            dtype=np.int64 if is_ids else column.dtype,  # embedding lookups want int64
        )
        for i, segment in enumerate(segments):
            values[i, : len(segment)] = getattr(segment, column.name)
        padded["loss_mask" if column.name == "sampled" else column.name] = values
    return {name: torch.from_numpy(values).to(device) for name, values in padded.items()}


def _of_rows(values: Sequence[Any], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """One value for each row: [rows, 1]."""
    return torch.tensor(values, dtype=dtype).to(device).unsqueeze(1)
