"""The loads that the engine benchmarks serve, and how time inside a function is taken."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from estr.bench import timed_calls
from estr.bench.engine import heavy_tailed_lengths, make_loads, serve
from estr.engines.local import LocalEngine
from tiny_models import tiny_model


def test_lengths_are_heavy_tailed_with_a_mean_of_a_quarter_of_the_longest() -> None:
    lengths = heavy_tailed_lengths(64, 256)
    assert len(lengths) == 64
    assert (min(lengths), max(lengths)) == (8, 256)
    assert sum(lengths) / 64 == pytest.approx(64, rel=0.02)
    assert sorted(lengths)[32] < 32  # half of them are shorter than half the mean
    assert lengths == heavy_tailed_lengths(64, 256)
    assert lengths != sorted(lengths)


def test_both_loads_ask_for_the_same_number_of_tokens_and_share_no_prompt() -> None:
    loads = make_loads(vocab_size=1000, quick=False)
    assert loads["equal"].num_useful_tokens == pytest.approx(
        loads["heavy"].num_useful_tokens, rel=0.01
    )
    assert len(set(loads["equal"].lengths)) == 1
    assert len({prompt.tobytes() for prompt in loads["heavy"].prompts}) == 64


def test_serving_a_load_draws_every_requested_token_and_no_other() -> None:
    model = tiny_model(max_position_embeddings=128)
    load = make_loads(vocab_size=40, quick=True)["heavy"]
    engine = LocalEngine(model, max_batch=load.max_batch, prefix_bytes=0)
    serve(engine, load)
    assert engine.statistics()["tokens"] == load.num_useful_tokens
    assert engine.statistics()["prefix_hits"] == 0


def test_time_is_taken_inside_a_function_which_is_put_back_afterwards() -> None:
    def work(value: int) -> int:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        return value + 1

    place = SimpleNamespace(work=work)
    with timed_calls((place, "work")) as spent_s:
        assert place.work(1) == 2
    assert place.work is work
    assert spent_s["work"] >= 0.02
    with pytest.raises(ZeroDivisionError), timed_calls((place, "work")):
        place.work(1 // 0)
    assert place.work is work
