"""Makes the built-in model: a small decoder that has seen the calculator used, badly.

    estr warmstart --out FOLDER --seed 0

A Llama-style decoder with one token a character learns, supervised, from demonstrations in which
22 % of the turns are wrong. It ends up right about two times in five: enough to earn reward now
and then, with far to go. The folder is an ordinary Hugging Face folder plus record.json: the
command, the losses, the accuracy measured at the end, versions and date.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import platform
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat import Codec
from .environment import Action
from .environments.calculator import CALL_ERROR, CalculatorOptions, CalculatorTask
from .models import save_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789+=[].!-*/ \n"
"""One token a character, after the three special ones; 24 in all. The calculator uses 16."""

_MAX_TOKENS = 120

Span = tuple[str, bool]
"""A piece of a demonstration, and whether the model is to write it."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How the model is made."""

    seed: int = 0
    steps: int = 300
    batch_size: int = 128
    lr: float = 3e-3
    error_rate: float = 0.22
    """Share of demonstrated turns that are wrong."""
    layers: int = 2
    width: int = 64
    num_measured: int = 2000
    """Held-out problems of the accuracy in the record."""


def make_tokenizer() -> Any:
    """One token a character of ALPHABET; anything else is <unk>."""
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
        max_position_embeddings=512,
        # The default 0.02 suits widths in the thousands; here attention would start out blind.
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def demonstrate(
    task: CalculatorTask, index: int, error_rate: float, rng: random.Random
) -> Iterator[Span]:
    """One rollout of training problem `index` by a demonstrator who, at a rate of error_rate a
    turn, copies a digit wrongly, takes a wrong number, or forgets the plus sign of a call (and then
    tries again). It goes on from whatever the tool answers."""
    first, *others = (task.written(term) for term in task.terms("train", index))
    yield "+".join([first, *others]) + "=", False
    total = first
    for term in others:
        answer = CALL_ERROR
        while answer == CALL_ERROR:
            call = f"[{total}+{term}"
            if rng.random() < error_rate:
                call = _spoilt(call, [first, *others], rng)
            answer = task.call(call)
            yield call + "]", True
            yield answer, False
        total = answer
    spoilt = rng.random() < error_rate
    yield (_wrong_digit(total, rng) if spoilt else total) + ".", True


def _spoilt(call: str, numbers: list[str], rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return call.replace("+", "")
    if kind == 1:
        left, _, right = call.partition("+")
        other = rng.choice([n for n in numbers if n != right] or numbers)
        return f"{left}+{other}"
    return _wrong_digit(call, rng)


def _wrong_digit(text: str, rng: random.Random) -> str:
    place = rng.choice([i for i, char in enumerate(text) if char.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != text[place]])
    return text[:place] + digit + text[place + 1 :]


def train(model: Any, tokenizer: Any, setting: WarmStart) -> list[float]:
    """Supervised steps on fresh demonstrations; only what the model is to write enters the loss.
    AdamW, cosine to zero. Returns the loss of every step, nats a token."""
    import torch
    from torch.nn.functional import cross_entropy

    task = CalculatorTask(CalculatorOptions())
    rng = random.Random(setting.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    losses = []
    model.train()
    for step in range(setting.steps):
        ids, labels = _batch(task, step, setting, tokenizer, rng)
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


def _batch(
    task: CalculatorTask, step: int, setting: WarmStart, tokenizer: Any, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """ids and labels [batch_size, length], padded on the right; -100 where nothing is learned."""
    import torch

    vocabulary = tokenizer.get_vocab()
    rows = []
    for i in range(setting.batch_size):
        ids: list[int] = []
        labels: list[int] = []
        index = step * setting.batch_size + i
        for text, written in demonstrate(task, index, setting.error_rate, rng):
            piece = [vocabulary[char] for char in text]
            ids += piece
            labels += piece if written else [-100] * len(piece)
        rows.append((ids, labels))
    length = max(len(ids) for ids, _ in rows)
    padded = [
        (
            ids + [tokenizer.pad_token_id] * (length - len(ids)),
            labels + [-100] * (length - len(ids)),
        )
        for ids, labels in rows
    ]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([labels for _, labels in padded])


def measure(model: Any, tokenizer: Any, setting: WarmStart) -> float:
    """Share of `num_measured` held-out problems solved at temperature 1, one rollout each."""
    import torch

    generator = torch.Generator().manual_seed(setting.seed)
    task = CalculatorTask(CalculatorOptions())
    chunk = 500
    solved = 0.0
    for start in range(0, setting.num_measured, chunk):
        indices = range(start, min(start + chunk, setting.num_measured))
        solved += asyncio.run(_play(model, Codec(tokenizer), task, indices, generator))
    return solved / setting.num_measured


async def _play(
    model: Any, codec: Codec, task: CalculatorTask, indices: range, generator: torch.Generator
) -> float:
    """The summed outcomes of test problems, played side by side, the whole history read anew for
    every token: slow and plain, no engine needed."""
    import torch

    stops = codec.resolve_stops(task.stop)
    environments = [task.make("test", index) for index in indices]
    histories = [codec.encode_prompt(await env.start()) for env in environments]
    turns: list[list[int]] = [[] for _ in indices]
    running = list(range(len(indices)))
    solved = 0.0
    while running:
        length = max(len(histories[i]) for i in running)
        ids = torch.tensor([histories[i] + [0] * (length - len(histories[i])) for i in running])
        last = torch.tensor([len(histories[i]) - 1 for i in running])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[torch.arange(len(ids)), last]
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator).flatten().tolist()
        for i, token in zip(list(running), drawn, strict=True):
            histories[i].append(token)
            turns[i].append(token)
            if token in stops:
                text = codec.decode(turns[i][:-1])
                reply = await environments[i].step(Action(text, tuple(turns[i]), "stop"))
                solved += reply.outcome or 0.0
                histories[i] += codec.encode_observation(reply.observation or "")
                turns[i] = []
                if reply.observation is None:
                    running.remove(i)
            if len(histories[i]) >= _MAX_TOKENS and i in running:
                running.remove(i)
    return solved


def make(setting: WarmStart, out: Path) -> dict[str, Any]:
    """Train, measure, save to `out`; returns the record. On one thread it repeats itself."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    tokenizer = make_tokenizer()
    model = make_model(setting, tokenizer)
    losses = train(model, tokenizer, setting)
    accuracy = measure(model, tokenizer, setting)
    torch.set_num_threads(threads)
    save_model(model, tokenizer, out)
    record = {
        "command": f"estr warmstart --out FOLDER --seed {setting.seed}",
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
