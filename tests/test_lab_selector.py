"""`estr lab selector`: gradients on one batch against what training then does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from estr.lab.experiments import fidelity, selector
from estr.lab.experiments.fidelity import Fidelity
from estr.lab.experiments.selector import Ranking
from estr.lab.lab import Lab, write_report
from estr.lab.rules import RULES, TUNE_REGIMES, entrants

NAN = (math.nan, math.nan)


def gradient(cosine, kept=1.0):
    return Fidelity(np.zeros((5, 4)), (1.0, NAN), (2.0, NAN), (cosine, NAN), kept)


class Sweep:
    """Gradients point the better the longer the name of a setting; in M, the better they point, the
    better they train, elsewhere the worse."""

    def __init__(self):
        self.seen = []

    def run(self, jobs):
        self.seen += jobs
        rows = []
        for job in jobs:
            own = self.gradients(job) if "regimes" in job.config else self.training(job)
            rows += [{**job.labels, "job": job.digest, "step": 0, **row} for row in own]
        return rows

    @staticmethod
    def gradients(job):
        yield {"regime": "on-policy", "method": "half", "measure": "cosine", "value": 0.5}
        cells = [("on-policy", "fresh")]
        cells += [(r, m) for r in job.config["regimes"] for m in job.config["corrections"]]
        for regime, method in cells:
            values = {"progress": len(method), "square": 1.0, "kept": 1 / len(method)}
            for measure, value in values.items():
                yield {"regime": regime, "method": method, "measure": measure, "value": value}

    @staticmethod
    def training(job):
        labels = job.labels
        rule = entrants()[labels["method"]]
        (setting,) = (s for s in rule.settings if s.option == labels["option"])
        length = len(fidelity.named(labels["method"], setting))
        share = length / 100 if labels["regime"] == "M" else 1 - length / 100
        noise = 0.001 * labels["seed"]
        yield {"measure": "accuracy", "value": share + noise, "step": 120}


def test_what_foretells_and_what_does_not(tmp_path):
    sweep = Sweep()
    lab = Lab(sweep, num_seeds=5)
    report = selector.run(lab)
    answers = {claim.claim: claim.answer for claim in report.claims}
    assert answers == {
        "settings with more relative cosine train better": "in part",
        "settings with more certain relative cosine train better": "in part",
        "settings with more progress train better": "in part",
        "settings with more shortness train better": "undecided",
        "settings with more kept train better": "in part",
    }
    lines = {(line["regime"], line["predictor"]): line for line in report.tables["predictors"]}
    found = lines["M, lr 0.0005", "relative cosine"]
    assert found["rank correlation"].startswith("+1.00 [+1.00")
    assert found["its pick"] == found["best"]
    assert lines["D, lr 0.002", "relative cosine"]["rank correlation"].startswith("-1.00")
    assert lines["D, lr 0.002", "kept"]["rank correlation"].startswith("+1.00")
    assert all(path.stat().st_size for path in write_report("selector", report, tmp_path))


def test_every_setting_is_trained_as_rules_trains_it():
    sweep = Sweep()
    selector.run(Lab(sweep, num_seeds=5))
    trained = [job for job in sweep.seen if "regimes" not in job.config]
    measured = [job for job in sweep.seen if "regimes" in job.config]
    settings = [s for rule in entrants().values() for s in rule.settings if not s.noise_floor]
    assert len(trained) == len(TUNE_REGIMES) * len(settings) * 2
    assert {(job.labels["twin"], job.labels["phase"]) for job in trained} == {
        ("calculator", "tune")
    }
    names = {name for job in measured for name in job.config["corrections"]}
    assert len(names) == len(settings) + 2
    assert {"estr", "estr, tau 0.2", "none_u", "no_clip"} <= names
    assert RULES.keys() - {"outward_token_noise"} <= names


def test_only_rules_count_as_independent():
    own = {f"a, tau {i}": gradient(i) for i in range(1, 10)} | {"b": gradient(0.5)}
    ranks = {name: value.cosine[0] for name, value in own.items()}
    found = selector.ranking(own, ranks, selector.PREDICTORS["relative cosine"])
    assert found.correlation == pytest.approx(1.0)
    assert math.isnan(found.interval[0]), "two rules say nothing"
    assert (found.pick, found.best) == ("a, tau 9", "a, tau 9")


def test_a_gradient_without_a_figure_is_left_out():
    own = {"a": gradient(math.nan), "b": gradient(0.5), "c": gradient(0.7)}
    found = selector.ranking(
        own, {"a": 0.9, "b": 0.2, "c": 0.1}, selector.PREDICTORS["relative cosine"]
    )
    assert found.correlation == pytest.approx(-1.0)
    assert (found.pick, found.best) == ("c", "b")
    none = selector.ranking({"a": gradient(math.nan)}, {"a": 0.9}, lambda its: its.cosine[0])
    assert math.isnan(none.correlation)
    assert selector.lines({("M", "x"): none}, {"M": {"a": 0.9}})[0]["its pick"] == ""


@pytest.mark.parametrize(
    ("correlation", "interval", "answer"),
    [
        (0.7, (0.4, 0.9), "holds"),
        (0.7, (-0.1, 0.9), "undecided"),
        (0.3, (0.1, 0.6), "undecided"),
        (0.1, (-0.2, 0.4), "not here"),
        (math.nan, NAN, "undecided"),
    ],
)
def test_a_correlation_of_use(correlation, interval, answer):
    its = Ranking(correlation, interval, "a", "b")
    assert selector.claim("progress", {("M", "progress"): its}).answer == answer
