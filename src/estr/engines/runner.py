"""A causal LM over rows: fill a row's cache, draw on all rows at once, take new weights.

The one place of the engine that calls the model. It knows rows and tokens, not requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import EngineError, WeightsError
from ..heads import split_head
from ..types import Int32Array
from ..weights import State
from .kv_cache import RowCache

PREFILL_TOKENS = 4096
"""Padded tokens in one prefill pass, at most (a single longer context goes alone)."""


class ModelRunner:
    """Runs `model` (transformers, in its own dtype and on its own device), which it takes over:
    eval mode, no gradients, its weights replaced by `load`.

    vocab_size: number of real token ids where the output layer is padded; None: all are real.
    Raises EngineError for a model whose cached logits do not match its own plain ones.
    """

    def __init__(self, model: nn.Module, *, vocab_size: int | None = None) -> None:
        self._model = model.eval().requires_grad_(False)
        self._head = split_head(model)
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        config: Any = model.config
        self.vocab_size = vocab_size or int(config.get_text_config().vocab_size)
        self.max_positions = max_positions(config)
        self.cache = RowCache()
        self._verify()

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], contexts: Sequence[Int32Array]) -> None:
        """Compute and keep keys and values of whole contexts (each at least one token)."""
        for batch in buckets([len(context) for context in contexts], PREFILL_TOKENS):
            length = max(len(contexts[i]) for i in batch)
            # Padding stands to the right, so causality alone hides it.
            ids = np.zeros((len(batch), length), dtype=np.int64)
            for line, i in zip(ids, batch, strict=True):
                line[: len(contexts[i])] = contexts[i]
            self._forward(
                torch.from_numpy(ids).to(self._device),
                position_ids=torch.arange(length, device=self._device)[None],
                past_key_values=self.cache.prefilling(
                    torch.tensor([rows[i] for i in batch], device=self._device)
                ),
            )

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of rows [0, n): logits [n, vocabulary] of what follows it.

        positions: where each token stands, i.e. how many positions its row holds already.
        """
        length = max(positions) + 1
        places = torch.tensor(positions, device=self._device)
        hidden_places = torch.arange(length, device=self._device) > places[:, None]
        mask = torch.zeros(hidden_places.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden_places, torch.finfo(self._dtype).min)
        logits = self._forward(
            torch.tensor(tokens, device=self._device)[:, None],
            attention_mask=mask[:, None, None],
            position_ids=places[:, None],
            past_key_values=self.cache.decoding(places, length),
            want_logits=True,
        )
        return logits[:, 0]

    @torch.inference_mode()
    def plain_logits(self, context: Int32Array) -> Tensor:
        """Logits [n, vocabulary] behind each token of a context [n], without any cache."""
        ids = torch.from_numpy(context.astype(np.int64))[None].to(self._device)
        return self._head.logits(ids, use_cache=False)[0]

    def _forward(self, input_ids: Tensor, *, want_logits: bool = False, **inputs: Any) -> Tensor:
        if want_logits or self._head.weight is None:
            return self._head.logits(input_ids, last=True, use_cache=True, **inputs)
        return self._head.hidden(input_ids, use_cache=True, **inputs)

    def check(self, state: State) -> None:
        """Raise WeightsError unless `state` fits the model: every tensor of it (a tied one under
        any of its names), the same shapes and kinds, all finite."""
        own = self._model.state_dict()
        unknown = sorted(set(state) - set(own))
        covered = {own[name].data_ptr() for name in state if name in own}
        missing = sorted(name for name, t in own.items() if t.data_ptr() not in covered)
        if unknown or missing:
            raise WeightsError(
                f"the weights do not fit the engine's {type(self._model).__name__}: "
                f"{len(missing)} missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
            )
        first_of: dict[int, Tensor] = {}
        for name, tensor in state.items():
            if tensor.shape != own[name].shape:
                raise WeightsError(
                    f"weight {name} has shape {tuple(tensor.shape)}, "
                    f"the engine's model wants {tuple(own[name].shape)}"
                )
            if tensor.is_floating_point() != own[name].is_floating_point():
                raise WeightsError(
                    f"weight {name} is {tensor.dtype}, the engine's model wants {own[name].dtype}"
                )
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise WeightsError(f"weight {name} holds NaN or infinity")
            first = first_of.setdefault(own[name].data_ptr(), tensor)
            if first is not tensor and not torch.equal(first, tensor):
                raise WeightsError(f"weight {name} is tied in the engine's model, but not here")

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Copy checked weights into the model, cast to its dtype."""
        own = self._model.state_dict()
        for name, tensor in state.items():
            own[name].copy_(tensor)

    @torch.inference_mode()
    def _verify(self) -> None:
        """Compare cached against plain logits, two rows of different length, two steps."""
        base = getattr(self._model, "base_model", self._model)
        lacking = {"position_ids", "past_key_values"} - set(
            inspect.signature(base.forward).parameters
        )
        if lacking:
            raise EngineError(
                f"{type(base).__name__} does not take {sorted(lacking)}; the engine needs both"
            )
        tolerance = 0.1 if torch.finfo(self._dtype).bits < 32 else 1e-3
        ids = torch.arange(7, device=self._device) % self.vocab_size
        self.cache.reserve(2, 7)
        prompt = ids.cpu().int().numpy()
        self.prefill([0, 1], [prompt[:4], prompt[:2]])
        for step in range(2):
            ends = [4 + step, 2 + step]
            cached = self.decode([int(ids[end]) for end in ends], ends).float()
            for end, logits in zip(ends, cached, strict=True):
                plain = self._head.logits(ids[None, : end + 1], last=True)[0, 0].float()
                size = float(plain[plain.isfinite()].abs().max()) if plain.isfinite().any() else 0.0
                if not torch.allclose(logits, plain, 0.0, tolerance * size, equal_nan=True):
                    raise EngineError(
                        f"{type(self._model).__name__}: logits with the engine's cache differ from "
                        "those without it; the local engine cannot serve this model"
                    )
        self.cache.clear()


def max_positions(config: Any) -> int | None:
    """The longest context that the engine serves, in tokens (None: no limit).

    Within a sliding window full and windowed attention agree, so the shortest window is a limit.
    Raises EngineError for layers that keep a state instead of keys and values.
    """
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds and window is not None and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise EngineError(
            f"{config.model_type} has layers of kind {sorted(unknown)}; the local engine serves "
            "full and sliding attention only"
        )
    limits = [getattr(config, "max_position_embeddings", None)]
    if "sliding_attention" in kinds:
        limits.append(window)
    return min((limit for limit in limits if limit is not None), default=None)


def buckets(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of contexts to be padded together, longest first: at most `budget` padded tokens in
    a bucket, and none that is less than half as long as its longest."""
    bucket: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if bucket:
            longest = lengths[bucket[0]]
            if (len(bucket) + 1) * longest > budget or 2 * lengths[i] < longest:
                yield bucket
                bucket = []
        bucket.append(i)
    if bucket:
        yield bucket
