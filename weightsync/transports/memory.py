"""One host: the receivers map the trainer's snapshots, so that nothing is transferred.

Where each rank owns whole rows all ranks write into one segment in the full layout, and a receiver reads it in place.
Otherwise each rank has a segment of its own, and a receiver puts the pieces together in an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from forge.errors import WeightSyncError
from forge.segment import Segment, SegmentRef
from weightsync.layout import sub_view
from weightsync.offer import Offer
from weightsync.plan import pair
from weightsync.transports.base import Puller, Sender
from weightsync.transports.context import PullerContext, make_image, stamp


class MemorySender(Sender):
    """Says where a rank's snapshot buffers lie; `shared` ones are in the full layout and belong to all ranks."""

    name = "memory"

    def __init__(self, segments: Sequence[Segment], shared: bool) -> None:
        self._segments = segments
        self._shared = shared

    @staticmethod
    def available(same_host: bool, device: str) -> str:
        if device == "cuda":
            return "the trainer's snapshots are in device memory (weightsync.staging)"
        return "" if same_host else "trainer and generators run on different hosts"

    def link(self) -> dict[str, Any]:
        return {"buffers": [asdict(segment.ref) for segment in self._segments], "shared": self._shared}


class MemoryPuller(Puller):
    """Reads what the trainer's ranks have written, where they have written it."""

    def __init__(self, context: PullerContext) -> None:
        self._context = context
        self._shared = bool(context.links[0]["shared"])
        links = context.links[:1] if self._shared else context.links
        self._buffers = [[self._map(ref) for ref in link["buffers"]] for link in links]
        self._moves = [] if self._shared else [m for m in pair(context.sources, context.needed) if self._mine(m.target)]
        self._image = None if self._shared else make_image(context.layout.nbytes, context.device)

    def _map(self, ref: Mapping[str, Any]) -> torch.Tensor:
        return Segment.attach(SegmentRef(**ref)).buffer

    def _mine(self, target: int) -> bool:
        return target == self._context.tp_rank

    def pull(self, offer: Offer) -> torch.Tensor:
        context = self._context
        self.confirm(offer)
        if self._image is None:
            return self._buffers[0][offer.buffer][: context.layout.nbytes]
        for move in self._moves:
            source = self._buffers[move.source][offer.buffer]
            piece = sub_view(source, context.sources[move.source].by_name[move.name], move.box)
            sub_view(self._image, context.layout.by_name[move.name], move.box).copy_(piece)
        return self._image

    def confirm(self, offer: Offer) -> None:
        ranks = range(len(self._context.sources))
        found = [
            int(stamp(self._buffers[0][offer.buffer], self._context.layout.nbytes, rank))
            if self._shared
            else int(stamp(self._buffers[rank][offer.buffer], self._context.sources[rank].nbytes, 0))
            for rank in ranks
        ]
        if any(version != offer.version for version in found):
            raise WeightSyncError(
                f"buffer {offer.buffer} was to hold version {offer.version} until it is applied, and holds {found} (by "
                "trainer rank): the trainer overtook a receiver that took too long; raise weightsync.deadline_s"
            )
