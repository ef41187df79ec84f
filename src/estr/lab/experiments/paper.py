"""`paper`: every experiment on a claim of the paper, beside the published figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..lab import Claim, Lab, Report
from ..table import Row
from . import EXPERIMENTS, find_experiment

TITLE = "every claim"

LEFT_OUT = ("paper", "collapse", "selector", "rules")
"""Questions of ours, no claims of the paper."""

PUBLISHED: tuple[dict[str, str], ...] = (
    {
        "task": "BrowseComp-Plus, avg@1 (other readings of the paper in brackets)",
        "sync": "37.10 (38.55)",
        "async": "- (28.91)",
        "icepop": "34.9 (32.53)",
        "kpop": "33.6 (34.94)",
        "estr": "37.34",
    },
    {
        "task": "GSM8K, multi-turn",
        "sync": "96.07",
        "async": "60.72",
        "icepop": "65.01",
        "kpop": "70.51",
        "estr": "95.69",
    },
    {
        "task": "AIME, mean avg@4 / pass@4",
        "sync": "17.54 / 27.68",
        "async": "13.61 / 23.00",
        "icepop": "15.82 / 24.96",
        "kpop": "16.22 / 25.47",
        "estr": "17.04 / 28.38",
    },
    {
        "task": "DAPO-Math, tokens/s/GPU; s a step",
        "sync": "82.56; 1356.47",
        "async": "214.38; 514.84",
        "icepop": "",
        "kpop": "",
        "estr": "",
    },
)
"""What the paper says, with models and machines that are not ours."""


def run(lab: Lab) -> Report:
    lab.strict = False  # the parts have different labels
    rows: list[Row] = []
    claims: list[Claim] = []
    tables: dict[str, Sequence[Mapping[str, str]]] = {"published": PUBLISHED}
    for name in EXPERIMENTS:
        if name in LEFT_OUT:
            continue
        report = find_experiment(name).run(lab)
        rows += [{"experiment": name, **row} for row in report.rows]
        claims += [dataclasses.replace(c, claim=f"{c.claim} ({name})") for c in report.claims]
        tables |= {f"{name}: {title}": lines for title, lines in report.tables.items()}
    return Report(rows, claims, tables)
