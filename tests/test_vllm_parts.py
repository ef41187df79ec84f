"""What of the vLLM engine can be tested without vLLM: its interpreter, its checks, its options."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import estr
from estr.check import check_recipe
from estr.config import load_recipe
from estr.engines.interpreter import require_interpreter, vllm_process
from estr.engines.vllm import check_state, checkpoint_shapes
from estr.errors import ConfigError, WeightsError
from estr.machine import check_packages
from estr.models import load_model
from estr.options.run import EngineOptions
from estr.parameters import Parameters
from estr.run import train
from estr.worker import Worker
from tiny_models import tiny_model

SHAPES = {"embed.weight": (4, 2), "norm.weight": (2,)}


def state(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Weights that fit SHAPES, with tensors changed, added or (None) taken out."""
    full = {"embed.weight": torch.arange(8.0).reshape(4, 2), "norm.weight": torch.ones(2)}
    full |= {name.replace("_", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in full.items() if tensor is not None}


def test_weights_that_fit_pass_with_a_copy_of_a_tied_one() -> None:
    check_state(state(), SHAPES)
    check_state(state(head_weight=torch.arange(8.0).reshape(4, 2)), SHAPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_weight": None}, r"1 missing \['norm.weight'\]"),
        ({"head_weight": torch.zeros(4, 2)}, r"1 unknown \['head.weight'\]"),
        ({"norm_weight": torch.ones(3)}, r"norm.weight has shape \(3,\), .* wants \(2,\)"),
        ({"norm_weight": torch.tensor([1.0, float("inf")])}, "norm.weight holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises(WeightsError, match=message):
        check_state(state(**changes), SHAPES)


@pytest.mark.parametrize("published", ["once", "twice"])
def test_a_tied_model_may_store_its_output_layer_as_well(tmp_path: Path, published: str) -> None:
    """As Qwen3-0.6B is published; the trainer's weights have it once."""
    model = tiny_model("llama-tied")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, path, metadata={"format": "pt"})
    shapes = checkpoint_shapes(tmp_path, tied=True)
    assert len(shapes) == len(stored) - 1
    weights = Parameters(load_model(tmp_path), dtype=torch.float32).published()
    assert "lm_head.weight" not in weights
    check_state(stored if published == "twice" else weights, shapes)


def test_an_output_layer_that_is_all_there_is_belongs_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    both = {"embed.weight": torch.zeros(4, 2), "lm_head.weight": torch.ones(4, 2)}
    save_file(both, path)
    assert set(checkpoint_shapes(tmp_path, tied=False)) == set(both)
    save_file({"lm_head.weight": torch.ones(4, 2), "norm.weight": torch.ones(2)}, path)
    assert set(checkpoint_shapes(tmp_path, tied=True)) == {"lm_head.weight", "norm.weight"}


def test_a_missing_interpreter_is_named_before_anything_starts(tmp_path: Path) -> None:
    options = EngineOptions(name="vllm", python=str(tmp_path / "python"))
    for ask in (require_interpreter, vllm_process):
        with pytest.raises(ConfigError, match=r"engine\.python = .*python' .* `make vllm`"):
            ask(options)
    overrides = ["engine.name=vllm", f"engine.python={tmp_path}/python"]
    with pytest.raises(ConfigError, match=r"engine\.python"):
        train(load_recipe(overrides=overrides), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert any("engine.python" in error for error in check_recipe(None, overrides).errors)
    require_interpreter(EngineOptions(python=str(tmp_path / "python")))  # the local engine has none


def test_an_interpreter_without_vllm_is_named_before_anything_starts(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    python = bare / "bin" / "python"
    overrides = ["engine.name=vllm", f"engine.python={python}"]
    with pytest.raises(ConfigError, match=r"engine\.python = .* has no vllm, torch.*; .*make vllm"):
        train(load_recipe(overrides=overrides), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    (packages,) = bare.glob("lib/python*/site-packages")
    for name in ("vllm", "torch", "numpy", "safetensors", "transformers"):
        (packages / f"{name}.py").write_text("raise SystemExit('looked for, not imported')\n")
    require_interpreter(EngineOptions(name="vllm", python=str(python)))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("#!/bin/sh\necho found\n", ""),
        ("#!/bin/sh\necho found vllm numpy\n", "has no vllm, numpy; `make vllm`"),
        ("#!/bin/sh\necho no such option >&2; exit 3\n", "exit status 3 no such option; `make"),
        ("#!/bin/sh\n", "is no interpreter: exit status 0; `make vllm`"),
        ("#!/nowhere/python\n", "is no interpreter: No such file or directory; `make vllm`"),
    ],
)
def test_an_interpreter_is_asked_what_it_has(tmp_path: Path, program: str, words: str) -> None:
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o755)
    options = EngineOptions(name="vllm", python=str(python))
    if not words:
        require_interpreter(options)
        return
    with pytest.raises(ConfigError, match=f"engine.python = '{python}' .*{words}"):
        require_interpreter(options)


def test_an_interpreter_without_vllm_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{sys.executable}' has no vllm; `make vllm`"):
        require_interpreter(EngineOptions(name="vllm", python=sys.executable))
    with pytest.raises(ConfigError, match="is no interpreter; `make vllm`"):
        require_interpreter(EngineOptions(name="vllm", python=str(tmp_path)))


def test_deterministic_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic = true needs engine\.name = 'local'"):
        load_recipe(overrides=["deterministic=true", "engine.name=vllm"])


def test_ray_places_vllm_and_the_nodes_of_a_cluster_need_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # ray, wherever this runs
    asked = ["placement=ray", "engine.name=vllm", "engine.count=2", f"engine.python={tmp_path}/no"]
    recipe = load_recipe(overrides=asked)
    assert recipe.engine.count == 2
    with pytest.raises(ConfigError, match=r"engine\.python = .*no' is no interpreter"):
        check_packages(recipe)
    check_packages(load_recipe(overrides=[*asked, "ray.address=auto"]))


def test_devices_are_counted_among_those_that_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    for device, name in (("cuda:0", "3"), ("cuda:1", "5")):
        options = EngineOptions(name="vllm", python=sys.executable, device=device)
        assert vllm_process(options)["env"]["CUDA_VISIBLE_DEVICES"] == name
    options = EngineOptions(name="vllm", python=sys.executable, device="cuda:2")
    for nonsense in ("cuda:", "cuda:x", "cuda:-1"):
        with pytest.raises(ConfigError, match=f"engine.device = '{nonsense}' names no device"):
            vllm_process(dataclasses.replace(options, device=nonsense))
    with pytest.raises(ConfigError, match=r"'cuda:2', but CUDA_VISIBLE_DEVICES = '3, 5' leaves 2"):
        vllm_process(options)


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
async def test_the_process_is_given_estr_and_nothing_else_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an interpreter without one installed package, the worker's protocol works."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    start = vllm_process(EngineOptions(name="vllm", python=str(bare), device="cuda:1"))
    assert start["env"]["CUDA_VISIBLE_DEVICES"] == "1"
    folder = Path(start["env"]["PYTHONPATH"])
    assert [entry.name for entry in folder.iterdir()] == ["estr"]
    assert (folder / "estr").resolve() == Path(estr.__file__).resolve().parent
    start["env"]["PYTHONPATH"] = f"{folder}:{os.path.dirname(__file__)}"
    worker = await Worker.start("bare", "worker_hosts:Plain", {"start": 5}, **start)
    assert await worker.call("add", 1, timeout_s=10) == 6
    assert not await worker.call("finds", "numpy", timeout_s=10)
    await worker.close()
    again = vllm_process(EngineOptions(name="vllm", python=str(bare)))
    assert again["env"]["PYTHONPATH"] == str(folder)
    assert "CUDA_VISIBLE_DEVICES" not in again["env"]


def test_the_host_itself_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, estr.engines.process; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert not {"torch", "transformers", "safetensors", "vllm"} & set(done.stdout.split())


def test_the_extension_imports_of_estr_only_the_weights() -> None:
    path = Path(estr.__file__).parent / "engines" / "vllm_extension.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in names}
    standard = {"__future__", "collections", "logging", "typing"}
    assert packages == {"vllm", "torch", "numpy", "weights"} | standard
