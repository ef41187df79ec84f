"""The pictures of docs/report.md, taken of a report in headless Chromium.

    python tools/report_images.py report.html docs/images

The first run of the report is the one whose tokens are shown.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SIZE = {"width": 1360, "height": 860}
PICTURES = (
    ("report-learning", "learning", "light"),
    ("report-region", "region", "light"),
    ("report-tokens", "tokens", "light"),
    ("report-staleness", "staleness", "dark"),
)


def take(page: Page, tab: str) -> None:
    """Bring the page to what is worth showing of a tab."""
    page.click(f"[role=tab][data-tab={tab}]")
    if tab == "tokens":
        page.click("#next")
    else:
        page.wait_for_selector(".figure svg")
    page.wait_for_timeout(300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, tab, theme in PICTURES:
            page = browser.new_page(viewport=SIZE)
            page.goto(arguments.report.resolve().as_uri())
            page.click(f'[aria-label="Theme"] [data-key={theme}]')
            take(page, tab)
            page.screenshot(path=arguments.out / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
