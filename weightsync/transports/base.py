"""What every transport is: a sender on each trainer rank, and a puller in each generator worker.

`pull` runs in a thread of the worker while it decodes, `send` in a thread of the trainer while it trains.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weightsync.layout import Box, Layout
from weightsync.offer import DELTA as DELTA
from weightsync.offer import FULL as FULL
from weightsync.offer import Endpoint as Endpoint
from weightsync.offer import Offer as Offer
from weightsync.offer import RankOffer as RankOffer

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


class Sender:
    """A trainer rank's half."""

    name: ClassVar[str]

    @staticmethod
    def available(same_host: bool, device: str) -> str:
        """Empty when it can be used between these two sides; else why not."""
        raise NotImplementedError

    def link(self) -> Any:
        """What the pullers of all peers need to reach this rank, in plain values."""
        raise NotImplementedError

    def meet(self, links: Sequence[Any]) -> None:
        """All ranks' links, once, before any peer."""

    def add_peer(self, peer: str, needed: Sequence[Mapping[str, Box]]) -> None:
        """A replica that will receive: what each of its workers needs. Again for one that came back."""

    def prepare(self, offer: Offer) -> dict[str, Any]:
        """Makes the version reachable, in the background; the result joins `offer.where`."""
        return {}

    def send(self, peer: str, offer: Offer) -> None:
        """Pushes the version to one peer; pull-only transports have nothing to do."""

    def close(self) -> None: ...


class Puller:
    """A generator worker's half."""

    def pull(self, offer: Offer) -> torch.Tensor:
        """A uint8 tensor in the full layout in which all that this worker needs of the version is in place."""
        raise NotImplementedError

    def pull_payloads(self, offer: Offer) -> list[torch.Tensor]:
        """The delta payload of every trainer rank, uint8 `[offer.nbytes[rank]]` each."""
        raise NotImplementedError

    def interrupt(self, epoch: int) -> None:
        """Ends a pull of an epoch before `epoch`, which another thread waits in or is about to begin."""

    def confirm(self, offer: Offer) -> None:
        """Raises WeightSyncError when what `pull` returned has been overwritten since; only mapped memory can be."""

    def close(self) -> None: ...


def make_image(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Memory for a model in the full layout, uint8 `[nbytes]`; on the host only pages that are written exist."""
    if device is not None and device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def stamp(buffer: torch.Tensor, data_nbytes: int, slot: int) -> torch.Tensor:
    """Where a trainer rank writes, behind the data, which version a buffer holds: int64 scalar, -1 while it writes."""
    at = data_nbytes + STAMP_BYTES * slot
    return buffer[at : at + 8].view(torch.int64)[0]
