"""Inputs with golden numbers, random ones with every field, and a step of one micro-batch. For the tests of losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.losses import AGGREGATIONS, LossConfig, LossInput, LossOutput, compute_loss, denominator

GOLDEN = Path(__file__).parent / "golden"
ALGORITHMS = json.loads((GOLDEN / "algorithms.json").read_text())
GRADIENTS = json.loads((GOLDEN / "losses_and_gradients.json").read_text())


# Key of a golden number, and the loss that has to give it: aggregation, options, and whether three policies take part.
Case = tuple[str, Any, dict[str, Any], bool]
WITH_VALUE: list[Case] = [
    *(
        (f"ppo_clip(.2,.28,c=3)/{name.replace('_', '-')}", name, {"dual_clip": 3.0, "norm_length": 5}, False)
        for name in AGGREGATIONS
    ),
    ("gspo(3e-4,4e-4)", "seq_mean_token_mean", {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, False),
    ("cispo(low=1,high=4)", "token_mean", {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0}, False),
    ("ppo*tis_token(C=2) token-mean", "token_mean", {"correction": "tis", "clip_high": 0.2}, True),
    ("ppo*icepop(.5,5) token-mean", "token_mean", {"correction": "icepop", "clip_high": 0.2}, True),
    (
        "decoupled_ppo(eps=.2,cap=1.2,mask)",
        "token_mean",
        {"name": "decoupled_ppo", "clip_high": 0.2, "weight_high": 1.2},
        True,
    ),
    (
        "decoupled_ppo(eps=.2,cap=1.2,clamp)",
        "token_mean",
        {"name": "decoupled_ppo", "clip_high": 0.2, "weight_high": 1.2, "weight_over": "clamp"},
        True,
    ),
]
"""Of algorithms.json."""
WITH_GRADIENT: list[Case] = [
    *(
        (f"ppo_{name.replace('_', '-')}", name, {}, False)
        for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
    ),
    ("ppo_token-mean(bnpo)", "token_mean", {}, False),
    ("gspo", "seq_mean_token_mean", {"name": "gspo"}, False),
    ("gspo_token-mean", "token_mean", {"name": "gspo"}, False),
    ("cispo", "token_mean", {"name": "cispo"}, False),
    ("cispo_upper_only", "token_mean", {"name": "cispo", "clip_low": 1.0}, False),
    ("ppo_tis2", "token_mean", {"correction": "tis"}, True),
    ("ppo_tis2", "token_mean", {"name": "decoupled_ppo", "weight_high": 2.0, "weight_over": "clamp"}, True),
    ("ppo_mask2", "token_mean", {"name": "decoupled_ppo", "weight_high": 1.05}, True),
    ("ppo_mask2", "token_mean", {"correction": "icepop", "weight_low": 0.0, "weight_high": 1.05}, True),
]
"""Of losses_and_gradients.json."""


def make_config(aggregation: Any = "token_mean", **changes: Any) -> LossConfig:
    return LossConfig(**{"aggregation": aggregation, "norm_length": 12, **changes})


def run(x: LossInput, cfg: LossConfig) -> LossOutput:
    return compute_loss(x, cfg, denominator(x.loss_mask, cfg.aggregation))


def value_and_grad(x: LossInput, cfg: LossConfig) -> tuple[float, Tensor]:
    leaf = x.policy_logprobs.detach().clone().requires_grad_()
    loss = run(replace(x, policy_logprobs=leaf), cfg).loss
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def assert_golden(got: tuple[float, Tensor], key: str) -> None:
    expected = GRADIENTS["expected"][key]
    assert got[0] == pytest.approx(expected["value"], abs=1e-6)
    torch.testing.assert_close(got[1], torch.tensor(expected["grad_new"]).to(got[1]), rtol=0, atol=1e-6)


def golden_tensors(data: Any) -> dict[str, Tensor]:
    two_dimensional = {k: v for k, v in data["inputs"].items() if isinstance(v[0], list)}
    return {k: torch.tensor(v, dtype=torch.float64) for k, v in two_dimensional.items()}


def forward_input(*, three_policies: bool = False) -> LossInput:
    """Inputs of algorithms.json: masks with holes, a group of three, of two and of one (raw reward).

    With three policies the golden old is the proximal one, and its rollout the one that sampled.
    """
    t = golden_tensors(ALGORITHMS)
    return LossInput(
        policy_logprobs=t["logp"],
        behavior_logprobs=t["rollout_logp"] if three_policies else t["old_logp"],
        proximal_logprobs=t["old_logp"] if three_policies else None,
        ref_logprobs=t["ref_logp"],
        loss_mask=t["mask"].bool(),
        advantages=torch.tensor(ALGORITHMS["outputs"]["grpo_adv"], dtype=torch.float64),
    )


def gradient_input(*, three_policies: bool = False) -> LossInput:
    """Inputs of losses_and_gradients.json: 16 ragged episodes in 4 groups, one without variance."""
    t = golden_tensors(GRADIENTS)
    return LossInput(
        policy_logprobs=t["new"],
        behavior_logprobs=t["roll"] if three_policies else t["old"],
        proximal_logprobs=t["old"] if three_policies else None,
        ref_logprobs=t["roll"],
        loss_mask=t["mask"].bool(),
        advantages=torch.tensor(GRADIENTS["expected"]["adv_grpo"]["value"], dtype=torch.float64),
    )


def kl_input() -> LossInput:
    """Without advantage the policy term vanishes and the KL term is what is left."""
    x = gradient_input()
    return replace(x, advantages=torch.zeros(16, dtype=torch.float64), ref_logprobs=x.behavior_logprobs)


def random_input(rows: int = 8, width: int = 50, seed: int = 0, spread: float = 0.5) -> LossInput:
    """Very ragged episodes with holes in their masks, every field given; the last row holds nothing to train.

    `spread` is how far apart the policies are, in nats.
    """
    g = torch.Generator().manual_seed(seed)
    draw = torch.randn((6, rows, width), generator=g, dtype=torch.float64)
    lengths = torch.tensor([2, width, 5, 11, 30, 3, 17, 0] * (rows // 8))
    mask = (torch.arange(width) < lengths[:, None]) & (torch.rand((rows, width), generator=g) > 0.2)
    mask[:, 0] = False
    policy = -draw[0].abs() - 0.3
    return LossInput(
        policy_logprobs=policy,
        behavior_logprobs=policy + spread * draw[1],
        proximal_logprobs=policy + spread * 0.6 * draw[1] + spread * 0.4 * draw[3],
        ref_logprobs=policy + spread * draw[2],
        loss_mask=mask,
        advantages=torch.randn(rows, generator=g, dtype=torch.float64),
        token_versions=torch.randint(3, 8, (rows, width), generator=g),
        policy_version=7,
    )


def rows_of(x: LossInput, rows: slice | list[int]) -> LossInput:
    named: dict[str, Any] = {k: v[rows] for k, v in vars(x).items() if isinstance(v, Tensor)}
    return replace(x, **named)
