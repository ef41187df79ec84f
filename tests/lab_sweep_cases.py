"""A sweep that runs nothing, for tests of what is made of its rows."""

from __future__ import annotations


class FakeSweep:
    """Answers every job by a rule, without running it."""

    def __init__(self, rule):
        self.rule, self.seen = rule, []

    def run(self, jobs):
        self.seen += jobs
        return [
            {**job.labels, "job": job.digest, "measure": measure, "step": 1, "value": value}
            for job in jobs
            for measure, value in (
                ("accuracy", self.rule(job.labels)),
                ("collapsed", 0.0),
                ("rho_mask", 0.1),
                ("eligible_tokens", 10.0),
            )
        ]
