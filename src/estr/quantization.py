"""Linear weights in few bits, as a sampler may have them: real rounding, no integer kernels.

Round-to-nearest, affine, per output row: with b bits a row has 2^b codes, evenly spaced from its
smallest to its largest value, one of them standing for exactly 0. The codes are turned back into
the weights' own type, in which the products are computed, so this costs and saves nothing; it makes
the mismatch between sampler and trainer of weight-only quantization.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .errors import ConfigError

Quantization = Literal["none", "int8", "int4", "int3"]

BITS: dict[str, int] = {"int8": 8, "int4": 4, "int3": 3}


class Quantized(NamedTuple):
    """codes: uint8 [out, in]; scales: [out, 1]; zeros: [out, 1], the code of 0, whole numbers."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def weight(self) -> Tensor:
        """What the codes stand for."""
        return (self.codes - self.zeros) * self.scales


def quantize_rows(weight: Tensor, bits: int) -> Quantized:
    """The codes of a weight [out, in] in 2 ... 8 bits. A row of zeros has scale 0; one that holds
    NaN or infinity stands for NaN. No gradient."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be in [2, 8], not {bits}")
    largest = 2**bits - 1
    weight = weight.detach()
    low = weight.amin(dim=1, keepdim=True).clamp(max=0.0)
    high = weight.amax(dim=1, keepdim=True).clamp(min=0.0)
    scales = (high - low) / largest
    divisors = torch.where(scales > 0, scales, 1.0)
    zeros = (-low / divisors).round()
    codes = ((weight / divisors).round() + zeros).clamp(0, largest)
    return Quantized(codes.to(torch.uint8), scales, zeros)


def inner_linear_weights(model: Any) -> frozenset[str]:
    """Names in model's state dict of the weights of its linear layers, but for the output layer
    (which may be tied to the embedding, and is usually left alone)."""
    output = model.get_output_embeddings()
    outside = None if output is None else output.weight
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight is not outside
    )


def require_inner_linear_weights(model: Any, quantization: Quantization) -> frozenset[str]:
    """`inner_linear_weights`, where they are at least half of the model's inner weights: of all
    parameters of two or more dimensions, but for embeddings and output layer. Raises ConfigError
    where rounding them would leave most of the model as it is."""
    names = inner_linear_weights(model)
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = model.get_output_embeddings()
    outside |= set() if output is None else {id(output.weight)}
    inner = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in outside
    }
    rounded, total = sum(inner.get(name, 0) for name in names), sum(inner.values())
    if not rounded or 2 * rounded < total:
        raise ConfigError(
            f"engine.quantization = {quantization!r} rounds linear layers (torch.nn.Linear), and "
            f"{type(model).__name__} has only {rounded} of its {total} inner weights in such; set "
            'engine.quantization = "none", or take a model that is built of them'
        )
    return names


def quantized_state(
    state: Mapping[str, Tensor], names: Collection[str], quantization: Quantization
) -> dict[str, Tensor]:
    """The state with the weights of these names rounded, in float32 and back in their own type;
    "none": as it is."""
    if quantization == "none":
        return dict(state)
    bits = BITS[quantization]
    return {
        name: quantize_rows(tensor.float(), bits).weight().to(tensor.dtype)
        if name in names
        else tensor
        for name, tensor in state.items()
    }
