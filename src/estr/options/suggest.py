"""What to say about a key that a recipe may not have: where it belongs, or what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

_CLIP = "correction.clip_low and correction.clip_high"

OTHER_NAMES: Mapping[str, str] = {
    "adv_estimator": "loss.advantage",
    "async_level": "max_staleness",
    "batch_size": "groups_per_step",
    "clip": _CLIP,
    "clip_eps": _CLIP,
    "clip_range": _CLIP,
    "clip_ratio": _CLIP,
    "clip_ratio_high": "correction.clip_high",
    "clip_ratio_low": "correction.clip_low",
    "dataset": "task",
    "env": "task",
    "environment": "task",
    "eps_clip": _CLIP,
    "epsilon": _CLIP,
    "epsilon_high": "correction.clip_high",
    "epsilon_low": "correction.clip_low",
    "eval_steps": "eval.every",
    "learning_rate": "trainer.lr",
    "loss_agg_mode": "loss.aggregation",
    "loss_type": "correction",
    "lr_scheduler": "trainer.schedule",
    "lr_scheduler_type": "trainer.schedule",
    "max_async_level": "max_staleness",
    "max_completion_length": "sampling.max_new_tokens",
    "max_grad_norm": "trainer.grad_clip",
    "max_length": "sampling.max_tokens",
    "max_model_len": "sampling.max_tokens",
    "max_off_policy_steps": "max_staleness",
    "max_response_length": "sampling.max_new_tokens",
    "max_seq_len": "sampling.max_tokens",
    "max_steps": "steps",
    "micro_batch_size": "trainer.token_budget",
    "model_name": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "num_generations": "group_size",
    "num_steps": "steps",
    "output_dir": "name",
    "per_device_train_batch_size": "trainer.token_budget",
    "rollouts_per_prompt": "group_size",
    "run_name": "name",
    "reward_fn": "task",
    "reward_funcs": "task",
    "save_steps": "checkpoint.every_steps",
    "staleness": "max_staleness",
    "total_steps": "steps",
    "train_batch_size": "groups_per_step",
    "train_file": "task",
    "train_files": "task",
}
"""Names that other trainers use, and the key of a recipe that means the same."""

RESHAPING = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "top_k",
        "top_p",
    }
)
"""Sampling options that make the drawn tokens those of another distribution than the recorded
log-probs speak of."""


def suggest(key: str, here: Collection[str], homes: Mapping[str, Collection[str]], at: str) -> str:
    """The remedy for an unknown key.

    here: the keys that are known where it stands; at: the path of that place with its trailing
    dot, empty at the top; homes: every key of a recipe with the full paths where it is right.
    """
    name = key.lower().replace("-", "_")
    if name in homes:
        # Inside a table a letter may be missing; at the top it is rather the table that is.
        near = difflib.get_close_matches(name, here, n=1, cutoff=0.85) if at else []
        rather = f"did you mean {at}{near[0]}? Else " if near else ""
        return f"{rather}it belongs at {' or '.join(homes[name])}"
    if name in RESHAPING:
        return (
            "training draws from the whole distribution, so that the recorded log-probs are those "
            "of the policy; only sampling.temperature is free"
        )
    meant = _meant(name, here, homes, at)
    return f"did you mean {meant}?" if meant else f"known here: {', '.join(sorted(here)) or 'none'}"


def nameless(place: str, table: Mapping[str, object]) -> str:
    """What to say of a table without the name that it needs, and where it has one misspelt."""
    near = difflib.get_close_matches("name", [key for key in table if key != "name"], n=1)
    if near:
        return f"{place} has no name, but {near[0]!r}; did you mean {place}.name?"
    return f"{place} has no name; say {place}.name = ..."


def _meant(
    name: str, here: Collection[str], homes: Mapping[str, Collection[str]], at: str
) -> str | None:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    elsewhere = {**OTHER_NAMES, **{leaf: " or ".join(paths) for leaf, paths in homes.items()}}
    beside = {leaf: at + leaf for leaf in here}
    # Where somebody wrote a key he meant one, unless only a far one is like it.
    for known, cutoff in ((beside, 0.75), (elsewhere | beside, 0.6)):
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
        if nearest:
            return known[nearest[0]]
    return None
