"""What is kept of a replay while it goes through the steps: sums, counts and a few examples, the
same amount of memory for a million tokens and for a hundred million."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..diagnostics import ENTROPY_EDGES
from .judging import Cut, Judged
from .results import Cell, Check, Example, Figures, cosines

SIGNS = ("--", "-+", "+-", "++", "0")
"""Signs of (advantage, log_ratio); "0": one of them is 0 or not a number."""

_BINS: tuple[float | None, ...] = (0.0, *ENTROPY_EDGES, None)
_BEFORE, _AFTER = 24, 8


class Tally:
    """Takes one step after the other; the first correction is the run's own."""

    def __init__(self, labels: Sequence[str], *, num_examples: int) -> None:
        self.labels = tuple(labels)
        self.steps: list[int] = []
        self.tokens = 0
        self.check = Check()
        number = len(labels)
        self._sums = np.zeros((number, 7))
        self._largest = np.zeros(number)
        self._rejected = np.zeros((number, number), dtype=np.int64)
        self._products = np.zeros((number, number))
        self._cells = np.zeros((1 + 2 * number, len(_BINS), 1, len(SIGNS)))
        self._num_examples = num_examples
        self._examples: list[list[tuple[float, int, Example]]] = [[] for _ in labels]

    def add(self, cut: Cut, judged: Sequence[Judged]) -> None:
        """judged[i]: of correction i, on the tokens of this step."""
        self.steps.append(cut.record.step)
        self._check(cut, judged[0])
        self.tokens += cut.num_tokens
        if not cut.num_tokens:
            return
        kept = np.stack([one.kept for one in judged])
        coefficients = np.stack([one.coefficients for one in judged])
        log_ratio = (cut.logged("policy_logprobs") - cut.recorded("behavior_logprobs")).astype(
            np.float64
        )
        square = np.square(np.where(np.isfinite(log_ratio), log_ratio, 0.0))
        for i, one in enumerate(judged):
            sums = (
                one.kept.sum(),
                one.clipped.sum(),
                one.weights.sum(),
                np.abs(one.coefficients).sum(),
                one.coefficients.sum(),
                one.loss,
                square[one.kept].sum(),
            )
            self._sums[i] += sums
            self._largest[i] = max(self._largest[i], one.weights.max())
        rejected = (~kept).astype(np.float64)  # exact up to 2^53 tokens
        self._rejected += (rejected @ rejected.T).astype(np.int64)
        self._products += coefficients @ coefficients.T
        advantages = advantages_of(cut)
        self._add_cells(cut, advantages, log_ratio, kept, np.abs(coefficients))
        for i in range(1, len(judged)):
            self._add_examples(i, cut, judged, advantages)

    def figures(self) -> tuple[Figures, ...]:
        rows = []
        for label, sums, largest in zip(self.labels, self._sums, self._largest, strict=True):
            kept, clipped, weight, mass, net, loss, square = sums.tolist()
            rows.append(
                Figures(
                    label,
                    kept=int(kept),
                    clipped=int(clipped),
                    rho_mask=1.0 - kept / self.tokens if self.tokens else math.nan,
                    weight_mean=weight / kept if kept else math.nan,
                    weight_max=float(largest),
                    mass=mass,
                    net=net,
                    loss=loss / len(self.steps) if self.steps else math.nan,
                    second_moment=square / kept if kept else math.nan,
                )
            )
        return tuple(rows)

    def rejected_by_both(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in self._rejected.tolist())

    def cosine(self) -> tuple[tuple[float | None, ...], ...]:
        return cosines(self._products.tolist())

    def cells(self) -> tuple[Cell, ...]:
        """Those that hold a token."""
        number = len(self.labels)
        found = []
        for b, lag, s in np.argwhere(self._cells[0] > 0).tolist():
            tokens, *values = self._cells[:, b, lag, s].tolist()
            kept = tuple(int(value) for value in values[:number])
            found.append(Cell(_BINS[b], lag, SIGNS[s], int(tokens), kept, tuple(values[number:])))
        return tuple(found)

    def examples(self) -> tuple[Example, ...]:
        """Of each correction, those first whose gradient coefficient differs most."""
        ordered = [sorted(heap, key=lambda entry: -entry[0]) for heap in self._examples]
        return tuple(example for heap in ordered for _, _, example in heap)

    def _check(self, cut: Cut, own: Judged) -> None:
        kept = own.kept != cut.logged("kept")
        clipped = own.clipped != cut.logged("clipped")
        first = self.check.first
        wrong = np.flatnonzero(kept | clipped)
        if first is None and len(wrong):
            trajectory, position = place_of(cut, int(wrong[0]))
            first = f"step {cut.record.step}, trajectory {trajectory}, position {position}"
        self.check = Check(
            self.check.tokens + len(kept),
            self.check.kept_differ + int(kept.sum()),
            self.check.clipped_differ + int(clipped.sum()),
            first,
        )

    def _add_cells(
        self,
        cut: Cut,
        advantages: npt.NDArray[np.float64],
        log_ratio: npt.NDArray[np.float64],
        kept: npt.NDArray[np.bool_],
        masses: npt.NDArray[np.float64],
    ) -> None:
        entropies = cut.recorded("behavior_entropies")
        edges = np.asarray(ENTROPY_EDGES, dtype=np.float32)
        bins = np.digitize(np.maximum(entropies, 0.0), edges)
        bins = np.where(np.isfinite(entropies), bins, len(_BINS) - 1)
        lags = cut.record.target_version - cut.recorded("versions").astype(np.int64)
        signed = (advantages != 0) & (log_ratio != 0) & ~np.isnan(log_ratio)
        signs = np.where(signed, 2 * (advantages > 0) + (log_ratio > 0), len(SIGNS) - 1)
        missing = int(lags.max()) + 1 - self._cells.shape[2]
        if missing > 0:
            self._cells = np.pad(self._cells, ((0, 0), (0, 0), (0, missing), (0, 0)))
        shape = self._cells.shape[1:]
        flat = np.ravel_multi_index((bins, lags, signs), shape)
        for plane, weights in enumerate([None, *kept.astype(np.float64), *masses]):
            counted = np.bincount(flat, weights=weights, minlength=math.prod(shape))
            self._cells[plane] += counted.reshape(shape)

    def _add_examples(
        self,
        i: int,
        cut: Cut,
        judged: Sequence[Judged],
        advantages: npt.NDArray[np.float64],
    ) -> None:
        own, other = judged[0], judged[i]
        differing = np.flatnonzero(own.kept != other.kept)
        sizes = np.abs(own.coefficients - other.coefficients)[differing]
        heap = self._examples[i]
        for place in np.argsort(-sizes, kind="stable")[: self._num_examples].tolist():
            size = float(sizes[place])
            if len(heap) == self._num_examples and size <= heap[0][0]:
                break
            # The second entry settles ties: the earlier token stays.
            order = -(self.tokens + int(differing[place]))
            example = example_of(self.labels[i], cut, judged, advantages, int(differing[place]))
            push = heapq.heappush if len(heap) < self._num_examples else heapq.heapreplace
            push(heap, (size, order, example))


def advantages_of(cut: Cut) -> npt.NDArray[np.float64]:
    """The advantage of each trained token's trajectory, as the loss reads it (float32)."""
    totals = [t.num_tokens for t in cut.record.trajectories]
    values = [
        0.0 if c.advantage is None else np.float32(c.advantage) for c in cut.record.consumptions
    ]
    return np.repeat(np.asarray(values, dtype=np.float64), totals)[cut.trained]


def place_of(cut: Cut, token: int) -> tuple[int, int]:
    """(trajectory, position) of the n-th trained token."""
    ends = np.cumsum([t.num_tokens for t in cut.record.trajectories])
    place = int(cut.trained[token])
    trajectory = int(np.searchsorted(ends, place, side="right"))
    return trajectory, place - (int(ends[trajectory - 1]) if trajectory else 0)


def example_of(
    label: str,
    cut: Cut,
    judged: Sequence[Judged],
    advantages: npt.NDArray[np.float64],
    token: int,
) -> Example:
    """The n-th trained token, with what every correction makes of it."""
    number, position = place_of(cut, token)
    trajectory = cut.record.trajectories[number]
    start = 0
    segment = trajectory.segments[0]
    for segment in trajectory.segments:
        if position < start + len(segment):
            break
        start += len(segment)
    here = position - start
    ids = segment.token_ids
    return Example(
        correction=label,
        step=cut.record.step,
        group=trajectory.id.group,
        trajectory=number,
        position=position,
        token_id=int(ids[here]),
        before=tuple(ids[max(0, here - _BEFORE) : here].tolist()),
        after=tuple(ids[here + 1 : here + 1 + _AFTER].tolist()),
        lag=cut.record.target_version - int(segment.versions[here]),
        behavior_logprob=float(segment.behavior_logprobs[here]),
        policy_logprob=float(cut.logged("policy_logprobs")[token]),
        entropy=float(segment.behavior_entropies[here]),
        advantage=float(advantages[token]),
        kept=tuple(bool(one.kept[token]) for one in judged),
        clipped=tuple(bool(one.clipped[token]) for one in judged),
        coefficients=tuple(float(one.coefficients[token]) for one in judged),
    )
