"""Where each parameter lies in a flat buffer: names, boxes, offsets. Computed once, used for every version; pure.

A buffer holds parameters one after the other in the order of its layout, each 64-byte aligned. Of a parameter it
holds a *box*: one range of indices per dimension, in coordinates of the full parameter. In a full layout (what a
receiver loads from) every box is the whole parameter; in a rank layout it is what one trainer rank owns, packed
densely, so a rank's buffer costs its own share and no rank ever gathers the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from forge.errors import WeightSyncError

# (start, stop) per dimension, in coordinates of the full parameter; () is the box of a scalar.
Box = tuple[tuple[int, int], ...]

ALIGNMENT = 64
# Path components that wrappers add: torch.compile, activation checkpointing, FSDP1, a PEFT layer around its base.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"}


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    return math.prod(box_shape(box))


def intersect(a: Box, b: Box) -> Box | None:
    """What lies in both boxes (of one parameter); None when nothing does."""
    both = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def inside(inner: Box, outer: Box) -> bool:
    return len(inner) == len(outer) and all(t <= s <= e <= f for (s, e), (t, f) in zip(inner, outer, strict=True))


@dataclass(frozen=True)
class Entry:
    """One parameter in a buffer: the shape of the full parameter, its dtype as text ("float32"), the box of it that
    the buffer holds, the byte offset of that box and its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    box: Box

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Layout:
    """The parameters of a buffer in publishing order; `nbytes` is the size of the buffer."""

    entries: tuple[Entry, ...]
    nbytes: int

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def key(self) -> int:
        """64 bits that are the same for equal entries, so that two sides can tell that they mean one layout."""
        return xxh3_64_intdigest(repr(self.plain()).encode())

    def plain(self) -> list[list[Any]]:
        """The layout in lists, text and numbers, for messages that carry nothing else."""
        return [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes, [list(r) for r in e.box]] for e in self.entries]

    @staticmethod
    def from_plain(rows: Sequence[Sequence[Any]]) -> Layout:
        entries = tuple(
            Entry(name, dtype, tuple(shape), offset, nbytes, tuple((start, stop) for start, stop in box))
            for name, dtype, shape, offset, nbytes, box in rows
        )
        return Layout(entries, max((aligned(e.offset + e.nbytes) for e in entries), default=0))


def clean_name(name: str) -> str:
    """The Hugging Face name of a parameter, without what DDP, FSDP, activation checkpointing, compile or PEFT added.

    `base_model.model.x.base_layer.weight` and `x.modules_to_save.default.weight` are `x.weight`.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]  # and the adapter's name
    while len(parts) > 1 and parts[0] == "module":  # DDP is outermost; deeper down it is somebody's own name
        del parts[0]
    if parts[:2] == ["base_model", "model"]:
        del parts[:2]
    return ".".join(parts)


def is_adapter(name: str) -> bool:
    """Whether a parameter is no parameter of the base model: a LoRA matrix, or the frozen original of a module of
    which PEFT trains a copy (`modules_to_save`).
    """
    return any(part.startswith("lora_") or part == "original_module" for part in name.split("."))


def make_layout(
    parameters: Iterable[tuple[str, Sequence[int], torch.dtype]], boxes: Mapping[str, Box | None] | None = None
) -> Layout:
    """Lays out `(name, full shape, dtype)` one after the other, cleaning names; adapters' parameters are left out.

    `boxes` (by clean name) says what the buffer holds of each: absent, None or empty is nothing. Without `boxes` it
    holds all of everything. Raises WeightSyncError when two parameters end up with one name, or when a box reaches
    out of its parameter.
    """
    entries: list[Entry] = []
    seen: set[str] = set()
    offset = 0
    for raw, size, dtype in parameters:
        if is_adapter(raw):
            continue
        name, shape = clean_name(raw), tuple(size)
        if name in seen:
            raise WeightSyncError(f"two parameters are named {name} once wrappers are removed (second: {raw})")
        seen.add(name)
        box = full_box(shape) if boxes is None else boxes.get(name)
        if box is None or (boxes is not None and numel(box) == 0):
            continue
        if not inside(box, full_box(shape)):
            raise WeightSyncError(f"box {box} of {name} reaches out of its shape {shape}")
        nbytes = numel(box) * dtype.itemsize
        entries.append(Entry(name, str(dtype).removeprefix("torch."), shape, offset, nbytes, box))
        offset = aligned(offset + nbytes)
    return Layout(tuple(entries), offset)


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """What `buffer` (uint8 `[layout.nbytes]`) holds of the parameter of `entry`, in the shape of its box, no copy."""
    raw = buffer[entry.offset : entry.offset + entry.nbytes]
    return raw.view(entry.torch_dtype).view(box_shape(entry.box))


def sub_view(buffer: torch.Tensor, entry: Entry, box: Box) -> torch.Tensor:
    """The part `box` (coordinates of the full parameter) of what `buffer` holds of `entry`, without a copy.

    Raises WeightSyncError when the buffer does not hold all of it.
    """
    if not inside(box, entry.box):
        raise WeightSyncError(f"{entry.name}: box {box} is not inside {entry.box}, which this buffer holds")
    origin = [start for start, _ in entry.box]
    part = view(buffer, entry)
    return part[tuple(slice(start - o, stop - o) for (start, stop), o in zip(box, origin, strict=True))]


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
