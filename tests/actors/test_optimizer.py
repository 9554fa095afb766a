"""Laws of actors/optimizer.py: the learning rate of each step, and optimizers by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.optimizer import make_optimizer, rate_share
from actors.trainer import TrainerConfig
from forge.errors import ConfigError


def shares(**config: Any) -> list[float]:
    cfg = TrainerConfig(steps=10, **config)
    return [rate_share(step, cfg) for step in range(1, 13)]


def test_a_constant_rate_is_constant_after_its_warm_up() -> None:
    assert shares() == [1.0] * 12
    assert shares(warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 9


def test_a_linear_rate_falls_in_equal_steps_to_its_share_and_stays_there() -> None:
    got = shares(schedule="linear", warmup_steps=2, min_lr_share=0.2)
    assert got == pytest.approx([0.5, 1.0, *(1.0 - 0.1 * n for n in range(1, 9)), 0.2, 0.2])


def test_a_cosine_is_halfway_in_the_middle_and_flat_at_both_ends() -> None:
    got = shares(schedule="cosine", min_lr_share=0.1)
    assert got[4] == pytest.approx(0.55)
    assert got[9:] == pytest.approx([0.1] * 3)
    assert got[0] > 0.97
    assert sorted(got, reverse=True) == got


def own(parameters: Any, cfg: TrainerConfig) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=cfg.lr)


def test_an_optimizer_is_one_of_ours_or_of_ones_own() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    adamw = make_optimizer([weight], TrainerConfig(lr=0.1, betas=[0.5, 0.6], weight_decay=0.3))
    assert isinstance(adamw, torch.optim.AdamW)
    assert {k: adamw.defaults[k] for k in ("lr", "betas", "weight_decay")} == {
        "lr": 0.1,
        "betas": (0.5, 0.6),
        "weight_decay": 0.3,
    }
    sgd = make_optimizer([weight], TrainerConfig(optimizer="sgd", lr=0.1, betas=[0.0, 0.6]))
    weight.grad = torch.ones(3)
    sgd.step()
    assert weight.tolist() == pytest.approx([0.9] * 3)
    assert isinstance(make_optimizer([weight], TrainerConfig(optimizer=f"{__name__}:own")), torch.optim.RMSprop)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"optimizer": "adamm"}, r"trainer\.optimizer is 'adamm', which is not registered; use one of adamw, sgd"),
        ({"schedule": "cosin"}, r"trainer\.schedule must be one of constant, linear, cosine, got cosin"),
        ({"min_lr_share": 1.5}, r"trainer\.min_lr_share must lie in \[0, 1\], got 1\.5"),
        ({"updates": 0}, r"trainer\.updates must be > 0, got 0"),
        ({"epochs": 0}, r"trainer\.epochs must be > 0, got 0"),
        ({"max_skipped": -1}, r"trainer\.max_skipped must be >= 0, got -1"),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TrainerConfig(**config).validate()
