"""Less memory: adapters, bfloat16 parameters under float32 masters, gradient checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from estr.adapters import add_adapters, without_adapters
from estr.checkpoint import restore_trainer, save_trainer
from estr.config import recipe_from_table
from estr.errors import CheckpointError, ConfigError
from estr.models import enable_gradient_checkpointing, load_model, save_model
from estr.options.run import LoraOptions
from estr.trainer import Trainer
from estr.weights import MemoryWeightStore
from tiny import VOCAB, draw_groups, tiny_model, tiny_recipe

LORA = {"lora": {"rank": 4, "alpha": 8.0}}
IDS = torch.arange(10)[None] % VOCAB


def trainer(seed: int = 0, model: dict | None = None, **table) -> Trainer:
    table.setdefault("trainer", {}).setdefault("warmup_steps", 0)
    return Trainer(tiny_model(seed, **(model or {})), tiny_recipe(**table), MemoryWeightStore())


def trained(own: Trainer, steps: int = 2) -> Trainer:
    groups = draw_groups(tiny_model())
    for _ in range(steps):
        own.train([groups])
    return own


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


class Tokenizer:
    """Has nothing to save."""

    def save_pretrained(self, folder: Path) -> None:
        pass


# -- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_only_adapters_change_and_what_is_published_is_the_merged_model(tied: bool) -> None:
    own = trainer(**LORA, model={"tie_word_embeddings": tied})
    before = {name: p.detach().clone() for name, p in own.model.named_parameters()}
    torch.testing.assert_close(logits(own.model), logits(tiny_model(tie_word_embeddings=tied)))
    trained(own)
    changed = {n for n, p in own.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert changed == set(own.parameters) == {n for n in before if "lora_" in n}
    plain = tiny_model(seed=7, tie_word_embeddings=tied)
    state = own.store.fetch(own.version)
    assert state.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(state, strict=not tied)
    plain.tie_weights()
    torch.testing.assert_close(logits(plain), logits(own.model), atol=5e-5, rtol=0)
    assert not torch.allclose(logits(plain), logits(tiny_model(tie_word_embeddings=tied)))


def test_the_saved_folder_loads_in_plain_transformers(tmp_path: Path) -> None:
    own = trained(trainer(**LORA))
    save_model(own.model, Tokenizer(), tmp_path / "out", own.weights.published())
    assert not list((tmp_path / "out").glob("adapter*"))
    torch.testing.assert_close(
        logits(load_model(tmp_path / "out")), logits(own.model), atol=1e-5, rtol=0
    )


def test_a_checkpoint_holds_the_adapters_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = trained(trainer(**LORA))
    save_trainer(straight, tmp_path)
    resumed = trainer(**LORA)
    restore_trainer(resumed, tmp_path)
    assert (resumed.step, resumed.version) == (2, 2)
    for own in (straight, resumed):
        trained(own, 1)
    for name, value in straight.master_state().items():
        assert torch.equal(value, resumed.master_state()[name]), name
    full = sum(p.numel() for p in straight.model.parameters())
    assert sum(t.numel() for t in straight.master_state().values()) < full / 3


def test_adapters_on_another_model_are_refused_at_a_resume(tmp_path: Path) -> None:
    save_trainer(trainer(**LORA), tmp_path)
    with pytest.raises(CheckpointError, match="not the one that checkpoint"):
        restore_trainer(trainer(seed=1, **LORA), tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        restore_trainer(trainer(), tmp_path)


def test_adapters_begin_the_same_for_one_seed_and_leave_the_global_one_alone() -> None:
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        model = tiny_model()
        before = torch.get_rng_state()
        add_adapters(model, LoraOptions(rank=2), seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        states.append([p for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))


def test_targets_choose_the_layers() -> None:
    own = trainer(lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    assert len(own.parameters) == 2 * 2 * 2, "two layers, two targets, A and B"
    assert all(".q_proj." in name or ".v_proj." in name for name in own.parameters)
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        trainer(lora={"rank": 2, "targets": ["nothing_of_this_name"]})


def test_the_reference_is_the_model_without_its_adapters() -> None:
    own = trained(trainer(**LORA, kl={"coefficient": 0.1, "estimator": "k3"}))
    with own.reference.in_force():
        torch.testing.assert_close(logits(own.model), logits(tiny_model()))
    assert all(p.requires_grad for p in own.parameters.values())
    (result,) = own.train([draw_groups(tiny_model())])
    assert result.metrics.to_row()["ref_kl_k3"] > 0
    before = logits(own.model)
    with without_adapters(own.model):
        assert not torch.equal(before, logits(own.model))
    assert torch.equal(before, logits(own.model))


# -- bfloat16 -------------------------------------------------------------------------------------

BF16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


def test_small_steps_add_up_in_the_masters() -> None:
    """An update far below bfloat16's resolution must not be lost."""
    own = trainer(trainer={**BF16, "lr": 1e-6, "schedule": "constant"})
    start = {name: t.clone() for name, t in own.master_state().items()}
    torch.testing.assert_close(start, dict(tiny_model().named_parameters()), rtol=0, atol=0)
    trained(own, 3)
    assert {p.dtype for p in own.model.parameters()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (own.master_state()[name] - start[name]).abs()
    assert 1e-6 < float(moved.max()) < 1e-5
    assert torch.equal(
        own.model.get_parameter(name).float(), own.master_state()[name].bfloat16().float()
    )
    assert {t.dtype for t in own.store.fetch(own.version).values()} == {torch.float32}


def test_bfloat16_parameters_learn_as_autocast_does() -> None:
    losses = []
    for options in (BF16, {"dtype": "bfloat16"}, {}):
        own = trainer(trainer=dict(options))
        groups = draw_groups(tiny_model())
        for _ in range(4):
            (result,) = own.train([groups])
        losses.append(result.metrics.to_row()["loss"])
    assert losses[2] < -0.05
    assert losses[0] == pytest.approx(losses[2], abs=0.05)
    assert losses[1] == pytest.approx(losses[2], abs=0.05)


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    groups = draw_groups(tiny_model(), num_groups=3)
    norms = []
    for budget in (4096, 40):
        own = trainer(trainer={**BF16, "token_budget": budget})
        (result,) = own.train([groups])
        norms.append(result.metrics.to_row()["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


def test_masters_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    straight = trained(trainer(trainer=dict(BF16)))
    save_trainer(straight, tmp_path)
    resumed = trainer(seed=3, trainer=dict(BF16))
    restore_trainer(resumed, tmp_path)
    for own in (straight, resumed):
        trained(own, 1)
    for name, value in straight.master_state().items():
        assert torch.equal(value, resumed.master_state()[name]), name
        assert torch.equal(straight.model.get_parameter(name), resumed.model.get_parameter(name))


# -- gradient checkpointing -----------------------------------------------------------------------


def test_gradient_checkpointing_gives_equal_gradients() -> None:
    groups = draw_groups(tiny_model())
    states, saved = [], []
    for checkpointing in (False, True):
        own = trainer(trainer={"gradient_checkpointing": checkpointing})
        kept = []

        def pack(tensor: torch.Tensor, kept: list = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            own.score(own._cut(groups)[0])
        saved.append(sum(kept))
        (result,) = own.train([groups])
        states.append((result.metrics.to_row()["grad_norm"], own.master_state()))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        assert torch.equal(value, states[1][1][name]), name
    assert saved[1] < saved[0] / 2


def test_dropout_stays_off_under_gradient_checkpointing() -> None:
    model = tiny_model(attention_dropout=0.5)
    before = logits(model)
    enable_gradient_checkpointing(model)
    assert torch.equal(before, logits(model))


def test_gradient_checkpointing_with_adapters_and_bfloat16_trains() -> None:
    own = trainer(**LORA, trainer={**BF16, "gradient_checkpointing": True, "warmup_steps": 0})
    before = {name: t.clone() for name, t in own.master_state().items()}
    trained(own)
    assert {p.dtype for p in own.parameters.values()} == {torch.float32}
    assert any(not torch.equal(t, before[n]) for n, t in own.master_state().items())


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"lora": {"rank": -1}}, "rank must be at least 0"),
        ({"lora": {"alpha": 0}}, "alpha must be finite and above 0"),
        ({"trainer": {"param_dtype": "bfloat16"}}, "param_dtype = 'bfloat16' needs dtype"),
        ({"trainer": {"attention": "flash_attention_2"}}, "needs dtype = 'bfloat16' and a GPU"),
        ({"trainer": {"attention": "flash"}}, "must be one of sdpa"),
    ],
)
def test_what_is_refused(table: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe_from_table(table)
