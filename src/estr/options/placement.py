"""Where processes run and how weights reach them: what may not be asked for together."""

from __future__ import annotations

from .corrections import require
from .run import EngineOptions, RayOptions, TrainerOptions


def check_placement(
    placement: str,
    engine: EngineOptions,
    trainer: TrainerOptions,
    ray: RayOptions,
    *,
    deterministic: bool,
) -> None:
    """Raise ValueError where `placement` cannot be had with the other options."""
    if placement == "local":
        require(
            engine.count == 1,
            f"engine.count = {engine.count} needs placement = 'ray', which starts a Ray of its own "
            "on this machine unless ray.address says otherwise",
        )
        require(
            ray.address == "local",
            f"ray.address = {ray.address!r} needs placement = 'ray': without it every process runs "
            "on this machine; set placement, or leave ray.address out",
        )
        return
    require(
        engine.weight_transfer == "file",
        f"placement = 'ray' needs engine.weight_transfer = 'file', not "
        f"{engine.weight_transfer!r}: weights come out of Ray's object store",
    )
    require(
        not deterministic,
        "placement = 'ray' needs deterministic = false: an engine that may be replaced, wherever "
        "there is room, follows no recorded schedule",
    )
    for key, device in (("engine", engine.device), ("trainer", trainer.device)):
        require(
            device in ("cpu", "cuda", "cuda:0"),
            f"placement = 'ray' needs {key}.device = 'cpu' or 'cuda:0', not {device!r}: every "
            "actor sees only the GPU that Ray has given to it",
        )


def check_weight_transfer(engine: EngineOptions, trainer: TrainerOptions) -> None:
    """Raise ValueError where `engine.weight_transfer` cannot work between these two."""
    way = engine.weight_transfer
    if way == "file":
        return
    asked = f"engine.weight_transfer = {way!r}"
    require(
        engine.name == "vllm",
        f"{asked} needs engine.name = 'vllm', not {engine.name!r}: it is vLLM's own; leave it at "
        "'file'",
    )
    if way == "gloo":
        return
    kinds = {device.partition(":")[0] for device in (engine.device, trainer.device)}
    found = f"engine.device = {engine.device!r} and trainer.device = {trainer.device!r}"
    require(
        kinds == {"cuda"},
        f"{asked} needs CUDA devices, not {found}; set both, or say 'file' or 'gloo', which "
        "need none",
    )
    first = {"cuda": "cuda:0"}
    on_one = first.get(engine.device, engine.device) == first.get(trainer.device, trainer.device)
    require(
        on_one == (way == "ipc"),
        f"{asked} needs {'one GPU for both' if way == 'ipc' else 'two GPUs'}, not {found}; say "
        f"{'nccl' if way == 'ipc' else 'ipc'!r}, or change a device",
    )
    require(
        way != "nccl" or trainer.ranks == 1,
        f"{asked} needs trainer.ranks = 1, not {trainer.ranks}: two NCCL communicators at work on "
        "one GPU may wait for each other for ever; say 'file' or 'gloo'",
    )
