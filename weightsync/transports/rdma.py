"""Monarch's RDMA: the generator's actor reads the trainer's snapshots from afar, without the trainer's help.

ibverbs where there is a card for it, TCP otherwise. Buffers are registered once. The engine's workers are processes
without Monarch, so the actor reads into a segment of its own host and the workers map that: one read for each replica,
whatever its tensor parallelism.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from forge.errors import WeightSyncError
from forge.mesh import within
from forge.segment import Segment
from weightsync import delta
from weightsync.layout import full_box, sub_view, view
from weightsync.offer import DELTA, FULL, Endpoint, Offer
from weightsync.transports.base import Sender
from weightsync.transports.context import STAMP_BYTES, stamp

_CHUNK = 4 << 20


class RdmaSender(Sender):
    """Registers a rank's buffers, in an actor; the handles travel in Monarch's own messages."""

    name = "rdma"

    def __init__(self, buffers: Sequence[torch.Tensor], payload: torch.Tensor | None) -> None:
        from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RDMATcpFallbackWarning)
            self._buffers = [RDMABuffer(buffer) for buffer in buffers]
            # A read takes a whole registered buffer: of a payload only the chunks that are filled are read.
            self._payload = [RDMABuffer(chunk) for chunk in ([] if payload is None else payload.split(_CHUNK))]

    @staticmethod
    def available(same_host: bool, device: str) -> str:
        from monarch.rdma import is_ibverbs_available

        return "" if is_ibverbs_available() else "no ibverbs card; asked for by name, TCP carries it"

    def link(self) -> dict[str, Any]:
        return {"buffers": self._buffers, "payload": self._payload}


class RdmaReader:
    """The generator actor's half. `local` is the endpoint that the engine's workers connect to instead."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        world, nbytes = len(endpoint.sources), endpoint.layout.nbytes
        self._segment = Segment.create(nbytes + STAMP_BYTES * world)
        self._image = self._segment.buffer[:nbytes]
        # One rank's snapshot is laid out as the image is; the pieces of several are put into place after the read.
        self._whole = world == 1 and endpoint.sources[0] == endpoint.layout
        self._scratch = [] if self._whole else [torch.empty(s.nbytes, dtype=torch.uint8) for s in endpoint.sources]
        self._held = -1
        link = {"buffers": [asdict(self._segment.ref)], "shared": True}
        self.local = replace(endpoint, transport="memory", links=[link])

    async def read(self, offer: Offer) -> Offer:
        """Brings the version into the segment; the result is the offer for the workers.

        Raises WeightSyncError at the deadline, or when a delta's base is not what the segment holds.
        """
        self._stamp(-1)
        held, self._held = self._held, -1
        if offer.kind == DELTA:
            if held != offer.base:
                raise WeightSyncError(f"a delta against version {offer.base} came to a replica that holds {held}")
            await self._read_delta(offer)
        elif self._whole:
            await self._fill([(self._endpoint.links[0]["buffers"][offer.buffer], self._image)], offer)
        else:
            links = self._endpoint.links
            await self._fill(
                [(link["buffers"][offer.buffer], s) for link, s in zip(links, self._scratch, strict=True)], offer
            )
            await asyncio.to_thread(self._scatter)
        self._held = offer.version
        self._stamp(offer.version)
        return replace(offer, kind=FULL, buffer=0, base=-1)

    async def _read_delta(self, offer: Offer) -> None:
        layout, reads, payloads = self._endpoint.layout, [], []
        for link, nbytes in zip(self._endpoint.links, offer.nbytes, strict=True):
            chunks = torch.empty(-(-nbytes // _CHUNK) * _CHUNK, dtype=torch.uint8)
            reads += list(zip(link["payload"], chunks.split(_CHUNK), strict=False))
            payloads.append(chunks[:nbytes])
        await self._fill(reads, offer)
        boxes = {entry.name: full_box(entry.shape) for entry in layout.entries}
        versions = {"version": offer.version, "base_version": offer.base}
        sources = self._endpoint.sources
        await asyncio.to_thread(delta.apply, self._image, payloads, sources, layout, boxes, **versions)

    async def _fill(self, reads: Sequence[tuple[Any, torch.Tensor]], offer: Offer) -> None:
        deadline = self._endpoint.deadline_s
        calls: list[Awaitable[Any]] = [
            remote.read_into(target, timeout=max(1, math.ceil(deadline))) for remote, target in reads
        ]
        what = f"an RDMA read of version {offer.version} ({sum(t.numel() for _, t in reads)} bytes) from the trainer"
        try:
            await within(deadline, what, asyncio.gather(*calls))
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{what} failed: {error}") from error

    def _scatter(self) -> None:
        full = self._endpoint.layout.by_name
        for source, scratch in zip(self._endpoint.sources, self._scratch, strict=True):
            for entry in source.entries:
                sub_view(self._image, full[entry.name], entry.box).copy_(view(scratch, entry))

    def _stamp(self, version: int) -> None:
        for slot in range(len(self._endpoint.sources)):
            stamp(self._segment.buffer, self._image.numel(), slot).fill_(version)

    def close(self) -> None:
        self._segment.close()
