"""The logged tokens of a run under other corrections: exact on its own, by hand on others."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from estr import warmstart
from estr.checkpoint import Checkpoints, save_trainer
from estr.cli import cli
from estr.config import correction_entries, recipe_from_table
from estr.errors import ConfigError, DataError
from estr.ledger import open_ledger, read_step
from estr.ledger.parts import part_path
from estr.ledger.schema import StepRecord, described, tokens_table, trajectories_table
from estr.models import load_model, save_model
from estr.replay import OWN, replay_corrections, replay_gradients
from estr.replay.results import by_part
from estr.run_folder import RunFolder
from estr.trainer import Trainer
from estr.types import RolloutId, Segment
from estr.weights import MemoryWeightStore
from ledger_cases import consumption, random_record, record, trajectory, write_step
from tiny import draw_groups

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    tokenizer = warmstart.make_tokenizer()
    tiny = warmstart.make_model(warmstart.WarmStart(layers=1, width=16), tokenizer)
    with torch.no_grad():
        tiny.lm_head.weight.mul_(8.0)  # far enough from uniform that entropies differ
    save_model(tiny, tokenizer, folder)
    return folder


def make_run(folder: Path, model: Path, correction: Any, **table: Any) -> RunFolder:
    """A run of three batches on the same groups, so that it soon rejects tokens: its ledger, its
    metrics, and a checkpoint before the last step."""
    recipe = recipe_from_table(
        {
            "name": "small",
            "model": str(model),
            "steps": STEPS,
            "correction": correction,
            "trainer": {"lr": 2e-2, "token_budget": 48},
            **table,
        }
    )
    run = RunFolder.create(recipe, folder)
    trainer = Trainer(load_model(model), recipe, MemoryWeightStore())
    groups = draw_groups(trainer.model, num_groups=4, size=4)
    number = recipe.num_minibatches
    batches = [groups[i::number] for i in range(number)]
    lines = []
    for batch in range(STEPS):
        if batch == STEPS - 1:
            save_checkpoint(run, trainer)
        for part, result in zip(batches, trainer.train(batches), strict=True):
            write_step(
                run.path,
                StepRecord(
                    result.step,
                    result.target_version,
                    result.version,
                    [t for g in part for t in g.trajectories],
                    result.consumptions,
                    described(recipe.correction),
                    recipe.loss.aggregation,
                ),
            )
            lines.append(json.dumps({"step": result.step, **result.metrics.to_row()}) + "\n")
    (run.path / "metrics.jsonl").write_text("".join(lines))
    return run


def save_checkpoint(run: RunFolder, trainer: Trainer) -> None:
    async def save(folder: Path) -> None:
        save_trainer(trainer, folder)

    state = {"step": trainer.step}
    asyncio.run(Checkpoints(run.checkpoints).write(trainer.step, state, {}, save))


# -- a step read again --------------------------------------------------------------------------


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Several segments, with and without gini, a trajectory without a token, an unscored one."""
    (first, *_) = random_record(4).trajectories
    first = replace(first, segments=(*first.segments, Segment.context([3]), *first.segments))
    bare = trajectory(RolloutId(0, 9, 0), logprobs=[-1.0], entropies=[0.5], versions=[2])
    empty = replace(bare, segments=(), turns=(), outcome=None, reward=None, status="timeout")
    drawn = [0.25] * first.num_sampled_tokens
    unscored = consumption(bare, [], advantage=None, proximal=[])
    nothing = {name: getattr(unscored, name)[:0] for name in ("policy_logprobs", "kept", "clipped")}
    written = record(
        4,
        [
            (first, consumption(first, drawn, proximal=drawn, advantage=0.5)),
            (empty, replace(unscored, **nothing, proximal_logprobs=nothing["policy_logprobs"])),
            (bare, unscored),
        ],
    )
    write_step(tmp_path, written)
    found = read_step(tmp_path, 4)
    assert tokens_table([found]).equals(tokens_table([written]))
    assert trajectories_table([found]).equals(trajectories_table([written]))
    assert [len(s) for s in found.trajectories[0].segments] == [len(s) for s in first.segments]
    assert found.trajectories[0].segments[0].behavior_gini is not None
    assert found.trajectories[2].segments[0].behavior_gini is None
    assert found.consumptions[0].ref_logprobs is None
    with pytest.raises(DataError, match=r"00000005\.parquet is absent or torn"):
        read_step(tmp_path, 5)


# -- exact on its own ---------------------------------------------------------------------------

OWN_CORRECTIONS: list[tuple[Any, dict[str, Any]]] = [
    ({"name": "estr", "tau": 0.01}, {}),
    ({"name": "estr", "tau": 0.01, "side": "outward", "mask": "soft"}, {"num_minibatches": 2}),
    ({"name": "icepop", "alpha": 0.95, "beta": 1.05, "edge": "B"}, {"num_minibatches": 2}),
    ({"name": "kpop", "phi": 0.001}, {"loss": {"aggregation": "group"}}),
    ({"name": "m2po", "budget": 0.001}, {}),
    ({"name": "mis", "level": "geometric", "low": 0.98, "high": 1.02}, {}),
    (
        [
            {"name": "estr", "tau": 0.02, "surrogate": "none"},
            {"name": "tis", "level": "sequence", "cap": 1.1},
            {"name": "none", "edge": "U"},
        ],
        {},
    ),
]


@pytest.mark.parametrize(
    ("correction", "table"), OWN_CORRECTIONS, ids=lambda value: str(value)[:50]
)
def test_the_verdicts_of_a_run_come_out_as_they_were(
    correction: Any, table: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """To the last bit, and the loss with them."""
    run = make_run(tmp_path, model, correction, **table)
    found = replay_corrections(run.path, ["none", "icepop:beta=1.1"])
    assert (found.check.kept_differ, found.check.clipped_differ, found.check.first) == (0, 0, None)
    assert found.check.tokens == found.tokens > 100
    own = found.figures[0]
    assert own.label == OWN
    ledger = open_ledger(run.path)
    ((kept, clipped),) = ledger.query(
        "select count(*) filter (kept), count(*) filter (clipped) from trained_tokens"
    ).rows
    assert (own.kept, own.clipped) == (kept, clipped)
    assert clipped > 0 or kept < found.tokens, "something was rejected or clipped at all"
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert own.loss == pytest.approx(sum(r["loss"] for r in rows) / len(rows), abs=1e-6)


def test_corrections_on_sequences_see_whole_trajectories(model: Path, tmp_path: Path) -> None:
    """A run cut in small micro-batches, asked about one: the weight of every token of a trajectory
    is the product of its ratios, by hand."""
    run = make_run(tmp_path, model, "estr")
    found = replay_corrections(run.path, ["tis:level=sequence,cap=1.05"])
    assert found.check.kept_differ == found.check.clipped_differ == 0
    weights = []
    for step in found.steps:
        one = read_step(run.path, step)
        for t, made in zip(one.trajectories, one.consumptions, strict=True):
            (segment,) = t.segments
            log_ratios = (made.policy_logprobs - segment.behavior_logprobs)[segment.sampled]
            weights += [min(1.05, math.exp(log_ratios.sum()))] * len(log_ratios)
    tis = found.figures[1]
    assert (tis.kept, tis.weight_max) == (found.tokens, pytest.approx(1.05))
    assert tis.weight_mean == pytest.approx(sum(weights) / len(weights), abs=1e-5)


def test_a_verdict_that_was_not_so_is_noticed(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path, model, {"name": "estr", "tau": 0.01})
    one = read_step(run.path, 2)
    one.consumptions[1].kept[~np.isnan(one.consumptions[1].policy_logprobs)] ^= True
    for table in ("tokens", "trajectories"):
        part_path(run.path, table, 2).unlink()
    write_step(run.path, one)
    found = replay_corrections(run.path, ["none"])
    assert found.check.kept_differ == one.trajectories[1].num_sampled_tokens
    assert found.check.first is not None
    assert found.check.first.startswith("step 2, trajectory 1, position ")


# -- by hand ------------------------------------------------------------------------------------


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """One step under `estr` (tau 1, eps 0.01), taken at version 3, one group of two.

    token   of   A    log_ratio   entropy   lag   estr keeps iff log_ratio^2 <= H + 0.01
    0       up   +1    0.10       1.000      1    yes
    1       up   +1    1.00       0.005      0    no
    2       down -1   -0.05       0.200      2    yes
    3       down -1    0.60       3.000      0    yes
    """
    recipe = recipe_from_table({"name": "hand", "steps": 1})
    run = RunFolder.create(recipe, tmp_path)
    up = trajectory(
        RolloutId(0, 7, 0), logprobs=[-1.0, -2.0], entropies=[1.0, 0.005], versions=[2, 3]
    )
    down = trajectory(
        RolloutId(0, 7, 1),
        logprobs=[-1.0, -1.0],
        entropies=[0.2, 3.0],
        versions=[1, 3],
        outcome=0.0,
    )
    pairs = [
        (up, consumption(up, [0.1, 1.0], advantage=1.0, kept=[True, False])),
        (down, consumption(down, [-0.05, 0.6], advantage=-1.0)),
    ]
    write_step(run.path, record(4, pairs, target_version=3))
    return run.path


def test_four_tokens_by_hand(by_hand: Path) -> None:
    found = replay_corrections(by_hand, ["none", "icepop:alpha=0.96,beta=1.5"])
    assert found.check.kept_differ == found.check.clipped_differ == 0
    assert (found.tokens, found.steps) == (4, (4,))
    own, none, icepop = found.figures
    assert (own.kept, none.kept, icepop.kept) == (3, 4, 1)
    # icepop: e^0.1 = 1.105 is inside; e^1 and e^0.6 = 1.822 are not, nor is e^-0.05 = 0.951.
    assert (own.clipped, none.clipped, icepop.clipped) == (0, 1, 0)
    assert own.mass == pytest.approx((math.exp(0.1) + math.exp(-0.05) + math.exp(0.6)) / 4)
    assert own.net == pytest.approx((-math.exp(0.1) + math.exp(-0.05) + math.exp(0.6)) / 4)
    assert none.mass == pytest.approx(own.mass), "the clip takes what the mask took"
    assert none.loss == pytest.approx(own.loss - 1.2 / 4), "its value, though not its gradient"
    assert icepop.mass == pytest.approx(math.exp(0.1) / 4)
    assert own.second_moment == pytest.approx((0.01 + 0.0025 + 0.36) / 3, rel=1e-5)
    assert found.rejected_by_both == ((1, 0, 1), (0, 0, 0), (1, 0, 3))
    assert found.agreement == ((1.0, 0.75, 0.5), (0.75, 1.0, 0.25), (0.5, 0.25, 1.0))
    assert found.cosine[0][1] == pytest.approx(1.0)
    lengths = math.sqrt(math.exp(0.2) + math.exp(-0.1) + math.exp(1.2))
    assert found.cosine[0][2] == pytest.approx(math.exp(0.1) / lengths)


def test_cells_by_hand(by_hand: Path) -> None:
    found = replay_corrections(by_hand, ["none"])
    where = {(c.entropy_bin, c.lag, c.signs): (c.tokens, c.kept) for c in found.cells}
    assert where == {
        (1.0, 1, "++"): (1, (1, 1)),
        (0.0, 0, "++"): (1, (0, 1)),
        (0.1, 2, "--"): (1, (1, 1)),
        (2.0, 0, "-+"): (1, (1, 1)),
    }
    lags = by_part(found.cells, "lag")
    assert {lag: (cell.tokens, cell.kept[0]) for lag, cell in lags.items()} == {
        0: (2, 1),
        1: (1, 1),
        2: (1, 1),
    }
    for part in ("entropy_bin", "lag", "signs"):
        cells = by_part(found.cells, part).values()
        for i, figures in enumerate(found.figures):
            assert sum(cell.mass[i] for cell in cells) == pytest.approx(figures.mass)


def test_examples_are_what_changes_the_gradient_most(by_hand: Path) -> None:
    """`icepop` rejects two tokens that `estr` keeps; the larger coefficient comes first. A
    token that `none` keeps but clips changes nothing, and is shown all the same."""
    found = replay_corrections(by_hand, ["none", "icepop:alpha=0.96,beta=1.5"], num_examples=1)
    clipped, dropped = found.examples
    assert (clipped.correction, clipped.token_id, clipped.position) == ("none", 2, 3)
    assert (clipped.kept, clipped.clipped) == ((False, True, False), (False, True, False))
    assert dropped.correction == "icepop:alpha=0.96,beta=1.5"
    assert (dropped.step, dropped.group, dropped.trajectory, dropped.position) == (4, 7, 1, 3)
    assert (dropped.before, dropped.token_id, dropped.after) == ((7, 8, 1), 2, ())
    assert dropped.log_ratio == pytest.approx(0.6)
    assert dropped.kept == (True, True, False)
    assert dropped.coefficients == pytest.approx((math.exp(0.6) / 4, math.exp(0.6) / 4, 0.0))


def test_memory_holds_a_few_examples_of_many(tmp_path: Path) -> None:
    """The largest of all steps, whatever the order of the steps."""
    run = RunFolder.create(recipe_from_table({"name": "many"}), tmp_path)
    for step in range(1, 5):
        write_step(run.path, random_record(step, num_groups=2, size=4, longest=20))
    whole = replay_corrections(run.path, ["none:clip_high=100.0,clip_low=1.0"], num_examples=999)
    few = replay_corrections(run.path, ["none:clip_high=100.0,clip_low=1.0"], num_examples=3)
    assert whole.tokens - whole.figures[0].kept == len(whole.examples) > 3
    assert few.examples == whole.examples[:3]
    sizes = [abs(e.coefficients[1] - e.coefficients[0]) for e in whole.examples]
    assert sizes == sorted(sizes, reverse=True)


# -- what the ledger lacks ----------------------------------------------------------------------


def test_q_is_pi_with_one_step_a_batch_and_unknown_with_several(
    model: Path, tmp_path: Path
) -> None:
    one = make_run(tmp_path / "one", model, "estr")
    found = replay_corrections(one.path, ["icepop", "icepop:edge=B"])
    assert found.figures[1].kept == found.figures[2].kept, "q/mu is pi/mu there"
    two = make_run(tmp_path / "two", model, "estr", num_minibatches=2)
    with pytest.raises(DataError, match=r"step 1 under tis: .*num_minibatches.*pi/mu"):
        replay_corrections(two.path, ["tis"])
    replay_corrections(two.path, ["icepop"])
    every = replay_corrections(two.path)
    refused = {label for label, _ in every.refused}
    assert {"tis", "mis", "m2po", "decoupled"} <= refused
    assert {"none", "estr", "icepop", "kpop", "dppo", "dual_clip"} == set(every.labels) - {OWN}


def test_what_was_not_recorded_is_named(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model, "estr")
    with pytest.raises(DataError, match=r"step 1 under estr:scale=gini: .*needs behavior_gini"):
        replay_corrections(run.path, ["estr:scale=gini"])
    with pytest.raises(DataError, match="holds steps 1 to 3: none of those that were asked for"):
        replay_corrections(run.path, ["none"], steps=[9])
    assert replay_corrections(run.path, ["none"], steps=range(2, 9)).steps == (2, 3)


# -- corrections as text ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("estr", [{"name": "estr"}]),
        (" estr:tau=0.5, eps=1e+0 ", [{"name": "estr", "tau": 0.5, "eps": 1.0}]),
        ("kpop:saturate=true,edge=B", [{"name": "kpop", "saturate": True, "edge": "B"}]),
        (
            "estr:tau=inf,surrogate=none + tis:level=sequence",
            [
                {"name": "estr", "tau": math.inf, "surrogate": "none"},
                {"name": "tis", "level": "sequence"},
            ],
        ),
        ("own.module:Mine", [{"name": "own.module:Mine"}]),
        ("own.module:Mine:reach=2", [{"name": "own.module:Mine", "reach": 2}]),
    ],
)
def test_a_correction_as_text(text: str, entries: list[dict[str, Any]]) -> None:
    assert list(correction_entries(text)) == entries


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("etsr", "'etsr' is unknown; did you mean estr"),
        ("estr:tua=1", r"unknown key correction\.tua of estr; did you mean"),
        ("estr:tau=0", "tau must be above 0"),
        ("estr:tau=1,eps", "'eps' is not of the form key=value"),
        ("estr:name=icepop", "'name' is given twice"),
        ("estr:tau=1,tau=2", "'tau' is given twice"),
        ("estr+icepop:edge=X", r"correction\[1\]\.edge = 'X': must be one of E, B"),
        (":tau=1", "is not of the form"),
    ],
)
def test_a_wrong_correction_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        correction_entries(text)


# -- gradients ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs"), model, {"name": "estr", "tau": 0.01})


def test_gradients_are_those_of_training(trained: RunFolder) -> None:
    """Loss and norm of the run's own correction as its metrics have them; those of another as of
    a trainer that goes on from the same checkpoint with it."""
    found = replay_gradients(trained.path, ["none", "estr:tau=0.01"])
    own, none, same = found.gradients
    assert (found.step, found.version, own.label) == (3, 2, OWN)
    assert found.max_difference < 1e-4
    assert own.loss == pytest.approx(found.recorded_loss, abs=1e-6)
    assert own.norm == pytest.approx(found.recorded_norm, rel=1e-4)
    assert (same.loss, same.norm) == (own.loss, own.norm)
    assert found.cosine[0][2] == pytest.approx(1.0)
    assert found.cosine[0][1] == found.cosine[1][0]
    other = trainer_after(trained, {"name": "none"})
    row = other.train([draw_groups(load_model(other.recipe.model), num_groups=4, size=4)])[0]
    figures = row.metrics.to_row()
    assert none.loss == pytest.approx(figures["loss"], abs=1e-6)
    assert none.norm == pytest.approx(figures["grad_norm"], rel=1e-4)
    assert abs(none.norm / own.norm - 1) > 1e-3, "the two corrections do differ"


def trainer_after(run: RunFolder, correction: dict[str, Any]) -> Trainer:
    from estr.config import load_recipe
    from estr.replay.gradients import trainer_at, weights_there

    recipe = replace(load_recipe(run.path / "config.toml"), correction=(correction,))
    return trainer_at(recipe, weights_there(run)[0][2])


def test_the_first_step_was_taken_at_the_weights_of_the_start(trained: RunFolder) -> None:
    found = replay_gradients(trained.path, ["m2po", "mis:level=sequence"], step=1)
    assert found.version == 0
    assert found.max_difference < 1e-4
    own, m2po, mis = found.gradients
    assert own.norm == pytest.approx(m2po.norm, rel=1e-3), "on-policy nothing is corrected"
    assert own.norm == pytest.approx(mis.norm, rel=1e-3)


def test_steps_without_weights_are_named_with_the_nearest(trained: RunFolder) -> None:
    words = r"step 2 was taken at version 1; .* holds the weights of version 0, 2; the nearest step"
    with pytest.raises(DataError, match=words):
        replay_gradients(trained.path, ["none"], step=2)
    with pytest.raises(DataError, match="step 8 is not in the ledger"):
        replay_gradients(trained.path, ["none"], step=8)


def test_torn_checkpoints_are_named(trained: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "torn")
    shutil.copytree(trained.path, run.path)
    (torn,) = run.checkpoints.iterdir()
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = replay_gradients(run.path, ["none"])
    assert (found.step, found.version) == (1, 0), "the weights of the start are left"
    assert found.passed_over == (f"{weights} is not what its manifest says",)
    assert found.to_json()["passed_over"] == list(found.passed_over)
    shown = CliRunner().invoke(cli, ["replay", str(run.path), "-c", "none", "--gradients"])
    assert f"passed over, so not among the weights to choose from: {weights}" in shown.output
    with pytest.raises(DataError, match=r"holds the weights of version 0; .*; passed over: .*torn"):
        replay_gradients(run.path, ["none"], step=3)
    assert replay_gradients(trained.path, ["none"]).passed_over == ()


def test_log_probs_of_other_weights_are_refused(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model, "estr")
    one = read_step(run.path, 3)
    made = one.consumptions[0]
    shifted = replace(made, policy_logprobs=made.policy_logprobs - np.float32(0.01))
    one = one._replace(consumptions=[shifted, *one.consumptions[1:]])
    for table in ("tokens", "trajectories"):
        part_path(run.path, table, 3).unlink()
    write_step(run.path, one)
    with pytest.raises(DataError, match=r"differ by up to 0\.01 .*not the weights"):
        replay_gradients(run.path, ["none"])


# -- the command --------------------------------------------------------------------------------


def replayed(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["replay", *(str(a) for a in arguments)])


def test_the_command_prints_tables_and_writes_json(by_hand: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    result = replayed(by_hand, "-c", "none", "-c", "icepop:beta=1.5", "--out", out)
    assert result.exit_code == 0, result.output
    for words in (
        "4 trained tokens of 1 optimizer steps (4 to 4)",
        "trained with estr:tau=1.0,eps=0.01",
        "all 4 verdicts are those recorded",
        "judged differently by A and B (none)",
        f"written to {out}",
    ):
        assert words in result.output
    found = json.loads(out.read_text())
    assert [figures["label"] for figures in found["figures"]] == [OWN, "none", "icepop:beta=1.5"]
    assert found["agreement"][0] == [1.0, 0.75, 0.75]


def test_the_command_shows_gradients(trained: RunFolder) -> None:
    result = replayed(trained.path, "-c", "none", "--gradients", "--step", "1")
    assert "all tokens of this step are of the weights that are trained (lag 0)" in result.stdout
    result = replayed(trained.path, "-c", "none", "--gradients")
    assert "lag 0" not in result.stdout
    assert result.exit_code == 0, result.output
    for words in (
        "step 3",
        "version 2",
        "agree with the logged ones within",
        "cosine of gradients",
    ):
        assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "etsr"], "'etsr' is unknown"),
        (["--step", 3], "--step needs --gradients"),
        (["--gradients"], "--gradients needs --correction"),
        (["--steps", "a:b"], "not of the form FROM:TO"),
        (["--out", "no/such/folder/x.json"], "there is no folder no/such/folder"),
    ],
)
def test_a_wrong_flag_is_refused(by_hand: Path, arguments: list[Any], words: str) -> None:
    result = replayed(by_hand, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
