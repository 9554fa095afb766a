"""Losses and advantages against the functions of TRL and TorchRL, where these can be imported.

Each has a virtual environment of its own, since their pins differ from ours (apps/bench/peers/trl.txt, torchrl.txt):

    .venv-trl/bin/pip install pytest pytest-timeout
    .venv-trl/bin/python -m pytest --noconftest tests/forge/test_peers.py
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_cases import make_config, random_input, rows_of, value_and_grad
from torch import Tensor

from forge.losses import LossInput
from forge.token_advantages import TokenRewards, gae

if not any(importlib.util.find_spec(peer) for peer in ("trl", "torchrl")):
    pytest.skip("neither TRL nor TorchRL is installed", allow_module_level=True)

SEEDS = range(10)
LOW, HIGH, NORM = 0.2, 0.28, 12


def inputs(seed: int, *, spread: float = 0.3) -> LossInput:
    """Ragged episodes with holes in their masks, both signs of the advantage; each has a token."""
    x = random_input(8, 24, seed=seed, spread=spread)
    return rows_of(x, x.loss_mask.any(dim=1).nonzero()[:, 0].tolist())


def _same(value: Tensor, **_: Any) -> Tensor:
    return value


def compare(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-9)


TRL_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "token mean": ("token_mean", {}, {"loss_type": "bnpo"}),
    "DAPO": ("token_mean", {}, {"loss_type": "dapo"}),
    "sequence mean": ("seq_mean_token_mean", {}, {"loss_type": "grpo"}),
    "Dr. GRPO": ("seq_mean_token_sum_norm", {}, {"loss_type": "dr_grpo"}),
    "GSPO": (
        "seq_mean_token_mean",
        {"name": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "CISPO": ("token_mean", {"name": "cispo", "clip_low": 1.0}, {"loss_type": "cispo", "epsilon_high": 1 + HIGH}),
    "KL k3": ("token_mean", {"kl_weight": 0.1, "kl_estimator": "k3"}, {"loss_type": "bnpo", "beta": 0.1}),
    "TIS": (
        "token_mean",
        {"name": "decoupled_ppo", "weight_high": 2.0, "weight_over": "clamp"},
        {"loss_type": "bnpo", "use_vllm": True},
    ),
}


def trl_loss(x: LossInput, **options: Any) -> tuple[float, Tensor]:
    """TRL's loss of one micro-batch, called on a stand-in for its trainer; value and gradient."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    leaf = x.policy_logprobs.detach().clone().requires_grad_()
    mask = x.loss_mask.to(leaf.dtype)
    settings: dict[str, Any] = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": NORM,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, gather=_same, reduce=_same),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
    }
    ids = torch.zeros_like(x.loss_mask, dtype=torch.int64)
    old = x.behavior_logprobs
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": x.advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": x.ref_logprobs,
        "num_items_in_batch": mask.sum(),
    }
    if options.get("use_vllm"):
        assert x.proximal_logprobs is not None
        batch["old_per_token_logps"] = x.proximal_logprobs
        batch["importance_sampling_ratio"] = (x.proximal_logprobs - old).exp().clamp(max=2.0)
    loss = trainer._compute_loss(SimpleNamespace(**{**settings, **options}), None, batch)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


@pytest.mark.parametrize("case", TRL_CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_and_its_gradient_are_those_of_trl(case: str, seed: int) -> None:
    aggregation, changes, options = TRL_CASES[case]
    x = inputs(seed)
    cfg = make_config(aggregation, **{"clip_low": LOW, "clip_high": HIGH, "norm_length": NORM, **changes})
    compare(value_and_grad(x, cfg), trl_loss(x, **options))


@pytest.mark.parametrize("clip", [(0.2, 0.2), (LOW, HIGH)])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_s_clip_and_its_gradient_are_those_of_torchrl(clip: tuple[float, float], seed: int) -> None:
    torchrl = pytest.importorskip("torchrl.objectives.llm")
    x = inputs(seed)
    leaf = x.policy_logprobs.detach().clone().requires_grad_()
    bounds = SimpleNamespace(_clip_bounds=(torch.tensor(-clip[0]).log1p(), torch.tensor(clip[1]).log1p()))
    gap = torch.where(x.loss_mask, leaf - x.behavior_logprobs, 0.0)
    per_token, _ = torchrl.GRPOLoss._compute_policy_objective(bounds, gap, x.advantages[:, None])
    mean = SimpleNamespace(aggregation="prompt_mean", reduction="mean")
    loss = torchrl.GRPOLoss._aggregate_loss_value(mean, per_token[..., None], x.loss_mask)
    loss.sum().backward()
    assert leaf.grad is not None
    cfg = make_config("seq_mean_token_mean", clip_low=clip[0], clip_high=clip[1])
    ours = value_and_grad(x, cfg)
    assert ours[0] == pytest.approx(loss.item(), abs=1e-7)  # its bounds are float32
    torch.testing.assert_close(ours[1], leaf.grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_that_of_torchrl(seed: int) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn((2, 4, 11), generator=generator, dtype=torch.float64)
    done = torch.zeros((4, 11, 1), dtype=torch.bool)
    done[:, -1] = True
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    theirs, _ = functional.generalized_advantage_estimate(
        0.99, 0.95, values[..., None], following[..., None], rewards[..., None], done
    )
    mask = torch.ones((4, 11), dtype=torch.bool)
    ours = gae(TokenRewards(rewards=rewards, loss_mask=mask, values=values, gamma=0.99, lam=0.95))
    torch.testing.assert_close(ours, theirs[..., 0], rtol=0, atol=2e-6)  # it discounts in float32


def test_the_comparison_would_notice_another_clip() -> None:
    x = inputs(0)
    theirs = trl_loss(x, loss_type="bnpo")
    with pytest.raises(AssertionError):
        compare(value_and_grad(x, make_config("token_mean", clip_low=LOW, clip_high=HIGH + 0.01)), theirs)
    with pytest.raises(AssertionError):
        compare(value_and_grad(replace(x, advantages=-x.advantages), make_config("token_mean")), theirs)
