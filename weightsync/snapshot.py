"""The buffers that a trainer rank copies its weights into, and the copy.

Behind its data a buffer has a stamp for each rank that writes to it: the version it holds, -1 while it is written. A
receiver that reads a buffer in place looks at it before and after.

On a GPU the copy runs on a stream of its own: the next forward and backward pass may start at once, and only the next
optimizer update has to wait for it (`before_update`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.errors import WeightSyncError
from forge.segment import Segment
from weightsync.layout import Layout, view
from weightsync.transports.context import STAMP_BYTES, stamp

NUM_BUFFERS = 2


class Snapshots:
    """`NUM_BUFFERS` buffers of `nbytes` bytes, of which this rank writes the entries of `layout`.

    `share` is given where all ranks write into the same segments: it hands rank 0's references to the others.
    """

    def __init__(
        self,
        layout: Layout,
        nbytes: int,
        device: torch.device,
        *,
        mapped: bool,
        on_device: bool,
        rank: int,
        slots: int = 1,
        share: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        size = nbytes + STAMP_BYTES * slots
        self.nbytes = nbytes
        self.segments: list[Segment] = []
        """What the buffers lie in where other processes of this host map them."""
        if mapped and not on_device:
            self.segments = _segments(size, rank, share)
            self.buffers = [segment.buffer for segment in self.segments]
            if device.type == "cuda":
                for buffer in self.buffers:
                    _pin(buffer)
        elif on_device:
            self.buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        else:
            pinned = device.type == "cuda"
            self.buffers = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_BUFFERS)]
        self._targets = [[view(buffer, entry) for entry in layout.entries] for buffer in self.buffers]
        self._stamps = [stamp(buffer, nbytes, rank if slots > 1 else 0) for buffer in self.buffers]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = [torch.cuda.Event() for _ in self.buffers] if self._stream else []

    def data(self, buffer: int) -> torch.Tensor:
        """What buffer number `buffer` holds, uint8 `[nbytes]`, without its stamps."""
        return self.buffers[buffer][: self.nbytes]

    def copy(self, pieces: Sequence[torch.Tensor], version: int, buffer: int) -> float:
        """Copies `pieces`, one for each entry of the layout; returns the seconds that the caller stood still."""
        begin = time.perf_counter()
        targets, mark = self._targets[buffer], self._stamps[buffer]
        if self._stream is None:
            mark.fill_(-1)
            torch._foreach_copy_(targets, list(pieces))
            mark.fill_(version)
            return time.perf_counter() - begin
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            mark.copy_(torch.tensor(-1), non_blocking=True)
            torch._foreach_copy_(targets, list(pieces), non_blocking=True)
            mark.copy_(torch.tensor(version), non_blocking=True)
            self._copied[buffer].record()
        return time.perf_counter() - begin

    def before_update(self) -> None:
        """Lets the next optimizer update wait, on the device, for a copy that still reads the parameters."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait(self, buffer: int) -> None:
        """Until the copy into `buffer` is complete, for a thread that is about to read it."""
        if self._copied:
            self._copied[buffer].synchronize()

    def close(self) -> None:
        """Nobody can map the buffers any more; who has goes on reading them."""
        for segment in self.segments:
            segment.close()


def _segments(size: int, rank: int, share: Callable[[Any], list[Any]] | None) -> list[Segment]:
    if share is None:
        return [Segment.create(size) for _ in range(NUM_BUFFERS)]
    own = [Segment.create(size) for _ in range(NUM_BUFFERS)] if rank == 0 else []
    first = share([segment.ref for segment in own])[0]
    return own or [Segment.attach(ref) for ref in first]


def _pin(buffer: torch.Tensor) -> None:
    """Lets the device copy into shared memory at full speed, and behind the host's back."""
    code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(code) != 0:
        raise WeightSyncError(
            f"cannot pin {buffer.numel()} bytes of shared memory (CUDA error {int(code)}); raise `ulimit -l`, or set "
            "weightsync.staging=device"
        )
