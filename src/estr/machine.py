"""Does this machine have what a recipe asks for? Asked before anything is computed."""

from __future__ import annotations

import importlib.util
import os

from .adapters import require_peft
from .config import Recipe
from .engines.interpreter import require_interpreter
from .errors import ConfigError
from .ray_head import require_head

_PROCESSES_PER_CORE = 8
"""Each holds a whole model at its start; more of them only wait for each other."""


def check_packages(recipe: Recipe) -> None:
    """Raises ConfigError, with the command that installs it, where a package of an option that is
    used is not installed."""
    if recipe.placement == "local" or recipe.ray.address == "local":
        require_interpreter(recipe.engine)  # else it is the engines' nodes that must have it
    if recipe.lora.rank:
        require_peft()
    if recipe.placement == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("placement = 'ray' needs the package ray: pip install 'estr[ray]'")
    if recipe.wandb.project and importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb.project needs the package wandb: pip install 'estr[wandb]'")
    if (
        recipe.trainer.attention == "flash_attention_2"
        and importlib.util.find_spec("flash_attn") is None
    ):
        raise ConfigError(
            "trainer.attention = 'flash_attention_2' needs the package flash-attn: pip install "
            "flash-attn, or leave it at 'sdpa', which has a flash kernel of its own"
        )


def check_devices(recipe: Recipe) -> None:
    """Raises ConfigError where a device is none that torch knows, or is not in this machine, or
    where there would be far more processes than cores; of a cluster, which only Ray knows, where
    it has no head at its address."""
    import torch

    if recipe.placement == "ray" and recipe.ray.address != "local":
        require_head(recipe.ray.address)
        return
    # vLLM has a torch of its own, and sees for itself what that one finds.
    keys = ("trainer",) if recipe.engine.name == "vllm" else ("engine", "trainer")
    for key in keys:
        name = getattr(recipe, key).device
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(
                f'{key}.device = {name!r} is no device of torch; say "cpu" or "cuda:0"'
            ) from error
        if device.type == "cpu":
            continue
        module = getattr(torch, device.type, None)
        found = module.device_count() if module is not None and module.is_available() else 0
        number = recipe.trainer.ranks if key == "trainer" else 1
        if (device.index or 0) + number > found:
            taken = f" with trainer.ranks = {number}" if number > 1 else ""
            raise ConfigError(
                f"{key}.device = {name!r}{taken}: torch finds {found} such devices here; set it to "
                '"cpu", or install a torch that is built for the device'
            )
    ranks, engines, cores = recipe.trainer.ranks, recipe.engine.count, os.cpu_count() or 1
    if ranks + engines > _PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"trainer.ranks = {ranks} and engine.count = {engines} are {ranks + engines} processes "
            f"on the {cores} cores of this machine, at most {_PROCESSES_PER_CORE * cores} are "
            "started; lower them, or join a cluster by ray.address"
        )
