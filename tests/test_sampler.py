"""Random numbers and the draw of a token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.engines.sampler import draw, inverse_cdf, philox4x32, stream_name, uniforms
from estr.types import RolloutId

ID = RolloutId(run=11, group=7, index=3, attempt=0)
ALMOST_ONE = 1 - 2.0**-53


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)[:, None]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox4x32(words(*counter), words(*key))[:, 0].tolist() == list(expected)


def test_a_uniform_is_53_bits_of_the_first_two_words() -> None:
    # run 0, group 0, member 0, position 0: counter 0 and key 0 of the known answers
    (drawn,) = uniforms([stream_name(RolloutId(0, 0, 0))], [0])
    assert drawn == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert drawn == pytest.approx(0.3990464, abs=1e-7)


def test_the_counter_and_the_key_are_laid_out_as_documented() -> None:
    rollout = RolloutId(run=(5 << 32) | 6, group=(8 << 32) | 9, index=3, attempt=2)
    block = philox4x32(words(17, 3 | 2 << 16, 9, 8), words(6, 5))
    expected = ((int(block[0, 0]) >> 5) * 2**26 + (int(block[1, 0]) >> 6)) / 2**53
    assert uniforms([stream_name(rollout)], [17])[0] == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**31)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=50, deadline=None)
def test_a_uniform_depends_on_its_own_name_and_position_only(
    cases: list[tuple[int, int, int]],
) -> None:
    names = [stream_name(RolloutId(run, group, i)) for i, (run, group, _) in enumerate(cases)]
    positions = [position for *_, position in cases]
    together = uniforms(names, positions)
    alone = [uniforms([name], [at])[0] for name, at in zip(names, positions, strict=True)]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_streams_of_members_attempts_groups_and_runs_differ_check_145() -> None:
    others = [
        replace(ID, run=12),
        replace(ID, group=8),
        replace(ID, index=4),
        replace(ID, attempt=1),
        replace(ID, run=ID.run + 2**32),
        replace(ID, group=ID.group + 2**32),
    ]
    drawn = {
        tuple(uniforms([stream_name(name)] * 20, range(20)).tolist()) for name in [ID, *others]
    }
    assert len(drawn) == 1 + len(others)
    again = uniforms([stream_name(ID)] * 20, range(20))
    assert tuple(again.tolist()) in drawn


def test_uniforms_are_uniform() -> None:
    drawn = uniforms([stream_name(ID)] * 40000, range(40000))
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    # 20 bins of 2000: chi square with 19 degrees of freedom, 99.99 % quantile 50.8
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 50.8
    assert abs(float(np.corrcoef(drawn[:-1], drawn[1:])[0, 1])) < 0.02


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run": -1}, "run = -1"),
        ({"run": 2**64}, f"run = {2**64}"),
        ({"group": -5}, "group = -5"),
        ({"index": 2**16}, "index = 65536"),
        ({"attempt": 2**16}, "attempt = 65536"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(change: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        stream_name(replace(ID, **change))


def pick(probs: list[float], uniform: float) -> int:
    chosen = inverse_cdf(torch.tensor([probs]), torch.tensor([uniform], dtype=torch.float64))
    return int(chosen[0])


def test_inverse_cdf_golden_values() -> None:
    probs = [0.25, 0.5, 0.0, 0.25]
    picks = [pick(probs, u) for u in (0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.99, ALMOST_ONE)]
    assert picks == [0, 0, 1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_impossible_tokens_at_the_edges_are_never_drawn(uniform: float) -> None:
    assert pick([0.0, 0.0, 1.0, 0.0], uniform) == 2
    far = [0.0] * 2000
    far[777] = 1e-30
    assert pick(far, uniform) == 777
    assert pick([0.0, 0.5, 0.0, 0.5, 0.0], uniform) in (1, 3)


def test_probabilities_need_not_sum_to_one() -> None:
    assert [pick([0.5, 0.25, 0.25 - 1e-4], u) for u in (0.4999, 0.5001, ALMOST_ONE)] == [0, 1, 2]
    assert [pick([2.0, 6.0], u) for u in (0.2499, 0.2501)] == [0, 1]


@given(st.integers(1, 1500), st.integers(0, 2**32 - 1), st.sampled_from([0.3, 3.0, 30.0]))
@settings(max_examples=60, deadline=None)
def test_blocks_agree_with_one_plain_cumulative_sum(size: int, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    probs = torch.from_numpy(rng.normal(0, spread, (4, size)).astype(np.float32)).softmax(-1)
    probs[rng.random((4, size)) < 0.3] = 0.0
    probs[:, rng.integers(size)] = 0.1
    uniform = rng.random(4)
    chosen = inverse_cdf(probs, torch.from_numpy(uniform)).numpy()
    for row, u, token in zip(probs.double().numpy(), uniform, chosen, strict=True):
        ends = row.cumsum()
        assert row[token] > 0
        assert ends[token] - row[token] <= u * ends[-1] * (1 + 1e-12) + 1e-300
        assert u * ends[-1] <= ends[token] * (1 + 1e-12)


@pytest.mark.parametrize("size", [5, 300, 5000])
def test_evenly_spaced_uniforms_reproduce_the_distribution(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(size, generator=generator)).softmax(-1)
    n = 4000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    chosen = torch.cat([inverse_cdf(probs.expand(500, -1), part) for part in uniform.split(500)])
    counts = torch.bincount(chosen, minlength=size)
    assert float((counts - n * probs.double()).abs().max()) <= 1.0


def test_a_token_is_recorded_with_the_distribution_it_was_drawn_from() -> None:
    # p = [.7, .2, .1]: entropy and gini do not depend on which token was drawn (check 49)
    logits = torch.tensor([[0.7, 0.2, 0.1]] * 3).log()
    draws = draw(logits, [1.0] * 3, np.array([0.1, 0.8, 0.95]))
    assert draws.token_ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(draws.logprobs, np.log([0.7, 0.2, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(draws.entropies, [0.801819] * 3, rtol=1e-5)
    np.testing.assert_allclose(draws.gini, [0.46] * 3, rtol=1e-5)
    assert draws.logprobs.dtype == draws.entropies.dtype == np.float32
    assert draws.sound.all()


def test_rows_of_different_temperatures_share_a_batch_check_38() -> None:
    logits = torch.tensor([[2.0, 0.0]] * 3)
    draws = draw(logits, [0.5, 1.0, 2.0], np.zeros(3))
    np.testing.assert_allclose(draws.logprobs, [-0.018150, -0.126928, -0.313262], atol=1e-6)
    assert logits.tolist() == [[2.0, 0.0]] * 3


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
def test_temperature_zero_is_argmax_check_43(uniform: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 0.5]])
    draws = draw(logits, [0.0, 0.0], np.full(2, uniform))
    assert draws.token_ids.tolist() == [1, 2]
    expected = logits.log_softmax(-1)[[0, 1], [1, 2]]
    np.testing.assert_allclose(draws.logprobs, expected.numpy(), rtol=1e-6)


def test_padded_columns_take_no_part_check_44() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]] * 2)
    draws = draw(logits, [1.0, 0.0], np.full(2, ALMOST_ONE), vocab_size=3)
    assert draws.token_ids.tolist() == [2, 2]
    np.testing.assert_allclose(draws.logprobs, [-0.407606] * 2, atol=1e-6)
    np.testing.assert_allclose(draws.entropies, [0.832396] * 2, atol=1e-6)
    huge = torch.tensor([[0.0, 0.0, 50.0]])
    assert draw(huge, [0.0], np.zeros(1), vocab_size=2).token_ids.tolist() == [0]


def test_impossible_tokens_contribute_nothing_check_48() -> None:
    draws = draw(torch.tensor([[0.0, 0.0, -math.inf]]), [1.0], np.array([ALMOST_ONE]))
    assert draws.token_ids.tolist() == [1]
    np.testing.assert_allclose(draws.entropies, [0.693147], atol=1e-6)
    np.testing.assert_allclose(draws.gini, [0.5], atol=1e-6)


@pytest.mark.parametrize("size", [3, 700])
@pytest.mark.parametrize(
    "bad", [[math.nan, 0.0], [math.inf, 0.0], [math.inf, math.nan], [-math.inf] * 2]
)
def test_what_is_no_distribution_is_not_sound(bad: list[float], size: int) -> None:
    logits = torch.zeros(3, size)
    logits[1] = torch.tensor(bad)[torch.arange(size) % 2]
    draws = draw(logits, [1.0] * 3, np.full(3, 0.5))
    assert draws.sound.tolist() == [True, False, True]


def test_bf16_logits_are_turned_into_float32_first_check_35() -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    halved, whole = (draw(t, [1.0] * 4, np.full(4, 0.3)) for t in (logits, logits.float()))
    assert halved.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_array_equal(halved.logprobs, whole.logprobs)
    np.testing.assert_array_equal(halved.entropies, whole.entropies)


def test_without_gini_none_is_recorded() -> None:
    assert draw(torch.zeros(1, 3), [1.0], np.zeros(1), gini=False).gini is None


def test_first_tokens_of_a_group_are_independent_check_146() -> None:
    members = [RolloutId(0, group, index) for group in range(200) for index in range(8)]
    uniform = uniforms([stream_name(name) for name in members], [5] * len(members))
    tokens = draw(torch.zeros(len(members), 4), [1.0] * len(members), uniform).token_ids
    groups = tokens.reshape(200, 8)
    assert not (groups == groups[:, :1]).all(axis=1).any()
    assert np.bincount(tokens, minlength=4).min() > 300
