"""From what episodes did to an advantage of each token, where the algorithm tells tokens apart.

    advantages [b] --spread--> rewards [b, t] --KL penalty--> returns or GAE --whitened over all ranks--> [b, t]

Runs before the first pass of a step, on the rank's whole share, since whitening looks at the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from actors.packing import MicroBatch
from forge.errors import SchemaError
from forge.losses import LossConfig
from forge.registry import lookup
from forge.token_advantages import (
    TOKEN_ADVANTAGES,
    TokenRewards,
    kl_penalised,
    merge_moments,
    moments,
    spread,
    whiten,
)

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""A tensor of this rank -> those of all data-parallel ranks, in one order."""


def token_advantages(cuts: Sequence[MicroBatch], cfg: LossConfig, gather: Gather) -> list[MicroBatch]:
    """The passes with `advantages` `[b, t]`, by `cfg.token_advantages`; all ranks call it at the same time.

    Where they have values, with `returns` too, see `with_returns`.

    Raises SchemaError where it needs what the batch lacks: values, reference log-probs.
    """
    if not cfg.per_token:
        return list(cuts)
    raw = [raw_advantages(cut, cfg) for cut in cuts]
    own = [moments(values, cut.loss_mask) for cut, values in zip(cuts, raw, strict=True)]
    of_batch = merge_moments(gather(merge_moments(own) if own else torch.zeros(3, dtype=torch.float64)))
    pairs = zip(cuts, raw, strict=True)
    return [replace(_with(cut, values), advantages=whiten(values, cut.loss_mask, of_batch)) for cut, values in pairs]


def with_returns(cut: MicroBatch, cfg: LossConfig) -> MicroBatch:
    """One pass with what a critic learns, `returns` `[b, t]`: GAE before whitening, plus the values it came from."""
    return _with(cut, raw_advantages(cut, cfg))


def _with(cut: MicroBatch, raw: torch.Tensor) -> MicroBatch:
    return cut if cut.values is None else replace(cut, returns=raw + cut.values)


def raw_advantages(cut: MicroBatch, cfg: LossConfig) -> torch.Tensor:
    """The same for one pass before whitening, `[b, t]`."""
    rewards = spread(cut.advantages, cut.loss_mask, cut.token_rewards)
    if cfg.kl_weight and cfg.kl_in == "reward":
        if cut.ref_logprobs is None:
            raise SchemaError("ref_logprobs is missing; loss.kl_in reward needs it, or loss.kl_weight 0")
        rewards = kl_penalised(
            rewards,
            cut.loss_mask,
            cut.behavior_logprobs,
            cut.ref_logprobs,
            weight=cfg.kl_weight,
            estimator=cfg.kl_estimator,
        )
    function = lookup(cfg.token_advantages, TOKEN_ADVANTAGES, "loss.token_advantages")
    return function(
        TokenRewards(rewards=rewards, loss_mask=cut.loss_mask, values=cut.values, gamma=cfg.gamma, lam=cfg.lam)
    )
