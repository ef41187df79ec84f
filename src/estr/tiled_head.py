"""Log-prob, entropy and gini from hidden states and the output matrix, tile by tile.

    for each tile of the vocabulary:            its part of the output matrix is read once
        for each block of tokens:
            logits = hidden @ weight.T          [tokens, columns], in one buffer, used again
            running sums of the block  <-  max, sum, squares and mean of the tile

    backward: the same two loops; the logits become their own gradient in place, which two matrix
    products carry to `hidden` and `weight`.

A tile stays in the cache of a core, so that what follows a matrix product costs little beside it,
and nothing of the size [tokens, vocabulary] ever exists. The backward pass computes the logits
again, except those of the first tiles, which the forward pass keeps as far as a fixed room goes: a
matrix product in four is saved where all of them fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG_ZERO = -200.0
"""exp of it is 0 in float32, so a column of probability zero adds 0 * -200 and not 0 * -inf."""

_CPU_COLUMNS, _CPU_ELEMENTS = 1024, 2**20
_ELEMENTS = 2**25

KEEP = 60 * 2**20
"""Logits that are kept for the backward pass at most: 252 MB in float32."""


def default_tile(device: torch.device, vocab_size: int) -> tuple[int, int]:
    """(tokens, columns) of a tile; a small vocabulary leaves room for more tokens."""
    on_cpu = device.type == "cpu"
    columns = min(vocab_size, _CPU_COLUMNS) if on_cpu else vocab_size
    return max(1, (_CPU_ELEMENTS if on_cpu else _ELEMENTS) // columns), columns


class HeadSettings(NamedTuple):
    """temperature: divides the logits. tile: (tokens, columns) of logits at once. keep: logits kept
    for the backward pass. entropy_grad: whether entropies carry a gradient. product_dtype: of the
    matrix products; all else is at least float32."""

    temperature: float
    tile: tuple[int, int]
    keep: int
    entropy_grad: bool
    product_dtype: torch.dtype


class HeadStatistics(torch.autograd.Function):
    """(logprobs, entropies, gini) [N] of hidden [N, D], weight [V, D], bias [V] or None and
    token_ids [N]. The gradient of a log-prob to the logits is (onehot - p) / temperature, that of
    an entropy -p (log p + H) / temperature; gini has none. Of the tiles' logits the first
    `keep` are kept for the backward pass, others are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles = _Tiles(hidden, weight, bias, settings)
        sums = _Sums(tiles.buffer, len(hidden))
        kept: list[Tensor] = []
        room = settings.keep if any(ctx.needs_input_grad) else 0
        for columns, head in tiles.columns():
            for rows in tiles.rows():
                logits = tiles.logits(rows, head)
                room -= logits.numel()
                if room >= 0:
                    kept.append(logits.clone())
                sums.add(rows, logits, token_ids[rows] - columns.start)
        logprobs, entropies, gini, log_normalizer = sums.statistics()
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_normalizer, entropies, *kept)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(gini, *(() if settings.entropy_grad else (entropies,)))
        return logprobs, entropies, gini

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, _gini: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, log_normalizer, entropies, *tensors = ctx.saved_tensors
        kept = iter(tensors)
        tiles = _Tiles(hidden, weight, bias, ctx.settings)
        slopes = _Slopes(grad_logprobs, grad_entropies, log_normalizer, entropies, ctx.settings)
        wide = tiles.buffer.dtype
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if to_hidden else None
        grad_weight = torch.zeros_like(weight) if to_weight else None
        grad_bias = hidden.new_zeros(len(weight), dtype=wide) if to_bias else None
        for columns, head in tiles.columns():
            # Summed at full width over all tokens also where the weight is stored in 16 bits.
            part = None if grad_weight is None else grad_weight[columns].to(wide)
            for rows in tiles.rows():
                logits = tiles.logits(rows, head, next(kept, None))
                grad_logits = slopes.of(rows, logits, token_ids[rows] - columns.start)
                if grad_bias is not None:
                    grad_bias[columns] += grad_logits.sum(dim=0)
                product = grad_logits.to(ctx.settings.product_dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], product, head.weight)
                if part is not None:
                    _add_product(part, product.T, tiles.hidden[rows])
            if grad_weight is not None and part is not None and part.dtype != weight.dtype:
                grad_weight[columns] = part
        return grad_hidden, grad_weight, grad_bias, None, None


class _HeadTile(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class _Tiles:
    """The walk over the logits, and the buffer that each tile of them is written to.

    hidden: [N, D] in the dtype of the products. buffer: one tile, at least float32.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings
    ) -> None:
        dtype = settings.product_dtype
        self.hidden = hidden.to(dtype)
        self._weight, self._bias, self._settings = weight, bias, settings
        self._tile = tile = min(settings.tile[0], len(hidden)), min(settings.tile[1], len(weight))
        self._products = hidden.new_empty(tile[0] * tile[1], dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.buffer = (
            self._products if wide == dtype else torch.empty_like(self._products, dtype=wide)
        )

    def columns(self) -> Iterator[tuple[slice, _HeadTile]]:
        for at in _slices(len(self._weight), self._tile[1]):
            bias = None if self._bias is None else self._bias[at].to(self.hidden.dtype)
            yield at, _HeadTile(self._weight[at].to(self.hidden.dtype), bias)

    def rows(self) -> Iterator[slice]:
        yield from _slices(len(self.hidden), self._tile[0])

    def logits(self, rows: slice, head: _HeadTile, kept: Tensor | None = None) -> Tensor:
        """logits / temperature of these rows under this part of the head, taken from `kept` if it
        is there: a view of the buffer, good until the next call and free to be overwritten."""
        hidden = self.hidden[rows]
        if kept is not None:
            return _shaped(self.buffer, hidden, head).copy_(kept)
        out = _shaped(self._products, hidden, head)
        if head.bias is None:
            torch.mm(hidden, head.weight.T, out=out)
        else:
            torch.addmm(head.bias, hidden, head.weight.T, out=out)
        if self.buffer is not self._products:
            out = _shaped(self.buffer, hidden, head).copy_(out)
        if self._settings.temperature != 1.0:
            out.div_(self._settings.temperature)
        return out


class _Sums:
    """Running sums over the vocabulary, per token, relative to the largest logit so far:

    top (the largest logit), rest = sum e^x, mean = sum x e^x, squares = sum e^2x, all three over
    the other columns, with x = logit - top. The top column itself, 1 in the first and last and 0 in
    the second, is left out of them: where a distribution is sharp the rest is all that counts, and
    1 + rest has lost its digits. Before any column the sum of all is 0, so the rest is -1.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """

    def __init__(self, buffer: Tensor, num_tokens: int) -> None:
        self._exp, self._top = torch.empty_like(buffer), torch.empty_like(buffer)
        start = buffer.new_tensor([-math.inf, -1.0, 0.0, -1.0])
        self._sums = start[:, None].repeat(1, num_tokens)
        self._drawn = buffer.new_full((num_tokens,), -math.inf)

    def add(self, rows: slice, logits: Tensor, places: Tensor) -> None:
        """Take in a tile [n, columns], which is overwritten. places: [n], the column of each drawn
        token, which may lie outside this tile."""
        place, inside = _within(logits, places)
        drawn = logits.gather(1, place)[:, 0]
        self._drawn[rows] = torch.where(inside, drawn, self._drawn[rows])
        top = logits.amax(dim=-1)
        logits.sub_(torch.where(top == -math.inf, 0.0, top)[:, None]).clamp_(min=LOG_ZERO)
        is_top = torch.eq(logits, 0.0, out=self._top[: logits.numel()].view_as(logits))
        exp = torch.exp(logits, out=self._exp[: logits.numel()].view_as(logits)).sub_(is_top)
        also = is_top.sum(dim=-1) - 1.0  # columns equal to the top beside it
        rest = exp.sum(dim=-1)
        squares = torch.linalg.vector_norm(exp, dim=-1).square()
        mean = logits.mul_(exp).sum(dim=-1)
        found = torch.stack([top, rest + also, mean, squares + also])
        self._sums[:, rows] = _merge(self._sums[:, rows], found)

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprobs, entropies, gini, log of the normalizer) of all tokens."""
        top, rest, mean, squares = self._sums
        log_sum, total = rest.log1p(), 1.0 + rest
        entropies = (log_sum - mean / total).clamp(min=0.0)
        gini = (rest * (1.0 + total) - squares) / total.square()
        return self._drawn - top - log_sum, entropies, gini, top + log_sum


def _merge(one: Tensor, other: Tensor) -> Tensor:
    """The sums [4, n] over the columns of both: what lies under the lower top moves by the
    difference of the tops, and that top itself joins the rest."""
    first = one[0] >= other[0]
    top, rest, mean, squares = torch.where(first, one, other)
    low, low_rest, low_mean, low_squares = torch.where(first, other, one)
    # NaN where both tops are -inf and nothing has been seen; NaN in a logit stays in the sums.
    shift = (low - top).nan_to_num(nan=LOG_ZERO).clamp(min=LOG_ZERO)
    factor = shift.exp()
    return torch.stack(
        [
            top,
            rest + factor * (1.0 + low_rest),
            mean + factor * (low_mean + shift * (1.0 + low_rest)),
            squares + factor.square() * (1.0 + low_squares),
        ]
    )


class _Slopes:
    """What the logits' gradient needs to know about each token; divided by the temperature."""

    def __init__(
        self,
        grad_logprobs: Tensor | None,
        grad_entropies: Tensor | None,
        log_normalizer: Tensor,
        entropies: Tensor,
        settings: HeadSettings,
    ) -> None:
        self._log_normalizer, self._entropies = log_normalizer, entropies
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        self._logprobs = grad_logprobs / settings.temperature
        self._of_entropies = (
            None if grad_entropies is None else grad_entropies / settings.temperature
        )

    def of(self, rows: slice, logits: Tensor, places: Tensor) -> Tensor:
        """The gradient to the head's output, in place of `logits` [n, columns]."""
        slope = self._logprobs[rows]
        logits.sub_(self._log_normalizer[rows, None])
        if self._of_entropies is None:
            grad_logits = logits.exp_().mul_(-slope[:, None])
        else:
            probs = logits.exp()
            surprisal = logits.clamp_(min=LOG_ZERO).add_(self._entropies[rows, None])
            surprisal.mul_(-self._of_entropies[rows, None]).sub_(slope[:, None])
            grad_logits = surprisal.mul_(probs)
        place, inside = _within(logits, places)
        return grad_logits.scatter_add_(1, place, torch.where(inside, slope, 0.0)[:, None])


def _within(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """(places [n, 1] moved into the columns, whether they were there)."""
    last = logits.shape[1] - 1
    return places.clamp(0, last)[:, None], (places >= 0) & (places <= last)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _shaped(buffer: Tensor, hidden: Tensor, head: _HeadTile) -> Tensor:
    rows, columns = len(hidden), len(head.weight)
    return buffer[: rows * columns].view(rows, columns)


def _slices(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, max(step, 1)):
        yield slice(start, min(start + step, total))
