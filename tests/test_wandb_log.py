"""Weights & Biases: lazily imported, offline records, refusals; what a machine lacks is named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from estr.check import check_recipe
from estr.config import Recipe, recipe_from_table
from estr.errors import ConfigError
from estr.machine import check_devices, check_packages
from estr.metrics import MetricsWriter


class Kept:
    """A log that remembers."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def log(self, record) -> None:
        self.records.append(dict(record))


def test_every_record_is_told_as_it_is_written(tmp_path: Path) -> None:
    kept = Kept()
    with MetricsWriter(tmp_path, tensorboard=False, also=[kept]) as writer:
        writer.write(step=1, version=1, wall_s=0.5, values={"loss": 0.25, "bad": float("nan")})
    assert kept.records == [json.loads((tmp_path / "metrics.jsonl").read_text())]
    assert kept.records[0]["bad"] is None


def test_an_offline_run_lies_in_the_run_folder_and_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path\n"
        "from estr.config import recipe_from_table\n"
        "from estr.wandb_log import WandbLog\n"
        "recipe = recipe_from_table({'wandb': {'project': 'p', 'mode': 'offline'}})\n"
        "log = WandbLog(Path(sys.argv[1]), recipe)\n"
        "log.log({'step': 1, 'loss': 0.25, 'nothing': None})\n"
        "log.close()\n"
    )
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            check=True,
            timeout=240,
            capture_output=True,
        )
    (name,) = {p.stem.removeprefix("run-") for p in tmp_path.glob("wandb/offline-*/*.wandb")}
    assert name == (tmp_path / "wandb.id").read_text()
    (first, *_) = sorted(tmp_path.glob("wandb/offline-*/*.wandb"))
    assert b"loss" in first.read_bytes()


def test_wandb_is_imported_only_where_it_is_used() -> None:
    code = "import sys, estr.run, estr.check, estr.wandb_log; print('wandb' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("table", "package", "said"),
    [
        ({"wandb": {"project": "p"}}, "wandb", r"pip install 'estr\[wandb\]'"),
        ({"lora": {"rank": 4}}, "peft", r"pip install 'estr\[lora\]'"),
        (
            {
                "trainer": {
                    "attention": "flash_attention_2",
                    "dtype": "bfloat16",
                    "device": "cuda:0",
                }
            },
            "flash_attn",
            "leave it at 'sdpa'",
        ),
    ],
)
def test_a_missing_package_is_named_before_compute(
    table: dict, package: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name)
    )
    with pytest.raises(ConfigError, match=said):
        check_packages(recipe_from_table(table))
    check_packages(Recipe())


def test_check_names_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name)
    )
    file = tmp_path / "r.toml"
    file.write_text('[wandb]\nproject = "p"\n')
    assert any("estr[wandb]" in error for error in check_recipe(file).errors)


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("engine", "gpu", "engine.device = 'gpu' is no device of torch"),
        ("trainer", "cuda:99", r"trainer.device = 'cuda:99': torch finds \d such devices here"),
    ],
)
def test_devices_that_are_not_there_are_named(key: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_devices(recipe_from_table({key: {"device": name}}))
    check_devices(Recipe())


def test_a_cluster_that_nobody_listens_for_is_named() -> None:
    recipe = recipe_from_table({"placement": "ray", "ray": {"address": "127.0.0.1:1"}})
    with pytest.raises(ConfigError, match=r"ray\.address = '127\.0\.0\.1:1': .*`ray start --head`"):
        check_devices(recipe)


def test_wandb_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="must be one of online, offline"):
        recipe_from_table({"wandb": {"mode": "dryrun"}})
