"""Losses of pairs: what a preference between two answers to one prompt costs. Pure functions.

Rows 2i and 2i + 1 are the chosen and the rejected episode of pair i; `needs(together=2)` keeps them in one pass.
Or the rewards are scalars, one for an answer, and the model that gives them is trained (`bradley_terry`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from forge.errors import ConfigError, SchemaError
from forge.loss_input import LossInput, TokenLoss, needs

if TYPE_CHECKING:
    from forge.loss_config import LossConfig

BETA = 0.1
"""DPO's beta where loss.params has none."""
_PARAMS = ("beta", "label_smoothing")


@needs(reference=True, together=2)
def dpo(x: LossInput, cfg: LossConfig) -> TokenLoss:
    """`-log sigmoid(m)` for `m = beta (g_chosen - g_rejected)`, `g = sum of policy - ref` (Rafailov et al. 2023).

    With label smoothing e, the chance that a label is wrong: `-(1 - e) log sigmoid(m) - e log sigmoid(-m)` (Mitchell
    2023). Each row carries the loss of its pair, spread evenly over its policy tokens: seq_mean_token_sum makes of that
    the mean over pairs. Nothing is asked about who wrote the answers. `loss.params` takes beta and label_smoothing.
    """
    beta, smoothing = dpo_params(cfg.params)
    ref = x.need("ref_logprobs", "loss.name dpo measures the policy against them")
    gains = (x.policy_logprobs - ref).sum(dim=1)
    margin = beta * _difference(gains)
    cost = -(1.0 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    share = _to_rows(cost) / x.loss_mask.sum(dim=1).clamp(min=1)
    metrics = {"extra/pair_margin": margin, "extra/pair_accuracy": margin > 0}
    metrics |= {"extra/chosen_gain": gains[0::2], "extra/rejected_gain": gains[1::2]}
    return share[:, None].expand_as(x.loss_mask), {name: _to_rows(value) for name, value in metrics.items()}


def bradley_terry(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`-log sigmoid(s_chosen - s_rejected)` and whether the former is larger, `[2P]` -> twice `[P]`.

    Bradley and Terry 1952; the loss of reward models since Ouyang et al. 2022.
    """
    margin = _difference(scores)
    return -logsigmoid(margin), margin > 0


def dpo_params(params: dict[str, float]) -> tuple[float, float]:
    """beta and label_smoothing. Raises ConfigError for values out of range, and for names that dpo does not read."""
    for name in params:
        if name not in _PARAMS:
            raise ConfigError(
                f"loss.params has {name!r}, which loss dpo does not read; it reads {' and '.join(_PARAMS)}"
            )
    beta, smoothing = params.get("beta", BETA), params.get("label_smoothing", 0.0)
    if not 0.0 < beta < math.inf:
        raise ConfigError(f"loss.params beta must be > 0, got {beta}; {BETA} is usual")
    if not 0.0 <= smoothing < 0.5:
        raise ConfigError(f"loss.params label_smoothing must lie in [0, 0.5), got {smoothing}; 0 trusts every label")
    return beta, smoothing


def check_dpo(cfg: LossConfig) -> None:
    """Raises ConfigError for what else the section says and a loss of pairs cannot do."""
    dpo_params(cfg.params)
    if cfg.aggregation != "seq_mean_token_sum":
        raise ConfigError(
            f"loss.aggregation is {cfg.aggregation} with loss.name dpo, whose tokens share out the loss of their pair: "
            "only seq_mean_token_sum adds it up again; use that"
        )
    if cfg.correction != "none" or cfg.per_token:
        raise ConfigError(
            f"loss.correction is {cfg.correction}, loss.token_advantages {cfg.token_advantages}, but loss.name dpo "
            "weighs whole pairs and reads no advantage; use none and episode"
        )


def _difference(values: Tensor) -> Tensor:
    if values.shape[0] % 2:
        raise SchemaError(
            f"{values.shape[0]} rows are no pairs; rows 2i and 2i + 1 must be a chosen and a rejected one"
        )
    return values[0::2] - values[1::2]


def _to_rows(of_pairs: Tensor) -> Tensor:
    """`[P]` -> `[2P]`."""
    return torch.repeat_interleave(of_pairs, 2)
