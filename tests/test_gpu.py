"""What only a CUDA device can show. Run with: pytest -m gpu"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from estr.checkpoint import restore_trainer, save_trainer
from estr.config import load_recipe
from estr.engine import Request
from estr.engines.local import LocalEngine
from estr.logprobs import token_statistics
from estr.metrics import read_metrics
from estr.models import load_model
from estr.run import train
from estr.trainer import Trainer
from estr.types import RolloutId, SamplingSettings, Segment
from estr.weights import MemoryWeightStore
from tiny import VOCAB, draw_groups, tiny_model, tiny_recipe

pytestmark = pytest.mark.gpu


def run_all(engine: LocalEngine, switch_to: dict[str, torch.Tensor] | None = None) -> list[Segment]:
    """Twelve requests of several lengths; new weights after the fifth step."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(2, 20)), np.int32) for _ in range(12)]
    for i, prompt in enumerate(prompts):
        engine.submit(Request(RolloutId(0, i, 0), prompt, SamplingSettings(), 24, len(prompt)))
    segments: dict[RolloutId, Segment] = {}
    step = 0
    while engine.num_running or engine.num_waiting:
        step += 1
        if switch_to is not None and step == 5:
            engine.begin_load(1, switch_to, "recompute")
        segments.update(engine.step())
    done = [segments[RolloutId(0, i, 0)] for i in range(12)]
    return [Segment.join([Segment.context(p), s]) for p, s in zip(prompts, done, strict=True)]


def test_every_token_is_rescored_by_its_own_version() -> None:
    models = [tiny_model(seed).cuda() for seed in (0, 1)]
    engine = LocalEngine(tiny_model(0).cuda(), max_batch=8)
    seen = set()
    for segment in run_all(engine, dict(models[1].named_parameters())):
        ids = torch.from_numpy(segment.token_ids).long().cuda()
        for version in (0, 1):
            here = np.flatnonzero(segment.sampled & (segment.versions == version))
            seen |= {version} if len(here) else set()
            with torch.no_grad():
                logits = models[version](ids[None]).logits[0, here - 1]
            again = token_statistics(logits, ids[here])
            for name in ("logprobs", "entropies", "gini"):
                recorded = getattr(segment, f"behavior_{name}")[here]
                np.testing.assert_allclose(getattr(again, name).cpu(), recorded, atol=1e-4)
    assert seen == {0, 1}


def test_gpu_and_cpu_draw_alike() -> None:
    there = run_all(LocalEngine(tiny_model(0).cuda(), max_batch=8))
    here = run_all(LocalEngine(tiny_model(0), max_batch=8))
    same = sum(
        a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(there, here, strict=True)
    )
    assert same >= 11, "only a draw within rounding of a border may differ"


def test_a_training_step_agrees_with_the_cpu() -> None:
    groups = draw_groups(tiny_model())
    results = {}
    for device in ("cpu", "cuda:0"):
        recipe = tiny_recipe(trainer={"device": device, "adam_eps": 1.0})
        trainer = Trainer(tiny_model().to(device), recipe, MemoryWeightStore())
        (step,) = trainer.train([groups])
        results[device] = (step.metrics.to_row(), trainer.master_state())
    for name, value in results["cpu"][1].items():
        torch.testing.assert_close(value, results["cuda:0"][1][name].cpu(), atol=1e-5, rtol=0)
    assert results["cuda:0"][0]["rho_mask"] == 0.0


def test_the_built_in_run_shares_one_gpu(tmp_path: Path) -> None:
    recipe = load_recipe(
        overrides=[
            "engine.device=cuda:0",
            "trainer.device=cuda:0",
            "steps=40",
            "eval.every=0",
            "eval.final_problems=512",
        ]
    )
    summary = train(recipe, runs=tmp_path)
    assert summary.steps == 40
    assert summary.intra_max > 0
    assert summary.final_accuracy > summary.start_accuracy + 0.2


def gpu_trainer(**table) -> Trainer:
    options = {"device": "cuda:0", "warmup_steps": 0, **table.pop("trainer", {})}
    return Trainer(tiny_model().cuda(), tiny_recipe(**table, trainer=options), MemoryWeightStore())


BF16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "table",
    [
        {"trainer": BF16},
        {"lora": {"rank": 4}},
        {"lora": {"rank": 4}, "trainer": {**BF16, "gradient_checkpointing": True}},
        {"kl": {"coefficient": 0.1, "estimator": "k3"}},
        {"kl": {"coefficient": 0.1, "place": "reward"}, "lora": {"rank": 4}},
    ],
    ids=["bf16", "lora", "lora-bf16-checkpointing", "kl", "kl-lora"],
)
def test_the_options_learn_on_the_gpu_and_go_on_bit_for_bit(table: dict, tmp_path: Path) -> None:
    straight, resumed = gpu_trainer(**table), gpu_trainer(**table)
    groups = draw_groups(tiny_model())
    for _ in range(3):
        straight.train([groups])
    save_trainer(straight, tmp_path)
    restore_trainer(resumed, tmp_path)
    losses = []
    for own in (straight, resumed):
        (result,) = own.train([groups])
        row = result.metrics.to_row()
        losses.append(row["loss"] - row.get("kl_loss", 0.0))
    assert losses[0] == losses[1] != 0.0
    for name, value in straight.master_state().items():
        assert torch.equal(value, resumed.master_state()[name]), name
    if "trainer" in table:
        return
    plain = tiny_model(seed=7).cuda()
    plain.load_state_dict(straight.store.fetch(straight.version))
    ids = torch.arange(10, device="cuda")[None] % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, straight.model(ids).logits, atol=1e-4, rtol=0)


def test_gradient_checkpointing_takes_less_memory() -> None:
    peaks, norms = [], []
    for checkpointing in (False, True):
        model = tiny_model(num_hidden_layers=8, hidden_size=256, intermediate_size=1024).cuda()
        options = {"device": "cuda:0", "gradient_checkpointing": checkpointing}
        own = Trainer(model, tiny_recipe(trainer=options), MemoryWeightStore())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (result,) = own.train([draw_groups(tiny_model(), num_groups=16, size=16)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        norms.append(result.metrics.to_row()["grad_norm"])
        del own, model
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert peaks[1] < 0.8 * peaks[0]


def test_flash_attention_2_agrees_with_sdpa(tmp_path: Path) -> None:
    pytest.importorskip("flash_attn")
    tiny_model(hidden_size=64).save_pretrained(tmp_path)
    ids = torch.arange(10, device="cuda")[None] % VOCAB
    results = []
    for attention in ("sdpa", "flash_attention_2"):
        model = load_model(tmp_path, dtype="bfloat16", device="cuda:0", attn=attention)
        with torch.no_grad():
            results.append(model(ids).logits.float())
    torch.testing.assert_close(*results, atol=0.1, rtol=0)


def test_two_ranks_on_two_gpus_are_one_trainer(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    rows = []
    for ranks in (1, 2):
        overrides = ["steps=2", "max_staleness=0", "eval.every=0", "eval.final_problems=8"]
        overrides += [f"trainer.ranks={ranks}", 'trainer.device="cuda:0"', f"name=of-{ranks}"]
        train(load_recipe(None, overrides), runs=tmp_path)
        rows.append(read_metrics(tmp_path / f"of-{ranks}" / "metrics.jsonl").records)
    first, second = (next(row for row in of if "loss" in row) for of in rows)
    for name in ("eligible_tokens", "loss", "grad_norm", "policy_entropy"):
        assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name
