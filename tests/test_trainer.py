"""The optimizer step: on-policy start, invariance to cuts, skips, refusals, checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from estr.checkpoint import Checkpoints, restore_trainer, save_trainer, verify
from estr.engine import Request
from estr.engines.local import LocalEngine
from estr.errors import CheckpointError, NumericsError
from estr.heads import Head
from estr.options.run import TrainerOptions
from estr.rollout_state import SegmentPool
from estr.trainer import Trainer, learning_rate
from estr.types import RolloutId, SamplingSettings, Segment
from estr.weights import MemoryWeightStore
from tiny import draw_groups, tiny_model, tiny_recipe


def trainer(**table) -> Trainer:
    return Trainer(tiny_model(), tiny_recipe(**table), MemoryWeightStore())


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in of.master_state().items()}


def test_untouched_weights_give_log_ratio_zero() -> None:
    own = trainer()
    (result,) = own.train([draw_groups(own.model)])
    row = result.metrics.to_row()
    assert row["rho_mask"] == 0.0
    assert row["ratio_deviation"] < 1e-5
    assert row["clip_fraction"] == 0.0
    assert row["intra_max"] == row["inter_max"] == 0
    assert (result.target_version, result.version, result.step) == (0, 1, 1)


@pytest.mark.parametrize("aggregation", ["batch", "group"])
def test_micro_batches_change_nothing(aggregation: str) -> None:
    # A large adam_eps makes the update proportional to the gradient, not to its sign.
    whole = trainer(loss={"aggregation": aggregation}, trainer={"adam_eps": 1.0})
    cut = trainer(loss={"aggregation": aggregation}, trainer={"adam_eps": 1.0, "token_budget": 40})
    groups = draw_groups(whole.model, num_groups=3)
    losses = []
    for one in (whole, cut):
        (result,) = one.train([groups])
        losses.append(result.metrics.to_row()["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for name, value in whole.master_state().items():
        torch.testing.assert_close(value, cut.master_state()[name], atol=1e-6, rtol=0)


def test_a_step_hands_back_what_it_made_of_each_token() -> None:
    """On-policy: the policy's log-probs are the recorded ones; in trajectory order, however the
    step was cut; nothing for tokens that were read, nor for unscored members."""
    own = trainer(trainer={"token_budget": 40})
    groups = draw_groups(own.model, num_groups=2)
    groups[1] = replace(groups[1], advantages=(*groups[1].advantages[:3], None))
    (result,) = own.train([groups])
    trajectories = [t for g in groups for t in g.trajectories]
    assert len(result.consumptions) == len(trajectories) == 8
    for t, made in zip(trajectories[:-1], result.consumptions, strict=False):
        (segment,) = t.segments
        np.testing.assert_allclose(
            made.policy_logprobs[segment.sampled],
            segment.behavior_logprobs[segment.sampled],
            atol=1e-5,
        )
        assert np.isnan(made.policy_logprobs[~segment.sampled]).all()
        assert (made.kept == segment.sampled).all()
        assert not made.clipped.any()
        assert made.proximal_logprobs is None
    assert [c.advantage for c in result.consumptions] == [a for g in groups for a in g.advantages]
    unscored = result.consumptions[-1]
    assert np.isnan(unscored.policy_logprobs).all()
    assert (unscored.kept.dtype, unscored.kept.any()) == (np.bool_, False)


def test_rejected_tokens_come_back_as_such() -> None:
    own = trainer(correction={"name": "estr", "tau": 0.1})
    groups = draw_groups(own.model)
    own.train([groups])
    (result,) = own.train([groups])
    kept = sum(int(c.kept.sum()) for c in result.consumptions)
    row = result.metrics.to_row()
    assert 0 < kept < row["eligible_tokens"]
    assert kept / row["eligible_tokens"] == pytest.approx(1 - row["rho_mask"])


def test_the_proximal_pass_comes_back_where_one_was_made() -> None:
    own = trainer(correction={"name": "icepop", "edge": "B"}, num_minibatches=2)
    first, second = draw_groups(own.model)
    results = own.train([[first], [second]])
    for group, result in zip((first, second), results, strict=True):
        for t, made in zip(group.trajectories, result.consumptions, strict=True):
            (segment,) = t.segments
            here = made.proximal_logprobs[segment.sampled]
            np.testing.assert_allclose(here, segment.behavior_logprobs[segment.sampled], atol=1e-5)


def test_a_step_without_a_scored_token_hands_back_nothing_trained() -> None:
    own = trainer()
    groups = [replace(g, advantages=(None,) * 4) for g in draw_groups(own.model)]
    (result,) = own.train([groups])
    assert result.skipped
    assert {c.kept.dtype for c in result.consumptions} == {np.dtype(np.bool_)}
    assert not any(c.kept.any() for c in result.consumptions)
    assert all(np.isnan(c.policy_logprobs).all() for c in result.consumptions)


def test_a_step_raises_the_probability_of_what_was_rewarded() -> None:
    own = trainer()
    groups = draw_groups(own.model)
    own.train([groups])
    (again,) = own.train([groups])
    loss = again.metrics.to_row()["loss"]
    assert loss < -0.01, "on the same tokens the objective has risen"


def test_all_advantages_zero_is_a_skip_check_14() -> None:
    own = trainer()
    groups = [replace(g, advantages=(0.0,) * 4) for g in draw_groups(own.model)]
    before = weights(own)
    own.train([draw_groups(own.model)])  # momentum must not move the weights in a skipped step
    moved = weights(own)
    assert any(not torch.equal(before[n], moved[n]) for n in before)
    (result,) = own.train([groups])
    assert result.skipped
    assert (result.step, result.version) == (2, 1)
    for name, value in own.master_state().items():
        assert torch.equal(value, moved[name])
    assert result.metrics.to_row()["skipped_updates"] == 1


def test_unscored_members_are_left_out() -> None:
    own = trainer()
    (group,) = draw_groups(own.model, num_groups=1)
    members = (*group.trajectories[:3], replace(group.trajectories[3], status="env_error"))
    members[3].segments[0].behavior_logprobs[:] = math.nan
    (result,) = own.train([[replace(group, trajectories=members, advantages=(-1, 1, -1, None))]])
    row = result.metrics.to_row()
    assert row["eligible_tokens"] == sum(t.num_sampled_tokens for t in members[:3])


def test_nan_in_a_recorded_logprob_stops_before_the_weights_are_touched() -> None:
    own = trainer()
    groups = draw_groups(own.model)
    segment = groups[0].trajectories[0].segments[0]
    segment.behavior_logprobs[np.flatnonzero(segment.sampled)[0]] = math.nan
    before = weights(own)
    with pytest.raises(NumericsError, match="behavior_logprobs"):
        own.train([groups])
    assert all(torch.equal(before[n], t) for n, t in own.master_state().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_was_refused_leaves_no_gradient_behind(dtype: str) -> None:
    """The micro-batches before the faulty one have been through backward."""
    table = {"trainer": {"token_budget": 40, "dtype": dtype, "param_dtype": dtype}}
    own, fresh = trainer(**table), trainer(**table)
    groups = draw_groups(own.model, num_groups=3)
    last = groups[-1].trajectories[-1]
    entropies = last.segments[0].behavior_entropies.copy()
    entropies[last.segments[0].sampled] = np.nan
    spoiled = replace(last, segments=(replace(last.segments[0], behavior_entropies=entropies),))
    members = (*groups[-1].trajectories[:-1], spoiled)
    with pytest.raises(NumericsError, match="behavior_entropies"):
        own.train([[*groups[:-1], replace(groups[-1], trajectories=members)]])
    assert all(p.grad is None for p in own.model.parameters())
    assert all(p.grad is None for p in own.parameters.values())
    (after,), (clean,) = own.train([groups]), fresh.train([groups])
    assert after.metrics.to_row()["grad_norm"] == clean.metrics.to_row()["grad_norm"]


def test_nan_in_the_weights_is_named() -> None:
    own = trainer()
    groups = draw_groups(own.model)
    with torch.no_grad():
        own.model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(NumericsError):
        own.train([groups])
    assert own.version == 0


def test_minibatches_share_the_proximal_policy_of_the_batch_start() -> None:
    table = {"correction": {"name": "none", "edge": "U"}, "num_minibatches": 2}
    own = trainer(**table)
    first, second = draw_groups(own.model), draw_groups(own.model, seed=1)
    results = own.train([first, second])
    assert [r.version for r in results] == [1, 2]
    # The second step reads pi/q with q from before the first, so its surrogate is not at ratio 1.
    alone = trainer(**{**table, "num_minibatches": 1})
    alone.train([first])
    (afresh,) = alone.train([second])
    assert results[1].metrics.to_row()["loss"] != afresh.metrics.to_row()["loss"]


@pytest.mark.parametrize(
    ("table", "passes"),
    [
        ({"correction": {"name": "estr"}}, 0),
        ({"correction": {"name": "tis"}}, 0),
        ({"correction": {"name": "estr"}, "num_minibatches": 2}, 0),
        ({"correction": {"name": "decoupled"}, "num_minibatches": 2}, 2),
        ({"correction": {"name": "m2po"}}, 1),
    ],
)
def test_a_proximal_pass_is_made_only_when_asked_for(
    table: dict, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trainer(**table)
    without_gradient = []
    score = own.score

    def counted(batch):
        without_gradient.append(not torch.is_grad_enabled())
        return score(batch)

    monkeypatch.setattr(own, "score", counted)
    number = table.get("num_minibatches", 1)
    own.train([draw_groups(own.model, seed=i) for i in range(number)])
    assert sum(without_gradient) == passes
    assert len(without_gradient) == passes + number


@pytest.mark.parametrize(
    "correction",
    [
        {"name": "m2po", "budget": 0.002},
        [{"name": "mis", "level": "geometric", "low": 0.9, "high": 1.1}],
        [{"name": "mis", "level": "turn", "low": 0.2, "high": 2.0}],
    ],
    ids=["m2po", "mis", "mis on turns"],
)
def test_rules_on_the_step_and_on_trajectories_do_not_depend_on_the_cut(correction) -> None:
    table = {"correction": correction, "trainer": {"adam_eps": 1.0}}
    whole = trainer(**table)
    cut = trainer(**{**table, "trainer": {"adam_eps": 1.0, "token_budget": 20}})
    groups = draw_groups(tiny_model(seed=1), num_groups=3)  # drawn by other weights
    rows = [one.train([groups])[0].metrics.to_row() for one in (whole, cut)]
    assert 0 < rows[0]["rho_mask"] < 1
    assert rows[0]["rho_mask"] == rows[1]["rho_mask"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    for name, value in whole.master_state().items():
        torch.testing.assert_close(value, cut.master_state()[name], atol=1e-6, rtol=0)


def test_publishing_follows_publish_every() -> None:
    own = trainer(publish_every=2)
    groups = draw_groups(own.model)
    assert own.publish() == 0
    own.train([groups])
    assert own.store.latest() == 0
    own.train([groups])
    assert own.store.latest() == 2


def test_learning_rate_schedule() -> None:
    options = TrainerOptions(lr=1.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(s, 6, options) for s in range(4)] == [0.5, 1.0, 1.0, 1.0]
    linear = replace(options, schedule="linear")
    assert [learning_rate(s, 6, linear) for s in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    cosine = replace(options, schedule="cosine")
    assert learning_rate(4, 6, cosine) == pytest.approx(0.5)
    assert learning_rate(6, 6, cosine) == pytest.approx(0.0)


def test_restored_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = trainer()
    groups = draw_groups(straight.model)
    for _ in range(2):
        straight.train([groups])
    save_trainer(straight, tmp_path)
    resumed = Trainer(tiny_model(seed=5), tiny_recipe(), MemoryWeightStore())
    restore_trainer(resumed, tmp_path)
    assert (resumed.step, resumed.version) == (2, 2)
    for one in (straight, resumed):
        one.train([groups])
    for name, value in straight.master_state().items():
        assert torch.equal(value, resumed.master_state()[name]), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_trainer(trainer(), tmp_path)
    other = Trainer(tiny_model(hidden_size=16), tiny_recipe(), MemoryWeightStore())
    with pytest.raises(CheckpointError, match="of another model"):
        restore_trainer(other, tmp_path)


async def _write(checkpoints: Checkpoints, own: Trainer, step: int) -> Path:
    async def save(folder: Path) -> None:
        save_trainer(own, folder)

    return await checkpoints.write(step, {"step": step}, SegmentPool().columns(), save)


async def test_a_torn_checkpoint_is_named_and_the_previous_one_used_check_123(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    own = trainer()
    for step in (1, 2, 3):
        newest = await _write(checkpoints, own, step)
    assert [p.name for p in checkpoints.complete()] == ["step-00000002", "step-00000003"]
    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    folder, state, torn = checkpoints.newest()
    assert (folder.name, state["step"]) == ("step-00000002", 2)
    assert len(torn) == 1
    assert "step-00000003" in torn[0]


async def test_a_checkpoint_of_another_layout_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    await _write(checkpoints, trainer(), 1)
    monkeypatch.setattr("estr.checkpoint.FORMAT", 99)
    await _write(checkpoints, trainer(), 2)
    monkeypatch.undo()
    folder, _, passed = checkpoints.newest()
    assert folder.name == "step-00000001"
    assert "step-00000002 has format 99, this estr reads" in passed[0]


async def test_a_save_that_fails_leaves_the_old_one_check_123(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    await _write(checkpoints, trainer(), 1)

    async def full_disk(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        await checkpoints.write(2, {"step": 2}, SegmentPool().columns(), full_disk)
    assert verify(checkpoints.newest()[0])["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model", lambda t: t[min(t)].flatten()[0].fill_(math.nan), "holds NaN or infinity in"),
        ("optimizer", lambda t: t[min(t)].flatten()[0].fill_(math.inf), "holds NaN or infinity in"),
        ("optimizer", lambda t: t.pop(min(t)), "is of another model"),
        ("optimizer", lambda t: t.clear(), "lacks the moments of weights that were trained"),
        ("model", lambda t: t.pop(min(t)), "is of another model"),
    ],
)
def test_a_state_that_no_trainer_could_have_saved_is_refused(
    tmp_path: Path, file: str, change, words: str
) -> None:
    own = trainer()
    own.train([draw_groups(own.model)])
    save_trainer(own, tmp_path)
    tensors = load_file(tmp_path / f"{file}.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / f"{file}.safetensors")
    before = weights(own)
    with pytest.raises(CheckpointError, match=words):
        restore_trainer(own, tmp_path)
    assert all(before[name].equal(tensor) for name, tensor in weights(own).items())
    (tmp_path / f"{file}.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore_trainer(own, tmp_path)


def test_no_checkpoint_is_an_error_naming_the_path_check_129(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Checkpoints(tmp_path / "nowhere").newest()


def test_segments_are_own_token_aligned_in_the_loss() -> None:
    """Shifting the recorded log-probs by one place must be seen as a large ratio."""
    own = trainer()
    groups = draw_groups(own.model)
    shifted = []
    for group in groups:
        members = []
        for t in group.trajectories:
            (s,) = t.segments
            columns = {f: getattr(s, f) for f in ("token_ids", "sampled", "versions")}
            logprobs = np.where(s.sampled, np.roll(np.nan_to_num(s.behavior_logprobs), 1), np.nan)
            moved = Segment(
                behavior_logprobs=logprobs.astype(np.float32),
                behavior_entropies=s.behavior_entropies,
                behavior_gini=None,
                **columns,
            )
            members.append(replace(t, segments=(moved,)))
        shifted.append(replace(group, trajectories=tuple(members)))
    (result,) = own.train([shifted])
    assert result.metrics.to_row()["log_ratio_variance"] > 0.1


@pytest.mark.parametrize("scaled", [False, True])
def test_padded_columns_stay_out_of_the_trainers_softmax_too_check_44(scaled: bool) -> None:
    """Drawn by the engine over 20 of 24 columns, at a temperature: the trainer agrees, with its
    output matrix split off and with whole logits alike."""
    engine = LocalEngine(tiny_model(), vocab_size=20)
    sampling = SamplingSettings(temperature=0.7)
    prompt = np.arange(5, dtype=np.int32)
    engine.submit(Request(RolloutId(0, 0, 0), prompt, sampling, 12, 5))
    drawn = next(iter([seg for _ in range(12) for _, seg in engine.step()]))
    (group,) = draw_groups(tiny_model(), num_groups=1, size=2)
    member = replace(
        group.trajectories[0], segments=(Segment.join([Segment.context(prompt), drawn]),)
    )
    recipe = tiny_recipe(sampling={"temperature": 0.7})
    deviations = []
    for vocab_size in (20, None):
        own = Trainer(tiny_model(), recipe, MemoryWeightStore(), vocab_size=vocab_size)
        if scaled:
            own.scorer.head = Head(own.model, None)
        (result,) = own.train([[replace(group, trajectories=(member, member))]])
        deviations.append(result.metrics.to_row()["ratio_deviation"])
    assert deviations[0] < 1e-4
    assert deviations[1] > 1e-2
