"""What the sampler computes in: a real mismatch between sampler and trainer, at will.

    float32         the trainer's own weights and kernels
    bfloat16        weights and activations in bfloat16, torch's own bfloat16 kernels
    int8/int4/int3  every linear weight quantized per output row and de-quantized; the products
                    themselves are float32, as in weight-only quantization without fused kernels

Round-to-nearest, affine: with b bits a row has 2^b codes, evenly spaced from its smallest to its
largest value, one of them standing for exactly 0. Embeddings and norms stay as they are; the output
matrix is quantized like every other linear weight.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Arithmetic = Literal["float32", "bfloat16", "int8", "int4", "int3"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)

_BITS: dict[str, int] = {"int8": 8, "int4": 4, "int3": 3}


class Quantized(NamedTuple):
    """codes: uint8 [out, in]; scales: [out, 1]; zeros: [out, 1], the code of 0, whole numbers."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def weight(self) -> Tensor:
        """What the codes stand for."""
        return (self.codes - self.zeros) * self.scales


def quantize_rows(weight: Tensor, bits: int) -> Quantized:
    """The codes of a weight [out, in] in 2 ... 8 bits. A row of zeros has scale 0. No gradient."""
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


def as_computed(weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    """A linear weight [out, in] as the sampler has it: bfloat16, or float32 after whatever the
    arithmetic does to it."""
    if arithmetic == "float32":
        return weight.detach().clone()
    if arithmetic == "bfloat16":
        return weight.detach().bfloat16()
    return quantize_rows(weight, _BITS[arithmetic]).weight()


def activation_dtype(arithmetic: Arithmetic) -> torch.dtype:
    """What activations, embeddings and norms are in."""
    return torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
