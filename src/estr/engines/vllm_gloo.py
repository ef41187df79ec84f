"""An engine for vLLM's weight transfer that needs no GPU: torch.distributed over sockets.

It lives in vLLM's worker, made there by vLLM's own factory, and follows the same steps as vLLM's
engines for NCCL and CUDA IPC; `estr.engines.transports.Gloo` is at the other end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from .transports import broadcast, gloo_group


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc] # vllm is not there
    """meeting: a file that both sides see. timeout_s: of the meeting and of every tensor."""

    meeting: str
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Of all tensors, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives every tensor on the CPU and loads it at once."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self._group = gloo_group(init_info.meeting, 1, init_info.timeout_s)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class asks for one in any case
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        self.model.load_weights(self._tensors(update_info))

    def _tensors(self, info: GlooUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self._group, tensor)
            yield name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None
