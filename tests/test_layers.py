"""Imports point down only, what must stay light stays light, and promised names exist."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import estr
from estr import errors

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "types",
        "errors",
        "options",
        "config",
        "recipe_files",
        "blocking",
        "own_loop",
        "functions",
        "output_files",
        "printable",
        "streams",
    ),
    (
        "tiled_head",
        "logprobs",
        "advantages",
        "corrections",
        "losses",
        "conformance",
        "batch",
        "reducers",
        "metrics",
        "kl",
        "diagnostics",
        "scores",
        "student",
        "ledger",
    ),
    (
        "environment",
        "chat",
        "grading",
        "killable",
        "math_grading",
        "records",
        "tools",
        "reward",
        "weights",
        "engine",
        "calls",
        "own_folders",
        "worker",
        "rank_workers",
        "heads",
        "quantization",
        "scorer",
        "models",
        "adapters",
        "ranks",
        "parameters",
    ),
    (
        "schedule",
        "rollout_state",
        "run_folder",
        "engines",
        "ray_head",
        "machine",
        "evaluation_records",
        "environments",
        "rollout",
        "recorded",
        "group",
        "groups_snapshot",
        "deadlines",
        "groups",
        "members",
        "buffer",
        "guard",
        "reference",
        "token_results",
        "trainer",
        "checkpoint",
        "trainer_process",
        "warmstart",
        "subject",
        "evaluation_result",
        "evaluation_rollouts",
        "evaluation",
        "evaluations",
        "evaluator_process",
        "processes",
        "cluster",
        "problems",
        "wandb_log",
    ),
    (
        "progress",
        "run_metrics",
        "group_endings",
        "dispatcher",
        "engine_versions",
        "loop",
        "resume",
        "run",
        "runs",
        "results",
        "replay",
        "report",
        "lab",
        "bench",
        "run_progress",
        "display",
        "check",
        "api",
    ),
    ("integrations",),
    ("estr", "cli", "__main__"),
)
"""Every module or package directly under estr ("estr" is the package's own __init__). A module may
import from lower layers, and within its layer from those listed before it. A new module gets its
place here."""

FORBIDDEN: dict[int, frozenset[str]] = {
    0: frozenset({"torch", "transformers", "ray", "vllm", "tensorboardX"}),
    1: frozenset({"transformers", "ray", "vllm"}),
}
"""Outside packages that a layer must not import, not even inside a function."""

EXPORTS: dict[str, str] = {
    "estr.advantages": "group_advantages is_zero_variance",
    "estr.api": "train resume_run export export_adapter read_recipe",
    "estr.batch": "Batch make_batches scatter_back",
    "estr.config": "Recipe load_recipe recipe_from_table correction_options read_options",
    "estr.corrections": "TokenColumns Verdict Correction CORRECTIONS build_correction",
    "estr.diagnostics": "token_diagnostics trajectory_diagnostics",
    "estr.engine": "Engine Request ScriptedEngine",
    "estr.environment": "Action Environment Reply ScriptedEnvironment Task",
    "estr.ledger": "LedgerWriter damaged_parts find_parts missing_parts open_ledger parts_up_to "
    "read_step supersede_after",
    "estr.losses": "PolicyLoss policy_loss estr_loss",
    "estr.metrics": "Metrics MetricsWriter read_metrics supersede_after",
    "estr.replay": "Gradients Replay judge replay_corrections replay_gradients",
    "estr.report": "Budget Report build_report render write_report",
    "estr.results": "TrainResult HeldOut read_run",
    "estr.types": "COLUMNS RolloutId Consumption SamplingSettings Segment Trajectory Turn",
    "estr.weights": "FileWeightStore MemoryWeightStore WeightStore",
}
"""Names that other programs may rely on."""

ROOT = Path(estr.__file__).parent
POSITION = {
    unit: (layer, place) for layer, units in enumerate(LAYERS) for place, unit in enumerate(units)
}


def unit_of(file: Path) -> str:
    """The entry of LAYERS that a source file belongs to."""
    first = file.relative_to(ROOT).parts[0]
    return "estr" if first == "__init__.py" else first.removesuffix(".py")


SOURCES = sorted(ROOT.rglob("*.py"))
UNITS = {unit_of(file) for file in SOURCES}


def imports(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Every import of a source file as (line, absolute dotted name), wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = [*base, *(node.module or "").split(".")] if node.module else list(base)
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])


def unit_imported(name: str) -> str | None:
    """The entry of LAYERS that a dotted name comes from; None: from outside."""
    parts = name.split(".")
    if parts[0] != "estr":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in UNITS else "estr"


def faults(file: Path, source: str) -> list[str]:
    """What the imports of one file do against the table."""
    unit = unit_of(file)
    if unit not in POSITION:
        return [f"{file.name}: {unit} has no place in LAYERS"]
    found = []
    package = ("estr", *file.relative_to(ROOT).parts[:-1])
    for line, name in imports(source, package):
        place = f"{file.relative_to(ROOT)}:{line} imports {name}"
        target = unit_imported(name)
        if target is None:
            if name.split(".")[0] in FORBIDDEN.get(POSITION[unit][0], frozenset()):
                found.append(f"{place}, which layer {POSITION[unit][0]} must not")
        elif target not in POSITION:
            found.append(f"{place}, which has no place in LAYERS")
        elif target != unit and POSITION[target] >= POSITION[unit]:
            found.append(f"{place}, which stands above or beside {unit}")
    return found


def test_no_module_stands_twice():
    units = [unit for layer in LAYERS for unit in layer]
    assert len(units) == len(set(units))


def test_every_module_has_its_place():
    assert UNITS - POSITION.keys() == set()


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down_only(file):
    assert faults(file, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("losses.py", "from .batch import Batch"),
        ("losses.py", "from . import batch"),
        ("losses.py", "import estr.engine"),
        ("losses.py", "from estr.engine import Engine"),
        ("losses.py", "from estr import Anything"),
        ("losses.py", "def f():\n    from .engine import Engine"),
        ("losses.py", "if TYPE_CHECKING:\n    from .engine import Engine"),
        ("losses.py", "def f():\n    import transformers"),
        ("corrections/own.py", "from ..losses import policy_loss"),
        ("corrections/own.py", "from transformers.utils import logging"),
        ("config.py", "import torch.nn"),
        ("newcomer.py", ""),
    ],
)
def test_the_walk_notices(file, source):
    assert len(faults(ROOT / file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("batch.py", "from .losses import policy_loss"),
        ("batch.py", "from . import types"),
        ("batch.py", "import torch"),
        ("corrections/own.py", "from .base import Verdict\nfrom ..errors import DataError"),
        ("corrections/__init__.py", "from .base import Verdict\nfrom ..errors import DataError"),
        ("models.py", "import transformers"),
    ],
)
def test_the_walk_permits(file, source):
    assert faults(ROOT / file, source) == []


# Weight


def loaded_by(modules: list[str]) -> set[str]:
    """The top-level packages that a fresh interpreter holds after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def modules_of(layer: int) -> list[str]:
    return [f"estr.{unit}" for unit in LAYERS[layer] if unit in UNITS]


def test_the_package_and_its_recipe_load_without_torch():
    heavy = {"torch", "transformers", "ray", "vllm", "tensorboardX", "safetensors"}
    assert loaded_by(["estr", *modules_of(0)]) & heavy == set()


def test_the_mathematics_load_without_transformers():
    loaded = loaded_by(["estr", "estr.corrections", *modules_of(1)])
    assert "torch" in loaded
    assert loaded & {"transformers", "ray", "vllm", "tensorboardX"} == set()


def test_the_seams_load_without_transformers():
    seams = ["estr.engine", "estr.environment", "estr.weights"]
    assert loaded_by(seams) & {"torch", "transformers", "ray", "vllm"} == set()


# Names


@pytest.mark.parametrize("module", EXPORTS)
def test_promised_names_exist(module):
    found = importlib.import_module(module)
    assert [name for name in EXPORTS[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", ["estr", *modules_of(0), *modules_of(1)])
def test_all_names_only_what_exists(module):
    found = importlib.import_module(module)
    assert [name for name in getattr(found, "__all__", ()) if not hasattr(found, name)] == []


def test_the_error_tree_is_drawn_as_it_is():
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"((?:\|   |    )*)(?:\|-- |`-- )?(\w+)(?:  +\S|$)", line)
        if match and hasattr(errors, match[2]):
            depth = len(match[1]) // 4 + ("-- " in line[: match.start(2)])
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1] if depth else "Exception"
    actual = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, Exception)
    }
    assert drawn == actual
