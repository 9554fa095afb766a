"""Logits in blocks of bounded size, and their way back: what every computation of log-probs shares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A fresh `[C, V]` block, at least float32, that the caller may overwrite."""
    with torch.autocast(hidden.device.type, enabled=False):  # forward and backward must agree
        block = F.linear(hidden, weight, bias)
    return block.to(torch.promote_types(block.dtype, torch.float32))


def add_product(total: Tensor, block: Tensor, hidden: Tensor) -> None:
    """`total += block^T hidden`, without a temporary `[V, D]` where the dtypes allow it."""
    if total.dtype == block.dtype:
        total.addmm_(block.T, hidden)
    else:
        total += block.T @ hidden
