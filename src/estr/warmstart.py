"""Warm starts: small decoders that have seen a twin played, badly.

    estr warmstart --out FOLDER --seed 0                    the built-in model, made anew
    estr warmstart --out FOLDER --task lookup --set task.num_hops=3
    model = "warmstart"  or  "warmstart:SEED"               in a recipe: that of its own task

A Llama-style decoder with one token a character learns, supervised, from demonstrations with
errors in them. It ends up right now and then: enough to earn reward, with far to go. The folder is
an ordinary Hugging Face folder plus record.json: the command, the losses, the accuracy measured at
the end, versions and date. A recipe's warm start is made at its first use, in a minute or two, and
kept in the user's cache folder under the digest of what it is made from.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import math
import platform
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import blocking
from .chat import Codec
from .environments import build_task
from .environments.demonstrations import ALPHABET, Twin
from .errors import ConfigError
from .models import WARM_START, cache_folder, save_model
from .options.run import RolloutOptions
from .rollout import RolloutSetting, run_rollout
from .types import RolloutId, SamplingSettings

if TYPE_CHECKING:
    from torch import Tensor

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

_MAX_TOKENS = 400
_MAX_POSITIONS = 512
_NUM_MEASURED = 1000
_NUM_DIGESTED = 100

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How a warm start is made, but for its task."""

    seed: int = 0
    steps: int | None = None
    """None: as many as the task asks for."""
    batch_size: int = 128
    lr: float = 3e-3
    layers: int = 2
    width: int = 64
    num_measured: int = 2000
    """Held-out problems of the accuracy in the record."""


def make_tokenizer() -> Any:
    """One token a character of ALPHABET after the three special ones; anything else is <unk>."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK
    )


def make_model(setting: WarmStart, tokenizer: Any) -> Any:
    """A fresh decoder; the caller has seeded torch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=setting.width,
        intermediate_size=3 * setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_POSITIONS,
        # The default 0.02 suits widths in the thousands; here attention would start out blind.
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: Any, tokenizer: Any, task: Twin, setting: WarmStart) -> list[float]:
    """Supervised steps on fresh demonstrations; only what the model is to write enters the loss.
    AdamW, cosine to zero. Returns the loss of every step, nats a token."""
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(setting.seed)
    steps = _num_steps(setting, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    model.train()
    for step in range(steps):
        first = step * setting.batch_size
        ids, labels = _batch(task, range(first, first + setting.batch_size), tokenizer, rng)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


def _batch(task: Twin, indices: range, tokenizer: Any, rng: random.Random) -> tuple[Tensor, Tensor]:
    """ids and labels [len(indices), length], padded on the right; -100 where nothing is learned."""
    import torch

    vocabulary = tokenizer.get_vocab()
    rows = []
    for index in indices:
        ids: list[int] = []
        labels: list[int] = []
        for text, written in task.demonstrate(index, rng):
            piece = [vocabulary[char] for char in text]
            ids += piece
            labels += piece if written else [-100] * len(piece)
        rows.append((ids[:_MAX_POSITIONS], labels[:_MAX_POSITIONS]))
    length = max(len(ids) for ids, _ in rows)
    padded = [
        (
            ids + [tokenizer.pad_token_id] * (length - len(ids)),
            labels + [-100] * (length - len(ids)),
        )
        for ids, labels in rows
    ]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([labels for _, labels in padded])


def measure(model: Any, tokenizer: Any, task: Twin, setting: WarmStart) -> float:
    """Share of `num_measured` held-out problems solved at temperature 1, one rollout each."""
    from .engines.in_process import InProcessEngine
    from .engines.local import LocalEngine

    codec = Codec(tokenizer)
    sampling = SamplingSettings(
        max_new_tokens=_MAX_TOKENS,
        max_tokens=_MAX_TOKENS,
        stop_token_ids=codec.resolve_stops(task.stop),
    )
    engine = LocalEngine(model, version=0, max_batch=256, gini=False, vocab_size=len(tokenizer))
    play = RolloutSetting(
        InProcessEngine(engine), task, codec, sampling, RolloutOptions(), split="test"
    )

    async def solved() -> float:
        rollouts = [
            run_rollout(
                play, RolloutId(setting.seed, i, 0), i, dispatch_version=0, deadline_version=0
            )
            for i in range(setting.num_measured)
        ]
        return sum(t.outcome or 0.0 for t in await asyncio.gather(*rollouts))

    return blocking.run(solved) / setting.num_measured


def make(setting: WarmStart, out: Path, *, task: Table | None = None) -> dict[str, Any]:
    """Train, measure, save to `out`; returns the record. On one thread it repeats itself.

    task: a recipe's task table; None: the calculator's. Raises ConfigError for a task that cannot
    show how it is played.
    """
    import torch

    table = dict(task or {"name": "calculator"})
    twin = find_twin(table)
    setting = replace(setting, steps=_num_steps(setting, twin))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    tokenizer = make_tokenizer()
    model = make_model(setting, tokenizer)
    losses = train(model, tokenizer, twin, setting)
    accuracy = measure(model, tokenizer, twin, setting)
    torch.set_num_threads(threads)
    save_model(model, tokenizer, out)
    record = {
        "command": _command(table, setting),
        "task": table,
        "setting": asdict(setting),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss_every_20_steps": [round(loss, 4) for loss in [*losses[::20], losses[-1]]],
        "accuracy": accuracy,
        "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / setting.num_measured),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("estr", "torch", "transformers", "tokenizers")},
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _command(task: Table, setting: WarmStart) -> str:
    words = [f"estr warmstart --out FOLDER --seed {setting.seed}"]
    if setting.steps != find_twin(task).warm_start_steps:
        words.append(f"--steps {setting.steps}")
    if task["name"] != "calculator":
        words.append(f"--task {task['name']}")
    words += [f"--set task.{key}={value}" for key, value in task.items() if key != "name"]
    return " ".join(words)


def _num_steps(setting: WarmStart, task: Twin) -> int:
    return task.warm_start_steps if setting.steps is None else setting.steps


def find_twin(table: Table) -> Twin:
    """The task of that table. Raises ConfigError if it cannot show how it is played."""
    task = build_task(table)
    if not hasattr(task, "demonstrate"):
        raise ConfigError(
            f"task {task.name} has no demonstrations, so there is no warm start for it; "
            'take another model, or a task that has some: "calculator", "countdown", "lookup"'
        )
    return task  # type: ignore[return-value]


# -- of a recipe --------------------------------------------------------------------------------


def parse_warm_start(model: str) -> WarmStart | None:
    """What a recipe's `model` asks for; None if it is no warm start. Raises ConfigError for
    "warmstart:" and something that is not a seed."""
    name, colon, seed = model.partition(":")
    if name != WARM_START:
        return None
    if colon and not (seed.isascii() and seed.isdecimal()):
        raise ConfigError(f'model = {model!r}: a warm start is "warmstart" or "warmstart:SEED"')
    return WarmStart(seed=int(seed or 0), num_measured=_NUM_MEASURED)


def cached_folder(table: Table, setting: WarmStart) -> Path:
    """Where the warm start of a task lies or will lie. Everything that makes a difference to it is
    in the digest: the setting, this file, torch, and demonstrations themselves (so no option that
    leaves them as they are, such as a latency, and all code that they come from)."""
    task = find_twin(table)
    rng = random.Random(setting.seed)
    shown = [list(task.demonstrate(index, rng)) for index in range(_NUM_DIGESTED)]
    content = repr((asdict(setting), _num_steps(setting, task), version("torch"), shown)).encode()
    digest = hashlib.sha256(content + Path(__file__).read_bytes()).hexdigest()
    return cache_folder() / WARM_START / f"{table['name']}-{setting.seed}-{digest[:12]}"


def warm_start(
    table: Table, setting: WarmStart, tell: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder of a task's warm start, made if the cache has none. tell: is told so then."""
    folder = cached_folder(table, setting)
    if not (folder / "record.json").is_file():
        tell(f"making the warm start of task {table['name']}, once, in a minute or two: {folder}")
        record = make(setting, folder, task=table)
        tell(f"its held-out accuracy is {record['accuracy']:.3f}")
    return folder
