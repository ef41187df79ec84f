"""The split of a causal LM into hidden states and an output matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from estr.guard.rescore import Rescorer
from estr.heads import split_head
from estr.models import enable_gradient_checkpointing
from tiny_models import VOCAB_SIZE, tiny_model

PLAIN = ["llama", "llama-grouped", "llama-tied", "qwen2", "gpt-neox", "gpt2", "phi"]
NOT_PLAIN = ["cohere-scaled", "gemma2-capped"]


def some_ids(batch: int = 2, length: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB_SIZE, (batch, length), generator=generator)


@pytest.mark.parametrize("family", PLAIN)
def test_hidden_states_times_the_matrix_are_the_models_own_logits(family: str) -> None:
    model, ids = tiny_model(family), some_ids()
    head = split_head(model)
    assert head.weight is not None
    logits = nn.functional.linear(head.hidden(ids), head.weight, head.bias)
    torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", PLAIN + NOT_PLAIN)
def test_logits_of_all_places_and_of_the_last_are_the_models_own(family: str) -> None:
    model, ids = tiny_model(family), some_ids()
    head, whole = split_head(model), model(input_ids=ids).logits
    torch.testing.assert_close(head.logits(ids), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(ids, last=True), whole[:, -1:], rtol=1e-5, atol=1e-5)


def refuses_float32(module, query, key, value, attention_mask, **more):  # type: ignore[no-untyped-def]
    """Stands for flash-attn's kernel, which is not installed here."""
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return sdpa_attention_forward(module, query, key, value, attention_mask, **more)


def test_a_model_with_a_flash_kernel_is_probed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "flash_attention_2"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, own, refuses_float32)
    # Whether the package is there is what transformers asks here.
    check = "_check_and_adjust_attn_implementation"
    monkeypatch.setattr(PreTrainedModel, check, lambda _, name, **more: name)
    model = tiny_model("llama")
    model.set_attn_implementation(own)
    with pytest.raises(RuntimeError, match="only support"):
        model(input_ids=some_ids())
    assert split_head(model).weight is not None
    enable_gradient_checkpointing(model)
    assert model.config._attn_implementation == own
    structure = Rescorer(model).structure
    assert structure.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == own


def test_a_bias_of_the_output_layer_is_part_of_the_split() -> None:
    model = tiny_model("phi")
    assert split_head(model).bias is model.lm_head.bias
    assert split_head(tiny_model("llama")).bias is None


@pytest.mark.parametrize("family", NOT_PLAIN)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_scaled_or_capped_logits_refuse_the_split_however_small(family: str, scale: float) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    head = split_head(model)
    assert head.weight is None
    assert head.bias is None
    with pytest.raises(ValueError, match="no plain output matrix"):
        head.hidden(some_ids())


def test_a_model_that_changes_its_hidden_states_before_the_output_refuses_the_split() -> None:
    class Halved(type(tiny_model())):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, **inputs: object) -> object:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            return type("Output", (), {"logits": self.lm_head(hidden / 2)})()

    assert split_head(Halved(tiny_model().config).eval()).weight is None


def test_gradients_reach_the_base_and_the_output_matrix() -> None:
    model, ids = tiny_model("llama"), some_ids()
    head = split_head(model)
    hidden = head.hidden(ids)
    nn.functional.linear(hidden, head.weight, head.bias).logsumexp(-1).sum().backward()
    split = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert float(parameter.grad.abs().max()) > 0
        torch.testing.assert_close(split[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_split_follows_the_weights_and_leaves_the_model_as_it_was() -> None:
    model, ids = tiny_model("llama-tied").train(), some_ids()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    head = split_head(model)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    torch.testing.assert_close(head.logits(ids), model(input_ids=ids).logits)
    model.to(torch.bfloat16)
    assert head.weight is not None
    assert head.weight.dtype == torch.bfloat16


def test_padding_masks_and_positions_pass_through() -> None:
    model, ids = tiny_model("llama"), some_ids()
    head = split_head(model)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    expected = model(input_ids=ids, **inputs).logits
    torch.testing.assert_close(head.logits(ids, **inputs), expected, rtol=1e-5, atol=1e-5)
