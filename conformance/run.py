"""Compares our losses with those of verl, TRL, OpenRLHF and AReaL on the same tensors.

    make conformance        or, with the environments made: python conformance/run.py [NAME ...]

Every package runs in its own process and environment (`install.py`), on tensors saved as
safetensors; where we have an adapter for it, the tests of `adapters/` run there, too. Writes
`conformance/results.json` and `docs/conformance.md`. A package that cannot be loaded is recorded
with what it said; the others go on, and its earlier result is not kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from install import FOLDER, PACKAGES
from ours import DIFFERENCES, compare
from page import render
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parent
TIMEOUT_S = 1200


def tensors() -> dict[str, Tensor]:
    """Two sets. `random`: ratios near and far, all trajectories of unequal length. `extreme`:
    probabilities next to 0 and 1, log-ratios up to 30, equal policies, single tokens."""
    generator = torch.Generator().manual_seed(0)
    sets: dict[str, Tensor] = {}
    for name, (rows, length), spread in (("random", (16, 48), 0.5), ("extreme", (16, 24), 6.0)):
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        lengths[0], lengths[1] = length, 1
        surprisal = torch.empty(rows, length).exponential_(1.0, generator=generator)
        if name == "extreme":
            scale = 10.0 ** torch.randint(-7, 2, (rows, length), generator=generator)
            surprisal = surprisal * scale
        noise = torch.randn(2, rows, length, generator=generator) * spread
        noise[:, ::4] = 0.0  # every fourth row: all three policies are equal
        # A ratio near 1 everywhere would show nothing, one far everywhere would be clipped away.
        size = torch.rand(rows, length, generator=generator) ** 3
        columns = {
            "behavior": -surprisal,
            "proximal": torch.minimum(-surprisal + noise[0] * size, torch.zeros(())),
            "policy": torch.minimum(
                -surprisal + (noise[0] + 0.3 * noise[1]) * size, torch.zeros(())
            ),
            "advantages": torch.randn(rows, 1, generator=generator).expand(rows, length),
            "mask": torch.arange(length) < lengths,
            "entropies": torch.full((rows, length), 0.99),
        }
        sets |= {f"{name}/{column}": t.contiguous() for column, t in columns.items()}
    return sets


def run_peer(name: str, cases: Path, folder: Path) -> dict[str, Any]:
    """The package's outputs, or why there are none."""
    out = folder / f"{name}.safetensors"
    script = HERE / "peers" / f"{name}_peer.py"
    try:
        done = _in_environment(name, [str(script), str(cases), str(out)])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if done.returncode or not out.exists():
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    with safe_open(out, framework="pt") as file:
        extra = file.metadata()
        outputs = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    return {
        "version": extra["version"],
        "failed": json.loads(extra["failed"]),
        "reports": json.loads(extra["reports"]),
        "outputs": outputs,
    }


def run_adapter(name: str) -> dict[str, Any] | None:
    """The outcome of the tests of our adapter or hook in that package, None without any."""
    tests = HERE / "adapters" / f"test_{name}.py"
    if not tests.exists():
        return None
    settings = str(HERE / "adapters" / "pytest.ini")
    try:
        done = _in_environment(name, ["-m", "pytest", "-c", settings, str(tests)])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"ok": False, "tests": f"{type(error).__name__}: {error}"}
    if done.returncode:
        print(done.stdout)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    counts = [c for c in last.partition(" in ")[0].split(", ") if "warning" not in c]
    return {"ok": done.returncode == 0, "tests": ", ".join(counts)}


def _in_environment(name: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [str(FOLDER / name / "bin" / "python"), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )


def main(names: list[str]) -> None:
    sets = tensors()
    results: dict[str, Any] = {"torch": torch.__version__, "packages": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_file(sets, folder / "cases.safetensors")
        for name in names:
            print(name, flush=True)
            found = run_peer(name, folder / "cases.safetensors", folder)
            outputs = found.pop("outputs", {})
            found["requirement"] = PACKAGES[name][0]
            found["cases"] = compare(name, sets, outputs)
            found["adapter"] = run_adapter(name)
            results["packages"][name] = found
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs" / "conformance.md").write_text(render(results, DIFFERENCES), encoding="utf-8")
    cases = [c for p in results["packages"].values() for c in p["cases"].values()]
    agree = sum(case["verdict"] == "agrees" for case in cases)
    print(f"{agree} of {len(cases)} agree; see conformance/results.json and docs/conformance.md")
    if any(case["verdict"] == "differs" for case in cases):
        sys.exit("a difference is not documented in conformance/ours.py")
    adapters = [p["adapter"] for p in results["packages"].values() if p["adapter"]]
    if not all(adapter["ok"] for adapter in adapters):
        sys.exit("the tests of an adapter fail; what they said stands above")


if __name__ == "__main__":
    main(sys.argv[1:] or list(PACKAGES))
