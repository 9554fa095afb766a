"""Whether what arrived is what was sent: a 64-bit checksum (xxh3) of each piece of a snapshot.

A *piece* is what one receiver gets of one entry of a trainer rank's layout. A worker without tensor parallelism gets
the whole entry; a tensor-parallel one gets a part of it, and a checksum of the whole would tell it nothing. So the
trainer is told all receivers' boxes, and hashes each distinct piece once; equal workers of equal replicas share
theirs. A checksum covers the bytes of a piece in row-major order, wherever they lie, and is therefore the same in a
rank's buffer, in a receiver's image and in an image that a delta has patched.

It finds accidents (bits, truncation, order, the wrong version), it is no defence against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from forge.errors import WeightSyncError
from weightsync.layout import Box, Entry, Layout, intersect, sub_view

_SLAB_BYTES = 8 << 20  # what is copied at once of a piece that is not contiguous, or not on the host
_LISTED = 4


def sums(buffer: torch.Tensor, layout: Layout, needed: Sequence[Mapping[str, Box]] | None = None) -> list[int]:
    """Checksums of a rank's snapshot `buffer` (uint8 `[layout.nbytes]` or more): key, checksum, key, checksum, ...

    `needed` has the boxes of every worker of every receiver; None stands for receivers that need everything. A key
    is made of name and box, so the order of receivers does not matter. Releases the GIL; safe in any thread.
    """
    found: dict[int, int] = {}
    for entry in layout.entries:
        for box in _boxes(entry, needed):
            key = _key(entry.name, box)
            if key not in found:
                found[key] = digest(sub_view(buffer, entry, box))
    return [number for pair in found.items() for number in pair]


def sum_as_one(buffer: torch.Tensor, layout: Layout) -> list[int]:
    """One checksum for all of a single trainer rank's `buffer`, for receivers that need all of it.

    Hundreds of small tensors cost more one by one than together; which of them differs cannot be told then.
    """
    return [_AS_ONE, digest(buffer[: layout.nbytes])]


def verify(
    image: torch.Tensor,
    full: Layout,
    sources: Sequence[Layout],
    needed: Mapping[str, Box],
    expected: Sequence[Sequence[int]],
    version: int,
) -> None:
    """Checks all that one worker `needed` in its `image` (layout `full`) against every trainer rank's `sums`.

    Raises WeightSyncError naming the first parameter that differs and how many do, or one for which the trainer
    computed no checksum. After that the image is good for nothing but a full transfer.
    """
    if len(expected) != len(sources):
        raise WeightSyncError(
            f"version {version} came with the checksums of {len(expected)} trainer ranks, and {len(sources)} publish"
        )
    if expected and list(expected[0][:1]) == [_AS_ONE]:
        if digest(image[: full.nbytes]) != expected[0][1]:
            raise WeightSyncError(
                f"version {version} ({full.nbytes} bytes) did not arrive as it was sent; not applied, send it again"
            )
        return
    held = full.by_name
    wrong: dict[str, str] = {}
    checked = 0
    for rank, (source, numbers) in enumerate(zip(sources, expected, strict=True)):
        sent = dict(zip(numbers[::2], numbers[1::2], strict=True))
        for entry in source.entries:
            box = intersect(entry.box, needed[entry.name]) if entry.name in needed else None
            if box is None:
                continue
            checksum = sent.get(_key(entry.name, box))
            if checksum is None:
                raise WeightSyncError(
                    f"version {version} came without a checksum for {entry.name} {box} from trainer rank {rank}: it "
                    "was computed before the trainer knew this worker; offer the version again"
                )
            checked += 1
            if digest(sub_view(image, held[entry.name], box)) != checksum:
                wrong.setdefault(entry.name, f"{entry.name} {box} from trainer rank {rank}")
    if wrong:
        more = f", {', '.join(list(wrong)[1:_LISTED])}" if len(wrong) > 1 else ""
        raise WeightSyncError(
            f"version {version} did not arrive as it was sent: {len(wrong)} parameters differ (of {checked} pieces "
            f"checked), the first is {next(iter(wrong.values()))}{more}; it is not applied, send it in full again"
        )


def digest(piece: torch.Tensor) -> int:
    """The 64-bit checksum of a tensor's elements in row-major order, whatever its strides and its device."""
    if piece.is_contiguous() and not piece.is_cuda:
        return xxh3_64_intdigest(_bytes(piece))
    state = xxh3_64()
    for slab in _slabs(piece):
        state.update(_bytes(slab.contiguous().cpu()))
    return state.intdigest()


def _slabs(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """`piece` cut along its first dimension, in order."""
    if piece.dim() == 0 or piece.numel() == 0:
        yield piece
        return
    row_bytes = max(1, piece.nbytes // len(piece))
    yield from piece.split(max(1, _SLAB_BYTES // row_bytes))


def _bytes(piece: torch.Tensor) -> memoryview:
    return piece.reshape(-1).view(torch.uint8).numpy().data


def _boxes(entry: Entry, needed: Sequence[Mapping[str, Box]] | None) -> Iterator[Box]:
    if needed is None:
        yield entry.box
        return
    for boxes in needed:
        both = intersect(entry.box, boxes[entry.name]) if entry.name in boxes else None
        if both is not None:
            yield both


def _key(name: str, box: Box) -> int:
    return xxh3_64_intdigest(f"{name} {box}".encode())


_AS_ONE = _key("", ())
