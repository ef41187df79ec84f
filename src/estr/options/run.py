"""Options of everything that is not a correction: one dataclass for each table of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .corrections import require


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless the value is finite and above 0."""
    require(value > 0 and math.isfinite(value), f"{name} must be finite and above 0, not {value}")


_LONGEST_S = 1e9
"""Thirty years; clocks and locks of the libraries that wait overflow soon after."""

_LEAST_TEMPERATURE = 1e-6

MOST_ROLLOUTS = 10_000_000
"""Of one evaluation, which keeps a record of each in memory."""

_MOST_PROCESSES = 1024
"""Of one kind, and threads in one of them."""


def require_seconds(name: str, value: float) -> None:
    """Raise ValueError unless the value is a time that can be waited for."""
    require_positive(name, value)
    require(value <= _LONGEST_S, f"{name} must be at most {_LONGEST_S:g} seconds, not {value:g}")


def _require_temperature(value: float) -> None:
    require_positive("temperature", value)
    require(
        value >= _LEAST_TEMPERATURE,
        f"temperature must be at least {_LEAST_TEMPERATURE:g}, not {value:g}: logits divided by "
        "less leave float32",
    )


def _require_number_of(name: str, value: int) -> None:
    _at_least(name, value, 1)
    require(value <= _MOST_PROCESSES, f"{name} must be at most {_MOST_PROCESSES}, not {value}")


def _at_least(name: str, value: int, least: int) -> None:
    require(value >= least, f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How training rollouts are drawn. Only a temperature: whatever truncates or reshapes the
    distribution (top_p, top_k, penalties) would make the recorded log-probs those of another
    policy, so there is no key for it."""

    temperature: float = 1.0
    """Divides the logits before the softmax; above 0."""
    max_new_tokens: int = 64
    """Budget of one turn, tokens."""
    max_tokens: int = 512
    """Budget of a whole trajectory, prompt and tool output included, tokens; what a chat template
    makes the model read again in a new segment counts again."""

    def __post_init__(self) -> None:
        _require_temperature(self.temperature)
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        _at_least("max_tokens", self.max_tokens, 2)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The process that generates."""

    name: Literal["local", "vllm"] = "local"
    """What draws the tokens; local: estr's own engine; vllm: vLLM, docs/vllm.md. Either runs in a
    process of its own."""
    python: str = ".venv-vllm/bin/python"
    """vllm only: the interpreter of the virtual environment that has vLLM; `make vllm` makes it."""
    kv_cache_gb: float = 1.0
    """vllm only: room for keys and values, GB; it must hold the longest context at least once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the sampler's forward pass; log-probs and entropies are float32 in any case."""
    quantization: Literal["none", "int8", "int4", "int3"] = "none"
    """local only: the sampler's linear weights, but for the output layer, rounded to so many bits
    per output row. Real rounding without integer kernels: a mismatch to train under, no saving. A
    model that has most of its weights elsewhere (GPT-2, fused experts) is refused."""
    count: int = 1
    """Engines that share the rollouts; more than one needs placement = "ray"."""
    max_batch: int = 128
    """Requests that run at once, in each engine."""
    threads: int = 1
    """Threads of each engine process."""
    device: str = "cpu"
    """A torch device, such as "cuda:0"."""
    weight_transfer: Literal["file", "gloo", "nccl", "ipc"] = "file"
    """vllm only: how new weights get from the trainer into the engine, docs/vllm.md. file: through
    the store's files. The others come out of the trainer's memory by vLLM's weight transfer: gloo
    over sockets, on any device; nccl between two GPUs; ipc within one."""
    gini: bool = True
    """Record gini = sum p(1-p) beside the entropy, for corrections whose scale it is."""
    timeout_s: float = 120.0
    """The engine is declared hung when it has not answered for this long."""

    def __post_init__(self) -> None:
        _require_number_of("count", self.count)
        _at_least("max_batch", self.max_batch, 1)
        _require_number_of("threads", self.threads)
        require_seconds("timeout_s", self.timeout_s)
        require_positive("kv_cache_gb", self.kv_cache_gb)
        require(
            self.quantization == "none" or self.name == "local",
            f"quantization = {self.quantization!r} needs name = 'local', not {self.name!r}: "
            "vLLM is given the weights as they were trained",
        )


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """The process that learns."""

    lr: float = 5e-4
    """Learning rate of AdamW after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    adam_eps: float = 1e-8
    """Added to the denominator of AdamW's update."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """What follows the warm-up; linear and cosine reach 0 after the last step."""
    grad_clip: float = 1.0
    """Bound on the global gradient norm; inf: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; the master weights and the optimizer stay float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model's own parameters are kept in. bfloat16 takes half the memory; float32 masters
    of what is trained, and gradients summed in float32, stay beside them. Needs dtype bfloat16."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less
    memory, about a third more time, the same gradients."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """sdpa: PyTorch's own, which on a GPU in bfloat16 is a flash kernel already.
    flash_attention_2 needs a GPU, dtype bfloat16 and the package flash-attn."""
    token_budget: int = 4096
    """Padded tokens in one micro-batch, at most."""
    threads: int = 1
    """Threads of the trainer process, of each where there are several."""
    ranks: int = 1
    """Processes that train together, each with a share of the batch and a shard of parameters and
    moments (FSDP2); docs/several-ranks.md."""
    device: str = "cpu"
    """A torch device, such as "cuda:0"; with several ranks that of the first, the others take those
    that follow."""
    timeout_s: float = 1800.0
    """The trainer is declared hung when one batch takes longer than this."""

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)
        require(all(0 <= b < 1 for b in self.betas), f"betas must be in [0, 1), not {self.betas}")
        require_positive("adam_eps", self.adam_eps)
        require(
            self.weight_decay >= 0 and math.isfinite(self.weight_decay),
            f"weight_decay must be finite and at least 0, not {self.weight_decay}",
        )
        _at_least("warmup_steps", self.warmup_steps, 0)
        require(self.grad_clip > 0, f"grad_clip must be above 0, not {self.grad_clip}")
        _at_least("token_budget", self.token_budget, 16)
        _require_number_of("threads", self.threads)
        _require_number_of("ranks", self.ranks)
        require(
            self.ranks == 1 or self.param_dtype == "float32",
            f"ranks = {self.ranks} needs param_dtype = 'float32', not {self.param_dtype!r}: "
            "the float32 parameters are sharded; dtype = 'bfloat16' computes in bfloat16 on them",
        )
        require(
            self.param_dtype == "float32" or self.dtype == "bfloat16",
            "param_dtype = 'bfloat16' needs dtype = 'bfloat16': arithmetic in float32 on rounded "
            "parameters would gain nothing",
        )
        require(
            self.attention != "flash_attention_2"
            or (self.dtype == "bfloat16" and self.device != "cpu"),
            f"attention = 'flash_attention_2' needs dtype = 'bfloat16' and a GPU, not "
            f"{self.dtype} on {self.device}; leave it at 'sdpa'",
        )
        require_seconds("timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How per-token terms become one number, and rewards become advantages."""

    aggregation: Literal["batch", "group"] = "batch"
    """batch: one token mean over the batch. group: token mean within each group, then the mean
    over groups (the formula as printed)."""
    advantage: Literal["grpo", "no_std", "leave_one_out"] = "grpo"
    """grpo: (reward - mean) / (std with n-1, + 1e-6). no_std: reward - mean. leave_one_out:
    reward - mean of the others."""
    variance_of: Literal["outcome", "reward"] = "outcome"
    """What must differ within a group for it to teach anything: the raw outcome of the task, or the
    reward, so that shaped parts (a well-formed call) teach where no outcome differs."""


@dataclass(frozen=True, slots=True)
class CurriculumOptions:
    """Problems and tasks chosen by how often they are solved, as found when their groups were
    trained on (or given up by dynamic sampling)."""

    skip: int = 0
    """A problem whose last pass rate was not between low and high is passed over when its turn
    comes again, at most so often in a row; 0: never."""
    low: float = 0.0
    """Up to this pass rate a problem counts as too hard."""
    high: float = 1.0
    """From this pass rate on a problem counts as mastered."""
    floor: float = 1.0
    """The weight of each of several tasks is multiplied by 4 p (1 - p), but at least by this, p
    being its running pass rate; 1: weights stay as they are."""

    def __post_init__(self) -> None:
        _at_least("skip", self.skip, 0)
        require(
            0 <= self.low < self.high <= 1,
            f"low and high must be pass rates, 0 <= low < high <= 1, not {self.low}, {self.high}",
        )
        require(0 < self.floor <= 1, f"floor must be in (0, 1], not {self.floor}")


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Low-rank adapters beside the linear layers, which alone are trained (extra `lora`, by peft).
    Published and saved weights have them merged in; `estr export --adapter` writes them alone."""

    rank: int = 0
    """Of the adapters; 0: none, the whole model is trained."""
    alpha: float = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers, such as "q_proj"; empty: every linear layer but the output layer."""

    def __post_init__(self) -> None:
        _at_least("rank", self.rank, 0)
        require_positive("alpha", self.alpha)


KlEstimator = Literal["k1", "k3"]


@dataclass(frozen=True, slots=True)
class KlOptions:
    """A price on the distance from the initial weights, which are kept as a frozen reference."""

    coefficient: float = 0.0
    """Reward per nat that the distance costs; 0: none, and no reference is kept."""
    estimator: KlEstimator = "k1"
    """With d = policy - reference log-prob of a token: k1 is d, k3 is exp(-d) - 1 + d (GRPO).
    docs/mathematics.md says what the gradient of each is."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of its own on every trained token. reward: the sum over a rollout's tokens, at
    their draw, is taken from its reward before advantages are computed; the outcome stays."""

    def __post_init__(self) -> None:
        require(
            self.coefficient >= 0 and math.isfinite(self.coefficient),
            f"coefficient must be finite and at least 0, not {self.coefficient}",
        )


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """Limits of one rollout."""

    timeout_s: float = 300.0
    """Wall time of a whole trajectory; beyond it the status is `timeout`."""
    step_timeout_s: float = 60.0
    """Wall time of one answer of the environment; beyond it the status is `env_error`."""
    max_attempts: int = 2
    """How often a member is tried when engine, environment or grader fail."""
    max_failed_groups: int = 64
    """The run stops when this many groups in a row failed, since then something is broken."""
    max_filtered_groups: int = 0
    """Dynamic sampling (DAPO): groups that would teach nothing are given up and others dispatched
    in their place, at most this many between two batches; 0: all are trained on."""
    overlong_buffer: int = 0
    """A rollout that comes nearer than this many tokens to the end of its budget loses reward, the
    more the nearer (DAPO's soft overlong punishment); 0: none does. The outcome stays as it is."""
    overlong_penalty: float = 1.0
    """What one loses that has used up its budget."""

    def __post_init__(self) -> None:
        require_seconds("timeout_s", self.timeout_s)
        require_seconds("step_timeout_s", self.step_timeout_s)
        _at_least("max_attempts", self.max_attempts, 1)
        _at_least("max_filtered_groups", self.max_filtered_groups, 0)
        _at_least("overlong_buffer", self.overlong_buffer, 0)
        require_positive("overlong_penalty", self.overlong_penalty)
        _at_least("max_failed_groups", self.max_failed_groups, 1)


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Held-out evaluation during training and at its end."""

    every: int = 25
    """Optimizer steps between two evaluations; 0: only at the start and the end."""
    problems: int = 256
    """Problems of the "test" split in one evaluation."""
    k: int = 1
    """Rollouts of each problem."""
    temperature: float = 1.0
    """Of the draws of an evaluation; 0: argmax."""
    final_problems: int = 1024
    """Problems of the evaluations at the start and at the end."""
    timeout_s: float = 300.0
    """The evaluator is declared hung when it has not answered for this long; an evaluation may take
    longer."""

    def __post_init__(self) -> None:
        require_seconds("timeout_s", self.timeout_s)
        _at_least("every", self.every, 0)
        for name in ("problems", "final_problems"):
            value = getattr(self, name)
            _at_least(name, value, 1)
            require(value <= MOST_ROLLOUTS, f"{name} must be at most {MOST_ROLLOUTS}, not {value}")
        _at_least("k", self.k, 1)
        require(
            self.temperature >= 0 and math.isfinite(self.temperature),
            f"temperature must be finite and at least 0, not {self.temperature}",
        )
        if self.temperature:
            _require_temperature(self.temperature)


@dataclass(frozen=True, slots=True)
class WandbOptions:
    """The metrics at Weights & Biases, too (extra `wandb`); metrics.jsonl and TensorBoard are
    written in any case."""

    project: str = ""
    """Name of the project there; empty: nothing goes there, and wandb is not imported."""
    entity: str = ""
    """User or team; empty: the default one."""
    mode: Literal["online", "offline"] = "online"
    """offline: kept in the run folder, for `wandb sync`."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The Ray cluster of placement = "ray" (extra `ray`); docs/ray.md."""

    address: str = "local"
    """local: a Ray of this run's own, on this machine, which ends with it; "auto": the cluster that
    this machine belongs to; else the address of its head, HOST:PORT."""
    start_timeout_s: float = 600.0
    """How long placing and starting all actors may take."""

    def __post_init__(self) -> None:
        _, _, port = self.address.rpartition(":")
        require(
            self.address in ("local", "auto")
            or ("://" not in self.address and port.isdecimal() and 0 < int(port) < 65536),
            f'address = {self.address!r} is neither "local", "auto" nor HOST:PORT',
        )
        require_seconds("start_timeout_s", self.start_timeout_s)


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """When the whole state of a run is saved, besides at its start and its end."""

    every_steps: int = 0
    """Optimizer steps between two checkpoints; 0: by time only."""
    every_s: float = 600.0
    """Seconds between two checkpoints."""
    keep: int = 2
    """How many are kept; an older one is deleted only after a newer one is complete."""

    def __post_init__(self) -> None:
        _at_least("every_steps", self.every_steps, 0)
        require_positive("every_s", self.every_s)
        _at_least("keep", self.keep, 1)
