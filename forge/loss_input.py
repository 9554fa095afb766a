"""What a loss may read, and what it gives back.

A loss sees everything as `[B, T]`, at least float32, and 0 outside the mask, so it need not think of padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from forge.errors import SchemaError

TokenLoss: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""Loss per token `[B, T]`, and metrics: per token `[B, T]` for means over policy tokens, or per episode `[B]`."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Needs:
    """What a loss asks of those who call it."""

    reference: bool = False
    """Log-probs under the frozen reference, whatever the KL weight."""
    together: int = 1
    """So many episodes in a row belong together: they must be in one pass, hence on one rank."""


def needs(*, reference: bool = False, together: int = 1) -> Callable[[F], F]:
    """Says of the loss below it what it needs, a user's own too."""

    def mark(loss: F) -> F:
        loss.__dict__["needs"] = Needs(reference, together)
        return loss

    return mark


def needs_of(loss: Callable[..., Any]) -> Needs:
    """What was said of `loss`; nothing where nothing was."""
    found: Needs = getattr(loss, "needs", Needs())
    return found


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """What a loss may read. Fields to come are optional, so a loss reads by name and keeps working.

    Inside a loss function everything is `[B, T]`, at least float32, and 0 outside `loss_mask`.
    """

    policy_logprobs: Tensor
    """`[B, T]`, under the weights being trained; carries the gradient."""
    behavior_logprobs: Tensor
    """`[B, T]`, as recorded when the token was sampled."""
    loss_mask: Tensor
    """bool `[B, T]`, True where the policy itself produced the token."""
    advantages: Tensor
    """`[B]` per episode or `[B, T]` per token; `[B, T]` inside a loss function."""
    ref_logprobs: Tensor | None = None
    """`[B, T]`, under the frozen reference; needed when kl_weight > 0."""
    entropy: Tensor | None = None
    """`[B, T]` nats, of the policy's distribution at each token; for metrics only."""
    proximal_logprobs: Tensor | None = None
    """`[B, T]`, under the trainer's weights at the start of the step; for corrections and decoupled_ppo."""
    token_versions: Tensor | None = None
    """int64 `[B, T]`, the policy version that sampled each token; for metrics only."""
    policy_version: int | None = None
    """The trainer's version at the start of the step; for metrics only."""

    def masked(self) -> Self:
        """A copy that is 0 outside the mask, whatever stood there (NaN included). Raises SchemaError for shapes."""
        mask = self.loss_mask
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise SchemaError(f"loss_mask is {mask.dtype} {list(mask.shape)}, expected bool [B, T]")
        clean: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if name != "loss_mask" and isinstance(value, Tensor):
                clean[name] = _blank(name, value, mask)
        return replace(self, **clean)

    def need(self, name: str, why: str) -> Tensor:
        """The optional field `name`. Raises SchemaError, saying `why` it is needed, when it is None."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise SchemaError(f"{name} is missing; {why}")
        return value


def _blank(name: str, value: Tensor, mask: Tensor) -> Tensor:
    if name == "advantages" and value.shape == mask.shape[:1]:
        value = value[:, None].expand_as(mask)
    if value.shape != mask.shape:
        raise SchemaError(f"{name} has shape {list(value.shape)}, loss_mask {list(mask.shape)}; make them equal")
    if value.is_floating_point():
        value = value.to(torch.promote_types(value.dtype, torch.float32))
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype, device=value.device))
