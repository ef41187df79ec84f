"""The laboratory's instruments: arithmetic, imposed versions, rollouts, runs, controls."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from estr.chat import Codec
from estr.corrections import TokenColumns, build_correction
from estr.environments import build_task
from estr.errors import ConfigError, EnvError
from estr.lab.arithmetic import as_computed
from estr.lab.decoder import Cache, Decoder, make_pass
from estr.lab.rollouts import Play, Sampler, roll_out
from estr.lab.scoring import score_by_version
from estr.lab.staleness import Plan, Staleness, WeightHistory
from estr.lab.training import LabRun, RunConfig, has_collapsed, train_once
from estr.logprobs import next_token, token_statistics
from estr.models import load_model, load_tokenizer, resolve_model
from estr.types import RolloutId, SamplingSettings


@pytest.fixture(scope="module")
def model():
    return load_model(resolve_model("builtin"))


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model.config)


@pytest.fixture(scope="module")
def history(model, decoder):
    """Seven versions, each a clear step away from the one before."""
    torch.manual_seed(0)
    history = WeightHistory(decoder, keep=7)
    state = {name: t.detach().clone() for name, t in model.named_parameters()}
    for version in range(7):
        history.publish(version, state)
        state = {name: t + 0.02 * torch.randn_like(t) for name, t in state.items()}
    return history


def play(split: str = "train", **table) -> Play:
    task = build_task({"name": "calculator", **table})
    codec = Codec(load_tokenizer(resolve_model("builtin")))
    stops = codec.resolve_stops(task.stop)
    return Play(task, split, codec, SamplingSettings(1.0, 24, 128, stops))


def drawn(history, decoder, staleness, *, arithmetic="float32", target=6, rows=6, **plan):
    ids = [RolloutId(3, i, 0) for i in range(rows)]
    sampler = Sampler(
        decoder, arithmetic, lambda v: history.weights(v, arithmetic), staleness.kv == "keep"
    )
    plan = Plan(staleness, target, rows, rng=np.random.default_rng(0), **plan)
    return roll_out(play(), sampler, plan, ids, list(range(rows)))


# Arithmetic


def test_the_error_is_at_most_half_a_step_of_the_row():
    torch.manual_seed(0)
    weight = torch.randn(16, 32)
    for name, bits in (("int8", 8), ("int4", 4), ("int3", 3)):
        steps = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / (2**bits - 1)
        error = (as_computed(weight, name) - weight).abs()
        assert (error <= steps / 2 + 1e-6).all()
        assert error.max() > steps.min() / 4
    assert as_computed(weight, "bfloat16").dtype == torch.bfloat16
    assert torch.equal(as_computed(weight, "float32"), weight)


# Decoder


def test_its_logits_are_those_of_transformers(model, decoder):
    torch.manual_seed(0)
    ids = torch.randint(3, 24, (3, 17))
    weights = decoder.prepare(dict(model.named_parameters()), "float32")
    cache = Cache(decoder, 3, 17, torch.float32)
    found = []
    # A chunk of 5, then of 1, 2, 3, 6: chunks must not change what a token sees.
    for begin, end in ((0, 5), (5, 6), (6, 8), (8, 11), (11, 17)):
        n = end - begin
        rows = torch.arange(3).repeat_interleave(n)
        offsets = torch.arange(n).repeat(3)
        step, _ = make_pass(
            ids[:, begin:end].flatten(),
            rows,
            offsets + begin,
            offsets,
            torch.zeros_like(rows),
            weights_of=lambda _: weights,
        )
        found.append(decoder.extend(cache, step, 3).view(3, n, -1))
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    torch.testing.assert_close(torch.cat(found, 1), plain, rtol=0, atol=5e-5)


def test_other_architectures_are_refused(model):
    config = type(model.config)(**{**model.config.to_dict(), "num_key_value_heads": 2})
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        Decoder(config)


# Staleness


@pytest.mark.parametrize("switches", ["even", "random", "turns"])
@pytest.mark.parametrize("arithmetic", ["float32", "int3"])
def test_every_token_was_drawn_by_the_version_that_was_imposed(
    model, history, decoder, switches, arithmetic
):
    staleness = Staleness(inter=2, intra=3, switches=switches)
    found = drawn(history, decoder, staleness, arithmetic=arithmetic, length=12.0)
    assert {v for t in found for v in t.sampled_versions().tolist()} == {1, 2, 3, 4}
    own = type(model)(model.config).eval()
    for trajectory in found:
        versions = trajectory.sampled_versions()
        assert versions[0] == 1
        assert (np.diff(versions) >= 0).all()
        (segment,) = trajectory.segments
        ids = torch.from_numpy(segment.token_ids.astype(np.int64))[None]
        mask = torch.from_numpy(segment.sampled)[None]
        for version in np.unique(versions):
            state = {
                n: as_computed(t, arithmetic) if n.endswith(("proj.weight", "head.weight")) else t
                for n, t in history.fetch(int(version)).items()
            }
            own.load_state_dict(state)
            with torch.no_grad():
                logits, tokens = next_token(own(input_ids=ids).logits, ids, mask)
            again = token_statistics(logits, tokens)
            at = versions == version
            for column, values in (
                (segment.behavior_logprobs, again.logprobs),
                (segment.behavior_entropies, again.entropies),
                (segment.behavior_gini, again.gini),
            ):
                np.testing.assert_allclose(column[segment.sampled][at], values[at], atol=2e-4)


def test_the_imposed_versions_are_these():
    rows, zeros = np.zeros(6, dtype=np.int64), np.zeros(6, dtype=np.int64)
    at = np.array([0, 3, 4, 8, 12, 40])
    even = Plan(Staleness(inter=5, intra=2), 10, 1, length=12.0)
    assert even.versions(rows, at, zeros).tolist() == [3, 3, 4, 5, 5, 5]
    turns = Plan(Staleness(inter=1, intra=6, switches="turns"), 10, 1, turns=4.0)
    assert turns.versions(rows, zeros, np.arange(6)).tolist() == [3, 5, 7, 9, 9, 9]
    early = Plan(Staleness(inter=15), 4, 1)
    assert early.versions(rows, at, zeros).tolist() == [0] * 6


def test_turn_switches_stand_at_borders_only(history, decoder):
    staleness = Staleness(intra=3, switches="turns")
    for trajectory in drawn(history, decoder, staleness):
        (segment,) = trajectory.segments
        for turn in trajectory.turns:
            assert len(set(segment.versions[turn.start : turn.stop].tolist())) == 1


def test_a_kept_cache_is_a_hybrid_of_versions(history, decoder):
    """No single version reproduces what came after a switch; before it, one does."""
    found = drawn(history, decoder, Staleness(intra=3, kv="keep"), length=12.0)
    again = score_by_version(decoder, lambda v: history.weights(v, "float32"), found)
    recorded = np.concatenate(
        [t.segments[0].behavior_logprobs[t.segments[0].sampled] for t in found]
    )
    first = np.concatenate([t.sampled_versions() == t.sampled_versions()[0] for t in found])
    error = np.abs(again.logprobs.numpy() - recorded)
    assert error[first].max() < 2e-4
    assert error[~first].max() > 1e-2


def test_a_version_that_is_gone_is_named(history):
    from estr.errors import WeightsError

    with pytest.raises(WeightsError, match="version 9"):
        history.weights(9, "float32")


# Rollouts


def test_rollouts_are_those_of_the_engine(model, history, decoder):
    """Same names, same uniforms, same weights: token for token what real rollouts draw."""
    import asyncio

    from estr.engines.in_process import InProcessEngine
    from estr.engines.local import LocalEngine
    from estr.options.run import RolloutOptions
    from estr.rollout import RolloutSetting, run_rollout

    found = drawn(history, decoder, Staleness(inter=6))
    setting = play()
    engine = InProcessEngine(LocalEngine(model, version=0, max_batch=8))
    real = RolloutSetting(
        engine, setting.task, setting.codec, setting.sampling, RolloutOptions(), split="train"
    )

    async def again():
        return await asyncio.gather(
            *(
                run_rollout(real, t.id, t.problem, dispatch_version=0, deadline_version=0)
                for t in found
            )
        )

    for ours, theirs in zip(found, asyncio.run(again()), strict=True):
        assert ours.segments[0].token_ids.tolist() == theirs.segments[0].token_ids.tolist()
        assert (ours.status, ours.outcome, ours.reward) == (
            theirs.status,
            theirs.outcome,
            theirs.reward,
        )
        assert ours.turns == theirs.turns


def test_an_environment_that_waits_is_refused(history, decoder):
    sampler = Sampler(decoder, "float32", lambda v: history.weights(v, "float32"))
    slow = play(latency_mean_s=0.5, latency_min_s=0.1, latency_max_s=1.0)
    with pytest.raises(EnvError, match="waits"):
        roll_out(
            slow, sampler, Plan(Staleness(), 6, 4), [RolloutId(0, i, 0) for i in range(4)], range(4)
        )


# Runs

SHORT = {"steps": 3, "prompts": 2, "group_size": 4, "window": 2, "eval_problems": 8, "eval_k": 2}


def test_a_run_repeats_itself_and_measures_lag():
    table = {**SHORT, "staleness": {"inter": 1}, "arithmetic": "int8"}
    once, again = train_once(table), train_once(table)
    timed = {"cpu_s", "trainer_s"}
    assert [r for r in once if r["measure"] not in timed] == [
        r for r in again if r["measure"] not in timed
    ]
    last = {row["measure"]: row["value"] for row in once}
    assert last["lag_max"] == 1.0
    assert last["collapsed"] in (0.0, 1.0)
    assert {"accuracy", "pass_at_k", "rho_mask", "kl_k3", "policy_entropy"} <= last.keys()


@pytest.mark.parametrize("window", [1, 3])
def test_weights_that_no_longer_draw_are_a_collapse(window):
    run = {"lr": 1e30, "warmup_steps": 0, "steps": 3, "window": window, "prompts": 2}
    rows = train_once(
        {**run, "group_size": 4, "eval_problems": 4, "eval_k": 1, "correction": [{"name": "none"}]}
    )
    last = {row["measure"]: row["value"] for row in rows}
    assert (last["nonfinite_run"], last["collapsed"], last["accuracy_end"]) == (1.0, 1.0, 0.0)
    assert {row["step"] for row in rows} == {0, window if window == 1 else 2}


def test_the_first_evaluation_is_shared_by_runs_of_one_model_and_task():
    def at_step_0(**table):
        return train_once({**SHORT, "steps": 1, **table})[0]["value"]

    first = at_step_0(eval_problems=32)
    for other in ({"seed": 5, "arithmetic": "int3"}, {"lr": 1e-2}):
        run = LabRun(RunConfig.read({**SHORT, "eval_problems": 32, **other}))
        assert run.evaluate(2).mean() == first == at_step_0(eval_problems=32, **other)
    harder = {"name": "countdown"}
    run = LabRun(RunConfig.read({**SHORT, "task": harder, "eval_problems": 32}))
    assert at_step_0(eval_problems=32, task=harder) == run.evaluate(2).mean() != first


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="stps"):
        RunConfig.read({"stps": 3})
    with pytest.raises(ConfigError, match="inter"):
        RunConfig.read({"staleness": {"inter": -1}})


def test_collapse_is_below_half_of_the_start_or_not_finite():
    assert not has_collapsed(0.4, 0.2, False)
    assert has_collapsed(0.4, 0.199, False)
    assert has_collapsed(0.4, 0.9, True)
    assert has_collapsed(0.4, math.nan, False)


def test_the_trainers_entropy_replaces_the_samplers():
    run = LabRun(RunConfig.read({**SHORT, "arithmetic": "int3", "entropy_of": "trainer"}))
    before = run.roll_out(first_group=0, num_groups=2)
    after = run._with_own_entropies(before)
    fresh = score_by_version(run.decoder, lambda v: run.history.weights(v, "float32"), before)
    column = np.concatenate(
        [t.segments[0].behavior_entropies[t.segments[0].sampled] for t in after]
    )
    np.testing.assert_allclose(column, fresh.entropies.numpy(), atol=1e-5)
    assert [t.segments[0].behavior_logprobs for t in after] == [
        t.segments[0].behavior_logprobs for t in before
    ]


# Controls


def columns() -> TokenColumns:
    torch.manual_seed(0)
    behavior = -torch.rand(200) - 0.01
    return TokenColumns(
        policy_logprobs=(behavior + 0.3 * torch.randn(200)).clamp(max=-1e-3),
        behavior_logprobs=behavior,
        advantages=torch.randn(200),
        loss_mask=torch.arange(200) % 4 != 0,
        behavior_entropies=torch.rand(200) * 2,
    )


@pytest.mark.parametrize("name", ["RandomMask", "ShuffledEntropy", "ConstantEntropy"])
def test_a_control_differs_from_estr_in_one_thing(name):
    given = columns()
    options = {"tau": 0.1, "eps": 0.01}
    control = build_correction([{"name": f"estr.lab.controls:{name}", **options}])
    found, plain = control(given), build_correction([{"name": "estr", **options}])(given)
    assert not (found.keep & ~given.loss_mask).any()
    assert not torch.equal(found.keep, plain.keep)
    if name == "RandomMask":
        assert found.keep.sum() == plain.keep.sum()
    if name == "ConstantEntropy":
        delta = given.policy_logprobs - given.behavior_logprobs
        mean = given.behavior_entropies[given.loss_mask].mean()
        assert torch.equal(found.keep, given.loss_mask & (delta.square() <= 0.1 * (mean + 0.01)))
    assert replace(found, keep=plain.keep).surrogate == plain.surrogate
