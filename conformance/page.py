"""docs/conformance.md from the results."""

from __future__ import annotations

from typing import Any

INTRODUCTION = """\
# Agreement with other packages

This page is written by `make conformance` from a run. The same tensors go through our losses and
through those of other packages, each in an environment and a process of its own
(`conformance/`). "agrees": values and gradients within 1e-5, relative to the largest, on both sets
(`random`; `extreme`: probabilities next to 0 and 1, large ratios). Masks: the share of tokens
judged differently. "theirs / ours": the median ratio of the gradients on each set; "rescaled": how
far they are apart once ours is multiplied by it. One loss call each on 16 trajectories, all divided
by the same token count where the package lets the caller give it. The numbers are in
`conformance/results.json`.

These are libraries that we learned from; a difference is a different choice unless the text says
otherwise."""

NOTES = {
    "openrlhf": (
        "Loaded with empty modules in place of flash-attn, deepspeed, ray, vllm and others, which "
        "its package imports and the loss does not use."
    ),
    "areal": (
        "Installed without its dependencies except those that these functions load; logging "
        "packages are replaced by empty modules. The loss is the mean of its micro-batch by "
        "design: AReaL's engine weighs micro-batches by their token counts afterwards."
    ),
    "trl": (
        "`GRPOTrainer._compute_loss` is called on a stand-in for the trainer that returns the "
        "given log-probs instead of running a model. bnpo and grpo are divided by the number of "
        "accumulation steps there, a mean of means."
    ),
    "verl": "Policy losses called by their registered names, with `batch_num_tokens` given.",
}


HOOK = "the function that [hooks.md](hooks.md) gives for it"
TESTED = {
    "verl": "`estr.integrations.verl`",
    "trl": "`estr.integrations.trl`",
    "openrlhf": HOOK,
    "areal": HOOK,
}


def render(results: dict[str, Any], differences: dict[tuple[str, str], str]) -> str:
    parts = [INTRODUCTION, f"torch {results['torch']}."]
    for name, package in results["packages"].items():
        parts.append(f"## {name} {package.get('version', package['requirement'])}")
        parts.append(NOTES[name])
        if package["adapter"]:
            tests = package["adapter"]["tests"]
            parts.append(f"Tests of {TESTED[name]} in this environment: {tests}.")
        if "error" in package:
            parts.append(f"Could not be run: `{package['error']}`")
            continue
        parts.append(_cases(package["cases"]))
        shown = [c for c, r in package["cases"].items() if r["verdict"] == "documented"]
        parts += [f"- **{case}**: {differences[name, case]}" for case in shown]
        parts += [f"- **{case}** failed: `{text}`" for case, text in package["failed"].items()]
        parts.append("What `estr.conformance` found (only what is not ok):")
        parts.append(_reports(package["reports"]))
    return "\n\n".join(parts) + "\n"


def _cases(cases: dict[str, Any]) -> str:
    lines = [
        "| case | ours | verdict | value | gradient | mask | theirs / ours | gradient, rescaled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        ours = " + ".join(_entry(entry) for entry in case["ours"])
        worst = {
            kind: max((m[kind] for m in case["measured"].values() if kind in m), default=None)
            for kind in ("loss", "gradient", "mask", "rescaled")
        }
        rescaled = worst.pop("rescaled")
        scales = {f"{m['scale']:.4g}" for m in case["measured"].values() if "scale" in m}
        cells = [name, f"`{ours}`", case["verdict"]]
        cells += ["" if value is None else f"{value:.1e}" for value in worst.values()]
        cells += [", ".join(sorted(scales)), "" if rescaled is None else f"{rescaled:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _entry(entry: dict[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in entry.items() if k != "name")
    return f"{entry['name']}({options})" if options else str(entry["name"])


def _reports(reports: dict[str, Any]) -> str:
    lines = []
    for case, findings in reports.items():
        faults = [f"{n} ({f['detail']})" for n, f in findings.items() if not f["ok"]]
        lines.append(f"- {case}: {'; '.join(faults) or 'nothing'}")
    return "\n".join(lines)
