"""Starting vLLM the way that `estr.engines.vllm` needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..options.run import EngineOptions

_EXTENSION = "estr.engines.vllm_extension.EstrWorker"
_GLOO = "estr_gloo"
_GLOO_ENGINE = ("estr.engines.vllm_gloo", "GlooWeightTransferEngine")
"""Ours among vLLM's engines for weight transfer: its name there, module and class."""


def start_vllm(folder: Path, options: EngineOptions) -> Any:
    """vLLM V1, its core in this very process, so that nothing happens between two steps but what
    is asked for. Raises ConfigError where vLLM is not installed, was built for another kind of
    device, or has too little room for keys and values."""
    try:
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine.python = {options.python!r} finds no module {error.name!r} on the machine "
            "that this engine was placed on; install vLLM there too (docs/vllm.md)"
        ) from error
    kind = options.device.partition(":")[0]
    if kind != current_platform.device_type:
        raise ConfigError(
            f"engine.device = {options.device!r}, but the vLLM of {options.python} runs on "
            f"{current_platform.device_type!r}; change engine.device, or engine.python"
        )
    backend: str = options.weight_transfer
    if backend == "gloo":
        backend = _GLOO
        WeightTransferEngineFactory.register_engine(backend, *_GLOO_ENGINE)
    arguments = EngineArgs(
        model=str(folder.resolve()),
        skip_tokenizer_init=True,
        generation_config="vllm",  # nothing of the folder's own reshapes the distribution
        dtype=options.dtype,
        max_model_len=-1,  # the model's own limit, or what the cache has room for
        kv_cache_memory_bytes=int(options.kv_cache_gb * 1e9),
        max_num_seqs=options.max_batch,
        enable_prefix_caching=True,
        # Only whole blocks are shared; vLLM's 128 on a CPU would share no short prompt.
        block_size=32 if kind == "cpu" else None,
        scheduling_policy="priority",
        async_scheduling=False,
        enforce_eager=kind == "cpu",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        worker_extension_cls=_EXTENSION,
        weight_transfer_config=None if backend == "file" else WeightTransferConfig(backend),
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except ValueError as error:
        # What vLLM advises whenever the cache is too small; a recipe has no such option.
        if "gpu_memory_utilization" not in str(error):
            raise
        raise ConfigError(
            f"engine.kv_cache_gb = {options.kv_cache_gb:g} has too little room for the keys and "
            f"values of one context; raise it (vLLM says: {error})"
        ) from error
