"""What goes into which message between a trainer rank and a worker; pure.

A message is a slice that lies in one piece both in the trainer's buffer and in the worker's image, and goes straight
from one into the other: with one trainer rank and a worker that needs everything all messages are such. What is small
or scattered shares a bucket, packed on one side and unpacked on the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.layout import ALIGNMENT, Box, Entry, Layout, aligned, box_shape, numel, sub_view
from weightsync.plan import Move

SLICE_BYTES = 64 << 20
BUCKET_BYTES = 16 << 20
# A message costs gloo two wake-ups, as much as copying a megabyte or two: below this size pieces share a bucket.
_DIRECT_BYTES = 4 << 20


@dataclass(frozen=True)
class Region:
    """`nbytes` of a buffer in one piece from `start`, or where `name` is given a box of that parameter."""

    start: int
    nbytes: int
    name: str = ""
    box: Box = ()

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def plain(self) -> list[Any]:
        return [self.start, self.nbytes, self.name, self.box]

    @staticmethod
    def from_plain(values: Sequence[Any]) -> Region:
        start, nbytes, name, box = values
        return Region(start, nbytes, name, tuple((first, last) for first, last in box))

    def tensor(self, buffer: torch.Tensor, entries: Mapping[str, Entry]) -> torch.Tensor:
        """The region in `buffer` without a copy: uint8 `[nbytes]`, or in dtype and shape of its box."""
        if self.name:
            return sub_view(buffer, entries[self.name], self.box)
        return buffer[self.start : self.stop]


Message = list[tuple[Region, Region]]
"""Where each piece comes from in the trainer rank's buffer, and where it goes to in the image."""


def cut(moves: Iterable[Move], source: Layout, full: Layout) -> list[Message]:
    """The messages that make the moves from a trainer rank with layout `source` to one worker."""
    held, wanted = source.by_name, full.by_name
    messages: list[Message] = []
    bucket: Message = []
    filled = 0
    for name, box, here, there in _runs(moves, held, wanted):
        if here.nbytes >= _DIRECT_BYTES:
            if here.name or there.name:
                size = held[name].torch_dtype.itemsize
                chunks = list(_chunks(box, BUCKET_BYTES // size))
                messages += [[(_region(held[name], chunk), _region(wanted[name], chunk))] for chunk in chunks]
            else:
                messages += [[(_slice(here, at), _slice(there, at))] for at in range(0, here.nbytes, SLICE_BYTES)]
            continue
        if filled + here.nbytes > BUCKET_BYTES:
            messages.append(bucket)
            bucket, filled = [], 0
        bucket.append((here, there))
        filled += aligned(here.nbytes)
    return [*messages, bucket] if bucket else messages


def _runs(
    moves: Iterable[Move], held: Mapping[str, Entry], wanted: Mapping[str, Entry]
) -> list[tuple[str, Box, Region, Region]]:
    """The moves in the order of the image. What follows upon each other on both sides is one, padding included; its
    name and box are those of its last part.
    """
    runs: list[tuple[str, Box, Region, Region]] = []
    for move in sorted(moves, key=lambda move: (wanted[move.name].offset, move.box)):
        source, target = held[move.name], wanted[move.name]
        here, there = _region(source, move.box), _region(target, move.box)
        if runs and not here.name and not there.name:
            name, box, first, into = runs[-1]
            gap = here.start - first.stop
            # Between whole entries less than the alignment is padding; elsewhere it could be somebody's data.
            padded = box == held[name].box == wanted[name].box and move.box == source.box == target.box
            follows = gap == 0 or (padded and 0 < gap < ALIGNMENT)
            if follows and gap == there.start - into.stop and not first.name and not into.name:
                nbytes = here.stop - first.start
                runs[-1] = move.name, move.box, Region(first.start, nbytes), Region(into.start, nbytes)
                continue
        runs.append((move.name, move.box, here, there))
    return runs


def _region(entry: Entry, box: Box) -> Region:
    """Where `box` lies in a buffer that holds `entry`."""
    outer, inner = box_shape(entry.box), box_shape(box)
    itemsize = entry.torch_dtype.itemsize
    start, stride, whole, pieces = 0, 1, True, False
    for dim in reversed(range(len(box))):
        start += (box[dim][0] - entry.box[dim][0]) * stride
        stride *= outer[dim]
        # In one piece: nothing is cut below the first dimension of which more than one index is taken.
        pieces = pieces or (not whole and inner[dim] > 1)
        whole = whole and inner[dim] == outer[dim]
    nbytes = numel(box) * itemsize
    return Region(0, nbytes, entry.name, box) if pieces else Region(entry.offset + start * itemsize, nbytes)


def _chunks(box: Box, most: int) -> Iterator[Box]:
    """`box` in boxes of at most `most` elements."""
    size = numel(box)
    if size <= most:
        yield box
        return
    dim = next(dim for dim, extent in enumerate(box_shape(box)) if extent > 1)
    start, stop = box[dim]
    step = max(1, most * (stop - start) // size)
    for at in range(start, stop, step):
        yield from _chunks((*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :]), most)


def _slice(run: Region, at: int) -> Region:
    return Region(run.start + at, min(SLICE_BYTES, run.nbytes - at))


def slices(nbytes: int) -> Asked:
    """A payload as messages."""
    return [[_slice(Region(0, nbytes), at)] for at in range(0, nbytes, SLICE_BYTES)]


Asked = list[list[Region]]
"""A worker's messages from one trainer rank, as that rank sees them."""


def write_plan(source: Layout, messages: Sequence[Message]) -> str:
    asked = [[here.plain() for here, _ in message] for message in messages]
    return json.dumps({"layout": source.key, "messages": asked})


def read_plan(layout_key: int, plan: str) -> Asked:
    values = json.loads(plan)
    if values["layout"] != layout_key:
        raise ValueError("a worker was told of another layout than this rank has")
    return [[Region.from_plain(region) for region in message] for message in values["messages"]]
