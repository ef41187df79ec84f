"""The recipe: precedence, refusals that name key, value and remedy, and the round trip."""

import dataclasses
import math
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr.config import (
    Recipe,
    as_override,
    correction_options,
    load_recipe,
    read_options,
    read_table,
    recipe_from_table,
)
from estr.errors import ConfigError
from estr.options.corrections import CORRECTION_OPTIONS, EstrOptions, IcepopOptions
from estr.options.run import EvalOptions, SamplingOptions
from estr.options.suggest import OTHER_NAMES, RESHAPING
from estr.recipe_files import find_recipe
from estr.subject import find_run

FEW = settings(max_examples=50, deadline=None)
NAN, INF = math.nan, math.inf

TABLES = {
    name: hint
    for name, hint in typing.get_type_hints(Recipe).items()
    if dataclasses.is_dataclass(hint)
}
KEYS = {
    *(f.name for f in dataclasses.fields(Recipe)),
    *(f"{name}.{f.name}" for name, hint in TABLES.items() for f in dataclasses.fields(hint)),
    *(
        f"correction.{f.name}"
        for cls in CORRECTION_OPTIONS.values()
        for f in dataclasses.fields(cls)
    ),
}


def nested(path: str, value) -> dict:
    """A recipe's table that sets one key."""
    *outer, key = path.split(".")
    table = {key: value}
    for part in reversed(outer):
        table = {part: {"name": "estr", **table} if part == "correction" else table}
    return table


def refusal(table) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe_from_table(table)
    return str(caught.value)


def recipe_file(tmp_path, text: str):
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


# Precedence


def test_no_file_and_no_override_is_the_default_recipe():
    assert load_recipe() == Recipe()


@pytest.mark.parametrize(
    ("default", "file", "flag", "value"),
    [
        (True, None, None, True),
        (True, False, None, False),
        (True, False, True, True),
        (True, True, False, False),
        (True, None, False, False),
    ],
)
def test_defaults_then_file_then_command_line_for_a_true_default_check_151(
    tmp_path, default, file, flag, value
):
    assert Recipe().in_flight is default
    path = recipe_file(tmp_path, "" if file is None else f"in_flight = {str(file).lower()}")
    overrides = [] if flag is None else [f"in_flight={str(flag).lower()}"]
    assert load_recipe(path, overrides).in_flight is value


@pytest.mark.parametrize(
    ("file", "flag", "value"),
    [(None, None, False), (True, None, True), (True, False, False), (None, True, True)],
)
def test_defaults_then_file_then_command_line_for_a_false_default_check_151(
    tmp_path, file, flag, value
):
    text = 'correction = { name = "kpop"' + ("" if file is None else ", saturate = true") + " }"
    overrides = [] if flag is None else [f"correction.saturate={str(flag).lower()}"]
    recipe = load_recipe(recipe_file(tmp_path, text), overrides)
    assert correction_options(recipe.correction[0]).saturate is value


def test_the_command_line_wins_key_by_key(tmp_path):
    path = recipe_file(tmp_path, "steps = 7\n[trainer]\nlr = 0.5\nwarmup_steps = 3")
    recipe = load_recipe(path, ["trainer.lr=0.25", "seed=9", "trainer.lr=0.125"])
    assert (recipe.steps, recipe.seed) == (7, 9)
    assert (recipe.trainer.lr, recipe.trainer.warmup_steps) == (0.125, 3)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("trainer.lr=1e-4", lambda r: r.trainer.lr, 1e-4),
        ("trainer.grad_clip=inf", lambda r: r.trainer.grad_clip, INF),
        ("trainer.betas=[0.8, 0.9]", lambda r: r.trainer.betas, (0.8, 0.9)),
        ("max_staleness=0", lambda r: r.max_staleness, 0),
        ("name=my-run", lambda r: r.name, "my-run"),
        ('name="my run"', lambda r: r.name, "my run"),
        ("kv = keep", lambda r: r.kv, "keep"),
        ("model=/models/a=b", lambda r: r.model, "/models/a=b"),
        ("correction=none", lambda r: r.correction, ({"name": "none"},)),
        ("correction.tau=0.5", lambda r: r.correction, ({"name": "estr", "tau": 0.5},)),
        ("correction.tau=inf", lambda r: r.correction, ({"name": "estr", "tau": INF},)),
        (
            'correction=["none", {name = "estr", tau = 2.0}]',
            lambda r: r.correction,
            ({"name": "none"}, {"name": "estr", "tau": 2.0}),
        ),
        ("task.num_terms=3", lambda r: r.task, {"name": "calculator", "num_terms": 3}),
        ("task=arithmetic", lambda r: r.task, {"name": "arithmetic"}),
    ],
)
def test_overrides_are_read_as_toml_or_as_text(override, get, value):
    assert get(load_recipe(overrides=[override])) == value


@pytest.mark.parametrize(
    "text",
    [
        'correction = "icepop"',
        'correction = ["icepop"]',
        '[correction]\nname = "icepop"',
        '[[correction]]\nname = "icepop"',
    ],
)
def test_an_override_speaks_of_the_correction_that_the_file_names(tmp_path, text):
    recipe = load_recipe(recipe_file(tmp_path, text), ["correction.beta=3"])
    assert correction_options(recipe.correction[0]) == IcepopOptions(beta=3.0)


def test_overrides_do_not_leak_into_the_defaults():
    load_recipe(overrides=["correction.tau=0.5", "task.num_terms=3"])
    assert Recipe().correction == ({"name": "estr"},)
    assert Recipe().task == {"name": "calculator"}


# Unknown keys


def test_the_three_misplaced_keys_check_149():
    assert "unknown key learnig_rate; did you mean trainer.lr?" in refusal({"learnig_rate": 1e-6})
    message = refusal({"loss": {"taau": 0.5}})
    assert "unknown key loss.taau; did you mean correction.tau (of estr)?" in message
    assert "unknown key tau; it belongs at correction.tau (of estr)" in refusal({"tau": 0.5})


def test_foreign_loss_options_are_refused_check_156():
    message = refusal({"correction": {"name": "icepop", "tau": 1.0}})
    assert "unknown key correction.tau of icepop; it belongs at correction.tau (of estr)" in message
    message = refusal({"correction": {"name": "estr", "clip_rato": 0.2}})
    assert "unknown key correction.clip_rato of estr; did you mean correction.clip_low" in message


@pytest.mark.parametrize("name", CORRECTION_OPTIONS)
def test_every_correction_takes_its_own_options_and_no_others_check_156(name):
    own = {f.name for f in dataclasses.fields(CORRECTION_OPTIONS[name])}
    every = {f.name for cls in CORRECTION_OPTIONS.values() for f in dataclasses.fields(cls)}
    for key in every:
        entry = {"name": name, key: "?"}
        message = refusal({"correction": entry})
        assert ("unknown key" in message) == (key not in own), message
        assert f"correction.{key}" in message


@pytest.mark.parametrize("path", sorted(path for path in KEYS if len(path.split(".")[-1]) > 2))
def test_a_misspelt_key_finds_its_right_name_at_every_level_check_149(path):
    *outer, key = path.split(".")
    misspelt = key[: len(key) // 2] + "q" + key[len(key) // 2 :]
    message = refusal(nested(".".join([*outer, misspelt]), 1))
    assert f"unknown key {'.'.join([*outer, misspelt])}" in message
    assert path in message


@pytest.mark.parametrize("path", sorted(key for key in KEYS if "." in key))
def test_a_key_of_an_inner_table_at_the_top_is_sent_home_check_149(path):
    key = path.split(".")[1]
    if key in {f.name for f in dataclasses.fields(Recipe)}:
        assert path in {"engine.name"}
        return
    message = refusal({key: 1})
    assert f"unknown key {key}; it belongs at " in message
    assert path in message


@pytest.mark.parametrize(
    ("table", "home"),
    [
        ({"learning_rate": 1e-3}, "trainer.lr"),
        ({"lr": 1e-3}, "it belongs at trainer.lr"),
        ({"Learning-Rate": 1e-3}, "trainer.lr"),
        ({"trainer": {"learning_rate": 1e-3}}, "trainer.lr"),
        ({"batch_size": 8}, "groups_per_step"),
        ({"num_generations": 8}, "group_size"),
        ({"temperature": 1.0}, "it belongs at sampling.temperature or eval.temperature"),
        ({"clip_range": 0.2}, "correction.clip_low and correction.clip_high"),
        ({"correction": {"name": "estr", "epsilon": 0.2}}, "clip_low and correction.clip_high"),
        ({"maxstaleness": 1}, "max_staleness"),
        ({"sampling": {"lr": 1.0}}, "trainer.lr"),
    ],
)
def test_names_of_other_trainers_are_understood(table, home):
    assert home in refusal(table)


def test_every_suggestion_is_a_key_that_exists():
    for other, meant in OTHER_NAMES.items():
        assert other not in {key.split(".")[-1] for key in KEYS}
        assert set(meant.split(" and ")) <= KEYS


@pytest.mark.parametrize("key", sorted(RESHAPING))
def test_what_reshapes_the_distribution_is_refused_with_the_reason(key):
    for table in ({key: 0.9}, {"sampling": {key: 0.9}}):
        assert "training draws from the whole distribution" in refusal(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"eval": {"problm": 2}}, "unknown key eval.problm; did you mean eval.problems?"),
        ({"task": {"nam": "lookup"}}, "task has no name, but 'nam'; did you mean task.name?"),
        (
            {"task": ["lookup", {"naem": "lookup"}]},
            "task[1] has no name, but 'naem'; did you mean task[1].name?",
        ),
        (
            {"correction": ["estr", {"nmae": "tis"}]},
            "correction[1] has no name, but 'nmae'; did you mean correction[1].name?",
        ),
        (
            {"correction": {"name": "estr", "nam": "tis"}},
            "unknown key correction.nam of estr; did you mean correction.name?",
        ),
        (
            {"correction": {"name": "estr", "clip_hig": 0.2}},
            "unknown key correction.clip_hig of estr; did you mean correction.clip_high?",
        ),
        # lora.rank and correction.beta are nearer, but elsewhere.
        ({"trainer": {"ransk": 2}}, "unknown key trainer.ransk; did you mean trainer.ranks?"),
        (
            {"trainer": {"rank": 2}},
            "unknown key trainer.rank; did you mean trainer.ranks? Else it belongs at lora.rank",
        ),
        ({"trainer": {"betsa": 2}}, "unknown key trainer.betsa; did you mean trainer.betas?"),
        ({"samplin": {"temperature": 1}}, "unknown key samplin; did you mean sampling?"),
    ],
)
def test_the_nearest_key_of_the_place_is_suggested(table, message):
    assert refusal(table) == message


def test_a_key_like_no_other_gets_the_list():
    assert refusal({"loss": {"zzzz": 1}}) == (
        "unknown key loss.zzzz; known here: advantage, aggregation, variance_of"
    )


@pytest.mark.parametrize(
    "override",
    ["trainer.lrr=1", "lr=1", "sampling.top_p=0.9", "correction.alpha=1", "trainer.lr.x=1"],
)
def test_the_command_line_is_as_strict_as_the_file(override):
    with pytest.raises(ConfigError, match=r"unknown key|trainer\.lr = "):
        load_recipe(overrides=[override])


# Values


@pytest.mark.parametrize("temperature", [0, -1, NAN, INF])
def test_training_needs_a_positive_finite_temperature_check_43(temperature):
    message = refusal({"sampling": {"temperature": temperature}})
    assert message.startswith("sampling.temperature must be finite and above 0, not ")


def test_evaluation_may_be_greedy_check_43():
    assert recipe_from_table({"eval": {"temperature": 0}}).eval.temperature == 0.0
    for temperature in (-1, NAN, INF, 1e-50):
        assert "eval.temperature" in refusal({"eval": {"temperature": temperature}})


TIMES = sorted(key for key in KEYS if key.endswith("_s"))


@pytest.mark.parametrize("path", TIMES)
def test_every_time_limit_is_finite_and_positive_check_106(path):
    for bad in (INF, NAN, 0, -1):
        assert refusal(nested(path, bad)).startswith(f"{path} must be finite and above 0, not ")
    table, key = path.split(".")
    assert getattr(getattr(recipe_from_table(nested(path, 5.0)), table), key) == 5.0


OWN_REWARD = {"path": "my.jsonl", "reward": "my_reward:score"}
JUDGED = {
    "name": "deep_search",
    "judge": "model",
    "judge_url": "http://localhost:1",
    "judge_model": "m",
}
OWN_TOOL = {"path": "my.jsonl", "tools": ["my_tools:look_up"]}


@pytest.mark.parametrize(
    ("task", "step_timeout_s", "says"),
    [
        (OWN_REWARD | {"reward_timeout_s": 60}, 60.0, "task.reward_timeout_s = 60"),
        (OWN_REWARD | {"reward_timeout_s": 90.5}, 60.0, "task.reward_timeout_s = 90.5"),
        (OWN_REWARD, 20.0, "task.reward_timeout_s = 30"),
        (OWN_TOOL, 10.0, "task.tool_timeout_s = 10"),
        (["calculator", OWN_TOOL], 5.0, "task[1].tool_timeout_s = 10"),
        (
            JUDGED | {"judge_timeout_s": 19.0},
            60.0,
            "task.judge_timeout_s = 19, 3 times with 3 s of pauses between,",
        ),
        ("reasoning_gym", 30.0, "task.problem_timeout_s = 30"),
        (
            "reasoning_gym",
            40.0,
            "task.score_timeout_s = 10, after problem_timeout_s = 30,",
        ),
    ],
)
def test_a_call_must_end_before_the_answer_in_which_it_is_made(task, step_timeout_s, says):
    told = refusal({"task": task, "rollout": {"step_timeout_s": step_timeout_s}})
    assert told.startswith(
        f"{says} must be below rollout.step_timeout_s = {step_timeout_s:g}, the limit"
    )
    assert "raise rollout.step_timeout_s or lower task" in told


@pytest.mark.parametrize(
    ("task", "step_timeout_s"),
    [
        (OWN_REWARD, 30.5),
        (OWN_TOOL, 10.5),
        ({"path": "my.jsonl", "reward": "boxed"}, 5.0),
        (JUDGED, 57.5),
        ("deep_search", 5.0),
        ("reasoning_gym", 40.5),
    ],
)
def test_limits_of_calls_that_fit_or_are_not_made_are_no_matter(task, step_timeout_s):
    recipe_from_table({"task": task, "rollout": {"step_timeout_s": step_timeout_s}})


def test_there_are_time_limits():
    assert {"rollout.timeout_s", "rollout.step_timeout_s", "engine.timeout_s"} <= set(TIMES)


@pytest.mark.parametrize(
    ("path", "bad"),
    [
        ("steps", 0),
        ("groups_per_step", 0),
        ("group_size", 1),
        ("num_minibatches", 0),
        ("publish_every", 0),
        ("max_staleness", -1),
        ("seed", -1),
        ("trainer.lr", 0),
        ("trainer.lr", INF),
        ("trainer.betas", [0.9, 1.0]),
        ("trainer.betas", [NAN, 0.9]),
        ("trainer.weight_decay", -0.1),
        ("trainer.weight_decay", INF),
        ("trainer.warmup_steps", -1),
        ("trainer.grad_clip", 0),
        ("trainer.grad_clip", NAN),
        ("trainer.token_budget", 8),
        ("engine.max_batch", 0),
        ("sampling.max_new_tokens", 0),
        ("rollout.max_attempts", 0),
        ("eval.k", 0),
        ("eval.every", -1),
        ("checkpoint.keep", 0),
        ("correction.tau", 0),
        ("correction.tau", NAN),
        ("correction.eps", 0),
        ("correction.eps", INF),
        ("correction.clip_low", 0),
        ("correction.clip_low", 1.5),
        ("correction.clip_low", NAN),
        ("correction.clip_high", 0),
        ("correction.clip_high", INF),
    ],
)
def test_values_out_of_range_are_refused_with_path_and_value(path, bad):
    message = refusal(nested(path, bad))
    assert message.startswith(f"{path} ")
    shown = tuple(map(float, bad)) if isinstance(bad, list) else bad
    assert str(shown) in message or f"{shown}.0" in message


def test_the_clip_bounds_say_what_they_bound():
    message = refusal({"correction": {"name": "none", "clip_low": 1.2}})
    assert "the ratio is clipped to [1 - clip_low, 1 + clip_high]" in message


@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        ("steps", "many", "steps = 'many': Expected int, got str"),
        ("steps", 1.5, "steps = 1.5: Expected int, got float"),
        ("steps", True, "steps = True: Expected int, got bool"),
        ("in_flight", "False", "in_flight = 'False': Expected bool, got str"),
        ("kv", "drop", "kv = 'drop': must be one of recompute, keep"),
        ("trainer.dtype", "fp8", "trainer.dtype = 'fp8': must be one of float32, bfloat16"),
        ("trainer.lr", "1e-3", "trainer.lr = '1e-3': Expected float, got str"),
        ("trainer.betas", [0.9], "trainer.betas = [0.9]: Expected array of length 2, got 1"),
        ("trainer.betas", [0.9, "x"], "trainer.betas[1] = 'x': Expected float, got str"),
        ("correction.tau", "x", "correction.tau = 'x': Expected float, got str"),
        ("trainer", 5, "trainer must be a table, not 5"),
        ("sampling", [], "sampling must be a table, not []"),
    ],
)
def test_values_of_the_wrong_type_are_refused_with_path_and_value(path, bad, message):
    assert refusal(nested(path, bad)) == message


def test_the_place_among_several_corrections_is_named():
    message = refusal({"correction": ["none", {"name": "estr", "tau": -1}]})
    assert message == "correction[1].tau must be above 0, not -1.0"


def test_keys_that_contradict_each_other():
    message = refusal({"sampling": {"max_new_tokens": 600, "max_tokens": 512}})
    assert "sampling.max_new_tokens = 600 exceeds sampling.max_tokens = 512" in message
    message = refusal({"max_staleness": 0, "num_minibatches": 2})
    assert "max_staleness = 0 cannot hold with num_minibatches = 2" in message
    message = refusal({"max_staleness": 1, "publish_every": 3})
    assert "raise max_staleness to 2" in message
    assert recipe_from_table({"max_staleness": 2, "publish_every": 3}).publish_every == 3


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\0b"])
def test_a_run_name_that_leaves_its_folder_is_refused(name):
    assert "name must be a plain folder name" in refusal({"name": name})


# Names of corrections and tasks


def test_a_misspelt_correction_gets_the_nearest_name():
    assert refusal({"correction": "estrr"}) == (
        "correction.name = 'estrr' is unknown; did you mean estr?"
    )
    assert (
        "known here: decoupled, dppo, dual_clip, estr, icepop, kpop, m2po, mis, none, tis"
        in refusal({"correction": "zzzzzzzz"})
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"correction": []}, "correction is empty"),
        ({"correction": {"tau": 1.0}}, "correction has no name"),
        ({"correction": 3}, "correction must be a name or a table with a name, not 3"),
        ({"correction": ["none", 3]}, "correction[1] must be a name or a table with a name, not 3"),
        ({"task": {"split": "x"}}, "task has no name"),
        ({"task": {"name": 3}}, "task has no name"),
    ],
)
def test_what_has_no_name_is_refused(table, message):
    assert message in refusal(table)


def test_a_correction_of_ones_own_keeps_its_options_for_later():
    recipe = recipe_from_table({"correction": {"name": "mine.rules:Rule", "anything": 1}})
    assert correction_options(recipe.correction[0]) == {"anything": 1}


def test_typed_options_of_a_correction():
    assert correction_options({"name": "estr", "tau": 2}) == EstrOptions(tau=2.0)
    assert correction_options({"name": "estr"}) == EstrOptions()


@dataclass(frozen=True)
class _Inner:
    depth: int = 1


@dataclass(frozen=True)
class _Own:
    size: int
    inner: _Inner = dataclasses.field(default_factory=_Inner)
    weights: dict[str, float] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sise": 1}, "unknown key task.sise of mine; did you mean task.size?"),
        ({"size": 1, "inner": {"dept": 2}}, "unknown key task.inner.dept; did you mean task.inner"),
        ({"size": 1, "inner": {"depth": "x"}}, "task.inner.depth = 'x': Expected int, got str"),
        ({}, "task: Object missing required field `size`"),
        ({"size": 1, "weights": {"a": "x"}}, "task.weights = {'a': 'x'}: Expected float, got str"),
    ],
)
def test_options_of_anything_else_are_read_by_the_same_rules(table, message):
    with pytest.raises(ConfigError) as caught:
        read_options(_Own, table, "task", of="mine")
    assert message in str(caught.value)


def test_options_of_anything_else_are_typed():
    assert read_options(_Own, {"size": 2, "inner": {"depth": 3}}, "task") == _Own(2, _Inner(3))


# Files and flags that cannot be read


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read recipe .*none\.toml: No such file"):
        load_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"steps = ", b"steps = 1\nsteps = 2", b"name = '\xff'"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"recipe\.toml is not TOML: "):
        load_recipe(path)


@pytest.mark.parametrize("override", ["steps", "", "=3", ".steps=3", "trainer..lr=1"])
def test_an_override_of_another_form_is_named(override):
    with pytest.raises(ConfigError, match="is not of the form key=value"):
        load_recipe(overrides=[override])


@pytest.mark.parametrize("override", ["steps.x=3", "correction.tau=1"])
def test_an_override_into_what_is_no_table_is_named(tmp_path, override):
    path = recipe_file(tmp_path, 'steps = 4\ncorrection = ["none", "estr"]')
    with pytest.raises(ConfigError, match="not a table"):
        load_recipe(path, [override])


# Round trip


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["correction=none", "trainer.grad_clip=inf", "in_flight=false"],
        ['correction=["none", {name = "estr", tau = inf}]'],
        ['name="say \\"hi\\" ü"', "task.num_terms=3", "trainer.betas=[0.0, 0.5]"],
    ],
)
def test_the_resolved_recipe_reads_back_the_same(tmp_path, overrides):
    recipe = load_recipe(overrides=overrides)
    assert load_recipe(recipe_file(tmp_path, recipe.to_toml())) == recipe


def test_the_resolved_recipe_spells_out_every_key():
    table = tomllib.loads(Recipe().to_toml())
    assert table.keys() == {f.name for f in dataclasses.fields(Recipe)}
    for name, hint in TABLES.items():
        assert table[name].keys() == {f.name for f in dataclasses.fields(hint)}


@FEW
@given(
    steps=st.integers(1, 10**9),
    name=st.text(min_size=1).filter(
        lambda s: s.isprintable() and not set(s) & set("/\\") and s not in (".", "..")
    ),
    lr=st.floats(1e-300, 1e300),
    temperature=st.just(0.0) | st.floats(1e-6, 1e300),
    tau=st.floats(0, exclude_min=True),
    in_flight=st.booleans(),
)
def test_any_recipe_reads_back_the_same(steps, name, lr, temperature, tau, in_flight):
    recipe = recipe_from_table(
        {
            "steps": steps,
            "name": name,
            "in_flight": in_flight,
            "trainer": {"lr": lr},
            "sampling": {"temperature": temperature or 1.0},
            "eval": {"temperature": temperature},
            "correction": {"name": "estr", "tau": tau},
        }
    )
    assert recipe_from_table(tomllib.loads(recipe.to_toml())) == recipe


def test_options_can_be_made_without_a_recipe():
    assert Recipe().sampling == SamplingOptions()
    assert Recipe().eval == EvalOptions()
    with pytest.raises(ValueError, match="temperature"):
        SamplingOptions(temperature=0.0)


@pytest.mark.parametrize(("s", "m", "p"), [(0, 2, 1), (0, 1, 2), (1, 2, 2), (3, 2, 4), (3, 4, 2)])
def test_a_bound_that_cannot_hold_is_refused_and_one_more_is_enough(s: int, m: int, p: int) -> None:
    """docs/the-loop.md, theorem 2: S >= M + P - 2, or a skipped update may stop everything."""
    table = {"num_minibatches": m, "publish_every": p}
    with pytest.raises(ConfigError, match=f"raise max_staleness to {s + 1}"):
        recipe_from_table({**table, "max_staleness": s})
    assert recipe_from_table({**table, "max_staleness": s + 1}).max_staleness == s + 1


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"engine": {"count": 2}}, "engine.count = 2 needs placement = 'ray'"),
        ({"ray": {"address": "auto"}}, "ray.address = 'auto' needs placement = 'ray'"),
        ({"engine": {"count": 0}}, "engine.count must be at least 1, not 0"),
        ({"engine": {"threads": 10**9}}, "engine.threads must be at most 1024, not 1000000000"),
        ({"trainer": {"ranks": 10**20}}, "trainer.ranks must be at most 1024"),
        ({"trainer": {"timeout_s": 1e300}}, "trainer.timeout_s must be at most 1e+09 seconds"),
        (
            {"placement": "ray", "engine": {"name": "vllm", "weight_transfer": "gloo"}},
            "needs engine.weight_transfer = 'file', not 'gloo'",
        ),
        ({"placement": "ray", "deterministic": True}, "needs deterministic = false"),
        (
            {"placement": "ray", "trainer": {"device": "cuda:1"}},
            "trainer.device = 'cpu' or 'cuda:0'",
        ),
        ({"ray": {"address": ""}}, "ray.address = '' is neither"),
        ({"ray": {"address": "ray://head:10001"}}, "is neither"),
        ({"ray": {"address": "somewhere"}}, "is neither"),
        ({"ray": {"address": "head:99999"}}, 'neither "local", "auto" nor HOST:PORT'),
    ],
)
def test_a_placement_that_cannot_be(table, words):
    assert words in refusal(table)


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        'quote " backslash \\boxed{} # no comment\nnew line\ttab',
        "\N{SLIGHTLY SMILING FACE} \x7f \u2028 {question}",
        "3",
        3,
        True,
        1e-05,
        1e300,
        [0.5, "a,b", []],
        {"min_terms": 2, "a key": {"x": [1, {"y": False}]}, "\N{SLIGHTLY SMILING FACE}": 1},
    ],
)
def test_an_override_says_any_value_of_a_recipe(value) -> None:
    override = as_override("task.config", value)
    assert read_table(None, ["task=reasoning_gym", override])["task"]["config"] == value


@pytest.mark.parametrize("text", ["steps = " + "[" * 5000, "steps = " + "9" * 5000, "\x00"])
def test_what_no_parser_takes_is_no_toml(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_recipe(file)
    with pytest.raises(ConfigError, match="steps"):
        load_recipe(None, [f"steps={text.rpartition(' ')[2]}"])


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(b"\xef\xbb\xbfsteps = 3\r\n")
    assert load_recipe(file).steps == 3


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({1: 2}, "unknown key 1"),
        ({"name": "a" * 201}, "at most 200 bytes"),
        ({"name": "\N{SNOWMAN}" * 67}, "at most 200 bytes"),
        ({"task": [{"name": "calculator", "weight": 10**400}, "lookup"]}, "weight must be finite"),
        ({"task": [{"name": "calculator", "weight": 1e300}, "lookup"]}, "weight must be finite"),
        ({"task": [{"name": "calculator", "weight": 5e-324}, "lookup"]}, "weight must be finite"),
        (
            {"task": {"path": "x", "reward": "a:b", "reward_timeout_s": 10**400}},
            "must be below rollout.step_timeout_s",
        ),
    ],
)
def test_values_beyond_all_bounds_are_config_errors(table, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        recipe_from_table(table)


def test_an_option_of_a_correction_that_is_none_is_its_default() -> None:
    recipe = recipe_from_table({"correction": {"name": "dppo", "radius": None}})
    assert recipe.correction == ({"name": "dppo"},)
    assert 'name = "dppo"' in recipe.to_toml()
    with pytest.raises(ConfigError, match="tau"):
        recipe_from_table({"correction": {"name": "estr", "tau": None}})


def test_a_temperature_that_no_logit_survives_is_refused() -> None:
    for table in ("sampling", "eval"):
        told = refusal({table: {"temperature": 1e-50}})
        assert told.startswith(f"{table}.temperature must be at least 1e-06, not 1e-50")


def test_an_evaluation_beyond_all_memory_is_refused() -> None:
    for key in ("problems", "final_problems"):
        told = refusal({"eval": {key: 10**30}})
        assert told.startswith(f"eval.{key} must be at most 10000000, not ")


def test_a_name_that_no_file_can_have_is_named_not_raised(tmp_path: Path) -> None:
    name = "a" * 300
    with pytest.raises(ConfigError, match="neither a file nor a shipped recipe"):
        find_recipe(name)
    assert find_run(name, tmp_path) is None
