"""Where each parameter lies in a weight segment: computed once from names and shapes, reused for every version.

A segment holds the whole model flat, in the order of the layout, each parameter 64-byte aligned. A trainer
rank that owns rows of a parameter (FSDP2 shards dimension 0 in chunks) writes just those rows, so no rank
ever gathers the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.errors import WeightSyncError

_ALIGNMENT = 64
# Names that wrappers put into a parameter's path; the receiver knows the bare Hugging Face name only.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


@dataclass(frozen=True)
class Entry:
    """One parameter in a segment: full `shape`, `dtype` as text ("float32"), byte `offset` and size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Layout:
    """All parameters of a model in publishing order; `nbytes` is the size of a segment."""

    entries: tuple[Entry, ...]
    nbytes: int

    def plain(self) -> list[list[Any]]:
        """The layout in lists, text and numbers, for messages that carry nothing else."""
        return [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes] for e in self.entries]

    @staticmethod
    def from_plain(rows: Sequence[Sequence[Any]]) -> Layout:
        entries = tuple(Entry(n, d, tuple(s), o, b) for n, d, s, o, b in rows)
        return Layout(entries, max((e.offset + e.nbytes for e in entries), default=0))


def clean_name(name: str) -> str:
    """The Hugging Face name of a parameter, without what FSDP, activation checkpointing or compile added."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def make_layout(parameters: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> Layout:
    """Lays out `(name, full shape, dtype)` one after the other.

    Raises WeightSyncError when two parameters end up with one name.
    """
    entries: list[Entry] = []
    seen: set[str] = set()
    offset = 0
    for raw, shape, dtype in parameters:
        name = clean_name(raw)
        if name in seen:
            raise WeightSyncError(f"two parameters are named {name} once wrappers are removed (second: {raw})")
        seen.add(name)
        nbytes = math.prod(shape) * dtype.itemsize
        entries.append(Entry(name, str(dtype).removeprefix("torch."), tuple(shape), offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return Layout(tuple(entries), offset)


def unpaired_names(
    published: Iterable[str], receiver: Iterable[str], packed: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str]]:
    """(missing, unknown): what the receiver's parameters need and nobody publishes, and the other way round.

    `packed` maps the receiver's fused modules to their parts, such as qkv_proj to q_proj, k_proj, v_proj: a fused
    parameter that got only some of its parts would be loaded without complaint and be wrong.
    """
    wanted: set[str] = set()
    for name in receiver:
        fused = next((module for module in name.split(".") if module in packed), None)
        wanted |= {name} if fused is None else {name.replace(fused, part) for part in packed[fused]}
    have = set(published)
    return sorted(wanted - have), sorted(have - wanted)


def shard_rows(rows: int, world: int, rank: int) -> range:
    """The rows of dimension 0 that `rank` of `world` owns under FSDP2 (chunks of `ceil(rows / world)`)."""
    size = -(-rows // world)
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The parameter of `entry` inside `buffer` (uint8 `[layout.nbytes]`), without a copy."""
    raw = buffer[entry.offset : entry.offset + entry.nbytes]
    return raw.view(entry.torch_dtype).view(entry.shape)


def row_view(buffer: torch.Tensor, entry: Entry, rows: range) -> torch.Tensor:
    """Rows `rows` of dimension 0 of the parameter of `entry` inside `buffer`, without a copy."""
    full = view(buffer, entry)
    return full[rows.start : rows.stop] if entry.shape else full
