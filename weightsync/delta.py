"""What changed between two versions of a rank's snapshot, bit for bit: the elements whose bits differ, and no others.

A small learning rate moves few bfloat16 weights to another value (`apps/bench/delta.py` measures how few), so a
version may travel as a small payload that patches the version before it. Values are sent as they are, not as
differences: applying a payload twice, or again after a failure half way, gives the same image.

A payload is a header of 64 bytes, then for each entry of the rank's layout, for each block of 2^18 elements of it:

    int32 mode, int32 count of changed elements, then by mode, each array padded to 8 bytes:
    SAME      nothing
    SPARSE    uint8 changed elements in each run of 256, uint8 their places in the run, their values
    BITMAP    one bit per element of the block, their values
    WHOLE     every value of the block

Each block takes the smallest one. All is little-endian, as this machine and the generators' are. The header has both
versions, the size, a checksum of the layout, and one of all that follows; a payload that does not match is refused
before anything is written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from forge.errors import WeightSyncError
from weightsync.layout import Box, Entry, Layout, intersect

Array: TypeAlias = npt.NDArray[Any]

HEADER_BYTES = 64
_HEADER = struct.Struct("<8sqqQQQQ")  # magic, version, base version, bytes in all, changed elements, layout, checksum
_SIGNED = _HEADER.size - 8  # the checksum covers what stands before it, and all that follows the header
_MAGIC = b"MFDELTA1"
_MARK = struct.Struct("<ii")
_SAME, _SPARSE, _BITMAP, _WHOLE = range(4)
_BLOCK = 1 << 18  # elements
_RUN = 256
_SLAB = 32 * _BLOCK  # elements that are fetched at once from a buffer that is not on the host
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # elements as bits, by their size


def encode(
    new: torch.Tensor, base: torch.Tensor, layout: Layout, payload: torch.Tensor, *, version: int, base_version: int
) -> int | None:
    """Writes what makes `new` (uint8, laid out by `layout`) of `base` into `payload` (uint8) and returns its bytes.

    None when it does not fit, or is not smaller than the snapshot: then a full transfer is due. Works in blocks and
    needs no memory to speak of; releases the GIL.
    """
    out = _Writer(payload.numpy()[: max(0, layout.nbytes - 1)])
    for entry in layout.entries:
        for now, before in zip(_blocks(_bits(new, entry)), _blocks(_bits(base, entry)), strict=True):
            if not _encode_block(now, before, out):
                return None
    return out.finish(version, base_version, layout)


def apply(
    image: torch.Tensor,
    payloads: Sequence[torch.Tensor],
    sources: Sequence[Layout],
    full: Layout,
    needed: Mapping[str, Box],
    *,
    version: int,
    base_version: int,
) -> int:
    """Makes `version` of an `image` (uint8, layout `full`) that holds `base_version`, in place, of what is `needed`.

    `payloads` are those of all trainer ranks, whose layouts are `sources`. Returns the number of elements written.
    Raises WeightSyncError, before it writes anything, when a payload is truncated, damaged, of another version,
    against another base or of another layout.
    """
    if len(payloads) != len(sources):
        raise WeightSyncError(f"{len(payloads)} delta payloads came for the layouts of {len(sources)} trainer ranks")
    checked = [
        _check(payload, source, rank, version, base_version)
        for rank, (payload, source) in enumerate(zip(payloads, sources, strict=True))
    ]
    held = full.by_name
    written = 0
    for data, source in zip(checked, sources, strict=True):
        reader = _Reader(data)
        for entry in source.entries:
            target = _target(image, entry, held[entry.name], needed.get(entry.name))
            size = _numel(entry)
            for start in range(0, size, _BLOCK):
                block = reader.block(min(_BLOCK, size - start), entry.torch_dtype.itemsize)
                if target is not None:
                    written += target.write(start, block)
    return written


def sparsity(new: torch.Tensor, base: torch.Tensor) -> float:
    """The fraction of elements, in [0, 1], whose bits differ between two tensors of one shape and dtype."""
    integers = _INTEGERS[new.element_size()]
    pairs = zip(*(_blocks(t.detach().contiguous().view(-1).view(integers)) for t in (new, base)), strict=True)
    return sum(int(np.count_nonzero(now != before)) for now, before in pairs) / max(new.numel(), 1)


# --- from and to payloads


@dataclass(frozen=True)
class _Block:
    """The arrays of one block of `size` elements, as they stand in the payload."""

    mode: int
    size: int
    runs: Array  # SPARSE: changed elements in each run
    places: Array  # SPARSE: places in their runs; BITMAP: bits
    values: Array

    def index(self) -> Array:
        """Which elements of the block changed, in order."""
        if self.mode == _BITMAP:
            return np.flatnonzero(np.unpackbits(self.places, count=self.size, bitorder="little").view(np.bool_))
        return np.repeat(np.arange(0, self.size, _RUN), self.runs) + self.places


def _encode_block(now: Array, before: Array, out: _Writer) -> bool:
    """False when there is no room left."""
    mask = now != before
    count = int(np.count_nonzero(mask))
    if count == 0:
        return out.block(_SAME, 0)
    size = len(now)
    if _padded(now.nbytes) <= _padded(_ceil(size, 8)) + _padded(count * now.itemsize):
        return out.block(_WHOLE, count, now)
    places = np.flatnonzero(mask)
    values = now.take(places)
    if _ceil(size, _RUN) + count < size // 8:
        edges = np.arange(0, size + _RUN, _RUN)
        runs = np.diff(np.searchsorted(places, edges))
        if runs.max() < _RUN:  # a run that changed throughout does not fit its byte
            return out.block(_SPARSE, count, runs.astype(np.uint8), places.astype(np.uint8), values)
    return out.block(_BITMAP, count, np.packbits(mask, bitorder="little"), values)


class _Writer:
    """Fills `data` with a payload."""

    def __init__(self, data: Array) -> None:
        self._data = data
        self._at = HEADER_BYTES
        self._changed = 0

    def block(self, mode: int, count: int, *arrays: Array) -> bool:
        """False when there is no room left."""
        if self._at + _MARK.size + sum(_padded(a.nbytes) for a in arrays) > len(self._data):
            return False
        _MARK.pack_into(self._data.data, self._at, mode, count)
        self._at += _MARK.size
        for array in arrays:
            end, padded = self._at + array.nbytes, self._at + _padded(array.nbytes)
            self._data[self._at : end] = array.view(np.uint8)
            self._data[end:padded] = 0
            self._at = padded
        self._changed += count
        return True

    def finish(self, version: int, base_version: int, layout: Layout) -> int | None:
        """The size of the payload; None when not even the header fits."""
        if self._at > len(self._data):
            return None
        data = self._data[: self._at]
        data[:HEADER_BYTES] = 0
        signed = (_MAGIC, version, base_version, self._at, self._changed, layout.key)
        _HEADER.pack_into(data.data, 0, *signed, 0)
        _HEADER.pack_into(data.data, 0, *signed, _checksum(data))
        return self._at


class _Reader:
    """Takes a payload apart that `_check` has found whole."""

    def __init__(self, data: Array) -> None:
        self._data = data
        self._at = HEADER_BYTES

    def block(self, size: int, itemsize: int) -> _Block:
        mode, count = _MARK.unpack_from(self._data.data, self._at)
        self._at += _MARK.size
        runs = self._take(_ceil(size, _RUN) if mode == _SPARSE else 0)
        places = self._take({_SPARSE: count, _BITMAP: _ceil(size, 8)}.get(mode, 0))
        values = self._take((size if mode == _WHOLE else count) * itemsize)
        return _Block(mode, size, runs, places, values)

    def _take(self, nbytes: int) -> Array:
        found = self._data[self._at : self._at + nbytes]
        self._at += _padded(nbytes)
        return found


def _check(payload: torch.Tensor, layout: Layout, rank: int, version: int, base_version: int) -> Array:
    """The payload's bytes, once they are known to be the right ones."""
    what = f"the delta payload of trainer rank {rank} for version {version}"
    data = payload.cpu().numpy()
    if len(data) < HEADER_BYTES:
        raise WeightSyncError(f"{what} has {len(data)} bytes, its header alone has {HEADER_BYTES}; {_REMEDY}")
    magic, found, base, nbytes, _, key, checksum = _HEADER.unpack_from(data.data)
    if magic != _MAGIC:
        raise WeightSyncError(f"{what} begins with {magic!r}, not {_MAGIC!r}; {_REMEDY}")
    if len(data) < nbytes:
        raise WeightSyncError(f"{what} is truncated: {len(data)} bytes of {nbytes}; {_REMEDY}")
    data = data[:nbytes]
    if nbytes < HEADER_BYTES or _checksum(data) != checksum:
        raise WeightSyncError(f"{what} is damaged: its {nbytes} bytes do not have its checksum; {_REMEDY}")
    if (found, base) != (version, base_version):
        raise WeightSyncError(
            f"{what} makes {found} of {base}, and this worker holds {base_version} and expects {version}; {_REMEDY}"
        )
    if key != layout.key:
        raise WeightSyncError(f"{what} was made for another layout than the one this worker knows; {_REMEDY}")
    return data


_REMEDY = "nothing was changed, send the version in full"


def _checksum(data: Array) -> int:
    """Of a whole payload, but for its checksum."""
    state = xxh3_64(data[:_SIGNED].data)
    state.update(data[HEADER_BYTES:].data)
    return state.intdigest()


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _ceil(size: int, per: int) -> int:
    return -(-size // per)


# --- from and to buffers


@dataclass(frozen=True)
class _Dim:
    """One dimension of an entry's box, `size` long, seen from the full parameter.

    Its first element stands at `start` there, steps are `stride` elements; indices `lo` to `hi` of it are needed.
    """

    size: int
    start: int
    stride: int
    lo: int
    hi: int


@dataclass(frozen=True)
class _Target:
    """Where elements of one rank's entry go: `elements` is the full parameter in the image, flat, as integers."""

    elements: torch.Tensor
    dims: tuple[_Dim, ...]

    def write(self, start: int, block: _Block) -> int:
        """Writes what is needed of the block that begins at element `start` of the entry; returns how much that is."""
        if block.mode == _SAME:
            return 0
        first, *others = self.dims
        row = math.prod(dim.size for dim in others)
        if start >= first.hi * row or start + block.size <= first.lo * row:
            return 0
        values = torch.from_numpy(block.values).view(self.elements.dtype)
        if block.mode == _WHOLE and not others:
            skip, end = max(0, first.lo - start), min(block.size, first.hi - start)
            at = start + first.start
            self.elements[at + skip : at + end] = values[skip:end].to(self.elements.device)
            return end - skip
        index = np.arange(block.size) if block.mode == _WHOLE else block.index()
        index += start
        if not others:
            skip, end = (int(i) for i in np.searchsorted(index, (first.lo, first.hi)))
            return self._scatter(index[skip:end] + first.start, values[skip:end])
        position = np.zeros_like(index)
        keep = np.ones(len(index), dtype=np.bool_)
        for dim in (*reversed(others), first):
            index, inner = (index // dim.size, index % dim.size) if dim is not first else (index, index)
            position += (inner + dim.start) * dim.stride
            keep &= (inner >= dim.lo) & (inner < dim.hi)
        return self._scatter(position[keep], values[torch.from_numpy(keep)])

    def _scatter(self, positions: Array, values: torch.Tensor) -> int:
        device = self.elements.device
        self.elements.scatter_(0, torch.from_numpy(positions).to(device), values.to(device))
        return len(positions)


def _target(image: torch.Tensor, entry: Entry, held: Entry, needed: Box | None) -> _Target | None:
    """None when nothing of `entry` is needed. `held` is the same parameter in the image."""
    wanted = intersect(entry.box, needed) if needed is not None else None
    if wanted is None:
        return None
    stride, dims = 1, [_Dim(1, 0, 1, 0, 1)]
    for size, (start, stop), (lo, hi) in zip(*(reversed(x) for x in (entry.shape, entry.box, wanted)), strict=True):
        inner = dims[0]
        here = _Dim(stop - start, start, stride, lo - start, hi - start)
        if inner.stride * inner.size == stride and (inner.start, inner.lo, inner.hi) == (0, 0, inner.size):
            # All of the inner dimensions is here and needed: one longer dimension.
            n = inner.size
            dims[0] = _Dim(here.size * n, here.start * n, inner.stride, here.lo * n, here.hi * n)
        else:
            dims.insert(0, here)
        stride *= size
    return _Target(_bits(image, held), tuple(dims))


def _bits(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """What `buffer` holds of `entry`, flat, as integers of the elements' size."""
    raw = buffer[entry.offset : entry.offset + entry.nbytes]
    return raw.view(_INTEGERS[entry.torch_dtype.itemsize])


def _blocks(elements: torch.Tensor) -> Iterator[Array]:
    """Blocks of a flat tensor on the host; where it lies on a device, many of them are fetched at once."""
    for slab in elements.split(_SLAB) if elements.is_cuda else (elements,):
        values = slab.cpu().numpy()
        for start in range(0, len(values), _BLOCK):
            yield values[start : start + _BLOCK]


def _numel(entry: Entry) -> int:
    return entry.nbytes // entry.torch_dtype.itemsize
