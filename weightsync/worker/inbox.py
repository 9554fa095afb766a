"""What arrives at one worker of a generator: pulled, put together, checked. Knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from forge.errors import WeightSyncError
from weightsync import delta
from weightsync.checksums import verify
from weightsync.layout import Box, view
from weightsync.offer import DELTA, Endpoint, Offer
from weightsync.transports import make_puller
from weightsync.transports.context import PullerContext


class Inbox:
    """The versions that one worker of replica `peer` receives, one after the other.

    `needed` has the boxes that each worker of the replica reads; this one is number `worker`.
    """

    def __init__(
        self, endpoint: Endpoint, peer: str, needed: Sequence[Mapping[str, Box]], worker: int, device: torch.device
    ) -> None:
        self._endpoint = endpoint
        self._needed = needed[worker]
        self._puller = make_puller(
            endpoint.transport,
            PullerContext(
                peer=peer,
                tp_rank=worker,
                tp_world=len(needed),
                layout=endpoint.layout,
                sources=endpoint.sources,
                needed=needed,
                links=endpoint.links,
                device=device,
                deadline_s=endpoint.deadline_s,
            ),
        )
        self._image: torch.Tensor | None = None
        self._held = -1
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def receive(self, offer: Offer) -> None:
        """Brings the image to the offered version.

        Raises WeightSyncError naming peer, version and bytes when that fails; the image is good for nothing then but
        a full transfer.
        """
        held, self._held = self._held, -1
        if offer.kind == DELTA:
            if self._image is None or held != offer.base:
                raise WeightSyncError(
                    f"a delta against version {offer.base} came to a worker that holds version {held}; send it whole"
                )
            payloads = self._puller.pull_payloads(offer)
            sources, layout = self._endpoint.sources, self._endpoint.layout
            versions = {"version": offer.version, "base_version": offer.base}
            delta.apply(self._image, payloads, sources, layout, self._needed, **versions)
        else:
            self._image = self._puller.pull(offer)
        if self._endpoint.checksums:
            layout, sources = self._endpoint.layout, self._endpoint.sources
            verify(self._image, layout, sources, self._needed, offer.sums, offer.version)
        self._held = offer.version

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of every parameter; of what this worker does not need the content is undefined."""
        assert self._image is not None, "receive comes first"
        # Views are made once for each memory: those of an adapter cost more than copying it.
        at = self._image.data_ptr()
        if at not in self._views:
            self._views[at] = [(entry.name, view(self._image, entry)) for entry in self._endpoint.layout.entries]
        yield from self._views[at]

    def confirm(self, offer: Offer) -> None:
        """Once the weights have been used: raises WeightSyncError when they have been overwritten meanwhile."""
        self._puller.confirm(offer)

    def interrupt(self, epoch: int) -> None:
        """Ends a `receive` of an epoch before `epoch`, which another thread waits in or is about to begin."""
        self._puller.interrupt(epoch)

    def close(self) -> None:
        """Gives up connections and memory."""
        self._puller.close()
        self._image = None
        self._views.clear()
