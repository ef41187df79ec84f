"""What the ledger derives: views against the loss itself, and every shipped query by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr.batch import make_batches
from estr.corrections import build_correction
from estr.ledger import Ledger, open_ledger, shipped_queries
from estr.ledger.schema import described
from estr.losses import policy_loss
from estr.token_results import token_columns
from estr.types import Consumption, RolloutId
from ledger_cases import consumption, random_record, record, trajectory, write_step

# -- views --------------------------------------------------------------------------------------


def test_what_follows_from_a_token_by_hand(tmp_path: Path) -> None:
    """delta = 0.5, H = 0.24, eps = 0.01: score 1; ratio e^0.5; at v_target 7 a token of 4 has lag
    3. A = 2, one token: the loss is -min(1.6487 * 2, 1.2 * 2) = -2.4, and clipped."""
    own = trajectory(RolloutId(0, 0, 0), logprobs=[-1.0], entropies=[0.24], versions=[4])
    pair = (own, consumption(own, [0.5], advantage=2.0, clipped=[True]))
    write_step(tmp_path, record(8, [pair], target_version=7))
    names = "lag, log_ratio, score, ratio, weight, entropy_bin, loss_term, gradient_coefficient"
    (row,) = open_ledger(tmp_path).query(f"select {names} from loss_terms").rows
    assert row[0] == 3
    assert row[1:5] == pytest.approx((0.5, 1.0, math.exp(0.5), 1.0), abs=1e-6)
    assert row[5] == pytest.approx(0.1), "the lower border of its bin"
    assert row[6:] == pytest.approx((-2.4, 0.0), abs=1e-6)


CORRECTIONS: list[list[dict[str, Any]]] = [
    [{"name": "estr", "tau": 0.3, "eps": 0.02}],
    [{"name": "none"}],
    [{"name": "none", "edge": "U", "clip_low": 0.1}],
    [{"name": "icepop", "alpha": 0.8, "beta": 1.3}],
    [{"name": "icepop", "edge": "B"}],
    [{"name": "kpop", "phi": 0.1, "clip_high": 0.3}],
    [{"name": "kpop", "edge": "B"}],
]


@pytest.mark.parametrize("aggregation", ["batch", "group"])
@pytest.mark.parametrize("entries", CORRECTIONS, ids=str)
def test_loss_terms_and_gradients_are_those_of_the_loss(
    entries: list[dict[str, Any]], aggregation: Any, tmp_path: Path
) -> None:
    """Sum of loss_term = policy_loss; gradient_coefficient = autograd's, token by token; with a
    proximal policy that differs from both."""
    one = random_record(1, num_groups=3, seed=4)
    correction = build_correction(entries)
    (batch,) = make_batches(
        one.trajectories,
        [c.advantage for c in one.consumptions],
        [t.id.group for t in one.trajectories],
        aggregation=aggregation,
        token_budget=10**6,
    )
    # In the order of the batch's rows, as the trainer has them.
    order = [row.trajectory for row in batch.rows]
    policy = torch.from_numpy(
        np.concatenate(
            [
                one.consumptions[i].policy_logprobs[one.trajectories[i].segments[0].sampled]
                for i in order
            ]
        )
    ).requires_grad_()
    proximal = (policy.detach() + batch.behavior_logprobs[batch.loss_mask]) / 2
    columns = token_columns(batch, policy, proximal)
    denominators: Any = batch.denominators
    if aggregation == "group":
        denominators = denominators.expand_as(batch.loss_mask)[batch.loss_mask]
    result = policy_loss(columns, correction, denominators=denominators)
    torch.autograd.backward([result.loss])

    place, consumptions = 0, dict(enumerate(one.consumptions))
    for i in order:
        own = one.trajectories[i]
        length = own.num_sampled_tokens
        here = slice(place, place + length)
        consumptions[i] = consumption(
            own,
            (policy.detach() - batch.behavior_logprobs[batch.loss_mask])[here].tolist(),
            advantage=one.consumptions[i].advantage,
            kept=result.kept[here].tolist(),
            clipped=result.clipped[here].tolist(),
            proximal=proximal[here].tolist(),
        )
        place += length
    consumed = [consumptions[i] for i in range(len(one.trajectories))]
    write_step(
        tmp_path,
        one._replace(consumptions=consumed, correction=described(entries), aggregation=aggregation),
    )
    found = (
        open_ledger(tmp_path)
        .query(
            "select trajectory, loss_term, gradient_coefficient from loss_terms "
            "order by trajectory, position"
        )
        .rows
    )
    assert sum(row[1] for row in found) == pytest.approx(float(result.loss.detach()), abs=1e-6)
    assert policy.grad is not None
    lengths = [one.trajectories[i].num_sampled_tokens for i in order]
    by_trajectory = dict(zip(order, policy.grad.split(lengths), strict=True))
    expected = torch.cat([by_trajectory[i] for i in sorted(order)])
    torch.testing.assert_close(
        torch.tensor([row[2] for row in found]), expected, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["nowhere_at_all:Mine", "tis", "dppo", "decoupled"])
def test_what_sql_cannot_follow_is_null(name: str, tmp_path: Path) -> None:
    """Facts and scores are left, no loss terms: not of kept tokens, and not of rejected ones, whose
    zeros would be taken for the sum of all. The first is one's own, not importable here."""
    correction = f'[{{"name": "{name}"}}]' if ":" in name else described([{"name": name}])
    write_step(tmp_path, random_record(1, correction=correction))
    ledger = open_ledger(tmp_path)
    known = "select sum(loss_term), sum(gradient_coefficient), bool_or(not kept) from loss_terms"
    assert ledger.query(known).rows == [(None, None, True)]
    assert {row["mass"] for row in ask(ledger, "gradient-mass")} == {None}
    ((scored, tokens),) = ledger.query("select count(score), count(*) from trained_tokens").rows
    assert scored == tokens > 0


def test_each_step_is_read_under_its_own_correction(tmp_path: Path) -> None:
    for step, eps in ((1, 0.01), (2, 1.0)):
        own = trajectory(RolloutId(0, step, 0), logprobs=[-1.0], entropies=[0.0], versions=[0])
        correction = described([{"name": "estr", "eps": eps}])
        write_step(tmp_path, record(step, [(own, consumption(own, [1.0]))], correction=correction))
    scores = open_ledger(tmp_path).query("select score from trained_tokens order by step").rows
    assert [row[0] for row in scores] == pytest.approx([100.0, 1.0], rel=1e-5)


def test_staleness_of_a_trajectory(tmp_path: Path) -> None:
    own = trajectory(
        RolloutId(0, 0, 0), logprobs=[-1.0] * 3, entropies=[1.0] * 3, versions=[2, 3, 5]
    )
    failed = trajectory(
        RolloutId(0, 0, 1), logprobs=[], entropies=[], versions=[], outcome=None, status="timeout"
    )
    pairs = [
        (own, consumption(own, [0.0] * 3, kept=[True, False, False])),
        (failed, consumption(failed, [], advantage=None)),
    ]
    write_step(tmp_path, record(10, pairs, target_version=9))
    facts = open_ledger(tmp_path).query(
        "select num_tokens, num_sampled_tokens, num_trained_tokens, num_kept_tokens, intra, inter, "
        "staleness, rho_mask from trajectory_facts order by trajectory"
    )
    assert facts.rows == [
        (5, 3, 3, 1, 3, 4, 7, pytest.approx(2 / 3)),
        (2, 0, 0, 0, None, None, None, None),
    ]


def test_a_trajectory_without_tokens_is_one_nonetheless(tmp_path: Path) -> None:
    own = trajectory(RolloutId(0, 0, 0), logprobs=[-1.0], entropies=[1.0], versions=[0])
    failed = trajectory(
        RolloutId(0, 0, 1),
        logprobs=[],
        entropies=[],
        versions=[],
        outcome=None,
        status="env_error",
        segments=(),
        turns=(),
    )
    pairs = [(own, consumption(own, [0.0])), (failed, without_tokens())]
    write_step(tmp_path, record(1, pairs))
    facts = open_ledger(tmp_path).query(
        "select status, num_tokens, num_sampled_tokens, num_trained_tokens, num_kept_tokens, "
        "intra, rho_mask from trajectory_facts order by trajectory"
    )
    assert facts.rows == [("ok", 3, 1, 1, 1, 0, 0.0), ("env_error", 0, 0, 0, 0, None, None)]


def without_tokens() -> Consumption:
    nothing = np.zeros(0, dtype=np.bool_)
    return Consumption(None, np.zeros(0, dtype=np.float32), nothing, nothing)


# -- shipped queries ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Three steps. Step 1: a group of two, of which one member spans a switch from version 0 to 1
    and has one wild token that is rejected. Step 2: a group of equal outcomes with an unscored
    member. Step 3: group 0 once more."""
    folder = tmp_path_factory.mktemp("run")
    calm = trajectory(
        RolloutId(0, 0, 0),
        logprobs=[-1.0, -1.0],
        entropies=[1.0, 0.005],
        versions=[1, 1],
        token_ids=[3, 4],
    )
    wild = trajectory(
        RolloutId(0, 0, 1),
        logprobs=[-1.0, -2.0, -0.5],
        entropies=[1.0, 0.005, 2.0],
        versions=[0, 0, 1],
        outcome=0.0,
        token_ids=[3, 5, 6],
    )
    write_step(
        folder,
        record(
            1,
            [
                (calm, consumption(calm, [0.0, 0.0], advantage=1.0)),
                (
                    wild,
                    consumption(wild, [0.1, 1.0, -0.2], advantage=-1.0, kept=[True, False, True]),
                ),
            ],
            target_version=1,
            version=2,
        ),
    )
    equal = [
        trajectory(
            RolloutId(0, 1, i), logprobs=[-1.0], entropies=[1.0], versions=[1], token_ids=[3]
        )
        for i in range(2)
    ]
    lost = trajectory(
        RolloutId(0, 1, 2), logprobs=[-1.0], entropies=[1.0], versions=[1], outcome=None
    )
    pairs = [(t, consumption(t, [0.3], advantage=0.0)) for t in equal]
    pairs.append((lost, consumption(lost, [0.0], advantage=None)))
    write_step(folder, record(2, pairs, target_version=2, version=2))
    again = trajectory(
        RolloutId(0, 0, 0), logprobs=[-1.0], entropies=[1.0], versions=[2], token_ids=[3]
    )
    write_step(folder, record(3, [(again, consumption(again, [0.0]))], target_version=2))
    return open_ledger(folder, threads=1)


def ask(ledger: Ledger, name: str) -> list[dict[str, Any]]:
    answer = ledger.query(shipped_queries()[name].sql)
    return [dict(zip(answer.names, row, strict=True)) for row in answer.rows]


def test_there_are_ten_queries_and_each_says_what_it_answers() -> None:
    queries = shipped_queries()
    assert len(queries) == 10
    assert all(len(query.meaning) > 30 for query in queries.values())


def test_query_suspicious_tokens(ledger: Ledger) -> None:
    first, second, *_ = ask(ledger, "suspicious-tokens")
    assert (first["token_id"], first["step"], first["position"], first["lag"]) == (5, 1, 3, 1)
    assert first["score"] == pytest.approx(1.0 / 0.015, rel=1e-4)
    assert (first["kept"], second["kept"]) == (False, True)
    assert second["score"] == pytest.approx(0.09 / 1.01, rel=1e-4)


def test_query_mask_rate(ledger: Ledger) -> None:
    rows = {(r["entropy_bin"], r["lag"]): r for r in ask(ledger, "mask-rate")}
    assert rows[0, 1]["rho_mask"] == 1.0
    assert rows[0, 0]["rho_mask"] == 0.0
    assert rows[1, 1]["tokens"] == 3
    assert sum(r["tokens"] for r in rows.values()) == 8
    assert list(rows) == sorted(rows)


def test_query_sign_cells(ledger: Ledger) -> None:
    cells = {(r["advantage_sign"], r["log_ratio_sign"]): r for r in ask(ledger, "sign-cells")}
    assert cells[-1, 1]["tokens"] == 2
    assert cells[-1, 1]["rho_mask"] == 0.5
    assert cells[-1, -1]["second_moment"] == pytest.approx(0.04, rel=1e-5)
    assert cells[1, 0]["tokens"] == 3


def test_query_noise_by_entropy(ledger: Ledger) -> None:
    rows = ask(ledger, "noise-by-entropy")
    assert [(r["above"], r["up_to"], r["tokens"]) for r in rows] == [
        (1 / 128, 1 / 64, 2),
        (1.0, 2.0, 5),
        (2.0, 4.0, 1),
    ]
    assert rows[0]["second_moment"] == pytest.approx(0.5)
    assert rows[0]["against_entropy"] == pytest.approx(0.5 / 0.015, rel=1e-4)
    assert rows[2]["rho_mask"] == 0.0


def test_query_length_bias(ledger: Ledger) -> None:
    rows = ask(ledger, "length-bias")
    assert sum(r["trajectories"] for r in rows) == 6
    assert (rows[0]["shortest"], rows[-1]["longest"]) == (1, 3)
    longest = rows[-1]
    assert (longest["intra"], longest["inter"], longest["advantage"]) == (1.0, 0.0, -1.0)
    assert longest["rho_mask"] == pytest.approx(1 / 3)


def test_query_staleness(ledger: Ledger) -> None:
    rows = ask(ledger, "staleness")
    assert (rows[0]["from_step"], rows[-1]["to_step"]) == (1, 3)
    assert max(r["intra_max"] for r in rows) == 1
    assert max(r["staleness_max"] for r in rows) == 1
    assert sum(r["share_across_updates"] for r in rows) == 1.0


def test_query_mismatch_at_lag_0(ledger: Ledger) -> None:
    rows = {r["entropy_bin"]: r for r in ask(ledger, "mismatch-at-lag-0")}
    assert rows[0]["tokens"] == 1
    assert rows[2]["max_abs_log_ratio"] == pytest.approx(0.2, rel=1e-5)
    assert (rows[1]["mean_log_ratio"], rows[1]["share_above_1e_4"]) == (0.0, 0.0)
    assert rows[2]["share_above_1e_2"] == 1.0


def test_query_after_a_switch(ledger: Ledger) -> None:
    rows = {r["tokens_after_switch"]: r for r in ask(ledger, "after-a-switch")}
    assert list(rows) == ["before any", "the first"]
    assert rows["before any"]["tokens"] == 2
    assert rows["before any"]["rho_mask"] == 0.5
    assert rows["the first"]["second_moment"] == pytest.approx(0.04, rel=1e-5)


def test_query_after_a_switch_looks_for_the_switched(tmp_path: Path) -> None:
    """Where few trajectories span a switch, all of them are looked at: the sample is of those."""
    pairs = []
    for index in range(200):
        versions = [0, 1] if index % 20 == 0 else [1, 1]
        rid = RolloutId(0, 0, index)
        own = trajectory(rid, logprobs=[-1.0] * 2, entropies=[1.0] * 2, versions=versions)
        pairs.append((own, consumption(own, [0.0, 0.1])))
    write_step(tmp_path, record(2, pairs))
    sql = shipped_queries()["after-a-switch"].sql.replace("5000 rows", "20 rows")
    rows = open_ledger(tmp_path).query(sql).rows
    assert [row[:2] for row in rows] == [("before any", 10), ("the first", 10)]


def test_query_gradient_mass(ledger: Ledger) -> None:
    rows = {r["token_id"]: r for r in ask(ledger, "gradient-mass")}
    assert rows[5]["mass"] == 0.0, "a rejected token moves nothing"
    assert rows[5]["rho_mask"] == 1.0
    assert rows[6]["net"] == pytest.approx(math.exp(-0.2) / 5, rel=1e-5)
    assert rows[3]["mass"] == pytest.approx(0.2 + math.exp(0.1) / 5 + 1.0, rel=1e-5)


def test_query_groups(ledger: Ledger) -> None:
    rows = ask(ledger, "groups")
    assert sum(r["groups"] for r in rows) == 3
    assert sum(r["consumed_again"] for r in rows) == 2
    assert sum(r["unscored_members"] for r in rows) == 1
    second = next(r for r in rows if r["from_step"] == 2)
    assert second["share_equal"] == 1.0


def test_an_entropy_that_was_not_recorded_is_not_zero(tmp_path: Path) -> None:
    """Neither in its bin nor in its score; a tiny negative one is."""
    own = trajectory(RolloutId(0, 0, 0), logprobs=[-1.0] * 2, entropies=[-1e-5, 1], versions=[0, 0])
    write_step(tmp_path, record(1, [(own, consumption(own, [0.1, 0.1]))]))
    ledger = open_ledger(tmp_path)
    found = ledger.query("select entropy_bin, score from trained_tokens order by position").rows
    assert found[0] == pytest.approx((0.0, 1.0), rel=1e-5)
    unknown = "select entropy_bin(not_negative(null)), not_negative(null) is null"
    assert ledger.query(unknown).rows == [(None, True)]
