"""Log-prob, entropy and gini of the distribution that tokens are really drawn from.

    logits ----------------> log_distribution --+--> token_statistics --> TokenStatistics
    hidden @ head, in tiles --> tiled_head -----+        (sampler and trainer alike)

One definition serves the sampler and the trainer: temperature on the logits first, columns beyond
the real vocabulary left out, natural logarithm, float32 (float64 for float64 input). Nothing is
changed in place. The causal shift (the state at t-1 predicts token t) lives in `next_token` and
nowhere else.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .tiled_head import KEEP, LOG_ZERO, HeadSettings, HeadStatistics, default_tile


class TokenStatistics(NamedTuple):
    """What is known about each token at its draw; all float32 and of one shape.

    logprobs: log-prob of the token. entropies: Shannon entropy of the whole distribution, nats, at
    least 0. gini: sum of p(1-p) over the distribution, or None where it was not asked for. Neither
    of the last two is a function of the token drawn.
    """

    logprobs: Tensor
    entropies: Tensor
    gini: Tensor | None

    def spread(self, mask: Tensor) -> TokenStatistics:
        """The statistics of N tokens laid out over bool `mask` [B, T] with N True entries, in row
        order; NaN (never computed) elsewhere. The gradient flows back to the N entries."""
        gini = None if self.gini is None else _spread(self.gini, mask)
        return TokenStatistics(_spread(self.logprobs, mask), _spread(self.entropies, mask), gini)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    nothing = values.new_full(mask.shape, math.nan)
    return nothing.masked_scatter(mask, values)


def next_token(states: Tensor, token_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The states that predict the tokens under `mask`, and these tokens: the one causal shift.

    states: [B, T, ...], hidden states or logits, where states[b, t-1] predicts token_ids[b, t].
    token_ids: [B, T]. mask: bool [B, T], the tokens to score. Returns ([N, ...], [N]) in row order,
    N the number of True entries; `TokenStatistics.spread(mask)` is the way back. The gradient flows
    to the chosen states only.

    Raises ValueError on shapes that do not fit, and where the first token of a row is to be
    scored: nothing precedes it.
    """
    if not states.shape[:2] == token_ids.shape == mask.shape:
        raise ValueError(
            f"states {tuple(states.shape)}, token_ids {tuple(token_ids.shape)} and mask "
            f"{tuple(mask.shape)} must share their first two dimensions"
        )
    if bool(mask[:, :1].any()):
        raise ValueError("token 0 of a row cannot be scored: no state precedes it; mask it out")
    rows, places = mask.nonzero(as_tuple=True)
    return states[rows, places - 1], token_ids[rows, places]


def log_distribution(
    logits: Tensor, *, temperature: float = 1.0, vocab_size: int | None = None
) -> Tensor:
    """log softmax(logits / temperature) over the real vocabulary: [..., V] -> [..., vocab_size].

    Columns from vocab_size on are padding of the output matrix and are left out of the normalizer
    and of the result. A logit of -inf gives a log-prob of -inf. Differentiable.

    Raises ValueError unless temperature is finite and above 0 and vocab_size within [1, V].
    """
    _check_temperature(temperature)
    real = logits[..., : _real_columns(vocab_size, logits.shape[-1])]
    real = real.to(_at_least_float32(real.dtype))
    if temperature != 1.0:
        real = real / temperature
    log_probs: Tensor = torch.log_softmax(real, dim=-1)
    return log_probs


def entropy_and_gini(log_probs: Tensor, *, gini: bool = True) -> tuple[Tensor, Tensor | None]:
    """Shannon entropy -sum p log p (nats, at least 0) and sum p(1-p) of [..., V] log-probs: [...].

    A column of probability zero contributes 0. The entropy is differentiable, gini carries no
    gradient. 1 - sum p^2 would lose all its digits just where the distribution is sharp; see
    `_gini` for the form that does not.
    """
    differentiable = torch.is_grad_enabled() and log_probs.requires_grad
    with torch.no_grad():
        probs = log_probs.exp()
        ginis = _gini(log_probs, probs) if gini else None
        entropies = probs.mul_(log_probs).sum(dim=-1).neg_()
    if differentiable or bool(entropies.isnan().any()):
        finite = log_probs.clamp(min=LOG_ZERO)
        entropies = -(finite.exp() * finite).sum(dim=-1)
    return entropies.clamp(min=0.0), ginis


def _gini(log_probs: Tensor, probs: Tensor) -> Tensor:
    """sum p(1-p), accurate to float32's relative precision also where one p is next to 1.

    With m the largest column and rest = sum_{i != m} p_i = 1 - p_m, the sum is
    rest * (1 + p_m) - sum_{i != m} p_i^2. Summing the small terms apart keeps digits that even
    -expm1(log p_m) has lost, since log_softmax rounds log p_m to zero. The top column is set to
    zero in `probs` for the two sums and put back.
    """
    top, at = probs.max(dim=-1, keepdim=True)
    probs.scatter_(-1, at, 0.0)
    rest = probs.sum(dim=-1)
    squares: Tensor = torch.linalg.vector_norm(probs, dim=-1).square()
    probs.scatter_(-1, at, top)
    return rest * (1.0 + top.squeeze(-1)) - squares


def token_statistics(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    gini: bool = True,
    entropy_grad: bool = False,
) -> TokenStatistics:
    """Statistics of the tokens `token_ids` [...] drawn from `logits` [..., V]; each is [...].

    logprobs carry the gradient to the logits; entropies do so only with entropy_grad, gini never.
    Raises ValueError on a token id outside the vocabulary, and as `log_distribution` does.
    """
    log_probs = log_distribution(logits, temperature=temperature, vocab_size=vocab_size)
    _check_tokens(token_ids, log_probs.shape[-1])
    logprobs = log_probs.gather(-1, token_ids.long().unsqueeze(-1)).squeeze(-1)
    entropies, ginis = entropy_and_gini(
        log_probs if entropy_grad else log_probs.detach(), gini=gini
    )
    return TokenStatistics(logprobs, entropies, ginis)


def statistics_from_hidden(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    head_bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tile: tuple[int, int] | None = None,
    keep: int = KEEP,
    gini: bool = True,
    entropy_grad: bool = False,
) -> TokenStatistics:
    """`token_statistics` of the logits hidden @ head_weight.T + head_bias, never held whole.

    hidden: [N, D]. head_weight: [V, D]. head_bias: [V] or None. token_ids: [N]. At most `tile`
    (tokens, columns) logits exist at once, None: as many as fit into a core's cache. The backward
    pass computes them again, except the first tiles of at most `keep` logits together (252 MB),
    which are kept where a gradient is asked for. Beside that, the outputs and the gradients both
    passes need a few tiles of memory, whatever N is; products in 16 bits also a copy of `hidden`,
    and its gradient in float32. Tile and keep change neither values nor gradients beyond rounding.

    The matrix products run in the dtype of autocast if it is on, else in that of the inputs;
    everything after them is float32, and so is the sum of the weight gradient over the tokens.
    Gradients reach hidden, head_weight and head_bias through logprobs, and through entropies with
    entropy_grad; gini carries none. There is no second derivative.

    Raises ValueError as `token_statistics` does, for a tile without an entry and for a negative
    keep.
    """
    _check_temperature(temperature)
    columns = _real_columns(vocab_size, len(head_weight))
    if columns < len(head_weight):
        head_weight = head_weight[:columns]
        head_bias = None if head_bias is None else head_bias[:columns]
    _check_tokens(token_ids, columns)
    tile = default_tile(hidden.device, columns) if tile is None else tile
    if min(tile) < 1:
        raise ValueError(f"a tile must hold at least 1 token and 1 column, not {tile}")
    if keep < 0:
        raise ValueError(f"keep is a number of logits, 0 or more, not {keep}")
    dtype = _product_dtype(hidden, head_weight)
    settings = HeadSettings(temperature, tile, keep, entropy_grad, dtype)
    logprobs, entropies, ginis = HeadStatistics.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, head_bias, token_ids.long(), settings
    )
    return TokenStatistics(logprobs, entropies, ginis if gini else None)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature must be finite and above 0, not {temperature}: "
            "argmax is not a distribution that tokens are drawn from"
        )


def _real_columns(vocab_size: int | None, columns: int) -> int:
    if vocab_size is None:
        return columns
    if not 1 <= vocab_size <= columns:
        raise ValueError(f"vocab_size must be within 1 and the {columns} columns, not {vocab_size}")
    return vocab_size


def _check_tokens(token_ids: Tensor, vocab_size: int) -> None:
    if not token_ids.numel():
        return
    low, high = (int(v) for v in token_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens")
