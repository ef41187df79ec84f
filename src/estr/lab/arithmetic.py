"""What the sampler computes in: a real mismatch between sampler and trainer, at will.

    float32         the trainer's own weights and kernels
    bfloat16        weights and activations in bfloat16, torch's own bfloat16 kernels
    int8/int4/int3  every linear weight quantized per output row and de-quantized; the products
                    themselves are float32, as in weight-only quantization without fused kernels

Rounding is that of `estr.quantization`. Embeddings and norms stay as they are; the output matrix is
quantized like every other linear weight.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..quantization import BITS, quantize_rows

Arithmetic = Literal["float32", "bfloat16", "int8", "int4", "int3"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)


def as_computed(weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    """A linear weight [out, in] as the sampler has it: bfloat16, or float32 after whatever the
    arithmetic does to it."""
    if arithmetic == "float32":
        return weight.detach().clone()
    if arithmetic == "bfloat16":
        return weight.detach().bfloat16()
    return quantize_rows(weight, BITS[arithmetic]).weight()


def activation_dtype(arithmetic: Arithmetic) -> torch.dtype:
    """What activations, embeddings and norms are in."""
    return torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
