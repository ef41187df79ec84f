"""The page of a report in a browser: it draws, its controls work, and what a model wrote stays
text."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from estr.report import Budget, write_report
from estr.types import RolloutId, Segment, Turn
from ledger_cases import consumption, record, trajectory, write_random_ledger, write_step
from report_cases import evil_run, finish, highest_score, make_run, save_tokenizer

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("ESTR_BROWSER") != "required",
    reason="chromium is not installed (Debian: apt-get install chromium, or make browser)",
)

TABS = ("learning", "staleness", "region", "work", "tokens")
BUDGET = Budget(trajectories=20_000, tokens=10_000_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM is not None, "ESTR_BROWSER=required, but there is no chromium (make browser)"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox wants rights that containers lack; nothing but our own page is opened.
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page that is open, with everything that it complained about or asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def load(self, file: Path, fragment: str = "") -> None:
        self.page.goto(file.as_uri() + fragment)
        self.page.wait_for_selector(".tabs")

    def tab(self, name: str) -> None:
        self.page.click(f"[role=tab][data-tab={name}]")
        # Charts are drawn once their width is known.
        drawn = ".figure > *" if name != "tokens" else ".reading, .empty"
        self.page.wait_for_selector(drawn)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())

    def styles(self, selector: str, name: str) -> list[str]:
        script = "(all, name) => all.map((e) => getComputedStyle(e)[name])"
        return list(self.page.locator(selector).evaluate_all(script, name))

    def press(self, group: str, key: str) -> None:
        self.page.click(f'[role=group][aria-label="{group}"] [data-key={key}]')


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    one = Opened(context.new_page())
    yield one
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith("file://")] == []
    context.close()


def page_of(folders: list[Path], out: Path, budget: Budget = BUDGET) -> Path:
    write_report(folders, out, budget)
    return out


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one recipe and a run of another."""
    runs = tmp_path_factory.mktemp("runs")
    folders = [
        make_run(runs, "first", "seed=0"),
        make_run(runs, "second", "seed=1"),
        make_run(runs, "other", "correction=icepop"),
    ]
    finish(folders[0])
    return page_of(folders, runs / "page.html")


def test_every_tab_draws(opened: Opened, three: Path) -> None:
    opened.load(three)
    for tab in TABS:
        opened.tab(tab)
        assert opened.count('[role=tab][aria-selected="true"]') == 1
        if tab != "tokens":
            assert opened.count(".figure") >= 7
            assert opened.count(".figure svg") >= opened.count(".figure") - 4
            assert "NaN" not in "".join(opened.page.locator("path").evaluate_all(_PATHS))
    opened.load(three, "#region")
    opened.page.wait_for_selector('[data-tab=region][aria-selected="true"]')


_PATHS = "(all) => all.map((e) => e.getAttribute('d'))"
_REWARD = '.card:has(h3:text-is("Reward"))'


def test_the_table_says_what_the_runs_are(opened: Opened, three: Path) -> None:
    opened.load(three)
    rows = opened.texts("tbody tr")
    assert [row.split("\t")[0].strip() for row in rows] == ["first", "second", "other"]
    assert "0.25 → 0.6" in rows[1]
    assert "1,000" in rows[0]
    assert "icepop" in rows[2]
    assert "second Unfinished: 6 of 6 steps." in opened.texts(".notes li")


def test_seeds_are_drawn_together_or_apart(opened: Opened, three: Path) -> None:
    opened.load(three)
    opened.page.wait_for_selector(f"{_REWARD} path.line")
    assert opened.count(f"{_REWARD} path.line") == 2
    assert opened.count(f"{_REWARD} .band") == 1
    assert "correction = estr (2 seeds)" in opened.texts(f"{_REWARD} .key")
    opened.press("Seeds", "apart")
    opened.page.wait_for_selector(f"{_REWARD} path.line")
    assert opened.count(f"{_REWARD} path.line") == 3
    assert opened.count(f"{_REWARD} .band") == 0


def test_runs_can_be_hidden(opened: Opened, three: Path) -> None:
    opened.load(three)
    opened.press("Seeds", "apart")
    opened.page.click(".chip:has-text('other')")
    opened.page.wait_for_selector(f"{_REWARD} path.line")
    assert opened.count(f"{_REWARD} path.line") == 2
    assert opened.count("tr.off") == 1
    for name in ("first", "second"):
        opened.page.click(f".chip:has-text('{name}')")
    for tab in TABS[:-1]:
        opened.tab(tab)
        assert opened.count(".figure svg") == 0
        assert opened.count(".figure .empty") == opened.count(".figure") > 0


def test_curves_follow_the_controls(opened: Opened, three: Path) -> None:
    opened.load(three)
    line = f"{_REWARD} path.line >> nth=0"
    before = opened.page.get_attribute(line, "d")
    assert opened.page.text_content(f"{_REWARD} .label") == "optimizer step"
    opened.page.select_option("select[aria-label=Smooth]", "2")
    opened.page.wait_for_selector(line)
    assert opened.page.get_attribute(line, "d") != before
    opened.page.select_option("select[aria-label=Along]", "tokens")
    opened.page.wait_for_selector(line)
    assert opened.page.text_content(f"{_REWARD} .label") == "trained tokens"


def test_the_pointer_brings_numbers(opened: Opened, three: Path) -> None:
    opened.load(three)
    opened.page.hover(f"{_REWARD} svg[role=img]")
    assert re.match(r"optimizer step [34]\n", opened.page.inner_text(".tip"))
    assert re.search(r"2 seeds\)\n0\.50\d \[", opened.page.inner_text(".tip"))
    opened.tab("region")
    opened.page.hover('.card:has(h3:text-is("rho_mask by lag")) rect.block >> nth=0')
    assert "of tokens" in opened.page.inner_text(".tip")


def test_light_and_dark(opened: Opened, three: Path) -> None:
    opened.load(three)
    opened.press("Theme", "dark")
    (dark,) = opened.styles("body", "backgroundColor")
    opened.press("Theme", "light")
    (light,) = opened.styles("body", "backgroundColor")
    assert (dark, light) == ("rgb(18, 21, 27)", "rgb(245, 246, 248)")


# The microscope


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """One run of which every token can be read."""
    runs = tmp_path_factory.mktemp("readable")
    folder = make_run(runs, "run", ledger=False)
    records = write_random_ledger(folder, steps=6)
    save_tokenizer(folder, [f"<{number}>" for number in range(12)])
    return page_of([folder], runs / "page.html"), records


def test_the_most_suspicious_token_is_one_click_away(opened: Opened, readable: Any) -> None:
    page, records = readable
    opened.load(page)
    opened.tab("tokens")
    opened.page.click("#next")
    shown = dict(zip(opened.texts(".tip-row span"), opened.texts(".tip-row b"), strict=True))
    assert float(shown["score"]) == pytest.approx(highest_score(records), rel=1e-3)
    assert shown["verdict"] == "rejected"
    assert opened.count(".t.selected.rejected") == 1
    first = opened.texts('.entry[aria-current="true"]')
    opened.page.click("#next")
    assert opened.texts('.entry[aria-current="true"]') != first
    opened.page.click("#previous")
    assert opened.texts('.entry[aria-current="true"]') == first
    opened.page.click(".entry[data-place='3']")
    assert "4 of" in opened.page.inner_text("#next")


def test_tokens_have_their_numbers_and_can_be_walked(opened: Opened, readable: Any) -> None:
    opened.load(readable[0])
    opened.tab("tokens")
    assert opened.texts(".read .t") == ["<7>", "<8>"]
    written = opened.texts(".t.w")
    assert written == [f"<{number}>" for number in range(1, len(written) + 1)]
    opened.page.hover(".t.w >> nth=0")
    assert "token id\n1\n" in opened.page.inner_text(".tip")
    assert "log-prob, behavior" in opened.page.inner_text(".tip")
    opened.page.click(".t.w >> nth=0")
    opened.page.focus(".reading")
    opened.page.keyboard.press("ArrowRight")
    assert opened.texts(".t.selected") == ["<2>"]
    opened.page.keyboard.press("ArrowLeft")
    opened.page.keyboard.press("ArrowLeft")
    assert opened.texts(".t.selected") == ["<8>"]
    assert "read, not sampled" in opened.page.inner_text(".tip")


def test_every_coloring_colors(opened: Opened, readable: Any) -> None:
    opened.load(readable[0])
    opened.tab("tokens")
    seen = set()
    for key in ("entropy", "log_ratio", "score", "version", "verdict"):
        opened.press("Color by", key)
        colors = opened.styles(".t.w", "backgroundColor")
        assert any(not color.endswith(", 0)") for color in colors), key
        assert opened.count(".reader .legend .key") >= 2
        seen.add(tuple(colors))
    assert len(seen) == 5
    assert set(opened.styles(".read .t", "backgroundColor")) == {"rgba(0, 0, 0, 0)"}


def test_trajectories_are_sorted_and_opened(opened: Opened, readable: Any) -> None:
    opened.load(readable[0])
    opened.tab("tokens")
    opened.press("List", "trajectories")
    opened.page.select_option("select[aria-label=First]", "length")
    lengths = [int(re.search(r"(\d+) tokens", text)[1]) for text in opened.texts(".entry")]
    assert lengths == sorted(lengths, reverse=True)
    opened.page.click(".entry >> nth=1")
    assert opened.count(".t.w") == lengths[1]
    opened.page.select_option("select[aria-label=First]", "step")
    assert opened.texts(".entry")[0].startswith("step 1 ")


def test_switches_segments_turns_and_tool_output_are_marked(opened: Opened, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=4, ledger=False)
    save_tokenizer(folder, ["?", "say", "\n", "x\u202ey", " tool", "\u001b[31m", "é"])

    def drawn(ids: list[int], versions: list[int]) -> Segment:
        return Segment.drawn(ids, [-1.0] * len(ids), [0.5] * len(ids), versions)

    first = Segment.join(
        [Segment.context([1]), drawn([3, 2, 6], [0, 0, 2]), Segment.context([4]), drawn([5], [2])]
    )
    second = Segment.join([Segment.context([1, 4]), drawn([6, 6], [3, 3])])
    own = trajectory(
        RolloutId(0, 0, 0),
        logprobs=[],
        entropies=[],
        versions=[],
        segments=(first, second),
        turns=(Turn(0, 1, 4, "stop"), Turn(0, 5, 6, "length"), Turn(1, 2, 4, "stop")),
    )
    kept = [True, True, False, True, True, True]
    clipped = [True, False, False, False, False, False]
    made = consumption(own, [0.3, 0.0, -2.0, 0.0, 0.0, 0.0], kept=kept, clipped=clipped)
    write_step(folder, record(4, [(own, made)]))
    opened.load(page_of([folder], tmp_path / "page.html"))
    opened.tab("tokens")
    assert opened.texts(".who") == [
        "prompt", "turn 1 · stop", "tool output", "turn 2 · length", "tool output", "turn 3 · stop"
    ]  # fmt: skip
    assert opened.texts(".switch") == ["v2", "v3"]
    assert opened.texts(".segment") == ["segment 2: the history was rewritten here"]
    texts = opened.page.locator(".t.w").evaluate_all("(all) => all.map((e) => e.textContent)")
    assert texts == ["x\\u202ey", "↵\n", "é", "\\u001b[31m", "é", "é"]
    assert opened.page.locator(".t.w").nth(2).get_attribute("class") == "t w rejected"
    assert opened.count(".t.rejected") == 1


@pytest.mark.parametrize("guarded", [True, False], ids=["policy", "no-policy"])
def test_what_a_model_wrote_does_nothing(opened: Opened, tmp_path: Path, guarded: bool) -> None:
    """With the page's Content-Security-Policy, and by its script alone."""
    page = page_of([evil_run(tmp_path)], tmp_path / "page.html")
    if not guarded:
        policy = re.compile(r"<meta http-equiv=[^>]*>")
        text, number = policy.subn("", page.read_text())
        assert number == 1
        page.write_text(text)
    opened.page.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
    opened.load(page)
    for tab in TABS:
        opened.tab(tab)
    opened.page.hover(".t.w >> nth=0")
    opened.press("List", "trajectories")
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("window.pwned") is None
    assert opened.count("img") == 0
    assert opened.count("script") == 2
    shown = opened.page.locator(".t.w").all_inner_texts()
    assert "</script><script>window.pwned = 1</script><img" in shown[0]
    assert shown[1:] == ["]]>", "<!--", "&lt;b&gt;"]
    assert "<img src=x" in opened.page.inner_text("h1")
    assert "window.pwned" in opened.page.inner_text(".error")


def test_the_policy_stops_a_script_that_gets_in(browser: Any, tmp_path: Path) -> None:
    """Were there a hole after all: a script in the page that is not the report's own."""
    page = page_of([make_run(tmp_path, "run", steps=1)], tmp_path / "page.html")
    text = page.read_text().replace("<noscript>", "<script>window.pwned = 1</script><noscript>")
    page.write_text(text)
    one = Opened(browser.new_page())
    one.load(page)
    assert one.page.evaluate("window.pwned") is None
    assert any("Content Security Policy" in line for line in one.complaints)
    one.page.close()


# Odd runs


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("ledger", [True, False])
def test_short_runs_and_runs_without_ledger(
    opened: Opened, tmp_path: Path, steps: int, ledger: bool
) -> None:
    folder = make_run(tmp_path, "run", "steps=1", steps=steps, ledger=ledger and steps > 0)
    opened.load(page_of([folder], tmp_path / "page.html"))
    for tab in TABS:
        opened.tab(tab)
    if steps == 0 or not ledger:
        assert opened.count(".microscope") == 0
        assert "No run here has a ledger" in opened.page.inner_text(".empty")
    else:
        assert opened.count(".t.w") > 0


def test_ten_thousand_trajectories_are_listed_without_ten_thousand_elements(
    opened: Opened, tmp_path: Path
) -> None:
    folder = make_run(tmp_path, "run", steps=5, num_groups=500)
    opened.load(page_of([folder], tmp_path / "page.html"), "#tokens")
    assert "10,000 of 10,000 trajectories (all of them)" in opened.page.inner_text(".microscope")
    opened.press("List", "trajectories")
    assert 5 < opened.count(".entry") < 60
    opened.page.select_option("select[aria-label=First]", "step")
    opened.page.locator(".scroller").evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
    opened.page.wait_for_selector(".entry:has-text('step 5 group 2999.3')")
    assert opened.count("*") < 3000


def test_on_a_narrow_screen_nothing_runs_out_of_the_page(browser: Any, three: Path) -> None:
    context = browser.new_context(viewport={"width": 420, "height": 800})
    one = Opened(context.new_page())
    one.load(three)
    for tab in TABS:
        one.tab(tab)
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 420, tab
    context.close()
