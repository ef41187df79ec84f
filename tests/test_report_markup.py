"""The page of a report as a file: it holds nothing but itself. And the command that writes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from click.testing import CliRunner

from estr.cli import cli
from estr.cli.train import MOST_TOKENS, report_of
from estr.errors import DataError
from estr.report import Budget, build_report, render, write_report
from report_cases import EVIL, evil_run, make_run, unpacked

BUDGET = Budget(trajectories=1000, tokens=1_000_000)


class Elements(HTMLParser):
    """Everything that a browser would see as markup."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def elements(page: str) -> Elements:
    parser = Elements()
    parser.feed(page)
    return parser


def test_what_a_model_wrote_is_nowhere_in_the_markup(tmp_path):
    harmless = elements(render(build_report([make_run(tmp_path, "run", steps=1)], BUDGET)))
    page = render(build_report([evil_run(tmp_path)], BUDGET))
    evil = elements(page)
    assert evil.tags == harmless.tags
    assert [name for name, _ in evil.attributes] == [name for name, _ in harmless.attributes]
    assert "pwned" not in page
    assert page.count("<script") == page.count("</script>") == 2


def test_the_page_holds_the_report(tmp_path):
    report = build_report([evil_run(tmp_path)], BUDGET)
    held = json.loads(unpacked(render(report)))
    assert held["runs"][0]["microscope"]["texts"][0] == EVIL
    assert held["runs"][0]["microscope"]["trajectories"][0]["error"] == EVIL
    assert render(report) == render(report)


def test_the_page_is_whole_and_lets_in_nothing_else(tmp_path):
    page = render(build_report([make_run(tmp_path, "run", steps=1)], BUDGET))
    found = elements(page)
    assert {"src", "href", "action", "data"} & {name for name, _ in found.attributes} == set()
    assert "link" not in found.tags
    addresses = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_no_script_reads_a_string_as_markup_or_as_code():
    assets = files("estr.report").joinpath("assets")
    scripts = {a.name: a.read_text() for a in assets.iterdir() if a.name.endswith(".js")}
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|eval\(|Function\("
    assert len(scripts) == 5
    assert {name for name, text in scripts.items() if re.search(ways, text)} == set()
    assert not any("</script" in text for text in scripts.values())


def test_the_command_says_where_the_page_lies(tmp_path):
    make_run(tmp_path, "one", steps=1)
    make_run(tmp_path, "two", "seed=1", steps=1)
    done = CliRunner().invoke(cli, ["report", "one", "two", "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    place = tmp_path / "one" / "report.html"
    assert f"report: {place}" in done.stdout
    assert place.read_text().startswith("<!doctype html>")
    assert "one: Unfinished" in done.stderr
    elsewhere = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "two"), "--out", str(elsewhere)])
    assert done.exit_code == 0
    assert elsewhere.is_file()


def test_a_finished_run_gets_its_report_if_that_is_quick(tmp_path):
    folder = make_run(tmp_path, "run", steps=1)
    assert report_of(folder, MOST_TOKENS + 1) == f"estr report {folder} makes a page of it"
    assert not (folder / "report.html").exists()
    assert report_of(folder, MOST_TOKENS) == str(folder / "report.html")
    assert (folder / "report.html").is_file()
    (folder / "summary.json").write_text("[]")
    assert "summary.json is not the summary of a run; try again" in report_of(folder, 1)


def test_what_is_no_run_and_where_nothing_can_be_written_are_errors(tmp_path):
    done = CliRunner().invoke(cli, ["report", "nothing", "--runs", str(tmp_path)])
    assert done.exit_code == 2
    assert "nothing" in done.stderr
    folder = make_run(tmp_path, "run", steps=1)
    with pytest.raises(DataError, match="--out"):
        write_report([folder], tmp_path / "absent" / "page.html", BUDGET)
