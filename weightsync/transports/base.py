"""What every transport is: a sender on each trainer rank, and a puller in each generator worker.

`pull` runs in a thread of the worker while it decodes, `send` in a thread of the trainer while it trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from weightsync.layout import Box
from weightsync.offer import Offer


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

    def remove_peer(self, peer: str) -> None:
        """A replica that has left or died; a transfer to it that runs ends."""

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
