"""Corrections that are ESTR but for one thing, to tell what its gain hangs on.

    RandomMask        as many tokens dropped in every micro-batch, but any
    ShuffledEntropy   the radii of ESTR, dealt out to other tokens of the micro-batch
    ConstantEntropy   every token has the mean entropy of the micro-batch

The fourth control, the trainer's entropy for the sampler's, is `entropy_of` of a run.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..corrections.base import TokenColumns, Verdict
from ..corrections.estr import Estr
from ..options.corrections import EstrOptions


class _Control:
    """ESTR with the entropies of a micro-batch changed by `_changed`."""

    Options = EstrOptions
    needs = frozenset({"behavior_entropies"})

    def __init__(self, options: EstrOptions) -> None:
        self._estr = Estr(options)
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, columns: TokenColumns) -> Verdict:
        mask = columns.loss_mask
        entropies = columns.require("behavior_entropies").clone()
        entropies[mask] = self._changed(entropies[mask])
        return self._estr(dataclasses.replace(columns, behavior_entropies=entropies))

    def _changed(self, entropies: Tensor) -> Tensor:
        raise NotImplementedError

    def _shuffled(self, values: Tensor) -> Tensor:
        return values[torch.randperm(len(values), generator=self._generator)]


class ShuffledEntropy(_Control):
    def _changed(self, entropies: Tensor) -> Tensor:
        return self._shuffled(entropies)


class ConstantEntropy(_Control):
    def _changed(self, entropies: Tensor) -> Tensor:
        return entropies.mean().expand_as(entropies) if len(entropies) else entropies


class RandomMask(_Control):
    """The mask of ESTR, its places shuffled among the eligible tokens."""

    def __call__(self, columns: TokenColumns) -> Verdict:
        verdict = self._estr(columns)
        keep = verdict.keep.clone()
        keep[columns.loss_mask] = self._shuffled(keep[columns.loss_mask])
        return dataclasses.replace(verdict, keep=keep)
