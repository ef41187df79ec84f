"""A causal LM as hidden states and an output matrix, so that only needed logits are computed.

    head = split_head(model)
    hidden = head.hidden(input_ids, attention_mask=mask)       [batch, length, width]
    logits = hidden[wanted] @ head.weight.T + head.bias        only where they are wanted

The engine needs one row of logits for each request, the trainer only those of sampled tokens, and
neither should hold [tokens, vocabulary]. A model that does more after its output matrix (soft caps,
scaled logits) or before it is found out by a probe and refuses the split: `head.weight` is None
there, and logits come whole from `head.logits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Head:
    """Made by `split_head`. `weight` and `bias` are looked up at each use, so they follow training,
    reloading and moving to a device."""

    def __init__(self, model: nn.Module, output: nn.Linear | None) -> None:
        self._model = model
        self._output = output
        self._base: nn.Module | None = getattr(model, "base_model", None) if output else None

    @property
    def weight(self) -> Tensor | None:
        """The output matrix [vocabulary, width]; None where logits are not a plain product."""
        return None if self._output is None else self._output.weight

    @property
    def bias(self) -> Tensor | None:
        """The output bias [vocabulary], None where there is none."""
        return None if self._output is None else self._output.bias

    def hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Last hidden states [batch, length, width] of input_ids [batch, length], with gradient.

        inputs: attention_mask, position_ids, past_key_values, use_cache, as the model takes them.
        Raises ValueError where the model cannot be split (`weight` is None).
        """
        if self._base is None:
            raise ValueError(
                f"{type(self._model).__name__} has no plain output matrix; use Head.logits"
            )
        # Without a cache handed in, transformers would build one, and keep its tensors alive.
        inputs.setdefault("use_cache", False)
        hidden: Tensor = self._base(input_ids=input_ids, **inputs).last_hidden_state
        return hidden

    def logits(self, input_ids: Tensor, *, last: bool = False, **inputs: Any) -> Tensor:
        """Logits [batch, length, vocabulary], or [batch, 1, vocabulary] of the last place only.

        Works for every model; for a split one it is hidden(...) times the output matrix.
        """
        if self._output is None:
            whole: Tensor = self._model(
                input_ids=input_ids, logits_to_keep=1 if last else 0, **inputs
            ).logits
            return whole
        hidden = self.hidden(input_ids, **inputs)
        logits: Tensor = self._output(hidden[:, -1:] if last else hidden)
        return logits


def split_head(model: nn.Module) -> Head:
    """Split a transformers causal LM after verifying, on four tokens, that its logits are exactly
    its output layer applied to the last hidden state of its base model.

    The output layer's result is replaced by known values during the probe; whatever the model does
    to logits afterwards (scaling, soft caps) changes them, however small the model's weights are.
    """
    get_output = getattr(model, "get_output_embeddings", None)
    output = get_output() if get_output is not None else None
    base = getattr(model, "base_model", model)
    if type(output) is not nn.Linear or base is model:
        return Head(model, None)
    with without_flash(model):
        return Head(model, output if _is_plain(model, base, output) else None)


@contextmanager
def without_flash(model: Any) -> Iterator[None]:
    """Attention by sdpa meanwhile, where it is a flash kernel, which computes in 16 bits only: what
    a probe asks of a model's structure is asked in the dtype of its weights."""
    own = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    if "flash" not in own:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@torch.no_grad()
def _is_plain(model: nn.Module, base: nn.Module, output: nn.Linear) -> bool:
    received: list[Tensor] = []
    planted = torch.linspace(-100.0, 100.0, output.out_features, device=output.weight.device)
    planted = planted.to(output.weight.dtype).expand(1, 4, -1)

    def plant(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> Tensor:
        received.append(inputs[0])
        return planted.clone()

    training = model.training
    model.eval()
    hook = output.register_forward_hook(plant)
    try:
        ids = torch.arange(4, device=output.weight.device)[None] % output.out_features
        logits = model(input_ids=ids, use_cache=False).logits
        hidden = getattr(base(input_ids=ids, use_cache=False), "last_hidden_state", None)
    finally:
        hook.remove()
        model.train(training)
    return (
        hidden is not None
        and len(received) == 1
        and received[0].shape == hidden.shape
        and torch.allclose(received[0], hidden, rtol=1e-3, atol=1e-5)
        and torch.equal(logits, planted.to(logits.dtype))
    )
