"""Low-rank adapters (LoRA), by peft: the weights of the model stay, a small product beside each
linear layer is trained.

    W x  becomes  W x + (alpha / rank) * B A x        A random, B zero at the start

Source: Hu et al., "LoRA: Low-rank adaptation of large language models" (arXiv 2106.09685), section
4.1. peft is the extra `lora`; it is imported only where adapters are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import ConfigError
from .options.run import LoraOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

_ADAPTER = "default"
_BASE = ".base_layer."


def require_peft() -> None:
    """Raises ConfigError, with the remedy, where peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora.rank needs the package peft: pip install 'estr[lora]'")


def add_adapters(model: nn.Module, options: LoraOptions, *, seed: int) -> None:
    """Put adapters into the model's linear layers, its output layer left out; everything else no
    longer requires a gradient. Adapters are float32, and the same for the same seed.

    Raises ConfigError where peft is absent or finds no layer of the names in lora.targets.
    """
    require_peft()
    from peft import inject_adapter_in_model

    config = _config(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora.targets = {list(options.targets)}: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _config(options: LoraOptions) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(options.targets) or "all-linear",
        lora_dropout=0.0,  # the policy's log-probs must be those of the policy
        bias="none",
        task_type="CAUSAL_LM",
    )


def save_adapter(
    state: Mapping[str, Tensor], options: LoraOptions, *, base: Path, folder: Path
) -> None:
    """Adapters, as a checkpoint keeps them (`Parameters.saved`), as
    peft's own folder, which `PeftModel.from_pretrained(model, folder)` puts beside the weights of
    the model in `base`. Raises OSError where it cannot be written.
    """
    require_peft()
    from safetensors.torch import save_file

    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in state}
    config = _config(dataclasses.replace(options, targets=tuple(sorted(layers))))
    config.base_model_name_or_path = str(base.absolute())
    config.inference_mode = True
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tensors = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in state.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))


@torch.no_grad()
def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of the model with its adapters as one of the plain model: W + (alpha / rank) B A, in
    float32, under W's own name."""
    merged = {
        name.replace(_BASE, "."): tensor
        for name, tensor in state.items()
        if f".{_ADAPTER}." not in name
    }
    for name, layer in _adapted(model):
        weight = f"{name}.weight"
        merged[weight] = merged[weight].float() + layer.get_delta_weight(_ADAPTER).float()
    return merged


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it came, for a while."""
    layers = [layer for _, layer in _adapted(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
