"""A correction of ours as a policy loss of verl (0.9.1), in its bypass mode.

    verl's ppo_loss(config, model_output, data)          <- wrapped: entropies are taken from data
        get_policy_loss_fn("estr")(old_log_prob, ...)    <- registered: estr.losses.policy_loss

verl hands a policy loss log-probs, advantages and a mask, but no entropy, so the wrapper around
`ppo_loss` takes it from the batch. verl's rollouts do not record the entropy of the distribution
that they sample from; an agent loop that does puts a list as long as the response into its output's
`extra_fields["rollout_entropies"]`. Where the batch lacks it the trainer's own entropy stands in,
which is another rule (it moves with the policy being trained), and the metric
`estr/trainer_entropy` says so with 1.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..corrections import Correction, TokenColumns, build_correction
from ..errors import ConfigError, DataError
from ..losses import policy_loss

NAME = "estr"
"""The registered name: actor.policy_loss.loss_mode."""

COLUMN = "rollout_entropies"
"""Of the batch: the entropy (nats) that each response token was drawn at."""

OPTIONS = "ESTR_VERL"
"""Environment variable with the arguments of `install` as JSON."""

EntropySource = Literal["auto", "sampler", "trainer"]

_CARRIED = frozenset({"behavior_entropies", "sequence_ids"})
_USERS = ("utils.losses", "engine_workers")
"""Modules of verl.workers that know `ppo_loss` by name."""

_log = logging.getLogger(__name__)


def install(
    correction: Sequence[Mapping[str, Any]] | None = None, entropy: EntropySource | None = None
) -> VerlLoss:
    """Register the policy loss "estr" with verl in this process and wrap its `ppo_loss`.

    correction: entries as in a recipe; entropy: "sampler" insists on the recorded one, "trainer"
    takes the trainer's, "auto" the first where the batch carries it. What is None comes from the
    environment variable ESTR_VERL, a JSON object, else it is `[{"name": "estr"}]` and "auto".
    Importing `estr.integrations.verl_plugin` calls this, so that verl's own
    VERL_USE_EXTERNAL_MODULES brings it into every worker.

    Raises ConfigError on unknown options and on a correction that needs what verl does not carry.
    """
    options = _options()
    entries = options.get("correction", [{"name": "estr"}]) if correction is None else correction
    source = options.get("entropy", "auto") if entropy is None else entropy
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    losses = importlib.import_module("verl.workers.utils.losses")
    inner = getattr(losses.ppo_loss, "estr_inner", losses.ppo_loss)
    loss = VerlLoss(build_correction(entries), source, inner)
    core.register_policy_loss(NAME)(loss.policy_loss)

    def ppo_loss(*args: Any, **kwargs: Any) -> Any:
        return loss.ppo_loss(*args, **kwargs)

    ppo_loss.estr_inner = inner  # type: ignore[attr-defined]
    for name in _USERS:
        module = sys.modules.get(f"verl.workers.{name}")
        if module is not None and hasattr(module, "ppo_loss"):
            module.ppo_loss = ppo_loss  # type: ignore[attr-defined]
    return loss


class VerlLoss:
    """The two functions that verl calls, around one correction. `inner` is verl's `ppo_loss`."""

    def __init__(
        self, correction: Correction, entropy: EntropySource, inner: Callable[..., Any]
    ) -> None:
        if entropy not in ("auto", "sampler", "trainer"):
            raise ConfigError(f"entropy must be auto, sampler or trainer, not {entropy!r}")
        missing = correction.needs - _CARRIED
        if missing:
            raise ConfigError(
                f"verl's batches do not carry {', '.join(sorted(missing))} in bypass mode; choose "
                "a correction that reads only pi/mu, the entropy or the trajectory"
            )
        self._correction, self._source, self._inner = correction, entropy, inner
        self._entropies: tuple[Tensor | None, bool] | None = None
        self._warned = False

    def ppo_loss(
        self, config: Any, model_output: Mapping[str, Any], data: Any, dp_group: Any = None
    ) -> Any:
        """verl's `ppo_loss` with the entropies of this micro-batch at hand for `policy_loss`."""
        _check_bypass(data)
        self._entropies = self._find(model_output, data)
        try:
            return self._inner(config, model_output, data, dp_group)
        finally:
            self._entropies = None

    def policy_loss(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """(loss of the micro-batch, metrics), all columns [B, T]; old_log_prob is mu's.

        The loss is `estr.losses.policy_loss` divided by verl's count of the tokens of the whole
        mini-batch, times its data-parallel size, over which verl averages gradients. Raises
        ConfigError where verl is set to anything else, DataError without a needed entropy. verl
        averages the metrics over micro-batches, whatever their token counts.
        """
        denominator = _denominator(loss_agg_mode, config)
        if rollout_is_weights is not None:
            raise ConfigError(
                "rollout_correction.rollout_is weighs by q/mu, which pi/mu holds already: "
                "set it to null"
            )
        entropies, from_trainer = self._entropies or (None, False)
        columns = TokenColumns(
            policy_logprobs=log_prob,
            behavior_logprobs=old_log_prob,
            advantages=advantages,
            loss_mask=response_mask.bool(),
            behavior_entropies=None if entropies is None else _fitted(entropies, log_prob),
            sequence_ids=torch.arange(len(log_prob), device=log_prob.device)[:, None].expand_as(
                log_prob
            ),
        )
        result = policy_loss(columns, self._correction, denominators=denominator)
        count = columns.loss_mask.sum().clamp(min=1)
        metrics = {
            "actor/ppo_kl": float(-(result.log_ratio * columns.loss_mask).sum() / count),
            "actor/pg_clipfrac": float(result.clipped.sum() / count),
            "estr/rho_mask": float(1 - result.kept.sum() / count),
            "estr/trainer_entropy": float(from_trainer),
        }
        return result.loss, metrics

    def _find(self, model_output: Mapping[str, Any], data: Any) -> tuple[Tensor | None, bool]:
        """(entropies [B, T], whether they are the trainer's)."""
        if "behavior_entropies" not in self._correction.needs:
            return None, False
        recorded = None if self._source == "trainer" else _recorded(data)
        if recorded is not None:
            return _padded(recorded), False
        trainers = None if self._source == "sampler" else model_output.get("entropy")
        if trainers is None:
            raise DataError(
                f"the batch carries no {COLUMN}: an agent loop must put them into its output's "
                "extra_fields, or actor.calculate_entropy=true gives the trainer's (another rule)"
            )
        if not self._warned:
            self._warned = True
            _log.warning("the trainer's entropy stands in for the sampler's: another rule")
        padding = importlib.import_module("verl.workers.utils.padding")
        return padding.no_padding_2_padding(trainers.detach(), data).float(), True


def _options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS, "{}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OPTIONS} is not JSON ({error}): {text}") from None
    if not isinstance(options, dict) or options.keys() - {"correction", "entropy"}:
        raise ConfigError(f"{OPTIONS} knows the keys correction and entropy only: {text}")
    return options


def _check_bypass(data: Any) -> None:
    """Where both columns are there they must be the same: that is what bypass mode makes them."""
    recorded = data.get("rollout_log_probs", None)
    if recorded is None:
        return
    old = data["old_log_probs"]
    if old.is_nested and recorded.is_nested:
        old, recorded = old.values(), recorded.values()
    if old.shape == recorded.shape and not torch.equal(old, recorded):
        raise ConfigError(
            "old_log_probs are not those of the rollout: set "
            "algorithm.rollout_correction.bypass_mode=true, so that the ratio is pi/mu"
        )


def _denominator(loss_agg_mode: str, config: Any) -> float:
    if loss_agg_mode != "token-mean":
        raise ConfigError(f"actor.loss_agg_mode must be token-mean, not {loss_agg_mode}")
    batch = {} if config is None else config.global_batch_info
    tokens = batch.get("batch_num_tokens")
    if tokens is None:
        raise ConfigError(
            "verl gave no batch_num_tokens, the token count of the whole mini-batch; the count of "
            "a micro-batch is no substitute, since masked means of parts do not add up"
        )
    return float(tokens) / float(batch.get("dp_size", 1))


def _recorded(data: Any) -> Any:
    """The column of recorded entropies, None where there is none. verl's `ray_trainer` spreads
    extra_fields into columns, its newer trainers keep them as one column of mappings."""
    column = data.get(COLUMN, None)
    if column is not None:
        return column
    extras = data.get("extra_fields", None)
    if extras is None:
        return None
    rows = [getattr(row, "data", row) for row in _listed(extras)]
    found = [row.get(COLUMN) if isinstance(row, Mapping) else None for row in rows]
    return None if all(row is None for row in found) else found


def _listed(column: Any) -> list[Any]:
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _padded(column: Any) -> Tensor:
    """[B, T] of a nested or dense tensor or of lists; NaN beyond a row's end. Raises DataError
    where a row has none."""
    if isinstance(column, Tensor):
        return column.to_padded_tensor(math.nan) if column.is_nested else column
    listed = _listed(column)
    without = [i for i, row in enumerate(listed) if row is None]
    if without:
        raise DataError(f"rows {without} of {len(listed)} carry no {COLUMN}, the others do")
    rows = [torch.as_tensor(row, dtype=torch.float32) for row in listed]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)


def _fitted(entropies: Tensor, like: Tensor) -> Tensor:
    """Cut or filled with NaN to the width of the response, on its device."""
    width = like.shape[1]
    entropies = entropies[:, :width].to(like.device)
    return torch.nn.functional.pad(entropies, (0, width - entropies.shape[1]), value=math.nan)
