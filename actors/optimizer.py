"""What moves the weights: an optimizer of torch by its name, and the learning rate of each step; pure.

The rate is a function of the step alone, so that a resume needs no state of a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from forge.registry import lookup

if TYPE_CHECKING:
    from actors.trainer import TrainerConfig

Parameters = Sequence[torch.nn.Parameter]


def adamw(parameters: Parameters, cfg: TrainerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019)."""
    betas = (cfg.betas[0], cfg.betas[1])
    return torch.optim.AdamW(parameters, lr=cfg.lr, betas=betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True)


def sgd(parameters: Parameters, cfg: TrainerConfig) -> torch.optim.Optimizer:
    """Gradient descent; the first beta is its momentum."""
    return torch.optim.SGD(parameters, lr=cfg.lr, momentum=cfg.betas[0], weight_decay=cfg.weight_decay, fused=True)


OPTIMIZERS: dict[str, Callable[[Parameters, TrainerConfig], torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd}
"""What `trainer.optimizer` may name."""


def make_optimizer(parameters: Parameters, cfg: TrainerConfig) -> torch.optim.Optimizer:
    """The optimizer that `cfg` names. Raises ConfigError for an unknown name."""
    return lookup(cfg.optimizer, OPTIMIZERS, "trainer.optimizer")(parameters, cfg)


def rate_share(step: int, cfg: TrainerConfig) -> float:
    """The share of `cfg.lr` that `step` trains with, counted from 1.

    It rises linearly from 0 to 1 over `warmup_steps`, then falls along `schedule` to `min_lr_share` at the last step.
    """
    if step <= cfg.warmup_steps:
        return step / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    done = min(1.0, (step - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps))
    left = 1.0 - done if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.min_lr_share + (1.0 - cfg.min_lr_share) * left
