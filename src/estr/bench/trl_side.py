"""TRL's side of `estr bench trl`, in the environment that has TRL.

python -m estr.bench.trl_side WORK.json FOUND.json

`GRPOTrainer` in the form that is best for it here: the whole batch in one `generate` (or, with
`continuous`, in transformers' continuous batching), old log-probs left out as aligned steps allow,
no reference model, and an asynchronous reward function in which all answers of a batch wait for
their grader at once. TRL's `tools` would make them wait one after the other: its loop calls the
tools of one completion at a time, and starts the next turns when the last of them has answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..config import read_options
from .trl_task import GradedOptions, GradedTask

_LONGEST_PROMPT = 64
_PAGE = 32


def measure(work: dict[str, Any]) -> dict[str, float]:
    """Train as `work` says (see `estr.bench.trl`); seconds of a step after the warm-up; CPU seconds
    of a step, mean length of answers and mean reward over all steps."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(work["threads"])
    task = GradedTask(read_options(GradedOptions, work["task"], "task"))
    lengths: list[int] = []
    outcomes: list[float] = []

    async def graded(
        completions: list[str], completion_ids: list[Any], index: list[int], **_: Any
    ) -> list[float]:
        golds = [task.gold("train", i)[0] for i in index]
        found = await asyncio.gather(*map(task.outcome, index, completions, golds))
        lengths.extend(map(len, completion_ids))
        outcomes.extend(found)
        return list(found)

    clock: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.append((time.perf_counter(), time.process_time()))

    indices = list(range(work["steps"] * work["groups"]))
    prompts = asyncio.run(_prompts(task, indices))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=_model(work["model"], work["stops"]),
            reward_funcs=graded,
            args=_config(work, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts, "index": indices}),
            processing_class=_tokenizer(work["model"]),
            callbacks=[Clock()],
        )
        trainer.train()
    begin, warm, end = clock[0], clock[work["warmup_steps"]], clock[-1]
    return {
        "step_s": (end[0] - warm[0]) / (work["steps"] - work["warmup_steps"]),
        "step_cpu_s": (end[1] - begin[1]) / work["steps"],
        "length": sum(lengths) / len(lengths),
        "outcome": sum(outcomes) / len(outcomes),
    }


def _config(work: dict[str, Any], folder: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work["groups"] * work["size"],
        num_generations=work["size"],
        max_completion_length=work["max_new_tokens"],
        max_steps=work["steps"],
        learning_rate=work["lr"],
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=work["continuous"],
        transformers_continuous_batching_config=_cache(work) if work["continuous"] else None,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def _cache(work: dict[str, Any]) -> dict[str, int]:
    """Room for the whole batch at its longest. Left to itself it takes nine tenths of the memory of
    the machine."""
    rows = work["groups"] * work["size"]
    return {
        "page_size": _PAGE,
        "num_blocks": rows * (1 + (_LONGEST_PROMPT + work["max_new_tokens"]) // _PAGE),
        "max_batch_tokens": rows * _LONGEST_PROMPT,
        "max_requests_per_batch": rows,
    }


async def _prompts(task: GradedTask, indices: list[int]) -> list[str]:
    return [await task.prompt("train", index) for index in indices]


def _model(folder: str, stops: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = stops
    return model


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(measure(asked)), encoding="utf-8")
