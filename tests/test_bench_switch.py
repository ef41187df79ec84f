"""`estr bench switch`: what it reads from the marks of an engine, and its quick form."""

from __future__ import annotations

import pytest

from estr.bench import switch
from estr.bench.switch import facts_of
from estr.bench.timed_host import Mark, Taken
from estr.errors import ConfigError, EngineError
from ray_cases import MARKS as RAY_MARKS
from ray_cases import processes_of_ray_left_alone
from vllm_cases import MARKS, PYTHON

STEPS = [
    Mark(10.0, 1.0, 3, 4),  # still admitting: fewer tokens than requests
    Mark(11.0, 1.5, 4, 4),
    Mark(12.0, 2.0, 4, 4),
    Mark(14.0, 3.0, 4, 4),
    Mark(20.0, 6.0, 1, 5),  # one request draws again
    Mark(23.0, 7.5, 4, 5),  # now all do
    Mark(24.0, 8.0, 4, 5),
]


def test_the_pause_ends_when_all_requests_draw_again() -> None:
    assert facts_of(STEPS, Taken(2.5, 0.75), 5, count=4) == {
        "pause_s": 9.0,
        "pause_cpu_s": 4.5,
        "load_s": 2.5,
        "load_cpu_s": 0.75,
        "usual_s": 1.5,
        "usual_cpu_s": 0.75,
    }


def test_a_switch_that_met_no_running_requests_is_an_error() -> None:
    with pytest.raises(EngineError, match="version 6"):
        facts_of(STEPS, Taken(1.0, 1.0), 6, count=4)
    with pytest.raises(EngineError, match="version 5"):
        facts_of(STEPS[:4] + STEPS[4:5], Taken(1.0, 1.0), 5, count=4)


def check(figures: dict, engine: str) -> None:
    for kv in ("recompute", "keep"):
        facts = figures["engines"][engine][kv]
        assert 0 < facts["load_s"] < facts["pause_s"]
        assert facts["first_token_s"] > 0
        assert facts["usual_s"] > 0 < facts["publish_s"] < facts["first_token_s"]


@pytest.mark.slow
def test_the_quick_form_sees_a_switch_under_each_policy() -> None:
    figures = switch.run(quick=True)
    check(figures, "local")
    assert figures["ratio"] > 0
    assert figures["size"]["requests"] == 4


@pytest.mark.slow
class TestVllm:
    pytestmark = MARKS

    def test_vllm_is_measured_where_its_interpreter_is_named(self) -> None:
        from pathlib import Path

        figures = switch.run(quick=True, vllm=Path(PYTHON))
        check(figures, "local")
        check(figures, "vllm")


@pytest.mark.slow
class TestRay:
    pytestmark = RAY_MARKS

    def test_ray_is_measured_beside_processes_and_the_flat_buffer_beside_its_tensors(self) -> None:
        with processes_of_ray_left_alone():
            figures = switch.run(quick=True, ray=True)
        check(figures, "local")
        check(figures, "ray")
        flat = figures["flat_buffer"]
        assert flat["bytes"] > 10_000_000
        assert flat["tensors"] == 2 + 2 * 9
        assert flat["ratio"] == flat["single"]["total_s"] / flat["flat"]["total_s"]
        for kind in ("flat", "single"):
            parts = [flat[kind][f"{part}_s"] for part in ("pack", "put", "get", "unpack")]
            assert flat[kind]["total_s"] == pytest.approx(sum(parts)), "of one round"
            assert flat[kind]["put_gb_per_s"] == flat["bytes"] / 1e9 / flat[kind]["put_s"]


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--ray needs the package ray: pip install"):
        switch.run(quick=True, ray=True)
