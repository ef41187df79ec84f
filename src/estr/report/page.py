"""One HTML file: the data, packed; one script and one style sheet, both inline; nothing else.

Whatever a model, a tool or a file name says is only ever in the packed data, which is base64 and
so holds no character that means anything in HTML. The script puts it on the page as text nodes. And
the page carries a Content-Security-Policy under which a browser runs this very script (by its hash)
and none other, and opens no connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from html import escape
from importlib.resources import files

import msgspec

from .runs import Report

SCRIPTS = ("base.js", "charts.js", "panels.js", "microscope.js", "page.js")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report is drawn by its own script; please let it run.</noscript>
<main id="page"><p class="loading">Unpacking the report…</p></main>
<script id="data" type="text/plain">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(report: Report) -> str:
    """The page. The same report gives the same text."""
    script = "".join(_asset(name) for name in SCRIPTS)
    style = _asset("style.css")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    packed = gzip.compress(msgspec.json.encode(report), 6, mtime=0)
    return _PAGE.format(
        policy=policy,
        title=escape(f"estr report: {report.title}"),
        style=style,
        script=script,
        data=base64.b64encode(packed).decode(),
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _digest(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
