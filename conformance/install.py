"""Makes an environment of its own for every package that `run.py` compares with.

    python conformance/install.py [NAME ...]

Each package is installed without its dependencies and with those that the compared functions load;
torch, transformers and safetensors are shared with the environment that runs this script. They are
not always the versions that the package asks for, which `run.py` records.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".venvs"

PACKAGES: dict[str, tuple[str, str]] = {
    "verl": (
        "verl==0.9.1",
        "ray tensordict==0.10.0 hydra-core codetiming datasets pandas torchdata peft accelerate",
    ),
    "trl": ("trl==1.16.0", "datasets>=4.7 pandas accelerate>=1.10.1"),
    "openrlhf": ("openrlhf==0.11.2", "peft accelerate einops"),
    "areal": (
        "areal==1.0.4",
        "aiohttp httpx hydra-core==1.4.0.dev1 omegaconf==2.4.0.dev2 pandas datasets colorlog "
        "tenacity flask torchdata lark uvloop ray numba orjson einops aiofiles",
    ),
}
"""name -> (requirement, what its compared functions need beside it)."""


def install(name: str) -> None:
    """Make `.venvs/NAME` unless it is whole."""
    place = FOLDER / name
    done = place / "installed"
    requirement, needs = PACKAGES[name]
    if done.exists() and done.read_text() == requirement:
        return
    venv.create(place, clear=True)
    site = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "-q"]
    subprocess.run([*pip, "--no-deps", requirement], check=True)
    subprocess.run([*pip, *needs.split()], check=True)
    done.write_text(requirement)


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        print(package, flush=True)
        install(package)
