"""estr against TRL's `GRPOTrainer`: the same machine, model, prompts, group, lengths and steps.

    arithmetic   SmolLM2-135M on the sums of the task `arithmetic`: short answers, graded at once
    long_tail    a small decoder with random weights that stops at each token with the same chance,
                 so that lengths are about geometric (a mean of 53 tokens, cut at 256), behind a
                 grader that takes 0.5 s on the mean and up to 4 s

Each side has both cores: TRL two threads in one process, estr a process for generation and one for
training. Both train in float32 with a learning rate that leaves the policy, and so the work, as it
is. TRL runs in its own environment (`conformance/install.py trl`), in a process of its own; the
sides take turns, run by run, and starting up is not counted. With `trl_continuous` TRL generates by
transformers' continuous batching; where that fails, it is left out, with what it said.

`ratio` is the lower of the regimes' ratios of samples per second, estr over the better form of TRL.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import blocking
from ..chat import Codec
from ..config import Recipe, recipe_from_table
from ..errors import ConfigError, DataError
from ..models import SMOLLM2, load_tokenizer, resolve_model, save_model
from . import machine, peer_python
from .async_parts import Clock, Facts, open_pair
from .trl_task import GradedTask

TIMEOUT_S = 7200.0
FORMS = {"trl": False, "trl_continuous": True}
"""Form of TRL's generation -> is it continuous batching?"""

_TASK = "estr.bench.trl_task:GradedTask"
_LR = 1e-9
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CHARACTERS = "0123456789+=[].!-*/ \n" + _LETTERS


@dataclass(frozen=True, slots=True)
class Regime:
    """model: a name, or "random" for random weights of `width` and `layers`. threads: of estr's
    trainer, whose engine has one."""

    model: str
    task: dict[str, Any] = field(default_factory=dict)
    groups: int = 4
    size: int = 8
    max_new_tokens: int = 6
    max_staleness: int = 1
    threads: int = 1
    width: int = 256
    layers: int = 6
    steps: int = 8
    warmup_steps: int = 3


REGIMES = {
    "arithmetic": Regime(SMOLLM2, threads=2),
    "long_tail": Regime(
        "random",
        {"rule": "parity", "latency_mean_s": 0.5, "latency_min_s": 0.05, "latency_max_s": 4.0},
        groups=8,
        max_new_tokens=256,
        max_staleness=4,
        steps=16,
        warmup_steps=6,
    ),
}


def quick_regimes() -> dict[str, Regime]:
    """The same with tiny random weights, on a few tiny steps."""
    tiny = {
        name: replace(its, model="random", width=64, layers=2, groups=2, size=2)
        for name, its in REGIMES.items()
    }
    few = {name: replace(its, steps=4, warmup_steps=1) for name, its in tiny.items()}
    slow = {"rule": "parity", "latency_mean_s": 0.05}
    return {
        "arithmetic": replace(few["arithmetic"], task={"rule": "parity"}),
        "long_tail": replace(few["long_tail"], task=slow, max_new_tokens=24),
    }


def run(
    quick: bool = False, peers: Path | None = None, regimes: dict[str, Regime] | None = None
) -> dict[str, Any]:
    """Measure. peers: the folder of TRL's environment. quick: tiny models, one round.

    Raises ConfigError where there is no such environment, or TRL failed there.
    """
    if peers is None:
        raise ConfigError(
            "this compares with TRL, so it needs --peers FOLDER; "
            "python conformance/install.py trl makes conformance/.venvs"
        )
    python = peer_python(peers, "trl")
    regimes = regimes or (quick_regimes() if quick else REGIMES)
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, regime in regimes.items():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                folder = _model(regime, Path(scratch) / "model")
            except DataError as error:
                left_out[name] = str(error)
                continue
            found[name] = _compare(name, python, folder, regime, rounds=1 if quick else 3)
    return {
        "name": "trl",
        "ratio": min((r["samples_ratio"] for r in found.values()), default=None),
        "regimes": found,
        "left_out": left_out,
        "quick": quick,
        "machine": machine(),
    }


def _model(regime: Regime, place: Path) -> Path:
    """The folder that both sides load. Raises DataError where the model cannot be had."""
    if regime.model != "random":
        return resolve_model(regime.model)
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *_CHARACTERS])}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=regime.width,
            intermediate_size=3 * regime.width,
            num_hidden_layers=regime.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    save_model(model, tokenizer, place)
    return place


def _compare(name: str, python: Path, folder: Path, regime: Regime, rounds: int) -> dict[str, Any]:
    recipe = _recipe(folder, regime)
    work = {
        **asdict(regime),
        "model": str(folder),
        "stops": Codec(load_tokenizer(folder)).resolve_stops(GradedTask.stop),
        "threads": 2,
        "lr": _LR,
    }
    sides: dict[str, list[Facts]] = {side: [] for side in ("estr", *FORMS)}
    left_out: dict[str, str] = {}
    for number in range(1, rounds + 1):
        sides["estr"].append(blocking.run(partial(_ours, recipe, regime)))
        _tell(name, number, "estr", sides)
        for side in sorted(sides.keys() & FORMS.keys()):
            try:
                sides[side].append(_theirs(python, work | {"continuous": FORMS[side]}))
                _tell(name, number, side, sides)
            except ConfigError as error:
                if not FORMS[side]:
                    raise
                # Continuous batching is not made for every machine; its plain form is.
                left_out[side] = str(error)
                del sides[side]
    medians = {side: _medians(facts) for side, facts in sides.items()}
    best = min(sides.keys() & FORMS.keys(), key=lambda side: medians[side]["step_s"])
    return {
        "samples_ratio": medians[best]["step_s"] / medians["estr"]["step_s"],
        "cpu_ratio": medians[best]["step_cpu_s"] / medians["estr"]["step_cpu_s"],
        "better_form": best,
        "left_out": left_out,
        "sides": {
            side: facts | {"samples_per_s": regime.groups * regime.size / facts["step_s"]}
            for side, facts in medians.items()
        },
        "regime": asdict(regime),
    }


def _tell(name: str, number: int, side: str, sides: dict[str, list[Facts]]) -> None:
    step_s = sides[side][-1]["step_s"]
    print(f"{name}, round {number}, {side}: {step_s:.2f} s a step", file=sys.stderr, flush=True)


def _medians(found: list[Facts]) -> Facts:
    return {key: statistics.median(facts[key] for facts in found) for key in found[0]}


def _recipe(folder: Path, regime: Regime) -> Recipe:
    return recipe_from_table(
        {
            "model": str(folder),
            "task": {"name": _TASK} | regime.task,
            "steps": regime.steps,
            "groups_per_step": regime.groups,
            "group_size": regime.size,
            "max_staleness": regime.max_staleness,
            "sampling": {"max_new_tokens": regime.max_new_tokens, "max_tokens": 512},
            "trainer": {"lr": _LR, "threads": regime.threads},
        }
    )


async def _ours(recipe: Recipe, regime: Regime) -> Facts:
    clock = Clock(regime.warmup_steps)
    async with open_pair(recipe) as pair:
        facts = await pair.loop(recipe, clock)
    return {
        "step_s": clock.rates()["step_s"],
        "step_cpu_s": facts["cpu_s"] / regime.steps,
        "length": facts["length_mean"],
        "outcome": facts["outcome_mean"],
    }


def _theirs(python: Path, work: dict[str, Any]) -> Facts:
    """TRL's side, in a process of its own."""
    source = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": str(work["threads"]), "TRL_EXPERIMENTAL_SILENCE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        asked, found = Path(scratch) / "work.json", Path(scratch) / "found.json"
        asked.write_text(json.dumps(work), encoding="utf-8")
        command = [str(python), "-m", "estr.bench.trl_side", str(asked), str(found)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"TRL's side did not end within {TIMEOUT_S:g} s") from error
        if done.returncode:
            raise ConfigError(f"TRL's side failed:\n{done.stderr[-2000:]}")
        facts: Facts = json.loads(found.read_text(encoding="utf-8"))
        return facts
