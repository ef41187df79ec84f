"""Weights in few bits: the rounding itself, an engine that draws from them, a guard that knows."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import estr
from estr.config import load_recipe
from estr.engine import Request
from estr.engines.process import EngineHost
from estr.errors import ConfigError, WeightsError
from estr.logprobs import token_statistics
from estr.metrics import read_metrics
from estr.models import load_model, load_tokenizer, resolve_model
from estr.options.run import EngineOptions
from estr.quantization import (
    inner_linear_weights,
    quantize_rows,
    quantized_state,
    require_inner_linear_weights,
)
from estr.types import RolloutId, SamplingSettings, Segment
from estr.weights import MemoryWeightStore
from tiny import tiny_model
from tiny_models import tiny_model as tiny_model_of


def test_quantized_rows_are_these() -> None:
    weight = torch.tensor([[0.9, -0.3, 0.31, 0.0], [0.0, 0.0, 0.0, 0.0], [-6.0, 2.9, 3.1, 1.0]])
    codes, scales, zeros = found = quantize_rows(weight, 3)
    assert codes.tolist() == [[7, 0, 4, 2], [0, 0, 0, 0], [0, 7, 7, 6]]
    assert scales[:, 0].tolist() == pytest.approx([1.2 / 7, 0.0, 1.3])
    assert zeros[:, 0].tolist() == [2.0, 0.0, 5.0]
    assert found.weight()[2].tolist() == pytest.approx([-6.5, 2.6, 2.6, 1.3])
    codes, scales, zeros = quantize_rows(weight, 8)
    assert codes[0].tolist() == [255, 0, 130, 64]
    assert scales[2].item() == pytest.approx(9.1 / 255)
    with pytest.raises(ValueError, match="bits"):
        quantize_rows(weight, 1)


@given(
    st.integers(2, 8),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_rounding_is_stable_keeps_zero_and_hides_no_nan(
    bits: int, row: list[float], wrong: float
) -> None:
    weight = torch.tensor([[*row, 0.0]])
    once = quantize_rows(weight, bits).weight()
    step = (max(*row, 0.0) - min(*row, 0.0)) / (2**bits - 1)
    assert (once - weight).abs().max() <= step * 0.51 + 1e-30
    assert once[0, -1] == 0
    assert torch.allclose(quantize_rows(once, bits).weight(), once, rtol=1e-4, atol=step * 1e-3)
    assert not quantize_rows(torch.tensor([[*row, wrong]]), bits).weight().isfinite().all()


def test_what_is_rounded_is_every_linear_layer_but_the_output() -> None:
    model = tiny_model()
    names = inner_linear_weights(model)
    rounded = quantized_state(model.state_dict(), names, "int4")
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, rounded[n])}
    assert changed == names
    assert all(name.endswith("proj.weight") for name in names)
    assert len(names) == 7 * model.config.num_hidden_layers
    assert all(len(rounded[name][0].unique()) <= 16 for name in names)
    half = {name: t.bfloat16() for name, t in model.state_dict().items()}
    assert quantized_state(half, names, "int4")[min(names)].dtype == torch.bfloat16
    assert quantized_state(half, names, "none") == half


@pytest.mark.parametrize(
    ("family", "message"),
    [
        # Conv1D throughout: 12 * 64^2 weights in each of two layers.
        ("gpt2", "GPT2LMHeadModel has only 0 of its 98304 inner weights"),
        # The experts of a layer are two tensors of three dimensions: 4 * 3 * 96 * 64 weights of it;
        # attention is linear, 4 * 64^2, the router 4 * 64 in a parameter.
        ("mixtral", "MixtralForCausalLM has only 32768 of its 180736 inner weights"),
    ],
)
def test_a_model_that_would_hardly_be_rounded_is_refused(
    family: str, message: str, tmp_path: Path
) -> None:
    load_tokenizer(resolve_model("builtin")).save_pretrained(tmp_path)
    tiny_model_of(family, vocab_size=64).save_pretrained(tmp_path)
    EngineHost(tmp_path, EngineOptions(), 0, True).close()
    with pytest.raises(ConfigError, match=f"quantization = 'int4' .*{message}.*\"none\""):
        EngineHost(tmp_path, EngineOptions(quantization="int4"), 0, True)


@pytest.mark.parametrize("family", ["llama-tied", "gpt-neox", "phi", "gemma2-capped", "mamba"])
def test_models_of_linear_layers_are_rounded(family: str) -> None:
    model = tiny_model_of(family)
    assert require_inner_linear_weights(model, "int8") == inner_linear_weights(model)


def drawn_by(host: EngineHost, number: int) -> Segment:
    request = Request(
        RolloutId(0, number, 0),
        np.array([1, 4, 5], dtype=np.int32),
        SamplingSettings(),
        max_new_tokens=4,
        first_position=3,
    )
    host.generate(number, request)
    while True:
        for answered, result in host.pump():
            if answered == number:
                assert isinstance(result, Segment)
                return result


def test_the_engine_draws_from_rounded_weights_before_and_after_a_switch() -> None:
    folder = resolve_model("builtin")
    host = EngineHost(folder, EngineOptions(quantization="int4"), 0, True)
    first, second = load_model(folder), load_model(folder)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(0))
    store = MemoryWeightStore()
    store.publish(1, second.state_dict())
    for number, model in enumerate((first, second)):
        if number:
            host.load(9, 1, store, "recompute")
        segment = drawn_by(host, number)
        exact = copy.deepcopy(model)
        rounded = quantized_state(model.state_dict(), inner_linear_weights(model), "int4")
        exact.load_state_dict(rounded)
        ids = torch.tensor([[1, 4, 5, *segment.token_ids.tolist()]])
        with torch.no_grad():
            own, plain = (
                token_statistics(m(ids).logits[0, 2:-1], ids[0, 3:]).logprobs.numpy()
                for m in (exact, model)
            )
        assert np.abs(segment.behavior_logprobs - own).max() < 1e-4
        assert np.abs(segment.behavior_logprobs - plain).max() > 1e-3
        assert set(segment.versions) == {number}
    store.publish(2, {n: t * math.nan for n, t in second.state_dict().items()})
    host.load(10, 2, store, "recompute")
    errors = [result for _, result in host.pump() if isinstance(result, Exception)]
    assert [type(error) for error in errors] == [WeightsError]
    host.close()


SMALL = ["steps=3", "groups_per_step=2", "group_size=2", "eval.problems=4"]
SMALL += ["eval.final_problems=4"]


def test_a_run_with_a_rounded_sampler_has_a_mismatch_and_no_alarm(tmp_path: Path) -> None:
    rows = {}
    for quantization in ("none", "int4"):
        overrides = [*SMALL, f"name={quantization}", f"engine.quantization={quantization}"]
        overrides += ["max_staleness=0", "guard=stop"]
        estr.train(load_recipe(overrides=overrides), runs=tmp_path)
        rows[quantization] = read_metrics(tmp_path / quantization / "metrics.jsonl").records
    gaps = {
        name: max(r["log_ratio_variance"] for r in its if "log_ratio_variance" in r)
        for name, its in rows.items()
    }
    assert gaps["none"] < 1e-8
    assert gaps["int4"] > 1e-4


def test_only_the_local_engine_rounds() -> None:
    with pytest.raises(ConfigError, match="quantization = 'int8' needs name = 'local'"):
        load_recipe(overrides=["engine.name=vllm", "engine.quantization=int8"])
