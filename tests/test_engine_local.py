"""The local engine: what it draws and records while requests come and go, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_cases import (
    TOLERANCE,
    assert_rescored,
    finish,
    random_requests,
    request,
    serve,
    state_of,
)
from estr.engines.local import LocalEngine
from estr.engines.runner import buckets
from estr.engines.sampler import stream_name, uniforms
from estr.errors import EngineError
from estr.types import RolloutId, SamplingSettings, Segment
from tiny_models import CONTEXT, FAMILIES, VOCAB_SIZE, tiny_model

SERVED = [name for name in FAMILIES if name != "mamba"]


@pytest.mark.parametrize(
    ("family", "seed"), [(family, 1) for family in SERVED] + [("llama-grouped", 2)]
)
def test_every_token_is_rescored_by_its_own_version_with_joins_leaves_and_switches(
    family: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    states = [state_of(family, version) for version in range(4)]
    engine = LocalEngine(tiny_model(family), max_batch=5)
    coming = random_requests(rng, 18)
    asked = {one.id: one for one in coming}
    finished: dict[RolloutId, Segment] = {}
    cancelled: set[RolloutId] = set()
    while coming or engine.num_running or engine.num_waiting:
        for _ in range(min(len(coming), int(rng.integers(0, 4)))):
            engine.submit(coming.pop())
        alive = list(engine.snapshot())
        if alive and rng.random() < 0.1:
            cancelled.add(alive[int(rng.integers(len(alive)))])
            engine.cancel(max(cancelled))
        if engine.version < 3 and rng.random() < 0.15:
            engine.begin_load(engine.version + 1, states[engine.version + 1], "recompute")
        assert engine.num_running <= 5
        finished.update(engine.step())
    assert set(finished) | cancelled == set(asked)
    reference = tiny_model(family)
    for rollout_id, drawn in finished.items():
        assert 1 <= len(drawn) <= asked[rollout_id].max_new_tokens
        assert (np.diff(drawn.versions) >= 0).all()
        assert_rescored(reference, states, asked[rollout_id], drawn)
    assert any(len(set(drawn.versions.tolist())) > 1 for drawn in finished.values())
    assert engine.statistics()["recomputed_tokens"] > 0


def test_tokens_do_not_depend_on_what_else_is_in_the_batch() -> None:
    requests = random_requests(np.random.default_rng(4), 12)
    alone = {one.id: serve(LocalEngine(tiny_model()), [one])[one.id] for one in requests}
    for max_batch, order in ((12, requests), (12, requests[::-1]), (3, requests), (1, requests)):
        together = serve(LocalEngine(tiny_model(), max_batch=max_batch), order)
        for rollout_id, drawn in together.items():
            assert drawn.token_ids.tolist() == alone[rollout_id].token_ids.tolist()
            assert drawn.finish_reason == alone[rollout_id].finish_reason
            np.testing.assert_allclose(
                drawn.behavior_logprobs, alone[rollout_id].behavior_logprobs, atol=TOLERANCE
            )


def test_a_token_is_drawn_by_the_uniform_of_its_place_in_the_trajectory() -> None:
    model = tiny_model(vocab_size=4)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    engine = LocalEngine(model)
    for first_position in (2, 17):
        one = replace(request(prompt=[1, 2], tokens=12), first_position=first_position)
        places = range(first_position, first_position + 12)
        uniform = uniforms([stream_name(one.id)] * 12, places)
        drawn = serve(engine, [one])[one.id]
        assert drawn.token_ids.tolist() == (4 * uniform).astype(int).tolist()


def test_members_attempts_and_runs_differ_and_each_is_repeatable_check_145() -> None:
    base = request(tokens=20)
    ids = [base.id, replace(base.id, index=1), replace(base.id, attempt=1), replace(base.id, run=6)]
    twice = [
        serve(LocalEngine(tiny_model()), [replace(base, id=one) for one in ids]) for _ in range(2)
    ]
    drawn = [[run[one].token_ids.tolist() for one in ids] for run in twice]
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) == len(ids)


def test_first_tokens_of_a_group_sharing_its_prompt_are_independent_check_146() -> None:
    model = tiny_model(vocab_size=4)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    members = [request(g, i, prompt=[1, 2], tokens=1) for g in range(200) for i in range(8)]
    finished = serve(LocalEngine(model, max_batch=512), members)
    firsts = np.array([finished[one.id].token_ids[0] for one in members]).reshape(200, 8)
    assert not (firsts == firsts[:, :1]).all(axis=1).any()
    assert np.bincount(firsts.ravel(), minlength=4).min() > 300


def test_a_stop_token_is_kept_and_a_budget_is_length() -> None:
    whole = serve(LocalEngine(tiny_model()), [request(tokens=10)])[request().id]
    assert whole.finish_reason == "length"
    assert len(whole) == 10
    stop = int(whole.token_ids[4])
    first = whole.token_ids.tolist().index(stop)
    cut = serve(LocalEngine(tiny_model()), [request(tokens=10, stop=(stop,))])[request().id]
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == whole.token_ids.tolist()[: first + 1]
    assert cut.sampled.all()


@pytest.mark.parametrize(
    ("family", "limit"), [("llama", CONTEXT), ("mistral-window", 24), ("gemma2-capped", 32)]
)
def test_the_models_context_is_a_limit(family: str, limit: int) -> None:
    engine = LocalEngine(tiny_model(family))
    one = request(prompt=[1] * (limit - 3), tokens=100)
    drawn = serve(engine, [one])[one.id]
    assert len(drawn) == 3
    assert drawn.finish_reason == "length"
    assert_rescored(tiny_model(family), [state_of(family, 0)], one, drawn)
    with pytest.raises(EngineError, match=f"group 0 .*context of {limit}"):
        engine.submit(request(prompt=[1] * limit))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": np.zeros(0, dtype=np.int32)}, "empty"),
        ({"token_ids": np.array([1, VOCAB_SIZE], dtype=np.int32)}, f"token id {VOCAB_SIZE}"),
        ({"token_ids": np.array([1, -1], dtype=np.int32)}, "token id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"sampling": SamplingSettings(temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingSettings(temperature=math.nan)}, "temperature"),
        ({"sampling": SamplingSettings(temperature=math.inf)}, "temperature"),
        ({"first_position": -1}, "first_position"),
        ({"id": RolloutId(5, 0, 2**16)}, "65536"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    change: dict[str, object], named: str
) -> None:
    engine = LocalEngine(tiny_model())
    with pytest.raises(EngineError, match=named) as caught:
        engine.submit(replace(request(), **change))
    assert "group 0" in str(caught.value)
    assert engine.num_waiting == 0


def test_token_ids_of_another_width_mean_the_same() -> None:
    one = request(prompt=[3, 1, 2])
    wide = replace(one, token_ids=one.token_ids.astype(np.int64))
    drawn = [serve(LocalEngine(tiny_model()), [each])[one.id] for each in (one, wide)]
    assert drawn[0].token_ids.tolist() == drawn[1].token_ids.tolist()
    np.testing.assert_array_equal(drawn[0].behavior_logprobs, drawn[1].behavior_logprobs)


def test_a_request_is_served_once_at_a_time() -> None:
    engine = LocalEngine(tiny_model())
    engine.submit(request())
    with pytest.raises(EngineError, match="already"):
        engine.submit(request())
    engine.step()
    with pytest.raises(EngineError, match="already"):
        engine.submit(request())
    finish(engine)
    assert len(serve(engine, [request()])) == 1


def test_the_oldest_deadline_is_served_first_then_the_first_to_arrive() -> None:
    engine = LocalEngine(tiny_model(), max_batch=1)
    deadlines = [3, 1, 2, 1, 0]
    for group, deadline in enumerate(deadlines):
        engine.submit(request(group, tokens=2, deadline=deadline))
    order: list[int] = []
    while engine.num_running or engine.num_waiting:
        order += [rollout_id.group for rollout_id, _ in engine.step()]
    assert order == [4, 1, 3, 2, 0]


def test_a_snapshot_holds_what_each_request_has_drawn() -> None:
    engine = LocalEngine(tiny_model(), max_batch=2)
    requests = [request(g, tokens=6) for g in range(3)]
    for one in requests:
        engine.submit(one)
    for _ in range(4):
        engine.step()
    partial = engine.snapshot()
    assert [len(partial[one.id]) for one in requests] == [4, 4, 0]
    assert all(segment.finish_reason is None for segment in partial.values())
    whole = finish(engine)
    for one in requests:
        part = partial[one.id]
        assert part.token_ids.tolist() == whole[one.id].token_ids.tolist()[: len(part)]
        assert part.versions.tolist() == [0] * len(part)


def test_cancelled_requests_leave_and_do_not_disturb_the_others() -> None:
    requests = [request(g, prompt=range(1, 3 + g), tokens=8) for g in range(5)]
    undisturbed = serve(LocalEngine(tiny_model()), requests)
    engine = LocalEngine(tiny_model(), max_batch=4)
    for one in requests:
        engine.submit(one)
    engine.cancel(requests[4].id)  # waiting
    engine.step()
    engine.step()
    engine.cancel(requests[0].id)  # running
    engine.cancel(requests[0].id)
    engine.cancel(RolloutId(9, 9, 9))
    assert engine.num_running == 3
    assert set(engine.snapshot()) == {one.id for one in requests[1:4]}
    finished = finish(engine)
    assert set(finished) == {one.id for one in requests[1:4]}
    for rollout_id, drawn in finished.items():
        assert drawn.token_ids.tolist() == undisturbed[rollout_id].token_ids.tolist()


def test_temperature_zero_is_argmax_for_evaluation_check_43() -> None:
    one = request(temperature=0.0, tokens=10)
    drawn = serve(LocalEngine(tiny_model()), [one])[one.id]
    model, ids = tiny_model(), torch.from_numpy(one.token_ids).long()[None]
    for token in drawn.token_ids.tolist():
        assert int(model(input_ids=ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    assert_rescored(tiny_model(), [state_of("llama-grouped", 0)], one, drawn)


def test_padding_of_the_vocabulary_is_neither_drawn_nor_read_check_44() -> None:
    model = tiny_model(vocab_size=8)
    engine = LocalEngine(model, vocab_size=6)
    one = request(tokens=40, prompt=[1, 2])
    drawn = serve(engine, [one])[one.id]
    assert drawn.token_ids.max() == 5
    ids = torch.from_numpy(np.concatenate([one.token_ids, drawn.token_ids])).long()[None]
    log_probs = model(input_ids=ids).logits[0, 1:-1, :6].log_softmax(-1)
    expected = log_probs.gather(1, ids[0, 2:, None])[:, 0]
    np.testing.assert_allclose(drawn.behavior_logprobs, expected.numpy(), atol=TOLERANCE)
    with pytest.raises(EngineError, match="token id 6"):
        engine.submit(request(1, prompt=[6]))


def test_gini_is_left_out_on_request() -> None:
    drawn = serve(LocalEngine(tiny_model(), gini=False), [request()])[request().id]
    assert drawn.behavior_gini is None
    assert np.isfinite(drawn.behavior_entropies).all()


def test_bf16_sampling_records_float32_facts_of_its_own_distribution() -> None:
    model = tiny_model(initializer_range=0.1).to(torch.bfloat16)
    engine = LocalEngine(model, version=3)
    requests = [request(g, prompt=range(1, 4 + g), tokens=8) for g in range(4)]
    finished = serve(engine, requests)
    engine.begin_load(4, state_of("llama-grouped", 1), "recompute")  # float32, cast
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert engine.version == 4
    for one in requests:
        drawn = finished[one.id]
        assert drawn.behavior_logprobs.dtype == np.float32
        assert drawn.versions.tolist() == [3] * 8
        assert ((drawn.behavior_entropies > 0) & (drawn.behavior_entropies < 3.7)).all()
        # a float32 number, not one rounded to the 8 bits of bf16
        as_bf16 = torch.from_numpy(drawn.behavior_logprobs).bfloat16().float().numpy()
        assert (as_bf16 != drawn.behavior_logprobs).any()
    again = serve(engine, [request(9)])[request(9).id]
    reference = tiny_model(seed=1).to(torch.bfloat16)
    ids = torch.from_numpy(np.concatenate([request(9).token_ids, again.token_ids])).long()[None]
    log_probs = reference(input_ids=ids).logits[0, 2:-1].float().log_softmax(-1)
    expected = log_probs.gather(1, ids[0, 3:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(again.behavior_logprobs, expected, atol=0.15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_distribution_end_in_an_error_and_no_token(bad: float) -> None:
    model = tiny_model("phi")
    engine = LocalEngine(model, version=2)
    sound = {name: t.clone() for name, t in model.state_dict().items()}
    for group in range(3):
        engine.submit(request(group))
    engine.step()
    with torch.no_grad():
        model.lm_head.bias.fill_(bad)
    with pytest.raises(EngineError, match=r"group 0 member 0 .*version 2 .*position 4.*3 requests"):
        engine.step()
    assert engine.num_running == engine.num_waiting == 0
    engine.begin_load(3, sound, "recompute")
    drawn = serve(engine, [request(5)])[request(5).id]
    assert_rescored(tiny_model("phi"), [{}, {}, {}, sound], request(5), drawn)


def test_a_cache_poisoned_by_bad_weights_does_not_outlive_them() -> None:
    model = tiny_model()
    engine = LocalEngine(model)
    sound = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(math.nan)
    engine.submit(request(prompt=range(1, 20)))
    with pytest.raises(EngineError, match="version 0"):
        engine.step()
    engine.begin_load(0, sound, "recompute")
    # A short request in the row that was full of NaN, beside a longer one that widens the reading.
    later = [request(1), request(2, prompt=range(1, 15))]
    finished = serve(engine, later)
    for one in later:
        assert_rescored(tiny_model(), [sound], one, finished[one.id])


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    model = tiny_model("phi")
    with torch.no_grad():
        model.lm_head.bias[3:] = -math.inf
    drawn = serve(LocalEngine(model), [request(tokens=30, prompt=[1, 2])])[request().id]
    assert set(drawn.token_ids.tolist()) <= {0, 1, 2}
    assert (drawn.behavior_entropies < math.log(3)).all()


def test_a_model_without_keys_and_values_is_refused() -> None:
    with pytest.raises(EngineError, match="linear_attention"):
        LocalEngine(tiny_model("mamba"))


def test_a_model_whose_attention_ignores_the_mask_is_refused() -> None:
    class Careless(type(tiny_model().model)):  # type: ignore[misc]
        def forward(
            self,
            input_ids: Tensor,
            position_ids: Tensor | None = None,
            past_key_values: object = None,
            **inputs: object,
        ) -> object:
            return super().forward(
                input_ids,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )

    model = tiny_model()
    model.model.__class__ = Careless
    with pytest.raises(EngineError, match="differ"):
        LocalEngine(model)


def test_a_closed_engine_refuses_work() -> None:
    engine = LocalEngine(tiny_model())
    engine.submit(request(0))
    engine.step()
    engine.close()
    engine.close()
    assert engine.num_running == engine.num_waiting == 0
    assert engine.step() == []
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request(1))


@pytest.mark.parametrize("budget", [1, 16, 100])
def test_prefill_buckets_hold_every_context_once_and_keep_the_budget(budget: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 40).tolist()
    parts = list(buckets(lengths, budget))
    assert sorted(i for part in parts for i in part) == list(range(40))
    for part in parts:
        longest = max(lengths[i] for i in part)
        assert len(part) == 1 or len(part) * longest <= budget
        assert all(2 * lengths[i] >= longest for i in part)
