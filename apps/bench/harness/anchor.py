"""Fixed work, timed beside every round: how fast the machine was just then.

Figures of two runs, or of two rounds, compare only as far as their anchors agree.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.table import Table

from actors.model import load_hf
from apps.bench.harness.result import Column, rows_table

_COPIED_BYTES = 64 << 20
_SHAPE = (64, 18)


class Anchor:
    """Forward and backward of `model` over 64 sequences of 18 tokens, and a memcpy of 64 MiB, on one thread."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self._hf = load_hf(model, torch.float32)
        self._tokens = torch.randint(10, 60, _SHAPE, generator=torch.Generator().manual_seed(0))
        self._source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)

    def measure(self) -> dict[str, float]:
        """Medians in ms, and the load of the machine over the last minute."""
        return {
            "forward_backward_ms": round(_median_ms(self._forward_backward, 5), 2),
            "memcpy_64mib_ms": round(_median_ms(lambda: self._target.copy_(self._source), 9), 2),
            "load": round(os.getloadavg()[0], 2),
        }

    def _forward_backward(self) -> None:
        self._hf(input_ids=self._tokens, labels=self._tokens).loss.backward()
        self._hf.zero_grad(set_to_none=True)


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def anchor_table(anchors: Sequence[Mapping[str, float]]) -> Table:
    """A line a round, of what `measure` returned."""
    rows = [{"round": number, **anchor} for number, anchor in enumerate(anchors, 1)]
    columns = (
        Column("round", "round"),
        Column("forward + backward ms", "forward_backward_ms", ".1f"),
        Column("memcpy 64 MiB ms", "memcpy_64mib_ms", ".1f"),
        Column("load", "load", ".1f"),
    )
    return rows_table("anchors: fixed work before each round", rows, columns)
