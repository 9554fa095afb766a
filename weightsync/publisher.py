"""The trainer's side: copy the parameters this rank owns into a shared segment, and go on training.

Two segments exist. The controller (`weightsync.sync`) names the one that nobody reads, so that
`snapshot` never waits: it costs one memory copy (and the cast, where the generators use another dtype).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from forge.errors import WeightSyncError
from forge.segment import Segment, SegmentRef
from weightsync.plan import Layout, make_layout, row_view, shard_rows

NUM_BUFFERS = 2


@dataclass(frozen=True)
class Endpoint:
    """What a receiver needs to read every version to come: the layout and the two segments."""

    layout: Layout
    segments: tuple[SegmentRef, ...]


class Publisher:
    """Snapshots of one rank's parameters.

    `dtype` is the dtype of the generators. Rank 0 creates the segments; the other ranks attach to
    `endpoint.segments`. Frozen parameters travel too: a receiver always holds one whole version.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        *,
        rank: int = 0,
        world: int = 1,
        segments: tuple[SegmentRef, ...] | None = None,
    ) -> None:
        named = list(parameters)
        self._tensors = [tensor for _, tensor in named]
        self._layout = make_layout((name, tensor.shape, dtype) for name, tensor in named)
        self._rows = [
            shard_rows(t.shape[0], world, rank) if isinstance(t, DTensor) and t.dim() else None for t in self._tensors
        ]
        self._writes_replicated = rank == 0
        if segments is None:
            if rank != 0:
                raise WeightSyncError(f"rank {rank} got no segments; rank 0 creates them and passes them on")
            self._segments = [Segment.create(self._layout.nbytes) for _ in range(NUM_BUFFERS)]
        else:
            self._segments = [Segment.attach(ref) for ref in segments]

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self._layout, tuple(s.ref for s in self._segments))

    @torch.no_grad()
    def snapshot(self, buffer: int) -> float:
        """Copies this rank's rows into segment `buffer`; returns the seconds it took."""
        begin = time.perf_counter()
        target = self._segments[buffer].buffer
        for entry, tensor, rows in zip(self._layout.entries, self._tensors, self._rows, strict=True):
            if rows is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                row_view(target, entry, rows).copy_(local)
            elif self._writes_replicated:
                row_view(target, entry, range(entry.shape[0] if entry.shape else 0)).copy_(tensor)
        return time.perf_counter() - begin

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
