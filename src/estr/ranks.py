"""Ranks: processes that train one model together, its parameters sharded among them.

    step --make_batches--> micro-batches, dealt among the ranks
    own micro-batches --forward, backward--> gradients --reduce-scatter, sum--> own shards --AdamW
    per-token results of one's own --share--> those of the whole step, on every rank

Sharding is FSDP2 (torch.distributed.fsdp.fully_shard): one unit for each decoder block, one for the
rest. Every rank is given the whole step and cuts it alike, so all of them know whose every
micro-batch is and how large; only results travel. A denominator speaks of the whole step, so the
gradients of the ranks add up, and are not averaged.

Every method that says "together" is called by all ranks in the same order, or they wait for each
other until the time limit of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .batch import Batch
from .errors import WorkerError
from .rank_workers import Place

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from .scorer import Scorer


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train one model. mesh: of all ranks; None where it is alone
    with a model that is not sharded."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def shard(self, scorer: Scorer) -> None:
        """Replace the model's parameters, equal on all ranks, by this rank's shards. From then on
        the model computes through `scorer` only. Together."""
        if self.mesh is None:
            return
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        blocks = [m for m in scorer.modules() if isinstance(m, GradientCheckpointingLayer)]
        for module in (*reversed(blocks), scorer):
            unit = fully_shard(module, mesh=self.mesh)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to add up

    def turns(self, batches: Sequence[Batch]) -> list[int | None]:
        """The indices of this rank's micro-batches. All ranks take equally many turns, for in each
        they wait for each other; None is a turn without a micro-batch."""
        own: list[int | None] = [i for i, b in enumerate(batches) if b.rank == self.rank]
        most = max(Counter(batch.rank for batch in batches).values(), default=0)
        return own + [None] * (most - len(own))

    def share(
        self, own: Mapping[int, Tensor], owners: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        """What every rank has found of its own micro-batches, for all of them. Together.

        own[i]: float32 [sizes[i]] of micro-batch i, for those with owners[i] == rank, without
        gradient.
        """
        if self.size == 1:
            return [own[i] for i in range(len(owners))]
        width = max(_totals(owners, sizes, self.size))
        if not width:
            return [torch.empty(0) for _ in owners]
        assert self.mesh is not None
        mine = torch.zeros(width, device=self.mesh.device_type)
        joined = torch.cat([mine[:0], *(own[i] for i in sorted(own))])
        mine[: len(joined)] = joined
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(gathered, mine)
        found, taken = [], [0] * self.size
        for owner, size in zip(owners, sizes, strict=True):
            found.append(gathered[owner][taken[owner] : taken[owner] + size])
            taken[owner] += size
        return found

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors, shards joined, on rank 0 (on the CPU where they were sharded); {} on
        the others. Together."""
        if self.mesh is None:
            return dict(tensors)
        joined = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self.rank == 0:
                joined[name] = full.cpu()
        return joined

    def leave(self) -> None:
        """At the end of the process. May be called twice."""
        if self.mesh is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


ALONE = Ranks()


def join(place: Place, device: str, timeout_s: float) -> Ranks:
    """Meet the others; returns when all are there. device: of this rank. timeout_s: of every wait
    for another rank, this one included. Raises WorkerError where they do not come."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    try:
        torch.distributed.init_process_group(
            "gloo" if kind == "cpu" else "nccl",
            # A file, where a port could be taken by others.
            store=torch.distributed.FileStore(  # type: ignore[attr-defined]
                str(place.meeting), place.size
            ),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )
        mesh = init_device_mesh(kind, (place.size,))
    except RuntimeError as error:
        raise WorkerError(
            f"rank {place.rank} did not meet the other ranks, {place.size} in all; each waits "
            f"trainer.timeout_s = {timeout_s:g} s: {str(error).partition(chr(10))[0]}"
        ) from error
    return Ranks(place.rank, place.size, mesh)


def rank_device(device: str, rank: int) -> str:
    """The device of a rank, counted from that of rank 0: "cuda:1" and rank 2 give "cuda:3"."""
    own = torch.device(device)
    return device if own.type == "cpu" else f"{own.type}:{(own.index or 0) + rank}"


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the shards of all ranks joined; a plain one as it is. Together."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(own: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, equal on all ranks, on own's device, and sharded as `own` is. Nothing
    travels."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(own.device)
    if not isinstance(own, DTensor):
        return value
    found: Any = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    placed: Tensor = found
    return placed


def _totals(owners: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    totals = [0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        totals[owner] += size
    return totals
