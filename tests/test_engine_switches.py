"""The local engine while its weights change under running requests, and while they may not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from engine_cases import TOLERANCE, State, assert_rescored, finish, request, serve, state_of
from estr.engine import KVPolicy, Request
from estr.engines.kv_cache import PrefixStore
from estr.engines.local import LocalEngine
from estr.errors import EngineError, WeightsError
from estr.types import RolloutId, Segment
from tiny_models import tiny_model


def test_an_update_while_a_request_runs_takes_effect_at_the_next_token_check_70() -> None:
    states = [state_of("llama-grouped", v) for v in range(2)]
    engine = LocalEngine(tiny_model())
    one = request(tokens=8)
    engine.submit(one)
    for _ in range(3):
        engine.step()
    engine.begin_load(1, states[1], "recompute")
    assert engine.version == 1
    drawn = finish(engine)[one.id]
    assert drawn.versions.tolist() == [0] * 3 + [1] * 5
    # the whole context but its last token was computed again: 3 + 3 - 1
    assert engine.statistics()["recomputed_tokens"] == 5
    assert_rescored(tiny_model(), states, one, drawn)


def hybrid_logprobs(states: Sequence[State], asked: Request, drawn: Segment) -> np.ndarray:
    """Log-probs of an uninterrupted transformers cache whose weights change underneath it."""
    model, cache = tiny_model(), DynamicCache()
    feed, logprobs = torch.from_numpy(asked.token_ids).long()[None], []
    for token, version in zip(drawn.token_ids.tolist(), drawn.versions.tolist(), strict=True):
        model.load_state_dict(states[version])
        with torch.no_grad():
            logits = model(input_ids=feed, past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(float(logits.log_softmax(-1)[token]))
        feed = torch.tensor([[token]])
    return np.array(logprobs)


def test_kv_keep_records_the_hybrid_that_it_samples_from() -> None:
    states = [state_of("llama-grouped", v) for v in range(3)]
    engine = LocalEngine(tiny_model(), max_batch=4)
    requests = [request(g, prompt=range(1, 4 + g), tokens=9 + g) for g in range(4)]
    for one in requests:
        engine.submit(one)
    finished: dict[RolloutId, Segment] = {}
    for step in range(40):
        if step in (3, 6):
            engine.begin_load(engine.version + 1, states[engine.version + 1], "keep")
        finished.update(engine.step())
    for one in requests:
        drawn = finished[one.id]
        assert set(drawn.versions.tolist()) == {0, 1, 2}
        expected = hybrid_logprobs(states, one, drawn)
        np.testing.assert_allclose(drawn.behavior_logprobs, expected, atol=TOLERANCE)
        with pytest.raises(AssertionError):  # no version by itself reproduces it
            assert_rescored(tiny_model(), states, one, drawn)
    assert engine.statistics()["recomputed_tokens"] == 0


def test_a_hybrid_cache_never_enters_the_shared_one() -> None:
    states = [state_of("llama-grouped", v) for v in range(2)]
    engine = LocalEngine(tiny_model())
    first = request(0, prompt=[7, 8, 9, 1], tokens=10)
    engine.submit(first)
    engine.step()
    engine.begin_load(1, states[1], "keep")
    engine.step()
    # What the first request holds is its prompt and its first token, in part from version 0.
    longer = [*first.token_ids, *engine.snapshot()[first.id].token_ids]
    later = [request(1, prompt=[7, 8, 9, 1]), request(2, prompt=[int(t) for t in longer])]
    finished = serve(engine, later)
    for one in later:
        assert_rescored(tiny_model(), states, one, finished[one.id])


def test_recompute_after_keep_makes_running_requests_rescorable_again() -> None:
    states = [state_of("llama-grouped", v) for v in range(3)]
    engine = LocalEngine(tiny_model())
    one = request(tokens=12)
    engine.submit(one)
    for version, kv in ((None, None), (1, "keep"), (2, "recompute")):
        if version is not None:
            engine.begin_load(version, states[version], kv)
        for _ in range(3):
            engine.step()
    drawn = finish(engine)[one.id]
    n = len(one.token_ids)
    model = tiny_model()
    model.load_state_dict(states[2])
    ids = torch.from_numpy(np.concatenate([one.token_ids, drawn.token_ids])).long()[None]
    expected = model(input_ids=ids).logits[0].log_softmax(-1)[n - 1 : -1].detach()
    expected = expected.gather(1, ids[0, n:, None])[:, 0].numpy()
    np.testing.assert_allclose(drawn.behavior_logprobs[6:], expected[6:], atol=TOLERANCE)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_without_in_flight_updates_no_request_spans_two_versions_check_71(kv: KVPolicy) -> None:
    states = [state_of("llama-grouped", v) for v in range(3)]
    engine = LocalEngine(tiny_model(), in_flight=False, max_batch=3)
    requests = [request(g, tokens=tokens) for g, tokens in enumerate((2, 2, 7, 4, 4))]
    for one in requests:
        engine.submit(one)
    finished = dict(engine.step()) | dict(engine.step())
    assert len(finished) == 2
    engine.begin_load(1, states[1], kv)
    engine.begin_load(2, states[2], kv)  # the newer one takes the place of the pending one
    while engine.version == 0:
        assert engine.num_running == 1
        assert engine.num_waiting == 2
        finished.update(engine.step())
        if not engine.num_running:
            finished.update(engine.step())
    assert engine.version == 2
    finished.update(finish(engine))
    for one in requests:
        assert len(set(finished[one.id].versions.tolist())) == 1
        assert_rescored(tiny_model(), states, one, finished[one.id])
    assert [int(finished[one.id].versions[0]) for one in requests] == [0, 0, 0, 2, 2]


def test_without_in_flight_updates_cancelling_the_last_request_lets_the_switch_through() -> None:
    engine = LocalEngine(tiny_model(), in_flight=False)
    one = request()
    engine.submit(one)
    engine.step()
    engine.begin_load(1, state_of("llama-grouped", 1), "recompute")
    engine.cancel(one.id)
    assert engine.version == 0
    assert engine.step() == []
    assert engine.version == 1


def bad_state(kind: str) -> State:
    state = state_of("llama-grouped", 1)
    name = list(state)[-1]  # the last: all before it are sound
    if kind == "missing":
        del state[name]
    elif kind == "unknown":
        state["model.layers.9.weight"] = torch.zeros(1)
    elif kind == "shape":
        state[name] = state[name][:-1]
    elif kind == "kind":
        state[name] = state[name].long()
    else:
        state[name].view(-1)[-1] = {"nan": math.nan, "inf": -math.inf}[kind]
    return state


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "kind", "nan", "inf"])
@pytest.mark.parametrize("in_flight", [True, False])
def test_weights_that_do_not_fit_leave_the_old_ones_in_force(kind: str, in_flight: bool) -> None:
    undisturbed = serve(LocalEngine(tiny_model()), [request()])[request().id]
    engine = LocalEngine(tiny_model(), in_flight=in_flight)
    engine.submit(request())
    engine.step()
    with pytest.raises(WeightsError):
        engine.begin_load(1, bad_state(kind), "recompute")
    assert engine.version == 0
    drawn = finish(engine)[request().id]
    assert drawn.versions.tolist() == [0] * 6
    np.testing.assert_array_equal(drawn.behavior_logprobs, undisturbed.behavior_logprobs)


def test_an_error_about_weights_names_them() -> None:
    engine = LocalEngine(tiny_model())
    for kind, named in (
        ("missing", "1 missing"),
        ("unknown", "layers.9"),
        ("shape", "has shape"),
        ("kind", "int64"),
        ("nan", "NaN"),
    ):
        with pytest.raises(WeightsError, match=named):
            engine.begin_load(1, bad_state(kind), "recompute")
    with pytest.raises(EngineError, match="'kep'"):
        engine.begin_load(1, state_of("llama-grouped", 1), "kep")  # type: ignore[arg-type]


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_matrix_may_come_under_either_of_its_names(dropped: str) -> None:
    states = [state_of("llama-tied", v) for v in range(2)]
    engine = LocalEngine(tiny_model("llama-tied"))
    engine.begin_load(1, {k: t for k, t in states[1].items() if k != dropped}, "recompute")
    drawn = serve(engine, [request()])[request().id]
    assert_rescored(tiny_model("llama-tied"), states, request(), drawn)


def test_a_tied_matrix_under_two_names_must_be_one_matrix() -> None:
    engine = LocalEngine(tiny_model("llama-tied"))
    state = state_of("llama-tied", 1)
    engine.begin_load(1, state, "recompute")
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(WeightsError, match="tied"):
        engine.begin_load(2, state, "recompute")
    assert engine.version == 1


def test_a_group_computes_its_prompt_once_check_68() -> None:
    states = [state_of("llama-grouped", v) for v in range(2)]
    engine = LocalEngine(tiny_model())
    prompt = [4, 5, 6, 7, 8]

    def group(number: int) -> list[Request]:
        return [request(number, index, prompt=prompt) for index in range(4)]

    finished = serve(engine, group(0))
    assert engine.statistics()["prefix_hits"] == 3
    assert engine.statistics()["prefill_tokens"] == 4  # the last token is read when drawing
    finished |= serve(engine, group(1))
    assert engine.statistics()["prefix_hits"] == 3 + 4
    assert engine.statistics()["prefill_tokens"] == 4
    engine.begin_load(1, states[1], "recompute")
    finished |= serve(engine, group(2))
    assert engine.statistics()["prefix_hits"] == 7 + 3
    assert engine.statistics()["prefill_tokens"] == 8
    for one in (*group(0), *group(1), *group(2)):
        assert_rescored(tiny_model(), states, one, finished[one.id])


def test_the_same_version_with_other_weights_shares_nothing() -> None:
    states = [state_of("llama-grouped", 0), state_of("llama-grouped", 1)]
    engine = LocalEngine(tiny_model())
    serve(engine, [request(0)])
    engine.begin_load(0, states[1], "recompute")
    drawn = serve(engine, [request(1)])[request(1).id]
    assert_rescored(tiny_model(), [states[1]], request(1), drawn)


def test_without_room_only_requests_admitted_together_share() -> None:
    engine = LocalEngine(tiny_model(), max_batch=2, prefix_bytes=0)
    serve(engine, [request(0, index, tokens=2) for index in range(4)])
    assert engine.statistics()["prefix_hits"] == 2
    assert engine.statistics()["prefill_tokens"] == 4


def test_the_prefix_store_is_bounded_in_bytes_and_forgets_the_oldest() -> None:
    def held(size: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(size), torch.zeros(size))]  # 8 bytes each entry

    store = PrefixStore(max_bytes=100)
    for name in (b"a", b"b", b"c"):
        store.put(1, name, held(4))
    assert store.get(1, b"a") is not None
    store.put(1, b"d", held(4))
    assert [store.get(1, name) is not None for name in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        True,
        True,
    ]
    assert store.get(2, b"a") is None
    store.put(1, b"too large", held(13))
    assert all(store.get(1, name) is None for name in (b"a", b"c", b"d", b"too large"))
    store.put(1, b"e", held(12))
    assert store.get(1, b"e") is not None
    store.clear()
    assert store.get(1, b"e") is None
