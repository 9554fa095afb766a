"""The trainer's side: copy what this rank owns into a snapshot buffer, and go on training.

There are two buffers. The controller (`weightsync.sync`) names the one that nobody reads, so `snapshot` never waits:
it costs one memory copy (and the cast, where the generators use another dtype). What follows, checksums, the delta and
the transfer, runs behind training, in another thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge.telemetry import span
from forge.trace import WEIGHTS
from weightsync import delta
from weightsync.adapters import AdapterSpec
from weightsync.checksums import sum_as_one, sums
from weightsync.config import WeightSyncConfig
from weightsync.layout import Box, Entry, Layout, box_shape, make_layout, numel
from weightsync.offer import DELTA, FULL, Endpoint, Offer, RankOffer
from weightsync.shards import Source, claim, published, tensor_box
from weightsync.snapshot import Snapshots
from weightsync.transports import MAPPED, make_sender
from weightsync.transports.context import SenderContext

Gather = Callable[[Any], list[Any]]
"""A collective of the trainer's ranks: the value of each, in rank order."""

AtHome = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor of the trainer to the same view of host memory."""


class Publisher:
    """Snapshots of one rank's parameters.

    `dtype` is the dtype of the generators, `model_type` that of the Hugging Face config. Frozen parameters travel too:
    a receiver always holds one whole version; with an `adapter` the `parameters` are its matrices alone
    (`weightsync.adapters.adapter_parameters`). With several ranks `gather` brings their values together, and all ranks
    make their publishers at the same time.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        config: WeightSyncConfig | None = None,
        *,
        transport: str = "memory",
        adapter: AdapterSpec | None = None,
        model_type: str = "",
        rank: int = 0,
        gather: Gather = lambda value: [value],
        folder: str = "",
        at_home: AtHome | None = None,
    ) -> None:
        """`at_home`: what a tensor says in host memory, of a trainer that is off its device when snapshots are made."""
        self._config = config or WeightSyncConfig()
        named = list(parameters)
        self._tensors = [tensor for _, tensor in named]
        self._locals: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._peers: dict[str, Sequence[Mapping[str, Box]]] = {}
        sources = _sources(named, dtype, model_type)
        full, layouts, shared = _lay_out(sources, gather, in_place=transport == "memory")
        self._layout = layouts[rank]
        owned = {entry.name for entry in self._layout.entries}
        self._sources = [source for source in sources if source.name in owned]
        self._at_home = at_home or (lambda tensor: tensor)
        self._device = device = torch.device("cpu") if at_home else self._tensors[0].device
        self._snapshots = Snapshots(
            self._layout,
            full.nbytes if shared else self._layout.nbytes,
            device,
            mapped=transport == "memory",
            on_device=transport == "ipc" or (device.type == "cuda" and self._config.staging == "device"),
            rank=rank,
            slots=len(layouts) if shared else 1,
            share=gather if shared else None,
        )
        nbytes, wants_delta = self._snapshots.nbytes, self._config.delta and transport not in MAPPED
        self._base = torch.empty(nbytes, dtype=torch.uint8) if wants_delta else None
        self._base_version = -1
        self._payload = torch.empty(nbytes // 2, dtype=torch.uint8) if wants_delta else None
        context = SenderContext(
            rank=rank,
            world=len(layouts),
            layout=self._layout,
            sources=layouts,
            buffers=[self._snapshots.data(buffer) for buffer in range(len(self._snapshots.buffers))],
            payload=self._payload,
            deadline_s=self._config.deadline_s,
            folder=folder,
        )
        self._sender = make_sender(transport, context, self._snapshots.buffers, self._snapshots.segments, shared)
        links = gather(self._sender.link())
        self._sender.meet(links)
        described = adapter.plain() if adapter else None
        deadline_s, checksums = self._config.deadline_s, self._config.checksums
        self.endpoint = Endpoint(transport, full, layouts, links, deadline_s, checksums, described)
        """What receivers connect to; the same on every rank."""

    @torch.no_grad()
    def snapshot(self, version: int, buffer: int) -> float:
        """Copies what this rank owns into snapshot `buffer`; returns the seconds that the caller stood still."""
        with span(WEIGHTS, "snapshot", version=version):
            return self._snapshots.copy(self._pieces(), version, buffer)

    def before_update(self) -> None:
        """Lets the next optimizer update wait, on the device, for a snapshot that still reads the parameters."""
        self._snapshots.before_update()

    def _pieces(self) -> list[torch.Tensor]:
        """What is copied, as views of the parameters; found again when something has given them new memory."""
        current = [self._at_home(_local(self._tensors[source.index])) for source in self._sources]
        pointers = [tensor.data_ptr() for tensor in current]
        if pointers != self._pointers:
            self._pointers = pointers
            self._locals = [source.of(tensor) for source, tensor in zip(self._sources, current, strict=True)]
        return self._locals

    def offer(self, version: int, buffer: int, base: int) -> RankOffer:
        """What receivers are told of a snapshot: checksums, and a delta against version `base` where there can be one.

        Runs behind training. `base` is -1 where a receiver holds no version that a delta could start from.
        """
        with span(WEIGHTS, "checksums and delta", version=version):
            self._snapshots.wait(buffer)
            snapshot = self._snapshots.data(buffer)
            nbytes = self._delta(snapshot, version, base)
            return RankOffer(nbytes, self._sums(snapshot) if self._config.checksums else [])

    def _delta(self, snapshot: torch.Tensor, version: int, base: int) -> int | None:
        """The bytes of the delta from version `base`; None where there can be none."""
        if self._base is None or self._payload is None:
            return None
        nbytes = None
        if base >= 0 and base == self._base_version:
            nbytes = delta.encode(snapshot, self._base, self._layout, self._payload, version=version, base_version=base)
        self._base_version = -1
        self._base.copy_(snapshot)
        self._base_version = version
        return nbytes

    def offer_at_once(self, version: int, buffer: int) -> RankOffer | None:
        """The offer of a snapshot that was just made, where it costs less than the message that would ask for it: of an
        adapter in host memory. None elsewhere.
        """
        small = self.endpoint.adapter is not None and self._base is None and self._device.type == "cpu"
        return self.offer(version, buffer, -1) if small else None

    def _sums(self, snapshot: torch.Tensor) -> list[int]:
        if self.endpoint.adapter is not None and self._layout == self.endpoint.layout:
            return sum_as_one(snapshot, self._layout)
        peers = list(self._peers.values())  # another thread may take one in, or forget one
        return sums(snapshot, self._layout, [boxes for peer in peers for boxes in peer])

    def prepare(self, offer: Offer) -> dict[str, Any]:
        """Makes an offered version reachable, where the transport has to; the result joins `offer.where`."""
        return self._sender.prepare(offer)

    def add_peer(self, peer: str, needed: Sequence[Mapping[str, Box]]) -> None:
        """A replica that will receive; `needed` are the boxes that each of its workers reads."""
        self._peers[peer] = needed
        self._sender.add_peer(peer, needed)

    def remove_peer(self, peer: str) -> None:
        """A replica that has left or died: a transfer to it ends, and no checksum is made for it."""
        self._peers.pop(peer, None)
        self._sender.remove_peer(peer)

    def send(self, peer: str, offer: Offer) -> None:
        """Pushes an offered version to one replica, where the transport pushes; behind training."""
        with span(WEIGHTS, "send", version=offer.version, to=peer):
            self._sender.send(peer, offer)

    def close(self) -> None:
        """Gives up buffers and connections."""
        self._sender.close()
        self._snapshots.close()


def combine(offers: Sequence[RankOffer], endpoint: Endpoint, version: int, buffer: int, base: int) -> Offer:
    """All ranks' shares as one offer: a delta only where every rank has one."""
    sizes = [offer.nbytes for offer in offers]
    smaller = [size for size in sizes if size is not None]
    checks = [offer.sums for offer in offers]
    if len(smaller) == len(offers):
        return Offer(version, buffer, DELTA, base, smaller, checks)
    return Offer(version, buffer, FULL, -1, [source.nbytes for source in endpoint.sources], checks)


def _sources(named: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype, model_type: str) -> list[Source]:
    # A buffer is read in the precision that it is kept in.
    kinds = [dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype for _, tensor in named]
    described = ((name, t.shape, kind, tensor_box(t)) for (name, t), kind in zip(named, kinds, strict=True))
    return published(described, model_type)


def _lay_out(sources: Sequence[Source], gather: Gather, *, in_place: bool) -> tuple[Layout, list[Layout], bool]:
    """The full layout, that of every rank, and whether all ranks write into one buffer in the full layout."""
    parameters = [(source.name, source.shape, source.dtype) for source in sources]
    full = make_layout(parameters)
    everybody = gather({source.name: source.held for source in sources if source.held is not None})
    boxes = claim(everybody, {source.name: source.dtype.itemsize for source in sources})
    if in_place:
        there = [layout for owned in boxes if (layout := _in_place(full, owned)) is not None]
        if len(there) == len(boxes):
            return full, there, True
    return full, [make_layout(parameters, owned) for owned in boxes], False


def _in_place(full: Layout, boxes: Mapping[str, Box]) -> Layout | None:
    """The layout of what a rank owns where it lies in a buffer in the full layout; None when some of it is scattered
    there, as a slice of columns is.
    """
    entries = []
    for entry in full.entries:
        if (box := boxes.get(entry.name)) is None:
            continue
        shape, sizes = box_shape(box), entry.shape
        cut = next((dim for dim, size in enumerate(sizes) if shape[dim] != size), 0)
        if any(extent != 1 for extent in shape[:cut]) or shape[cut + 1 :] != sizes[cut + 1 :]:
            return None
        start = sum(box[dim][0] * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        itemsize = entry.torch_dtype.itemsize
        entries.append(
            Entry(entry.name, entry.dtype, sizes, entry.offset + start * itemsize, numel(box) * itemsize, box)
        )
    return Layout(tuple(entries), full.nbytes)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
