"""The training step of TRL's `GRPOTrainer` on given episodes: a program for the Python of a venv that has TRL.

    .venv-trl/bin/python apps/bench/peers/trl_step.py SETTINGS.json

SETTINGS.json is what `Settings` holds. Generation is left out: the trainer is handed its prompts and completions in the
form in which it keeps them, padded to the longest, and does everything else as it is.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The work. `data` is a JSON list of `prompt` and `completion` (token ids) and `advantage`."""

    model: str
    data: str
    folder: str
    out: str
    steps: int
    episodes_per_pass: int
    ranks: int = 1

    def write(self, path: Path) -> None:
        """As the program reads it."""
        path.write_text(json.dumps(asdict(self)))


def passes(episodes: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """What `_prepare_inputs` returns for each pass: prompts padded left, completions right, all to the longest."""
    import torch

    longest_prompt = max(len(one["prompt"]) for one in episodes)
    longest = max(len(one["completion"]) for one in episodes)
    columns: dict[str, list[list[int]]] = {
        "prompt_ids": [],
        "prompt_mask": [],
        "completion_ids": [],
        "completion_mask": [],
    }
    for one in episodes:
        left, right = longest_prompt - len(one["prompt"]), longest - len(one["completion"])
        columns["prompt_ids"].append([0] * left + one["prompt"])
        columns["prompt_mask"].append([0] * left + [1] * len(one["prompt"]))
        columns["completion_ids"].append(one["completion"] + [0] * right)
        columns["completion_mask"].append([1] * len(one["completion"]) + [0] * right)
    tensors = {key: torch.tensor(rows) for key, rows in columns.items()}
    tensors["advantages"] = torch.tensor([one["advantage"] for one in episodes])
    total = tensors["completion_mask"].sum()
    starts = range(0, len(episodes), size)
    return [{key: x[n : n + size] for key, x in tensors.items()} | {"num_items_in_batch": total} for n in starts]


def train(settings: Settings) -> dict[str, Any]:
    """The median step in seconds, and the peak memory in bytes."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    torch.set_num_threads(1)
    episodes = json.loads(Path(settings.data).read_text())
    prepared = passes(episodes, settings.episodes_per_pass)
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(time.monotonic())

    class Given(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return prepared[self._step % len(prepared)]

        def log(self, *_: Any, **__: Any) -> None:
            """Its tables are of generations, of which there are none."""

    arguments = {
        "output_dir": settings.folder,
        "max_steps": settings.steps + 1,
        "per_device_train_batch_size": settings.episodes_per_pass,
        "gradient_accumulation_steps": len(prepared),
        "num_generations": 2,
        "beta": 0.0,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer = Given(
        model=settings.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": "0"}] * len(episodes)),
        callbacks=[Clock()],
    )
    trainer.train()
    return {
        "step_s": statistics.median(later - earlier for earlier, later in pairwise(stamps)),
        "tokens": sum(len(one["prompt"]) + len(one["completion"]) for one in episodes),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def main() -> None:
    """The command line."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    Path(settings.out).write_text(json.dumps(train(settings)))


if __name__ == "__main__":
    main()
