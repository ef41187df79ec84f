"""Inject faults into runs of the built-in task and look whether the guard names them.

    python tools/faults --clean 20            (make faults)

Each fault begins after three steps; it counts as detected if the first finding names it, and comes
before the third step on faulty data is over. Clean runs have seeds of their own. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from injectors import MORE, TEN, Fault
from runs import ARMED_AFTER, Outcome, play, recipe_of

STEPS = 14
WITHIN = 3


def detected(outcome: Outcome, fault: Fault) -> bool:
    """Is the first finding the right one, in time, and not before the fault began?"""
    if outcome.caught is None or outcome.first_hit is None:
        return False
    if (outcome.check, outcome.kind) not in fault.expected:
        return False
    return ARMED_AFTER < outcome.caught < outcome.first_hit + WITHIN


def shown(outcome: Outcome, fault: Fault) -> dict[str, object]:
    """One fault's line of the table."""
    return {
        "fault": outcome.fault,
        "detected": detected(outcome, fault),
        "check": outcome.check,
        "kind": outcome.kind,
        "first_faulty_step": outcome.first_hit,
        "caught_before_step": outcome.caught,
        "findings": outcome.findings,
        "message": outcome.message,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clean", type=int, default=20, help="clean runs")
    parser.add_argument("--seed", type=int, default=0, help="of the faulty runs")
    parser.add_argument("--only", help="faults whose name holds this text; no clean runs")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="estr-faults-"))
    details = []
    for kind in (*TEN, *MORE):
        fault = kind()
        if options.only and options.only not in fault.name:
            continue
        recipe = recipe_of(options.seed, STEPS, options.overrides)
        outcome = play(folder / fault.name.replace(" ", "-"), recipe, fault)
        details.append(shown(outcome, fault))
        print(json.dumps(details[-1]), flush=True)
    false_alarms, clean, totals = 0, 0, Outcome("clean")
    for number in range(0 if options.only else options.clean):
        recipe = recipe_of(1000 + number, STEPS, options.overrides)
        outcome = play(folder / f"clean-{number}", recipe, Fault())
        clean += 1
        false_alarms += bool(outcome.findings)
        totals.steps += outcome.steps
        totals.rescored_tokens += outcome.rescored_tokens
        totals.gap = max(totals.gap, outcome.gap)
        totals.guard_s += outcome.guard_s
        totals.cpu_s += outcome.cpu_s
        line = {k: getattr(outcome, k) for k in ("steps", "findings", "gap", "switched")}
        print(json.dumps({"clean": number, **line}), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    caught = sum(bool(d["detected"]) for d in details)
    result = {
        "faults": len(details),
        "detected": caught,
        "false_alarms": false_alarms,
        "clean_runs": clean,
        "alarms_per_run_below": round(3.0 / clean, 3) if clean and not false_alarms else None,
        "clean_steps": totals.steps,
        "rescored_tokens": totals.rescored_tokens,
        "largest_gap": totals.gap,
    }
    print(json.dumps(result))
    sys.exit(0 if caught == len(details) and not false_alarms else 1)


if __name__ == "__main__":
    main()
