"""Random numbers and the draw of a token.

One Philox uniform for each token: key = the run's seed, counter = (position of the token in its
trajectory, member and attempt, group). So a rollout's numbers depend on nothing but its name, and a
request draws the same tokens alone or in any batch, up to the rounding of its logits. The token
comes from the inverse of the distribution function, in float64.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..logprobs import entropy_and_gini, log_distribution
from ..types import BoolArray, Float32Array, RolloutId

UInt32Array = npt.NDArray[np.uint32]
Float64Array = npt.NDArray[np.float64]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint32)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_BLOCK = 256


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Philox4x32-10 of counter [4, n] and key [2, n] (or [2, 1]): four random words [4, n]."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        high, low = (product >> 32).astype(np.uint32), product.astype(np.uint32)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = key + _WEYL
    words = np.empty((4, even.shape[1]), dtype=np.uint32)
    words[0::2], words[1::2] = even, odd
    return words


class StreamName(NamedTuple):
    """A rollout's name as the words that Philox takes (the position fills the fifth)."""

    member: int
    group_low: int
    group_high: int
    run_low: int
    run_high: int


def stream_name(rollout_id: RolloutId) -> StreamName:
    """The words of a rollout. Raises ValueError where a number does not fit into its bits."""
    run, group = rollout_id.run, rollout_id.group
    for name, value, bits in (
        ("run", run, 64),
        ("group", group, 64),
        ("index", rollout_id.index, 16),
        ("attempt", rollout_id.attempt, 16),
    ):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{rollout_id}: {name} = {value} does not fit into {bits} bits")
    member = rollout_id.index | rollout_id.attempt << 16
    return StreamName(member, group & _LOW, group >> 32, run & _LOW, run >> 32)


def uniforms(names: Sequence[StreamName], positions: Sequence[int]) -> Float64Array:
    """One uniform in [0, 1) with 53 random bits for each (rollout, token position), [n]."""
    words = np.array(names, dtype=np.uint32).reshape(-1, 5).T
    counter = np.vstack([np.array(positions, dtype=np.uint32)[None], words[:3]])
    random = philox4x32(counter, words[3:])
    bits = (random[0] >> 5).astype(np.uint64) << 26 | (random[1] >> 6)
    drawn: Float64Array = bits * 2.0**-53
    return drawn


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the distribution function first exceeds `uniform`.

    probs: [n, vocabulary] float32, at least 0; they need not sum to exactly 1. uniform: [n]
    float64 in [0, 1). Returns int64 [n]. Sums run in float64, over blocks first and then inside
    one block, so that a large vocabulary costs one pass. A token of probability 0 is never
    returned, also where `uniform` is so near 1 that rounding carries it past the last token. For
    NaN probabilities the result is any token id, and no error: the caller tells such rows apart.
    """
    n, vocab_size = probs.shape
    block = min(_BLOCK, vocab_size)
    if vocab_size % block:
        probs = torch.nn.functional.pad(probs, (0, block - vocab_size % block))
    blocks = probs.reshape(n, -1, block)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    chosen = _first_above(ends, target)
    before = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(n, device=probs.device), chosen[:, 0]].double().cumsum(-1)
    tokens = chosen * block + _first_above(inside, target - before)
    return tokens[:, 0].clamp(max=vocab_size - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First place whose cumulative sum exceeds the target, at most the last that raises it."""
    above = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    # NaN sums are above nothing and would lead outside.
    return torch.minimum(above, last).clamp(max=cumulative.shape[1] - 1)


class Draws(NamedTuple):
    """One drawn token in each row, [n] each, with the facts of the distribution it came from.
    Where `sound` is False the logits were no distribution and the rest of the row means nothing."""

    token_ids: npt.NDArray[np.int64]
    logprobs: Float32Array
    entropies: Float32Array
    gini: Float32Array | None
    sound: BoolArray


@torch.inference_mode()
def draw(
    logits: Tensor,
    temperatures: Sequence[float],
    uniform: Float64Array,
    *,
    vocab_size: int | None = None,
    gini: bool = True,
) -> Draws:
    """Draw one token from each row of logits [n, columns], of any float type; columns from
    vocab_size on are padding. `uniform` [n] is in [0, 1).

    Everything recorded is float32 and of the very distribution that the token is drawn from, the
    softmax of logits / temperature. Temperature 0 takes the argmax (the lowest id among equals),
    which has no useful log-prob of its own: log-prob and entropy are those at temperature 1 there.
    """
    divisors = np.array([value or 1.0 for value in temperatures], dtype=np.float32)
    if (divisors != 1).any():
        logits = logits.float() / torch.from_numpy(divisors)[:, None].to(logits.device)
    log_probs = log_distribution(logits, vocab_size=vocab_size)
    probs = log_probs.exp()
    chosen = inverse_cdf(probs, torch.from_numpy(uniform).to(logits.device))
    greedy = [i for i, value in enumerate(temperatures) if value == 0]
    if greedy:
        chosen[greedy] = log_probs[greedy].argmax(-1)
    entropies, ginis = entropy_and_gini(log_probs, gini=gini)
    return Draws(
        token_ids=chosen.cpu().numpy(),
        logprobs=log_probs.gather(1, chosen[:, None])[:, 0].cpu().numpy(),
        entropies=entropies.cpu().numpy(),
        gini=None if ginis is None else ginis.cpu().numpy(),
        # NaN, +inf, or nothing but -inf: the probabilities do not sum to anything near 1.
        sound=((probs.sum(-1) - 1.0).abs() < 1e-3).cpu().numpy(),
    )
