"""One logged step under one correction: what it keeps, how it weighs, what enters the gradient.

    ledger rows --read_step--> StepRecord --cut_step--> the micro-batches that the trainer made
        --correction, policy_loss--> Judged, one entry for each trained token

The functions are the trainer's own, on the same micro-batches in the same order, so the verdicts
of a run's own correction come out as they were recorded, to the last bit. No model is needed: the
ledger has the policy's log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch import Batch, make_batches, token_places
from ..corrections import Correction, for_step
from ..corrections.base import WHOLE_STEP, TokenColumns, concatenate
from ..errors import DataError
from ..ledger.schema import StepRecord
from ..losses import policy_loss
from ..token_results import token_columns

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A logged step as micro-batches. policy[b], proximal[b]: log-probs of the eligible tokens of
    batches[b], flat and in row order (proximal: None where no such pass was made). trained: where
    the eligible tokens stand among all tokens of the step's trajectories, joined, ascending; order:
    what brings them, micro-batch after micro-batch, into that order."""

    record: StepRecord
    batches: list[Batch]
    policy: list[Tensor]
    proximal: list[Tensor] | None
    trained: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return len(self.trained)

    def in_order(self, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Values of the eligible tokens, given by micro-batch, in the order of the ledger."""
        return np.concatenate(parts)[self.order] if parts else np.zeros(0)

    def logged(self, name: str) -> npt.NDArray[Any]:
        """A column of `Consumption` at the trained tokens."""
        return _joined([getattr(c, name) for c in self.record.consumptions])[self.trained]

    def recorded(self, name: str) -> npt.NDArray[Any]:
        """A column of `Segment` at the trained tokens."""
        parts = [getattr(s, name) for t in self.record.trajectories for s in t.segments]
        return _joined(parts)[self.trained]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What a correction makes of the trained tokens of a step, in the order of the ledger, [N].

    kept: inside the trust region. clipped: kept, but without gradient. weights: the detached factor
    of the term, 1 where the correction does not weigh, 0 where not kept. coefficients: the factor
    of the token's grad log pi in the gradient of the step's loss. loss: of the step.
    """

    kept: BoolArray
    clipped: BoolArray
    weights: FloatArray
    coefficients: FloatArray
    loss: float


def cut_step(
    record: StepRecord, *, token_budget: int, whole_trajectories: bool, device: str = "cpu"
) -> Cut:
    """The micro-batches of a logged step. token_budget, whole_trajectories: as in `make_batches`;
    those of the run give the micro-batches that its trainer made. device: of all tensors."""
    trajectories, consumptions = record.trajectories, record.consumptions
    batches = make_batches(
        trajectories,
        [c.advantage for c in consumptions],
        [t.id.group for t in trajectories],
        aggregation=record.aggregation,  # type: ignore[arg-type]
        token_budget=token_budget,
        whole_trajectories=whole_trajectories,
        device=device,
    )
    places = token_places(batches, trajectories).eligible
    where = _joined(places).astype(np.int64)
    order = np.argsort(where)

    def gathered(name: str) -> list[Tensor]:
        joined = _joined([getattr(c, name) for c in consumptions])
        return [torch.from_numpy(joined[there]).to(device) for there in places]

    has_proximal = all(c.proximal_logprobs is not None for c in consumptions)
    return Cut(
        record,
        batches,
        gathered("policy_logprobs"),
        gathered("proximal_logprobs") if has_proximal else None,
        where[order],
        order,
    )


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)


def require_proximal(needs: frozenset[str], cut: Cut, *, num_minibatches: int) -> None:
    """With one optimizer step a batch q is pi; with several the ledger must have log q of what was
    trained on. Raises DataError where a correction reads q and it has not."""
    missing = bool(cut.batches) and cut.proximal is None
    if "proximal_logprobs" in needs and missing and num_minibatches > 1:
        raise DataError(
            "it reads the policy at the start of the batch, which is not the current one: the run "
            f"made {num_minibatches} optimizer steps of a batch (num_minibatches), and no "
            "proximal_logprobs were logged, since its own correction asks for none; choose a "
            "correction or an edge that reads pi/mu"
        )


def correction_of_step(correction: Correction, cut: Cut) -> Correction:
    """The correction with what it reads of the whole step (see `StepCorrection`)."""
    if WHOLE_STEP not in correction.needs or not cut.batches:
        return correction
    scored = zip(cut.batches, cut.proximal or cut.policy, strict=True)
    return for_step(correction, concatenate([token_columns(batch, q, q) for batch, q in scored]))


def judge(correction: Correction, cut: Cut, *, num_minibatches: int = 1) -> Judged:
    """What the correction makes of the step, under the policy log-probs of the ledger.

    Raises DataError where the ledger lacks what the correction needs, NumericsError on impossible
    values, as `TokenColumns.check`.
    """
    require_proximal(correction.needs, cut, num_minibatches=num_minibatches)
    correction = correction_of_step(correction, cut)
    kept, clipped, weights, coefficients = [], [], [], []
    loss = 0.0
    for columns, batch in zip(columns_of(cut), cut.batches, strict=True):
        result = policy_loss(columns, correction, denominators=batch.token_denominators())
        loss += float(result.loss.detach())
        (gradient,) = torch.autograd.grad(
            result.loss, columns.policy_logprobs, materialize_grads=True
        )
        verdict = correction(columns)
        weight = torch.ones(()) if verdict.weight is None else verdict.weight.detach()
        kept.append(result.kept.numpy())
        clipped.append(result.clipped.numpy())
        weights.append(torch.where(result.kept, weight, 0.0).double().numpy())
        coefficients.append(gradient.double().numpy())
    return Judged(
        cut.in_order(kept).astype(np.bool_),
        cut.in_order(clipped).astype(np.bool_),
        cut.in_order(weights),
        cut.in_order(coefficients),
        loss,
    )


def columns_of(cut: Cut) -> list[TokenColumns]:
    """The columns of each micro-batch; the logged policy log-probs take a gradient."""
    proximal: Any = cut.proximal or [None] * len(cut.batches)
    return [
        token_columns(batch, policy.clone().requires_grad_(), q)
        for batch, policy, q in zip(cut.batches, cut.policy, proximal, strict=True)
    ]
