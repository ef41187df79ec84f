"""Corrections: golden masks and weights, the accepted region, what is refused, how they compose."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estr.corrections import (
    CORRECTIONS,
    ClippedSurrogate,
    TokenColumns,
    Verdict,
    build_correction,
)
from estr.corrections.bernoulli import bernoulli_divergences
from estr.corrections.none import NoCorrection
from estr.errors import ConfigError, DataError, NumericsError
from estr.options.corrections import CORRECTION_OPTIONS

INF, NAN = math.inf, math.nan
DOC = Path(__file__).parent.parent / "docs" / "adding-a-correction.md"


def columns_of(
    policy: list[float], behavior: list[float], dtype: torch.dtype = torch.float32, **more: Any
) -> TokenColumns:
    n = len(policy)
    given_columns = {
        "advantages": torch.ones(n),
        "loss_mask": torch.ones(n, dtype=torch.bool),
        "behavior_entropies": torch.ones(n),
    } | more
    return TokenColumns(
        policy_logprobs=torch.tensor(policy, dtype=dtype),
        behavior_logprobs=torch.tensor(behavior, dtype=dtype),
        **given_columns,
    )


def verdict_of(columns: TokenColumns, name: str, **options: Any) -> Verdict:
    return build_correction([{"name": name, **options}])(columns)


def kept(columns: TokenColumns, name: str, **options: Any) -> list[bool]:
    return [bool(k) for k in verdict_of(columns, name, **options).keep]


# --- the columns --------------------------------------------------------------------------------


def test_log_ratio_along_each_edge() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor([-1.5, -1.75]),
        advantages=torch.ones(2),
        loss_mask=torch.tensor([True, True]),
        proximal_logprobs=torch.tensor([-1.25, -1.0]),
    )
    assert columns.log_ratio("E").tolist() == [0.5, -0.25]
    assert columns.log_ratio("B").tolist() == [0.25, 0.75]
    assert columns.log_ratio("U").tolist() == [0.25, -1.0]
    assert not columns.log_ratio("B").requires_grad
    for edge in ("E", "U"):
        (gradient,) = torch.autograd.grad(columns.log_ratio(edge).sum(), policy)
        assert gradient.tolist() == [1.0, 1.0]


def test_without_a_proximal_pass_q_is_the_policy_itself() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = TokenColumns(
        policy, torch.tensor([-1.5, -1.75]), torch.ones(2), torch.ones(2, dtype=torch.bool)
    )
    assert columns.log_ratio("U").tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(columns.log_ratio("U").sum(), policy)
    assert gradient.tolist() == [1.0, 1.0]
    assert columns.log_ratio("B").tolist() == [0.5, -0.25]
    assert not columns.log_ratio("B").requires_grad


@pytest.mark.parametrize("edge", ["E", "B", "U"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_log_ratio_is_zero_where_not_eligible(edge: Any, garbage: float) -> None:
    policy = torch.tensor([-1.0, garbage], requires_grad=True)
    columns = TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor([-1.5, garbage]),
        advantages=torch.ones(2),
        loss_mask=torch.tensor([True, False]),
    )
    log_ratio = columns.log_ratio(edge)
    assert float(log_ratio.detach()[1]) == 0.0
    if log_ratio.requires_grad:
        (gradient,) = torch.autograd.grad(log_ratio.sum(), policy)
        assert gradient.tolist() == [1.0, 0.0]


def test_columns_of_unequal_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages has shape \(1,\), policy_logprobs \(2,\)"):
        columns_of([-1.0, -1.0], [-1.0, -1.0], advantages=torch.ones(1))


def test_a_mask_that_is_not_bool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_mask is torch\.float32, not bool"):
        columns_of([-1.0], [-1.0], loss_mask=torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_in_16_bits_are_refused_check_35(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="16 bits round log-probs into false ratios"):
        columns_of([-17.31], [-17.31], dtype=dtype)


def test_equal_weights_give_no_ratio_at_low_entropy_check_35() -> None:
    columns = columns_of([-17.31], [-17.31], behavior_entropies=torch.tensor([0.001]))
    assert columns.log_ratio("E").tolist() == [0.0]
    assert kept(columns, "estr", tau=1.0, eps=0.001) == [True]
    rounded = columns_of([-17.31], [-17.25], behavior_entropies=torch.tensor([0.001]))
    assert kept(rounded, "estr", tau=1.0, eps=0.001) == [False]


FAULTS = [
    ("policy_logprobs", NAN),
    ("policy_logprobs", INF),
    ("behavior_logprobs", NAN),
    ("behavior_logprobs", INF),
    ("advantages", NAN),
    ("advantages", -INF),
    ("behavior_entropies", NAN),
    ("behavior_entropies", INF),
    ("behavior_entropies", -0.5),
    ("behavior_gini", NAN),
    ("proximal_logprobs", NAN),
]


def faulty(name: str, value: float, mask: list[bool]) -> TokenColumns:
    table = {
        "policy_logprobs": torch.full((2, 3), -1.0),
        "behavior_logprobs": torch.full((2, 3), -1.0),
        "proximal_logprobs": torch.full((2, 3), -1.0),
        "behavior_entropies": torch.ones(2, 3),
        "behavior_gini": torch.ones(2, 3),
        "advantages": torch.ones(2, 3),
    }
    table[name][1, 1:] = value
    table["policy_logprobs"].requires_grad_()
    return TokenColumns(**table, loss_mask=torch.tensor([mask, mask]))


NEEDS = frozenset({"behavior_entropies", "behavior_gini", "proximal_logprobs"})


@pytest.mark.parametrize(("name", "value"), FAULTS)
def test_an_impossible_value_on_an_eligible_token_raises_check_33(name: str, value: float) -> None:
    columns = faulty(name, value, [True, True, True])
    message = rf"{name}: 2 of 6 eligible tokens .* the first is {value} at \[1, 1\]"
    with pytest.raises(NumericsError, match=message):
        columns.check(NEEDS)


@pytest.mark.parametrize(("name", "value"), FAULTS)
def test_an_impossible_value_in_a_masked_slot_does_not_matter_check_12(
    name: str, value: float
) -> None:
    faulty(name, value, [True, False, False]).check(NEEDS)


def test_a_column_that_is_not_needed_may_hold_anything() -> None:
    faulty("behavior_gini", NAN, [True, True, True]).check(frozenset({"behavior_entropies"}))


def test_a_missing_entropy_is_an_error_and_never_zero() -> None:
    columns = columns_of([-1.0], [-1.0], behavior_entropies=None)
    with pytest.raises(DataError, match="needs behavior_entropies, which the batch does not carry"):
        columns.check(frozenset({"behavior_entropies"}))
    with pytest.raises(DataError, match="needs behavior_entropies"):
        verdict_of(columns, "estr")


# --- estr ---------------------------------------------------------------------------------------


def test_estr_mask_of_the_worked_example_check_1() -> None:
    columns = columns_of(
        [-1.0, -0.5, -2.0, -0.02],
        [-1.1, -0.5, -1.2, -0.35],
        behavior_entropies=torch.tensor([1.0, 0.6, 1.5, 0.01]),
    )
    # S = 0.009524, 0, 0.412903, 1.815
    assert kept(columns, "estr", tau=0.5, eps=0.05) == [True, True, True, False]
    assert kept(columns, "estr", tau=0.4, eps=0.05) == [True, True, False, False]
    assert kept(columns, "estr", tau=1.82, eps=0.05) == [True, True, True, True]


def test_estr_radius_grows_with_entropy_check_3() -> None:
    radii = {0.0: 0.158114, 1.5: 0.880341}
    for entropy, radius in radii.items():
        for sign in (1.0, -1.0):
            policy = [sign * radius * 0.9999, sign * radius * 1.0001]
            columns = columns_of(policy, [0.0, 0.0], behavior_entropies=torch.full((2,), entropy))
            assert kept(columns, "estr", tau=0.5, eps=0.05) == [True, False]
    columns = columns_of([-0.5, -0.5], [-1.0, -1.0], behavior_entropies=torch.tensor([0.0, 1.5]))
    assert kept(columns, "estr", tau=0.5, eps=0.05) == [False, True]


def test_estr_is_two_sided_and_blind_to_the_advantage() -> None:
    for advantage in (1.0, -1.0):
        columns = columns_of(
            [-0.5, -1.5, -0.95], [-1.0, -1.0, -1.0], advantages=torch.full((3,), advantage)
        )
        assert kept(columns, "estr", tau=0.1, eps=0.05) == [False, False, True]


@given(
    policy=st.floats(-30, 0, width=32),
    behavior=st.floats(-30, 0, width=32),
    entropy=st.floats(0, 12, width=32),
    tau=st.floats(1e-4, 1e3),
    eps=st.floats(1e-4, 1.0),
)
@settings(max_examples=300, deadline=None)
def test_estr_keeps_exactly_the_region_of_its_radius(
    policy: float, behavior: float, entropy: float, tau: float, eps: float
) -> None:
    radius = math.sqrt(tau * (entropy + eps))
    distance = abs(policy - behavior)
    assume(abs(distance - radius) > 1e-6 * radius)
    columns = columns_of([policy], [behavior], behavior_entropies=torch.tensor([entropy]))
    assert kept(columns, "estr", tau=tau, eps=eps) == [distance <= radius]


def test_estr_with_tau_inf_keeps_every_finite_ratio() -> None:
    columns = columns_of(
        [0.0, -80.0, -1.0], [-80.0, 0.0, -1.0], behavior_entropies=torch.tensor([0.0, 0.0, 5.0])
    )
    assert kept(columns, "estr", tau=INF) == [True, True, True]


def test_an_entropy_a_little_below_zero_counts_as_zero() -> None:
    columns = columns_of(
        [-1.0, -1.1], [-1.0, -1.0], behavior_entropies=torch.tensor([-1e-6, -1e-6])
    )
    assert kept(columns, "estr", tau=1.0, eps=1e-7) == [True, False]


# --- icepop -------------------------------------------------------------------------------------

RATIOS = [0.499, 0.501, 1.0, 4.99, 5.01]


def test_icepop_on_edge_e_keeps_the_band_of_pi_over_mu() -> None:
    policy = [-3.0 + math.log(r) for r in RATIOS]
    columns = columns_of(policy, [-3.0] * 5, proximal_logprobs=torch.full((5,), -9.0))
    verdict = verdict_of(columns, "icepop")
    assert verdict.keep.tolist() == [False, True, True, True, False]
    assert verdict.weight is None
    assert verdict.surrogate == ClippedSurrogate("E", 0.2, 0.2)


def test_icepop_on_edge_b_weighs_with_q_over_mu_inside_the_band() -> None:
    proximal = torch.tensor([-3.0 + math.log(r) for r in RATIOS])
    columns = columns_of([-9.0] * 5, [-3.0] * 5, proximal_logprobs=proximal)
    verdict = verdict_of(columns, "icepop", edge="B")
    assert verdict.keep.tolist() == [False, True, True, True, False]
    assert verdict.weight is not None
    assert verdict.weight[verdict.keep].tolist() == pytest.approx([0.501, 1.0, 4.99], rel=1e-5)
    assert verdict.surrogate == ClippedSurrogate("U", 0.2, 0.2)


def test_icepop_band_may_be_open_on_either_side() -> None:
    columns = columns_of([-90.0, -1.0, -0.1], [-0.1, -1.0, -90.0])
    assert kept(columns, "icepop", alpha=0.0) == [True, True, False]
    assert kept(columns, "icepop", beta=INF) == [False, True, True]


# --- kpop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "m", "forward", "backward"),
    [
        (0.6, 0.3, 0.192042, 0.183787),
        (0.9, 0.1, 1.757780, 1.757780),
        (0.5, 0.05, 0.830366, 0.494632),
        (0.05, 0.5, 0.494632, 0.830366),
        (0.9, 0.5, 0.368064, 0.510826),
        (0.5, 0.5, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("saturate", [False, True])
def test_kpop_divergences(
    p: float, m: float, forward: float, backward: float, saturate: bool
) -> None:
    found = bernoulli_divergences(torch.tensor(p).log(), torch.tensor(m).log(), saturate=saturate)
    assert [float(d) for d in found] == pytest.approx([forward, backward], abs=1e-6)


def test_kpop_keeps_only_where_both_divergences_are_within_phi() -> None:
    pairs = [(0.6, 0.3), (0.9, 0.1), (0.5, 0.05), (0.05, 0.5), (0.9, 0.5), (0.5, 0.5)]
    policy, behavior = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    columns = columns_of(policy, behavior)
    assert kept(columns, "kpop") == [True, False, False, False, True, True]
    assert kept(columns, "kpop", phi=0.5) == [True, False, False, False, False, True]
    assert kept(columns, "kpop", phi=0.84) == [True, False, True, True, True, True]
    verdict = verdict_of(columns, "kpop")
    assert verdict.weight is None
    assert verdict.surrogate == ClippedSurrogate("E", 0.2, 0.2)


def test_kpop_on_edge_b_judges_q_and_weighs_with_q_over_mu() -> None:
    q, m = [0.6, 0.9], [0.3, 0.1]
    columns = columns_of(
        [-9.0, -9.0], [math.log(x) for x in m], proximal_logprobs=torch.tensor(q).log()
    )
    verdict = verdict_of(columns, "kpop", edge="B")
    assert verdict.keep.tolist() == [True, False]
    assert verdict.weight is not None
    assert float(verdict.weight[0]) == pytest.approx(2.0, rel=1e-5)
    assert verdict.surrogate == ClippedSurrogate("U", 0.2, 0.2)


@pytest.mark.parametrize(
    ("log_p", "log_m"),
    [(0.0, 0.0), (0.0, -1e-4), (-1e-4, 0.0), (-1e-9, -2e-9), (0.0, -0.02), (-0.02, 0.0)],
)
def test_kpop_where_a_probability_rounds_to_one(log_p: float, log_m: float) -> None:
    columns = columns_of([log_p], [log_m])
    assert kept(columns, "kpop") == [True]
    assert kept(columns, "kpop", saturate=True) == [False]


def test_kpop_forms_agree_where_nothing_saturates() -> None:
    generator = torch.Generator().manual_seed(5)
    policy, behavior = (-3 * torch.rand(2, 200, generator=generator) - 1e-3).tolist()
    columns = columns_of(policy, behavior)
    assert kept(columns, "kpop") == kept(columns, "kpop", saturate=True)


# --- all of them --------------------------------------------------------------------------------


def test_none_keeps_everything_eligible_under_its_edge() -> None:
    columns = columns_of([-1.0, -9.0], [-9.0, -1.0], loss_mask=torch.tensor([True, False]))
    for edge in ("E", "U"):
        verdict = verdict_of(columns, "none", edge=edge, clip_low=0.1, clip_high=0.3)
        assert verdict.keep.tolist() == [True, False]
        assert verdict.weight is None
        assert verdict.surrogate == ClippedSurrogate(edge, 0.1, 0.3)


VARIANTS = [
    {"name": "none"},
    {"name": "none", "edge": "U"},
    {"name": "estr"},
    {"name": "estr", "tau": INF},
    {"name": "icepop"},
    {"name": "icepop", "edge": "B"},
    {"name": "kpop"},
    {"name": "kpop", "edge": "B"},
    {"name": "kpop", "saturate": True},
    {"name": "estr", "scale": "gini"},
    {"name": "estr", "scale": "token", "mask": "soft"},
    {"name": "tis"},
    {"name": "tis", "level": "sequence"},
    {"name": "mis", "level": "geometric"},
    {"name": "dppo"},
    {"name": "dppo", "scale": "entropy"},
    {"name": "m2po"},
    {"name": "dual_clip", "edge": "U"},
    {"name": "decoupled"},
    {"name": "estr", "scale": "constant"},
    {"name": "dppo", "scale": "gini"},
    {"name": "tis", "level": "turn"},
]


@pytest.mark.parametrize("entry", VARIANTS)
def test_no_correction_keeps_a_masked_slot_or_lets_gradient_into_its_verdict(
    entry: dict[str, Any],
) -> None:
    policy = torch.tensor([-1.0, -1.0, NAN], requires_grad=True)
    columns = TokenColumns(
        policy_logprobs=policy,
        behavior_logprobs=torch.tensor([-1.0, -1.0, NAN]),
        advantages=torch.tensor([1.0, 1.0, NAN]),
        loss_mask=torch.tensor([True, False, False]),
        behavior_entropies=torch.tensor([1.0, 1.0, NAN]),
        behavior_gini=torch.tensor([0.5, 0.5, NAN]),
        sequence_ids=torch.tensor([3, 3, 3]),
        turn_ids=torch.tensor([1, 1, 2]),
    )
    verdict = build_correction([entry])(columns)
    assert verdict.keep.tolist() == [True, False, False]
    if verdict.weight is not None:
        assert not verdict.weight.requires_grad
        assert verdict.weight[verdict.keep].tolist() == [1.0]


def test_needs_name_what_each_correction_reads() -> None:
    needs = [set(build_correction([entry]).needs) for entry in VARIANTS]
    q, h = {"proximal_logprobs"}, {"behavior_entropies"}
    gini, ids, step = {"behavior_gini"}, {"sequence_ids"}, {"whole_step"}
    first = [set(), q, h, h, set(), q, set(), q, set()]
    last = [set(), gini, q | {"turn_ids"}]
    assert needs == [*first, gini, gini, q, q | ids, q | ids, set(), h, q | step, q, q, *last]


# --- building and composing ---------------------------------------------------------------------


def test_every_registered_name_has_options_and_builds() -> None:
    assert set(CORRECTIONS) == set(CORRECTION_OPTIONS)
    for name in CORRECTIONS:
        assert build_correction([{"name": name}]) is not None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "estrr"}, "did you mean estr"),
        (
            {"name": "icepop", "tau": 0.5},
            r"correction\.tau of icepop; it belongs at correction\.tau \(of estr\)",
        ),
        (
            {"name": "estr", "clip_rato": 0.5},
            "clip_rato of estr; did you mean correction.clip_low and",
        ),
        ({"name": "estr", "tau": 0.0}, "tau must be above 0"),
        ({"name": "estr", "eps": 0.0}, "eps must be above 0"),
        ({"name": "kpop", "edge": "U"}, "edge"),
    ],
)
def test_foreign_and_wrong_options_are_refused_check_156(
    entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_correction([entry])


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match='name "none" for no correction'):
        build_correction([])


def test_two_surrogates_are_refused() -> None:
    with pytest.raises(ConfigError, match="estr and icepop each bring a surrogate"):
        build_correction([{"name": "estr"}, {"name": "icepop"}])


@dataclass(frozen=True)
class WeighOptions:
    factor: float = 2.0
    keep_first: int = 2


class Weigh:
    """Keeps the first tokens, all with one weight; brings no surrogate."""

    Options = WeighOptions
    needs = frozenset({"versions"})

    def __init__(self, options: WeighOptions) -> None:
        self.options = options

    def __call__(self, columns: TokenColumns) -> Verdict:
        places = torch.arange(columns.loss_mask.numel()).reshape(columns.loss_mask.shape)
        weight = torch.full_like(columns.behavior_logprobs, self.options.factor)
        return Verdict(places < self.options.keep_first, weight)


class WholeStep(Weigh):
    needs = frozenset({"whole_step"})


class NoOptions(Weigh):
    Options = None  # type: ignore[assignment]


class UnknownNeed(Weigh):
    needs = frozenset({"entropy"})


class FloatKeep(Weigh):
    def __call__(self, columns: TokenColumns) -> Verdict:
        return Verdict(torch.ones_like(columns.behavior_logprobs))


class NoVerdict(Weigh):
    def __call__(self, columns: TokenColumns) -> Verdict:
        return columns.loss_mask  # type: ignore[return-value]


HERE = __name__


def test_masks_and_weights_multiply_under_one_surrogate() -> None:
    correction = build_correction(
        [
            {"name": f"{HERE}:Weigh", "factor": 3.0, "keep_first": 2},
            {"name": "estr", "tau": 0.1, "clip_high": 0.3},
            {"name": f"{HERE}:Weigh", "factor": 0.5, "keep_first": 5},
        ]
    )
    assert correction.needs == {"versions", "behavior_entropies"}
    columns = columns_of([-1.0, -2.0, -1.0], [-1.0, -1.0, -1.0])
    verdict = correction(columns)
    assert verdict.keep.tolist() == [True, False, False]
    assert verdict.weight is not None
    assert verdict.weight.tolist() == [1.5, 1.5, 1.5]
    assert verdict.surrogate == ClippedSurrogate("E", 0.2, 0.3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Thing", "cannot be imported: .*No module named 'no_such_module'"),
        (f"{HERE}:Missing", "cannot be imported: .*no attribute 'Missing'"),
        (":Weigh", "must read package.module:Class"),
        (f"{HERE}:", "must read package.module:Class"),
        ("../evil:Weigh", "must read package.module:Class"),
        (f"{HERE}:NoOptions", "give the class an attribute Options"),
        (f"{HERE}:columns_of", "give the class an attribute Options"),
        (f"{HERE}:UnknownNeed", "needs must be a frozenset within .*not frozenset"),
        (f"{HERE}:WholeStep", "needs whole_step but has no method for_step"),
        (f"{HERE}:FloatKeep", "must return a Verdict whose keep is a bool tensor"),
        (f"{HERE}:NoVerdict", "must return a Verdict whose keep is a bool tensor"),
    ],
)
def test_a_faulty_correction_of_ones_own_is_refused_when_built(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_correction([{"name": name}])


def test_options_of_ones_own_are_checked_like_any_other() -> None:
    with pytest.raises(
        ConfigError, match=r"correction\.factr of .*Weigh; did you mean correction\.factor"
    ):
        build_correction([{"name": f"{HERE}:Weigh", "factr": 1.0}])
    with pytest.raises(ConfigError, match=r"correction\[1\]\.factr of"):
        build_correction([{"name": "none"}, {"name": f"{HERE}:Weigh", "factr": 1.0}])
    with pytest.raises(ConfigError, match=r"correction\.factor.*Expected .?float"):
        build_correction([{"name": f"{HERE}:Weigh", "factor": "much"}])


def test_one_s_own_module_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from estr.corrections.none import NoCorrection as Mine\n"
    (tmp_path / "lies_here.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # As the installed command has it: the folder that it is started in is not among them.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "lies_here", raising=False)
    assert type(build_correction([{"name": "lies_here:Mine"}])) is NoCorrection


# --- the documentation --------------------------------------------------------------------------


@pytest.fixture
def import_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module of one's own to a folder on the Python path."""

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_the_documented_correction_works(import_from: Callable[[str, str], None]) -> None:
    definition, use = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)
    import_from("sequence_mask", definition)
    exec(compile(use, str(DOC), "exec", dont_inherit=True), {})
    columns = columns_of(
        [-1.0, -1.1, -0.5, 7.0],
        [-1.02, -1.1, -1.0, NAN],
        loss_mask=torch.tensor([True, True, True, False]),
        sequence_ids=torch.tensor([4, 4, 9, 9]),
    )
    assert kept(columns, "sequence_mask:SequenceMask", width=0.05)[:3] == [True, True, False]
    with pytest.raises(ConfigError, match="width must be above 0"):
        build_correction([{"name": "sequence_mask:SequenceMask", "width": -1.0}])


class Misbehaving:
    """A correction of one's own; `how` says in what it goes wrong."""

    @dataclass(frozen=True)
    class Options:
        how: str = ""

    needs: frozenset[str] = frozenset()

    def __init__(self, options: Options) -> None:
        self.how = options.how
        if self.how == "exit":
            raise SystemExit(0)

    def __call__(self, columns: TokenColumns) -> Verdict:
        keep: Any = torch.ones_like(columns.loss_mask)
        weight = None
        if self.how == "list":
            keep = [True]
        elif self.how == "negative":
            weight = -torch.ones(keep.shape)
        elif self.how == "nan":
            weight = torch.full(keep.shape, math.nan)
        elif self.how == "writes":
            columns.loss_mask.fill_(False)
        return Verdict(keep, weight)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "cannot be made of its options: SystemExit: 0"),
        ("list", "must return a Verdict whose keep is a bool tensor"),
        ("negative", "weights must be finite and at least 0"),
        ("nan", "weights must be finite and at least 0"),
        ("writes", "changes the columns that it is given"),
    ],
)
def test_a_correction_of_ones_own_that_misbehaves_is_refused(how: str, words: str) -> None:
    entry = {"name": f"{__name__}:Misbehaving", "how": how}
    with pytest.raises(ConfigError, match=words):
        build_correction([entry])
