"""Logits in blocks of bounded size, and their way back: what every computation of log-probs shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


class HeadGradients:
    """The gradients of hidden states, weight and bias `wanted`, added up over blocks of gradients of logits."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], dtype: torch.dtype
    ) -> None:
        self._of, self._bias_dtype = (hidden, weight), None if bias is None else bias.dtype
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        # Many chunks are added up: in float32 even when the head is bfloat16.
        self._weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if wanted[2] and bias is not None else None

    def add(self, span: slice, block: Tensor) -> None:
        """`block` `[C, V]` is the gradient of the logits of the rows `span`."""
        hidden, weight = self._of
        if self._bias is not None:
            self._bias += block.sum(dim=0)
        block = block.to(weight.dtype)
        if self._hidden is not None:
            torch.mm(block, weight, out=self._hidden[span])
        if self._weight is not None:
            _add_product(self._weight, block, hidden[span])

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias, in their own dtypes; None for what is not wanted."""
        weight = None if self._weight is None else self._weight.to(self._of[1].dtype)
        return self._hidden, weight, None if self._bias is None else self._bias.to(self._bias_dtype)


def _add_product(total: Tensor, block: Tensor, hidden: Tensor) -> None:
    """`total += block^T hidden`, without a temporary `[V, D]` where the dtypes allow it."""
    if total.dtype == block.dtype:
        total.addmm_(block.T, hidden)
    else:
        total += block.T @ hidden
