"""The guard: nothing on consistent data, and each fault by its name."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.advantages import group_advantages
from estr.buffer import TrainingGroup
from estr.engine import Request
from estr.engines.local import LocalEngine
from estr.errors import GuardError
from estr.guard import Guard
from estr.guard.records import (
    Surprise,
    Trained,
    check_advantages,
    check_alignment,
    check_labels,
    largest_variance,
)
from estr.guard.rescore import Rescorer, Scores, Tolerance, logit_noise, unit_of
from estr.logprobs import token_statistics
from estr.options.run import LossOptions
from estr.progress import SilentReporter
from estr.rollout_state import RolloutState
from estr.types import Finding, RolloutId, SamplingSettings, Segment, Trajectory, Turn
from estr.weights import MemoryWeightStore
from estr.worker import CpuBudget
from tiny import VOCAB, tiny_model, tiny_recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "faults"))
from injectors import Fault, SurprisalAsEntropy, SwappedGroups
from runs import play, recipe_of

FIRST_TURN = 6
SEAM = [3, 4]


def moved(model: Any, seed: int, size: float = 0.01) -> Any:
    """A later version of the model."""
    later = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return later


MODELS = [tiny_model(), moved(tiny_model(), 1)]
STRANGER = moved(tiny_model(), 2, 0.05)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def guard_of(versions: Sequence[int] = (0, 1), **table: Any) -> Guard:
    """A guard over a store that holds these versions."""
    store = MemoryWeightStore()
    for version in versions:
        store.publish(version, state_of(MODELS[version]))
    guard = Guard(STRANGER, tiny_recipe(group_size=4, **table), store)
    guard.budget = CpuBudget(share=1.0)
    return guard


@torch.no_grad()
def played(
    rid: RolloutId,
    prompt: Sequence[int],
    *,
    reward: float,
    switch: int = 3,
    temperature: float = 1.0,
    forgets: int | None = None,
    drawn_by: Sequence[Any] = tuple(MODELS),
) -> Trajectory:
    """Two turns of six honest draws; versions change from 0 to 1 before draw number `switch`.
    forgets: a place that the sampler does not see."""
    rng = np.random.default_rng([rid.group, rid.index])
    ids = list(prompt)
    parts, turns, count = [Segment.context(prompt)], [], 0
    for turn in range(2):
        if turn:
            ids += SEAM
            parts.append(Segment.context(SEAM))
        start, columns = len(ids), []
        for _ in range(FIRST_TURN):
            version = int(count >= switch)
            seen = [t for i, t in enumerate(ids) if i != forgets]
            logits = drawn_by[version](torch.tensor([seen])).logits[0, -1] / temperature
            probs = logits.double().softmax(-1)
            token = int(np.searchsorted(probs.cumsum(-1).numpy(), rng.random()))
            token = min(token, VOCAB - 1)
            found = token_statistics(logits, torch.tensor(token))
            columns.append((token, float(found.logprobs), float(found.entropies), version))
            ids.append(token)
            count += 1
        parts.append(Segment.drawn(*zip(*columns, strict=True)))
        turns.append(Turn(0, start, len(ids), "length"))
    return Trajectory(
        id=rid,
        task="tiny",
        problem=rid.group,
        segments=(Segment.join(parts),),
        turns=tuple(turns),
        sampling=SamplingSettings(),
        status="ok",
        dispatch_version=0,
        outcome=reward,
        reward=reward,
    )


def group_of(number: int, size: int = 4, **how: Any) -> TrainingGroup:
    prompt = [1 + number % 8, 5, 9, 2]
    members = tuple(
        played(RolloutId(0, number, i), prompt, reward=float(i % 2), **how) for i in range(size)
    )
    rewards = [m.reward for m in members]
    advantages = tuple(group_advantages(rewards, rewards, kind="grpo"))
    return TrainingGroup(number, 1, members, advantages)


GROUP = group_of(0)


def altered(group: TrainingGroup, change: Callable[[Segment], Segment]) -> TrainingGroup:
    """The group with every segment changed."""
    members = tuple(
        dataclasses.replace(t, segments=tuple(map(change, t.segments))) for t in group.trajectories
    )
    return dataclasses.replace(group, trajectories=members)


def with_drawn(**changes: Callable[[Any], Any]) -> Callable[[Segment], Segment]:
    """Changes columns at the sampled places only."""

    def change(segment: Segment) -> Segment:
        columns = {}
        for name, how in changes.items():
            column = getattr(segment, name).copy()
            column[segment.sampled] = how(column[segment.sampled])
            columns[name] = column
        return dataclasses.replace(segment, **columns)

    return change


def kinds(found: Sequence[Finding]) -> set[str]:
    return {f"{f.check}/{f.kind}" for f in found}


# Consistent data


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 12))
def test_consistent_data_is_found_consistent(number: int, switch: int) -> None:
    found, metrics = guard_of().check([[group_of(number, 2, switch=switch)]], 1)
    assert found == []
    row = metrics.to_row()
    assert row["guard_rescored_tokens"] == 12
    assert row["guard_gap"] < 1e-4


def test_a_low_precision_sampler_is_measured_and_then_trusted() -> None:
    half = [copy.deepcopy(model).bfloat16() for model in MODELS]
    rounded = [moved(model, 0, 0.0).bfloat16().float() for model in MODELS]
    store = MemoryWeightStore()
    for version, model in enumerate(rounded):
        store.publish(version, state_of(model))
    guard = Guard(STRANGER, tiny_recipe(group_size=4, engine={"dtype": "bfloat16"}), store)
    guard.budget = CpuBudget(share=1.0)
    for number in range(3):
        group = group_of(number, drawn_by=half)
        found, metrics = guard.check([[group]], 1)
        assert found == []
    assert 1e-3 < metrics.to_row()["guard_gap"] < 0.5
    shifted = altered(group_of(3, drawn_by=half), with_drawn(behavior_logprobs=rolled))
    assert kinds(guard.check([[shifted]], 1)[0]) == {"rescore/shifted_logprobs"}


# What re-scoring names


def rolled(column: Any) -> Any:
    return np.roll(column, 1)


def hybrid(segment: Segment) -> Segment:
    """Behind the switch inside the first turn, log-probs that no version gives."""
    logprobs = segment.behavior_logprobs.copy()
    logprobs[7:10] -= 0.01
    entropies = segment.behavior_entropies.copy()
    entropies[7:10] += 0.02
    return dataclasses.replace(segment, behavior_logprobs=logprobs, behavior_entropies=entropies)


RESCORED: dict[str, Callable[[], TrainingGroup]] = {
    "shifted_logprobs": lambda: altered(GROUP, with_drawn(behavior_logprobs=rolled)),
    "shifted_entropies": lambda: altered(GROUP, with_drawn(behavior_entropies=rolled)),
    "shifted_columns": lambda: altered(
        GROUP, with_drawn(behavior_logprobs=rolled, behavior_entropies=rolled)
    ),
    "foreign_logprobs": lambda: altered(GROUP, with_drawn(behavior_logprobs=lambda x: x - 0.1)),
    "foreign_entropies": lambda: altered(GROUP, with_drawn(behavior_entropies=lambda x: x + 0.1)),
    "surprisal_as_entropy": lambda: altered(
        GROUP, lambda s: dataclasses.replace(s, behavior_entropies=-s.behavior_logprobs)
    ),
    "wrong_version": lambda: altered(GROUP, with_drawn(versions=lambda v: 1 - v)),
    "shifted_versions": lambda: altered(
        GROUP, with_drawn(versions=lambda v: np.concatenate([v[:1], v[:-1]]))
    ),
    "wrong_temperature": lambda: group_of(0, temperature=2.0),
    "kept_cache": lambda: altered(GROUP, hybrid),
    "dropped_context": lambda: group_of(0, forgets=3, switch=0),
    "foreign_weights": lambda: group_of(0, switch=0, drawn_by=[STRANGER, STRANGER]),
}


@pytest.mark.parametrize("kind", RESCORED)
def test_re_scoring_names_the_fault(kind: str) -> None:
    guard, found, gap = guard_of(), [], 0.0
    for _ in range(3):  # behind a switch, before one, anywhere
        some, metrics = guard.check([[RESCORED[kind]()]], 1)
        found += [f for f in some if f.check == "rescore"]
        gap = max(gap, metrics.to_row()["guard_gap"])
    assert {f.kind for f in found} == {kind}
    assert gap > 1e-4


def test_what_no_single_version_reproduces_is_left_out() -> None:
    kept = altered(GROUP, hybrid)
    assert guard_of(kv="keep").check([[kept]], 1)[0] == []
    unit = unit_of(kept.trajectories[0], 0, 0, kv="keep", retained=[0, 1])
    assert unit is not None
    assert unit.places.tolist() == [4, 5, 6]


def test_forgotten_versions_are_left_out() -> None:
    store = MemoryWeightStore(keep=1)
    store.publish(1, state_of(MODELS[1]))
    guard = Guard(STRANGER, tiny_recipe(group_size=4), store)
    found, metrics = guard.check([[GROUP]], 1)
    assert found == []
    assert metrics.to_row()["guard_rescored_tokens"] == 9


@pytest.mark.parametrize("tied", [False, True])
def test_the_structure_shares_nothing_with_the_model(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    source = copy.deepcopy(model)
    rescorer = Rescorer(model)
    assert {p.device.type for p in rescorer.structure.parameters()} == {"meta"}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    places = np.array([2, 3])
    rows = [np.array([1, 5, 9, 2]), np.array([1, 5])]
    scores = rescorer.score(state_of(source), rows, [places, np.array([1])], 1.0)
    assert {p.device.type for p in rescorer.structure.parameters()} == {"meta"}
    with torch.no_grad():
        logits = source(torch.tensor([[1, 5, 9, 2]])).logits[0, [1, 2, 0]]
    expected = token_statistics(logits, torch.tensor([9, 2, 5]))
    np.testing.assert_allclose(scores.logprobs, expected.logprobs.numpy(), atol=1e-6)
    np.testing.assert_allclose(scores.entropies, expected.entropies.numpy(), atol=1e-6)


# Tolerances


def test_limits_by_hand() -> None:
    scores = Scores(np.log([0.5, 1.0]), np.array([math.log(2), 0.0]), np.array([0.5, 0.0]))
    assert Tolerance().of_logprobs(scores).tolist() == [1e-4, 1e-4]
    noisy = Tolerance(0.01)
    assert noisy.of_logprobs(scores) == pytest.approx([1e-4 + 0.12 * math.sqrt(0.5), 1e-4])
    factor = (1 + math.log(2)) * math.sqrt(0.5)
    assert noisy.of_entropies(scores) == pytest.approx([1e-4 + 0.12 * factor, 1e-4])


def test_the_noise_of_logits_is_recovered_from_log_probs() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (2000, 12)))
    tokens = torch.from_numpy(rng.integers(0, 12, 2000))
    exact = token_statistics(logits, tokens)
    noisy = token_statistics(logits + torch.from_numpy(rng.normal(0, 0.02, (2000, 12))), tokens)
    scores = Scores(*(column.numpy() for column in exact if column is not None))
    recorded = noisy.logprobs.numpy()
    assert logit_noise(recorded, scores) == pytest.approx(0.02, rel=0.1)
    recorded[:600] -= 5.0  # a fault in fewer than half of them does not decide
    assert logit_noise(recorded, scores) < 0.05


# Labels, advantages, alignment


def test_swapped_groups_and_mixed_ones() -> None:
    other = group_of(1)
    swapped = [
        dataclasses.replace(GROUP, trajectories=other.trajectories),
        dataclasses.replace(other, trajectories=GROUP.trajectories),
    ]
    assert kinds(list(check_labels(swapped, seed=0))) == {"labels/swapped_groups"}
    assert kinds(list(check_labels([GROUP], seed=1))) == {"labels/swapped_groups"}
    mixed = [
        *GROUP.trajectories[:3],
        dataclasses.replace(other.trajectories[3], id=RolloutId(0, 0, 3)),
    ]
    found = list(check_labels([dataclasses.replace(GROUP, trajectories=tuple(mixed))], seed=0))
    assert kinds(found) == {"labels/mixed_group"}
    twins = dataclasses.replace(GROUP, trajectories=(GROUP.trajectories[0],) * 4)
    assert kinds(list(check_labels([twins], seed=0))) == {"labels/doubled_member"}
    unasked = dataclasses.replace(
        GROUP.trajectories[0],
        segments=RolloutState().segments(),
        turns=(),
        status="env_error",
        outcome=None,
        reward=None,
    )
    one_failed = dataclasses.replace(GROUP, trajectories=(unasked, *GROUP.trajectories[1:]))
    assert list(check_labels([one_failed], seed=0)) == []


def test_advantages_of_other_rewards() -> None:
    a = GROUP.advantages
    shuffled = dataclasses.replace(GROUP, advantages=(a[1], a[0], *a[2:]))
    halved = dataclasses.replace(GROUP, advantages=tuple(v / 2 for v in a if v is not None))
    unscored = dataclasses.replace(GROUP, advantages=(None, *a[1:]))
    loss = LossOptions()
    assert list(check_advantages([GROUP], loss=loss)) == []
    assert kinds(list(check_advantages([shuffled], loss=loss))) == {
        "advantages/shuffled_advantages"
    }
    for wrong in (halved, unscored):
        assert kinds(list(check_advantages([wrong], loss=loss))) == {
            "advantages/foreign_advantages"
        }
    # By another rule they would be others.
    assert list(check_advantages([GROUP], loss=LossOptions(advantage="no_std"))) != []


def test_masks_off_by_one_are_told_from_other_ones() -> None:
    def shift(segment: Segment, offset: int) -> Segment:
        sampled = np.roll(segment.sampled, offset)
        sampled[0] = False
        versions = np.where(sampled, 1, -1).astype(np.int32)
        return dataclasses.replace(segment, sampled=sampled, versions=versions)

    for offset in (1, -1):
        group = altered(GROUP, lambda s, by=offset: shift(s, by))
        found = {f.kind for f in check_alignment(group.trajectories)}
        assert found == {"shifted_mask", "shifted_logprobs", "shifted_entropies"}
    assert list(check_alignment(GROUP.trajectories)) == []

    def hole(segment: Segment) -> Segment:
        logprobs = segment.behavior_logprobs.copy()
        logprobs[6] = np.nan
        return dataclasses.replace(segment, behavior_logprobs=logprobs)

    (finding,) = check_alignment(altered(GROUP, hole).trajectories)
    assert (finding.kind, finding.message) == (
        "misplaced_logprobs",
        "log-probs and mask disagree on 4 of 76 tokens",
    )


def test_a_turn_that_stops_must_end_in_a_stop_token() -> None:
    def stopped(stop_ids: tuple[int, ...]) -> Trajectory:
        t = GROUP.trajectories[0]
        turns = tuple(turn._replace(finish_reason="stop") for turn in t.turns)
        sampling = SamplingSettings(stop_token_ids=stop_ids)
        return dataclasses.replace(t, turns=turns, sampling=sampling)

    ends = tuple(int(GROUP.trajectories[0].segments[0].token_ids[i]) for i in (9, 17))
    assert list(check_alignment([stopped(ends)])) == []
    (finding,) = check_alignment([stopped((VOCAB,))])
    assert (finding.kind, finding.message.partition(",")[0]) == (
        "turn_end",
        "2 turns end with 'stop'",
    )


def surprised(surprisal: float, entropy: float, n: int) -> list[Trajectory]:
    values = np.full(n, -surprisal, dtype=np.float32)
    entropies = np.full(n, entropy, dtype=np.float32)
    segment = Segment.join(
        [Segment.context([1]), Segment.drawn([2] * n, values, entropies, [0] * n)]
    )
    return [dataclasses.replace(GROUP.trajectories[0], segments=(segment,), turns=())]


def test_surprise_by_hand() -> None:
    # At H = 0.5 among 20 the bound on the variance is 1 + log(20)^2 / 4 = 3.244, so 1,000 tokens
    # have a standard error of 57.
    assert Surprise(20).check(surprised(0.52, 0.5, 1000)) == []
    (cold,) = Surprise(20).check(surprised(0.1, 0.5, 1000))
    assert (cold.kind, cold.message.rpartition(", ")[2]) == (
        "drawn_colder",
        "7 standard errors apart",
    )
    (hot,) = Surprise(20).check(surprised(0.9, 0.5, 1000))
    assert hot.kind == "drawn_hotter"


def test_surprise_adds_up_over_three_batches() -> None:
    surprise = Surprise(20)
    assert surprise.check(surprised(0.1, 0.5, 280)) == []  # 3.7 standard errors
    assert surprise.check(surprised(0.1, 0.5, 280)) == []
    assert [f.kind for f in surprise.check(surprised(0.1, 0.5, 280))] == ["drawn_colder"]


def test_rare_events_that_did_not_happen_are_no_finding() -> None:
    # One token in a thousand is another: nothing but the likely one among 2,000 is no wonder.
    rare = -0.999 * math.log(0.999) - 0.001 * math.log(0.001)
    assert Surprise(20).check(surprised(-math.log(0.999), rare, 2000)) == []


@pytest.mark.parametrize("vocab_size", [2, 5, 37, 50_000, 200_000])
def test_no_distribution_varies_more_than_the_bound(vocab_size: int) -> None:
    """Over all of two distinct probabilities, q of the mass spread over n tokens and the rest over
    k: none of the same entropy varies more."""
    q = np.concatenate([np.logspace(-9, -1, 300), np.linspace(0.1, 0.999, 200)])
    counts = {1, 2, 3, 7, vocab_size // 4, vocab_size // 2, vocab_size - 1}
    for k in counts - {0, vocab_size}:
        for n in {c for c in counts | {vocab_size - k} if 1 <= c <= vocab_size - k}:
            many, rest = np.log(q / n), np.log((1 - q) / k)
            entropies = -q * many - (1 - q) * rest
            variances = q * (1 - q) * (many - rest) ** 2
            assert (variances <= largest_variance(entropies, vocab_size) + 1e-12).all()


def test_a_group_is_trained_once() -> None:
    trained = Trained()
    assert trained.check([GROUP, group_of(1, 2)], 3) == []
    (finding,) = trained.check([GROUP], 5)
    assert finding.message == "group 0 is trained at version 5, as it was at 3"


# Canaries


def engine_on(model: Any, version: int) -> LocalEngine:
    return LocalEngine(copy.deepcopy(model), version=version)


def test_an_engine_that_computes_with_its_version_passes() -> None:
    guard = guard_of()
    for version in (0, 1):
        canaries = engine_on(MODELS[version], version).probe(1.0)
        assert guard.check_canaries(canaries) == []
        assert [c.versions[-1] for c in canaries] == [version, version]


def test_canaries_name_what_the_engine_computes_with() -> None:
    guard = guard_of()
    assert kinds(guard.check_canaries(engine_on(MODELS[0], 1).probe(1.0))) == {
        "canary/wrong_version"
    }
    assert kinds(guard.check_canaries(engine_on(STRANGER, 1).probe(1.0))) == {
        "canary/foreign_weights"
    }
    turned = copy.deepcopy(MODELS[1])
    turned.model.rotary_emb.inv_freq.mul_(0.9)
    assert kinds(guard.check_canaries(engine_on(turned, 1).probe(1.0))) == {
        "canary/wrong_positions"
    }
    # What differs after a switch to these weights is then no matter of caches.
    (finding,) = guard.check([[altered(GROUP, hybrid)]], 1)[0]
    assert finding.kind == "foreign_weights"


def test_a_probe_changes_nothing_that_is_drawn() -> None:
    def drawn(*, probed: bool) -> list[Segment]:
        engine = engine_on(MODELS[0], 0)
        for index, prompt in enumerate(([1, 2, 3], [4, 5, 6, 7, 8])):
            engine.submit(
                Request(
                    RolloutId(0, 0, index),
                    np.array(prompt, dtype=np.int32),
                    SamplingSettings(),
                    12,
                    len(prompt),
                )
            )
        segments = []
        while engine.num_running or engine.num_waiting:
            if probed:
                engine.probe(1.0)
            segments += [segment for _, segment in engine.step()]
        return segments

    for with_probe, without in zip(drawn(probed=True), drawn(probed=False), strict=True):
        assert with_probe.token_ids.tolist() == without.token_ids.tolist()
        assert with_probe.behavior_logprobs.tobytes() == without.behavior_logprobs.tobytes()


# What comes of a finding


def test_stop_raises_before_the_batch_is_trained_and_warn_does_not() -> None:
    wrong = RESCORED["surprisal_as_entropy"]()
    with pytest.raises(GuardError, match=r"surprisal_as_entropy: group 0 member .* ends the run"):
        guard_of(guard="stop").check([[wrong]], 1)
    assert len(guard_of().check([[wrong]], 1)[0]) == 1


def test_a_used_up_budget_leaves_out_re_scoring_twice() -> None:
    guard = guard_of()
    guard.budget = CpuBudget(share=0.0)
    guard.budget.spent_s = 1.0
    for number in range(4):
        group = altered(group_of(number, 2), with_drawn(behavior_entropies=lambda x: x + 0.1))
        found, metrics = guard.check([[group]], 1)
        assert ("guard_rescored_tokens" in metrics.to_row()) == (number in (0, 3))
    assert kinds(found) == {"rescore/foreign_entropies"}


def test_the_budget_is_of_all_processes() -> None:
    budget = CpuBudget(share=0.0)
    assert budget.allows()
    budget.spent_s = 1.0
    assert not budget.allows()
    budget = CpuBudget(share=0.5)
    budget.spent_s = 1e6
    budget.share_with({"cpu_s": 2e6 + 10.0, "guard_s": 0.0})
    assert budget.allows()
    budget.share_with({"cpu_s": 2e6 + 10.0, "guard_s": 1e6})
    assert not budget.allows()


def test_forgetting_lets_a_group_be_trained_again() -> None:
    guard = guard_of()
    guard.check([[GROUP]], 1)
    guard.forget()
    assert guard.check([[GROUP]], 1)[0] == []


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.parametrize("kind", [SurprisalAsEntropy, SwappedGroups])
def test_a_fault_in_a_run_is_caught_before_it_is_trained(tmp_path: Path, kind: type[Fault]) -> None:
    fault, listener = kind(), Listener()
    outcome = play(tmp_path, recipe_of(0, 10), fault, reporter=listener)
    assert outcome.first_hit is not None
    assert outcome.caught is not None
    assert outcome.first_hit <= outcome.caught < outcome.first_hit + 3
    assert (outcome.check, outcome.kind) in fault.expected
    told = [m for m in listener.messages if f"{outcome.check}, {outcome.kind}" in m]
    assert len(told) == 1
    assert told[0].startswith(f"guard, before step {outcome.caught}: ")


def test_a_run_ends_where_it_is_told_to(tmp_path: Path) -> None:
    outcome = play(tmp_path, recipe_of(0, 10, ["guard=stop"]), SwappedGroups())
    assert outcome.stopped
    assert outcome.steps == 3


def test_a_clean_run_has_no_finding(tmp_path: Path) -> None:
    outcome = play(tmp_path, recipe_of(7, 5), Fault())
    assert (outcome.steps, outcome.findings) == (5, {})
    assert outcome.rescored_tokens > 0
    assert outcome.gap < 1e-4
