"""What is trained of a model, and how it becomes weights that others can load.

    model (float32 or bfloat16) --backward--> gradients --collect--> float32 masters --AdamW-->
          ^                                                              |
          +------------------------- write_back -------------------------+--published--> engines

Where the model computes with float32 parameters these are their own masters. With adapters
(`estr.adapters`) only those are trained and saved; what is published is merged, so that nobody
downstream needs to know of them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from .adapters import merged_state
from .ranks import placed_like

if TYPE_CHECKING:
    from torch import Tensor


class Parameters:
    """The trained parameters of `model`. masters: float32 tensors by name, for the optimizer.

    dtype: of the parameters that the model computes with. bfloat16: the float32 values that the
    model came with become the masters, and its own parameters are rounded; trained parameters that
    are adapters stay float32. has_adapters: only what requires a gradient is saved.
    """

    def __init__(
        self, model: torch.nn.Module, *, dtype: torch.dtype, has_adapters: bool = False
    ) -> None:
        self.model = model
        self.has_adapters = has_adapters
        self.masters: dict[str, Tensor] = {}
        self._rounded: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            trained = parameter.requires_grad
            if trained:
                self.masters[name] = parameter
            if dtype == torch.float32 or (trained and has_adapters):
                continue
            if trained:
                self._rounded[name] = parameter
                self.masters[name] = parameter.detach().clone().requires_grad_()
            # Buffers stay as they are: rotary frequencies do not survive rounding.
            parameter.data = parameter.data.to(dtype)

    def look_up(self) -> None:
        """After the model's parameters have been replaced (`Ranks.shard`), which must be float32:
        the new ones are the masters."""
        assert not self._rounded
        self.masters = {n: p for n, p in self.model.named_parameters() if n in self.masters}

    def collect_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the masters, in float32."""
        for name, parameter in self._rounded.items():
            if parameter.grad is None:
                continue
            master, gradient = self.masters[name], parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def forget_gradients(self) -> None:
        """Drop those of a micro-batch that were not collected."""
        for parameter in self._rounded.values():
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model, after they have changed."""
        for name, parameter in self._rounded.items():
            parameter.copy_(self.masters[name])

    def published(self) -> dict[str, Tensor]:
        """Parameters (tied ones once) and persistent buffers under the names of the plain model,
        with the digits of the masters, adapters merged; sharded where those are."""
        state = self._state()
        return merged_state(self.model, state) if self.has_adapters else state

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: as published; of a model with adapters only those."""
        if self.has_adapters:
            return {name: master.detach() for name, master in self.masters.items()}
        return self._state()

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Put a saved state back."""
        for name, own in self.saved().items():
            own.copy_(placed_like(own, state[name]))
        self.write_back()

    def _state(self) -> dict[str, Tensor]:
        kept = self.model.state_dict()
        buffers = {name: b for name, b in self.model.named_buffers() if name in kept}
        tensors = {**dict(self.model.named_parameters()), **self.masters, **buffers}
        return {name: t.detach() for name, t in tensors.items()}


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 of a model's parameters, their names included."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        raw = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.hexdigest()
