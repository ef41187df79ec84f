"""Displays: what they say, how often, and that model text cannot steer a terminal."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from estr.config import Recipe, recipe_from_table
from estr.display import (
    LiveReporter,
    PlainReporter,
    reporter_for,
    rollout_head,
    rollout_lines,
)
from estr.printable import printable
from estr.run_folder import RunFolder, Summary
from estr.run_progress import RunProgress, duration, rate, sparkline
from estr.types import RolloutId, SamplingSettings, Segment, Trajectory

EVIL = "\x1b]0;owned\x07[bold]loud[/bold]\x1b[2J\x9b31m\u202edrow"

SUMMARY = Summary(
    name="calculator",
    steps=120,
    version=119,
    start_accuracy=0.402,
    final_accuracy=None,
    best_accuracy=0.961,
    wall_s=75.4,
    tokens_per_s=5123.4,
    trained_tokens=391234,
    intra_max=2,
    inter_max=3,
    intra_mean=0.41,
    inter_mean=1.52,
    rho_mask=0.00031,
    engine_busy=0.93,
    trainer_busy=0.71,
    guard_share=0.004,
    dropped_groups=4,
    statuses={"ok": 15360},
    findings={},
    seed=0,
)


def row(tokens: float, reward: float = 0.5) -> dict[str, float | None]:
    return {
        "reward_mean": reward,
        "eligible_tokens": tokens,
        "rho_mask": 0.00123,
        "intra_mean": 0.25,
        "intra_max": 1.0,
        "inter_mean": 1.5,
        "inter_max": 3.0,
    }


def trajectory(reward: float | None = 1.0, **kwargs) -> Trajectory:
    drawn = Segment.drawn([3, 4, 9], [-0.1] * 3, [0.2] * 3, [4, 4, 5])
    again = Segment.drawn([6], [-0.1], [0.2], [5])
    parts = [Segment.context([1, 2]), drawn, Segment.context([7, 8]), again]
    return Trajectory(
        id=RolloutId(0, 3, 1),
        task="scripted",
        problem=17,
        segments=(Segment.join(parts),),
        turns=(),
        sampling=SamplingSettings(),
        dispatch_version=4,
        reward=reward,
        **{"status": "ok", **kwargs},
    )


def decode(ids: list[int]) -> str:
    return "".join({1: "What?\n", 2: EVIL, 9: "]"}.get(i, str(i)) for i in ids)


# -- text ---------------------------------------------------------------------------------------


@given(st.text())
@settings(deadline=None, max_examples=200)
def test_nothing_printable_moves_a_cursor(text: str) -> None:
    shown = printable(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    assert printable(shown) == shown


def test_printable_shows_escapes_and_leaves_the_rest() -> None:
    assert printable("a [b] é 中 😀") == "a [b] é 中 😀"
    assert printable("\x1b[1m\r\n\t\x00") == r"\x1b[1m\r\n\t\x00"
    assert printable("\u2028\u202e\x85") == r"\u2028\u202e\x85"
    assert printable("two\nlines\r", newlines=True) == "two\nlines\\r"
    assert printable("\ud800") == r"\ud800"


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([5.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0], "█▁"),
    ],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_a_long_sparkline_averages_what_it_cannot_show() -> None:
    assert sparkline([0, 2, 7, 9], width=2) == "▁█"
    assert len(sparkline(list(range(101)), width=40)) == 40
    assert sparkline(list(range(8000)), width=8) == "▁▂▃▄▅▆▇█"


def test_a_slow_run_has_a_rate_too() -> None:
    rates = [rate(r) for r in (12345.4, 9.97, 9.94, 3.14, 0.5, 0.0)]
    assert rates == ["12,345", "10", "9.9", "3.1", "0.5", "0"]


def test_durations() -> None:
    assert [duration(s) for s in (0, 7.4, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]


# -- progress -----------------------------------------------------------------------------------


def test_pace_and_time_left() -> None:
    progress = RunProgress("x", steps=10, bound=4)
    assert (progress.tokens_per_s, progress.left_s) == (None, None)
    progress.take(1, 1, 5.0, row(1000))
    assert (progress.tokens_per_s, progress.left_s) == (None, None)
    progress.take(2, 2, 7.0, row(300))
    progress.take(4, 3, 11.0, row(600))
    assert progress.tokens_per_s == 150.0
    assert progress.left_s == 12.0


def test_figures_of_a_row_that_lacks_everything() -> None:
    progress = RunProgress("x", steps=10, bound=4)
    progress.take(1, 1, 5.0, {})
    assert list(progress.figures()) == []


def test_figures_of_a_whole_row() -> None:
    progress = RunProgress("x", steps=10, bound=4)
    progress.take(1, 1, 1.0, {**row(100), "engine_busy": 0.95, "trainer_busy": 0.6})
    progress.take(2, 2, 2.0, {**row(2500), "engine_busy": 0.95, "trainer_busy": 0.6})
    progress.accuracies.append((1, 0.4561, 256))
    assert list(progress.figures()) == [
        ("reward", "0.500"),
        ("held-out", "0.456 (version 1)"),
        ("tokens/s", "2,500"),
        ("staleness", "intra 0.25, at most 1; inter 1.50, at most 3; allowed 4"),
        ("rho_mask", "0.0012"),
        ("busy", "engine 95 %, trainer 60 %"),
    ]


# -- plain --------------------------------------------------------------------------------------


def test_plain_lines() -> None:
    stream = io.StringIO()
    with PlainReporter(stream, every_s=5.0) as reporter:
        reporter.starting(Recipe())
        reporter.started(Recipe(steps=30), RunFolder(Path("runs/x")), 0)
        reporter.evaluated(0, 0.40234, 1024)
        for step in range(1, 31):
            reporter.stepped(step, step, float(step), row(100))
        reporter.rolled_out(trajectory(), EVIL)
        reporter.message(f"careful {EVIL}")
        reporter.finished(SUMMARY, RunFolder(Path("runs/x")))
    text = stream.getvalue()
    lines = text.split("\n")
    assert lines[1] == "runs/x: builtin on calculator, correction estr"
    assert lines[2] == "version 0: held-out accuracy 0.402 on 1024 problems"
    steps = [line.split(" | ")[0] for line in lines if line.startswith("step ")]
    assert steps == [f"step {n}/30" for n in (1, 6, 11, 16, 21, 26, 30)]
    assert "step 6/30 | reward 0.500 | held-out 0.402 (version 0) | tokens/s 100 |" in text
    assert "model              runs/x/model/best and last" in lines
    assert all(c == "\n" or c.isprintable() for c in text)
    assert r"careful \x1b]0;owned\x07[bold]loud" in text
    assert "0.402 at the start, not measured at the end, 0.961 at best" in text
    assert "1:15, 5,123 tokens/s" in text
    assert "runs/x: summary.json, metrics.jsonl" in text


def test_a_reader_that_has_gone_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with PlainReporter(Gone()) as reporter:
        reporter.message("x")
    closed = io.StringIO()
    closed.close()
    with PlainReporter(closed) as reporter:
        reporter.message("x")


# -- live ---------------------------------------------------------------------------------------


def live(act) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with LiveReporter(console) as reporter:
        act(reporter)
    return console.file.getvalue()


def test_live_display_shows_the_run() -> None:
    def act(reporter: LiveReporter) -> None:
        reporter.started(Recipe(steps=30), RunFolder(Path("runs/x")), 0)
        reporter.evaluated(0, 0.4, 1024)
        for step in range(1, 5):
            reporter.stepped(step, step, float(step), row(100, reward=step / 4))
        reporter.evaluated(4, 0.5, 256)

    text = live(act)
    for part in ("step 4/30", "0:26 left", "1.000  ▁▃▆█", "0.500 (version 4)  ▁█", "allowed 4"):
        assert part in text


def test_live_display_keeps_model_text_harmless() -> None:
    def act(reporter: LiveReporter) -> None:
        reporter.started(Recipe(), RunFolder(Path("runs/x")), 0)
        reporter.rolled_out(trajectory(), EVIL)
        reporter.message(EVIL)

    text = live(act)
    assert r"\x1b]0;owned\x07[bold]loud[/bold]\x1b[2J\x9b31m\u202edrow" in text
    assert "problem 17: reward 1; tokens: 2 of version 4, 2 of version 5" in text
    for part in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\u202e"):
        assert part not in text


def test_live_display_shows_the_end_of_a_long_rollout() -> None:
    def act(reporter: LiveReporter) -> None:
        reporter.started(Recipe(), RunFolder(Path("runs/x")), 0)
        reporter.rolled_out(trajectory(), "head" + "x" * 5000 + "tail")

    text = live(act).replace("\n", "")
    assert "xtail" in text
    assert "head" not in text


def test_live_display_ends_with_the_result() -> None:
    text = live(lambda reporter: reporter.finished(SUMMARY, RunFolder(Path("runs/x"))))
    assert "estr sample runs/x" in text
    assert "engine 93 %, trainer 71 %" in text


def test_nothing_is_said_to_start_before_it_does() -> None:
    stream = io.StringIO()
    with PlainReporter(stream) as reporter:
        assert stream.getvalue() == ""
        reporter.starting(Recipe())
    assert stream.getvalue() == "starting engine, trainer and evaluator\n"
    assert "starting" not in live(lambda reporter: None)
    large = recipe_from_table(
        {
            "placement": "ray",
            "engine": {"name": "vllm", "count": 2},
            "trainer": {"ranks": 4},
            "ray": {"address": "auto"},
        }
    )
    words = "starting 2 engines (vllm), trainer of 4 ranks and evaluator on Ray (auto)"
    assert words in live(lambda reporter: reporter.starting(large))
    assert "starting engine" in live(lambda reporter: reporter.starting(Recipe()))


def test_events_before_the_start_do_no_harm() -> None:
    def act(reporter: LiveReporter | PlainReporter) -> None:
        reporter.message("a checkpoint is torn")
        reporter.stepped(1, 1, 1.0, row(100))
        reporter.evaluated(0, 0.4, 16)

    assert "a checkpoint is torn" in live(act)
    stream = io.StringIO()
    act(PlainReporter(stream))
    assert "a checkpoint is torn" in stream.getvalue()


def test_the_display_suits_the_stream() -> None:
    stream = io.StringIO()
    assert isinstance(reporter_for(stream), PlainReporter)
    assert isinstance(reporter_for(stream, live=True), LiveReporter)
    assert isinstance(reporter_for(stream, live=False), PlainReporter)


# -- rollouts -----------------------------------------------------------------------------------


def test_a_rollout_says_who_wrote_what() -> None:
    assert rollout_lines(trajectory(), decode).plain == (
        "  read  | What?\n"
        "        | \\x1b]0;owned\\x07[bold]loud[/bold]\\x1b[2J\\x9b31m\\u202edrow\n"
        "  wrote | 34]\n"
        "  read  | 78\n"
        "  wrote | 6\n"
    )


def test_heads_of_rollouts() -> None:
    assert rollout_head(trajectory(0.5)) == (
        "problem 17: reward 0.5; tokens: 2 of version 4, 2 of version 5"
    )
    failed = trajectory(None, status="env_error", error="the tool\x1b broke")
    assert rollout_head(failed).startswith("problem 17: env_error, unscored; ")
    assert rollout_lines(failed, decode).plain.endswith("  the tool\\x1b broke\n")
