"""Masks that drop a set share of a micro-batch's tokens by entropy alone, for `diversity`.

    DropHigh  those of the highest entropy        DropLow  those of the lowest
    DropAny   any, by lot

All keep the same number of tokens, so what they do differently is due to which. Ties are broken by
lot: many tokens of a trained model have an entropy of almost 0. Clipped surrogate on pi/mu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..corrections.base import TokenColumns, Verdict
from ..corrections.surrogates import ClippedSurrogate
from ..options.corrections import require


@dataclass(frozen=True, slots=True)
class EntropyMaskOptions:
    share: float = 0.2
    """Of the eligible tokens of a micro-batch that is dropped; rounded to whole tokens."""
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        require(0 < self.share < 1, f"share must be in (0, 1), not {self.share}")


class _EntropyMask:
    Options = EntropyMaskOptions
    needs = frozenset({"behavior_entropies"})

    def __init__(self, options: EntropyMaskOptions) -> None:
        self._share = options.share
        self._surrogate = ClippedSurrogate("E", options.clip_low, options.clip_high)
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, columns: TokenColumns) -> Verdict:
        mask = columns.loss_mask
        entropies = columns.require("behavior_entropies")[mask]
        lot = torch.randperm(len(entropies), generator=self._generator)
        order = lot[torch.argsort(self._rank(entropies[lot]), stable=True)]
        kept = torch.ones(len(entropies), dtype=torch.bool)
        kept[order[: round(self._share * len(entropies))]] = False
        keep = torch.zeros_like(mask)
        keep[mask] = kept
        return Verdict(keep, surrogate=self._surrogate)

    def _rank(self, entropies: Tensor) -> Tensor:
        """The lowest go first."""
        raise NotImplementedError


class DropHigh(_EntropyMask):
    def _rank(self, entropies: Tensor) -> Tensor:
        return -entropies


class DropLow(_EntropyMask):
    def _rank(self, entropies: Tensor) -> Tensor:
        return entropies


class DropAny(_EntropyMask):
    def _rank(self, entropies: Tensor) -> Tensor:
        return torch.zeros_like(entropies)
