"""What a transport's halves are given, and the memory that they share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.layout import Box, Layout

STAMP_BYTES = 64


@dataclass(frozen=True)
class SenderContext:
    """One trainer rank: its layout and its snapshot buffers (uint8 `[layout.nbytes]` each), and its delta payload."""

    rank: int
    world: int
    layout: Layout
    sources: Sequence[Layout]  # of every rank; its own at `rank`
    buffers: Sequence[torch.Tensor]
    payload: torch.Tensor | None
    deadline_s: float
    folder: str = ""


@dataclass(frozen=True)
class PullerContext:
    """One worker of `peer`: the full layout, every trainer rank's layout and link, and the boxes that it needs."""

    peer: str
    tp_rank: int
    tp_world: int
    layout: Layout
    sources: Sequence[Layout]
    needed: Sequence[Mapping[str, Box]]  # of every worker of this peer; its own at `tp_rank`
    links: Sequence[Any]
    device: torch.device
    deadline_s: float


def make_image(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Memory for a model in the full layout, uint8 `[nbytes]`; on the host only pages that are written exist."""
    if device is not None and device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # Private: of a shared mapping even a page that is only read would exist.
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def stamp(buffer: torch.Tensor, data_nbytes: int, slot: int) -> torch.Tensor:
    """Where a trainer rank writes, behind the data, which version a buffer holds: int64 scalar, -1 while it writes."""
    at = data_nbytes + STAMP_BYTES * slot
    return buffer[at : at + 8].view(torch.int64)[0]
