"""Hosts for the tests of several ranks; spawned processes import them by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from estr.rank_workers import Place


def trained(ranks: Any, table: dict[str, Any], **how: Any) -> dict[str, Any]:
    """A tiny model trained for a few steps, with everything that came of it. The same in one
    process (`ranks.ALONE`) and, on every rank, in several.

    how: steps, num_groups, members of each, minibatches of each batch, restore and
    save (folders of a checkpoint), unscored (the last group is).
    """
    import dataclasses

    from estr.checkpoint import restore_trainer, save_trainer
    from estr.trainer import Trainer
    from estr.weights import MemoryWeightStore
    from tiny import draw_groups, tiny_model, tiny_recipe

    store = MemoryWeightStore()
    own = Trainer(tiny_model(), tiny_recipe(**table), store, ranks=ranks)
    if "restore" in how:
        restore_trainer(own, Path(how["restore"]))
    rows, consumptions, turns = [], [], []
    for step in range(own.step, own.step + how.get("steps", 3)):
        number = how.get("minibatches", 1)
        batch = [
            draw_groups(
                tiny_model(), how.get("num_groups", 3), how.get("members", 4), step * 10 + i
            )
            for i in range(number)
        ]
        if how.get("unscored"):
            batch = [
                [dataclasses.replace(g, advantages=(None,) * len(g.advantages)) for g in groups]
                for groups in batch
            ]
        turns += [ranks.turns(own._cut(groups)) for groups in batch]
        for result in own.train(batch):
            rows.append(result.metrics.to_row())
            consumptions += result.consumptions
    if "save" in how:
        save_trainer(own, Path(how["save"]))
    own.publish()
    return {
        "rows": rows,
        "consumptions": consumptions,
        "turns": turns,
        "published": {n: t.numpy() for n, t in store.fetch(own.version).items()}
        if ranks.rank == 0
        else store.latest(),
        "local": sum((p.to_local() if ranks.mesh else p).numel() for p in own.parameters.values()),
        "numbers": sum(p.numel() for p in own.parameters.values()),
    }


class Process:
    """Joins groups of any size, one after the other."""

    def __init__(self, place: Place) -> None:
        self.rank = place.rank

    def train(
        self, size: int, meeting: Path, table: dict[str, Any], how: dict[str, Any]
    ) -> dict[str, Any] | None:
        from estr.ranks import join

        if self.rank >= size:
            return None
        ranks = join(Place(self.rank, size, meeting), "cpu", 240.0)
        try:
            return trained(ranks, table, **how)
        finally:
            ranks.leave()


class Fragile:
    """A rank that fails while the others wait for it."""

    def __init__(self, place: Place, timeout_s: float = 240.0) -> None:
        from estr.ranks import join

        self.ranks = join(place, "cpu", timeout_s)

    def share(self, failure: str) -> list[float]:
        import torch

        from estr.errors import NumericsError

        if self.ranks.rank == 1 and failure == "dies":
            print("last words of a rank", flush=True)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ranks.rank == 1 and failure == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.ranks.rank == 1 and failure == "raises":
            raise NumericsError("a token of rank 1")
        rank = self.ranks.rank
        own = {rank: torch.full((rank + 1,), float(rank))}
        return torch.cat(self.ranks.share(own, [0, 1], [1, 2])).tolist()

    def close(self) -> None:
        self.ranks.leave()
