"""TRL's `GRPOTrainer` at the work of the tiny preset: a program for the Python of a venv that has TRL.

    .venv-trl/bin/python apps/bench/peers/trl_grpo.py SETTINGS.json

SETTINGS.json is what `Settings` holds; the program writes the times and rewards of its steps to the file `out`.
Synchronous: generate with transformers, score, one optimizer step. TRL runs unmodified, with its own defaults
wherever the work does not depend on them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The work. `data` is a file of JSON lines with `prompt` and `answer`; TRL may write into `folder`."""

    model: str
    data: str
    folder: str
    out: str
    steps: int
    seed: int
    threads: int
    group_size: int
    batch_size: int
    max_new_tokens: int
    lr: float
    temperature: float
    top_p: float
    top_k: int
    clip_low: float
    clip_high: float
    clip_norm: float

    def write(self, path: Path) -> None:
        """As the program reads it."""
        path.write_text(json.dumps(asdict(self)))


def digits_reward(text: str, answer: str) -> float:
    """Fraction of digits in the right place, less 0.1 if the length is wrong; -0.1 to 1."""
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / len(answer) - 0.1 * (len(text) != len(answer))


def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """TRL's form of a reward function."""
    return [digits_reward(text, right) for text, right in zip(completions, answer, strict=True)]


def trainer_arguments(settings: Settings) -> dict[str, Any]:
    """The `GRPOConfig`: one generation and one optimizer step a batch, float32, nothing saved."""
    return {
        "output_dir": settings.folder,
        "seed": settings.seed,
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size,
        "gradient_accumulation_steps": 1,
        "num_generations": settings.group_size,
        "num_iterations": 1,
        "max_completion_length": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "beta": 0.0,
        "epsilon": settings.clip_low,
        "epsilon_high": settings.clip_high,
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": settings.clip_norm,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def train(settings: Settings) -> dict[str, Any]:
    """Runs the steps; returns the second at which each one ended, and what TRL logged of it."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    torch.set_num_threads(settings.threads)
    rows = [json.loads(line) for line in Path(settings.data).read_text().splitlines()]
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(time.monotonic())

    trainer = GRPOTrainer(
        model=settings.model,
        reward_funcs=score,
        args=GRPOConfig(**trainer_arguments(settings)),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    begin = time.monotonic()
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "stamps": [stamp - begin for stamp in stamps],
        "rewards": [float(entry["reward"]) for entry in logged],
        "tokens_per_episode": [float(entry["completions/mean_length"]) for entry in logged],
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")},
    }


def main() -> None:
    """The command line."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    Path(settings.out).write_text(json.dumps(train(settings)))


if __name__ == "__main__":
    main()
