"""`estr.integrations.trl` in the real package; `make conformance` runs it in its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from estr.errors import ConfigError
from estr.integrations.trl import grpo_trainer
from estr.logprobs import next_token, token_statistics
from estr.losses import estr_loss

WORDS = [f"w{i}" for i in range(28)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    bare = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def first_words(completions: list[str], **_: Any) -> list[float]:
    """Share of a completion's words from the first half of the vocabulary."""
    first = set(WORDS[:14])
    found = [completion.split() for completion in completions]
    return [sum(word in first for word in words) / max(len(words), 1) for words in found]


def trainer(folder: Path, correction: list[dict[str, Any]], **options: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        **options,
    }
    return grpo_trainer()(
        correction=correction,
        model=model(),
        reward_funcs=first_words,
        args=GRPOConfig(output_dir=str(folder), **settings),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3", "w4 w5 w6", "w7"] * 4}),
        processing_class=tokenizer(),
    )


def test_two_real_steps(tmp_path: Path) -> None:
    made = trainer(tmp_path, [{"name": "estr", "tau": 0.5}])
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    made.train()
    steps = [line for line in made.state.log_history if "estr/rho_mask" in line]
    assert made.state.global_step == len(steps) == 2
    for line in steps:
        assert line["estr/trainer_entropy"] == 0.0
        assert line["estr/rho_mask"] == 0.0  # the policy is that of the rollouts
        assert 0 < line["entropy"] < torch.tensor(31.0).log()
    assert steps[0]["grad_norm"] > 0
    assert any(not torch.equal(before[n], p) for n, p in made.model.named_parameters())


def test_the_loss_of_a_micro_batch_is_ours(tmp_path: Path) -> None:
    """Two optimizer steps on one batch: in the second, policy and sampler differ."""
    made = trainer(
        tmp_path, [{"name": "estr", "tau": 0.05}], steps_per_generation=4, num_generations=8,
        learning_rate=0.05,
    )  # fmt: skip
    seen: list[tuple[dict[str, Any], Any, torch.Tensor]] = []
    inner = made._compute_loss

    def noting(given: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = inner(given, inputs)
        seen.append((inputs, {n: p.detach().clone() for n, p in given.named_parameters()}, loss))
        return loss

    made._compute_loss = noting
    made.train()
    assert len(seen) == 4
    dropped = 0
    fresh = model()
    for inputs, parameters, loss in seen:
        fresh.load_state_dict(parameters, strict=False)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, inputs["prompt_ids"].shape[1] :] = inputs["completion_mask"].bool()
        chosen = inputs["completion_mask"].bool()
        with torch.no_grad():
            logits = fresh(input_ids=ids, attention_mask=attention).logits
        policy = token_statistics(*next_token(logits, ids, mask)).logprobs
        expected, keep = estr_loss(
            policy,
            inputs["old_per_token_logps"][chosen],
            inputs["behavior_entropies"][chosen],
            inputs["advantages"][:, None].expand_as(chosen)[chosen],
            torch.ones_like(policy, dtype=torch.bool),
            tau=0.05,
            eps=0.01,
            # Half of the tokens of the rollouts belong to each of the two steps on them.
            num_sampled_tokens=float(inputs["num_items_in_batch"]) * 2 / 4,
        )
        dropped += int((~keep).sum())
        assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    assert dropped > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("beta", 0.1),
        ("top_k", 5),
        ("entropy_coef", 0.01),
        ("loss_type", "dr_grpo"),
        ("epsilon", 0.05),
        ("epsilon_high", 0.28),
        ("delta", 4.0),
        ("steps_per_generation", 1),
    ],
)
def test_an_option_that_it_would_not_follow_is_refused(
    tmp_path: Path, option: str, value: float | str
) -> None:
    with pytest.raises(ConfigError, match=f"GRPOConfig.{option} must be"):
        trainer(tmp_path, [{"name": "estr"}], **{option: value})


def test_log_probs_of_a_model_in_bfloat16_are_float32(tmp_path: Path) -> None:
    """Rounded to 16 bits they would pass for staleness; TokenColumns refuses such."""
    made = trainer(tmp_path, [{"name": "estr"}])
    made.model.to(torch.bfloat16)
    made.train()
    assert made.state.global_step == 2


def test_a_batch_with_images_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, [{"name": "estr"}])
    with pytest.raises(ConfigError, match="reads text only, and the batch has pixel_values"):
        made._compute_loss(made.model, {"pixel_values": torch.zeros(1), "image_sizes": None})


def test_a_correction_that_needs_versions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not carry behavior_gini"):
        trainer(tmp_path, [{"name": "estr", "scale": "gini"}])
