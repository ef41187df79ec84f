"""Run folders with what a report reads, made of random numbers, and one made to do harm."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

from estr.config import load_recipe
from estr.metrics import MetricsWriter
from estr.types import RolloutId
from ledger_cases import consumption, record, trajectory, write_random_ledger, write_step

METRICS = {
    "reward_mean": 0.5,
    "rho_mask": 0.01,
    "behavior_entropy": 0.4,
    "policy_entropy": 0.3,
    "kl_k1": -0.001,
    "kl_k3": 0.002,
    "log_ratio_variance": 0.02,
    "log_ratio_variance_kept": 0.01,
    "effective_sample_size": 0.98,
    "eligible_tokens": 100.0,
    "length_mean": 5.0,
    "length_p90": 8.0,
    "length_trained_mean": 5.0,
    "intra_mean": 0.5,
    "inter_mean": 1.0,
    "staleness_max": 2.0,
    "staleness_allowed": 4.0,
    "engine_busy": 0.9,
    "trainer_busy": 0.5,
    "num_groups": 2.0,
    "status/ok": 8.0,
    "status/timeout": 1.0,
}


def make_run(
    runs: Path, name: str, *overrides: str, steps: int = 6, ledger: bool = True, **fields: Any
) -> Path:
    """A run folder with recipe, metrics and ledger. fields: of `random_record`."""
    folder = runs / name
    folder.mkdir(parents=True)
    recipe = load_recipe(None, [f"steps={steps}", *overrides])
    (folder / "config.toml").write_text(recipe.to_toml())
    with MetricsWriter(folder, tensorboard=False) as writer:
        write_evaluation(writer, step=0, accuracy=0.25)
        for step in range(1, steps + 1):
            values = {k: v + 0.001 * step + 0.01 * recipe.seed for k, v in METRICS.items()}
            values |= {k: v for k, v in METRICS.items() if "/" in k or k == "eligible_tokens"}
            writer.write(step=step, version=step, wall_s=2.0 * step, values=values)
        write_evaluation(writer, step=steps, accuracy=0.5 + 0.1 * recipe.seed)
    if ledger:
        write_random_ledger(folder, steps=steps, **{"seed": recipe.seed, **fields})
    return folder


def write_evaluation(writer: MetricsWriter, *, step: int, accuracy: float) -> None:
    values = {"eval/accuracy": accuracy, "eval/problems": 64.0}
    writer.write(step=step, version=step, wall_s=2.0 * step, values=values)


def finish(folder: Path, **fields: Any) -> None:
    """The summary of a finished run."""
    summary = {"tokens_per_s": 1000.0, "rho_mask": 0.01, "intra_max": 1, **fields}
    (folder / "summary.json").write_text(json.dumps(summary))


def save_tokenizer(folder: Path, texts: list[str]) -> None:
    """A tokenizer with these tokens, numbered from 0, as the run's own."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, texts[0]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=texts[0]).save_pretrained(
        folder / "model" / "last"
    )


def highest_score(records: list[Any], eps: float = 0.01) -> float:
    """Of all trained tokens, worked out from the columns."""
    best = -math.inf
    for one in records:
        for of, consumed in zip(one.trajectories, one.consumptions, strict=True):
            (segment,) = of.segments
            delta = consumed.policy_logprobs - segment.behavior_logprobs
            scores = delta**2 / (segment.behavior_entropies + eps)
            best = max(best, float(scores[segment.sampled].max()))
    return best


EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><!--"


def evil_run(runs: Path) -> Path:
    """Whose name, tokens, errors and rewards are markup."""
    folder = make_run(runs, "<img src=x onerror=alert(1)>", steps=1, ledger=False)
    save_tokenizer(folder, ["?", EVIL, "]]>", "<!--", "&lt;b&gt;", *map(str, range(5, 9))])
    own = trajectory(
        RolloutId(0, 0, 0),
        logprobs=[-1.0] * 4,
        entropies=[0.5] * 4,
        versions=[0] * 4,
        rewards={EVIL: 1.0},
        error=EVIL,
        status="timeout",
    )
    write_step(folder, record(1, [(own, consumption(own, [2.0, 0.0, 0.0, 0.0]))]))
    return folder


def unpacked(page: str) -> str:
    """The data in a page."""
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)<', page)
    return gzip.decompress(base64.b64decode(packed[1])).decode()
