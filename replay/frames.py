"""The bytes of the journal: values as records, records in a file, and what a crash or a bad disk leaves of them.

    frame    magic, 4 bytes | length of the body, u32 | xxh3 of length and body, u64 | body
    body     kind, u8 | length of the header, u32 | header, JSON | zeros up to a multiple of 64 | payload
    payload  the tensors of the record, raw, each at a multiple of 64 bytes; pickled objects between them

Little-endian. The header is the record with each tensor replaced by dtype, shape and place. Only what is no plain
value, tensor, TensorDict or registered dataclass is pickled. A *mark* is a frame that is written after a sync:
whatever lies before it was on the disk. So a damaged frame before a mark is damage, and one behind the last mark
is the torn end that a crash leaves.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from tensordict import TensorDictBase

from forge.data import Prompt
from forge.layout import ALIGN, Layout, flatten, rebuild

MAGIC = b"\x93MJ1"
MARK = 0
"""Kind of a mark; its value is None."""
MAX_BODY = 2**32 - 1
_HEAD = struct.Struct("<4sIQ")
_BODY = struct.Struct("<BI")
_CLASSES: dict[str, type] = {"Prompt": Prompt}


def plain(cls: type) -> type:
    """Registers a dataclass: written field by field, read back as itself. Fields are added at the end only."""
    _CLASSES[cls.__name__] = cls
    return cls


# --- values


class _Payload:
    """Tensors and pickled objects of one record, and where they lie."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []
        self.size = 0

    def add(self, data: Any, nbytes: int) -> int:
        offset = -(-self.size // ALIGN) * ALIGN
        self.parts.append((offset, data))
        self.size = offset + nbytes
        return offset


def _dump(value: Any, out: _Payload) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return value if all(type(v) is int for v in value) else [_dump(v, out) for v in value]
    if kind is tuple:
        return {"t": [_dump(v, out) for v in value]}
    if kind is dict:
        if all(type(k) is str for k in value):
            return {"d": {k: _dump(v, out) for k, v in value.items()}}
        return {"m": [[_dump(k, out), _dump(v, out)] for k, v in value.items()]}
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested)
    ):
        return {"a": [_dtype_name(value.dtype), list(value.shape), _add_leaf(value, out)]}
    if isinstance(value, TensorDictBase):
        layout, leaves = flatten(value)
        specs = [[_dtype_name(dtype), list(shape)] for dtype, shape in layout.specs]
        return {"td": [_dump(layout.tree, out), specs, [_add_leaf(leaf, out) for leaf in leaves]]}
    if _CLASSES.get(kind.__name__) is kind:
        return {"c": [kind.__name__, *(_dump(getattr(value, f.name), out) for f in fields(value))]}
    pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return {"o": [out.add(pickled, len(pickled)), len(pickled)]}


def _load(node: Any, payload: bytearray) -> Any:
    if isinstance(node, list):
        return [_load(v, payload) if isinstance(v, list | dict) else v for v in node]
    if not isinstance(node, dict):
        return node
    ((tag, value),) = node.items()
    match tag:
        case "t":
            return tuple(_load(v, payload) for v in value)
        case "d":
            return {k: _load(v, payload) for k, v in value.items()}
        case "m":
            return {_load(k, payload): _load(v, payload) for k, v in value}
        case "c":
            return _CLASSES[value[0]](*(_load(v, payload) for v in value[1:]))
        case "o":
            return pickle.loads(payload[value[0] : value[0] + value[1]])
        case "a":
            dtype, shape, offset = value
            return _tensor(payload, _dtype(dtype), shape, offset)
        case _:
            tree, specs, offsets = value
            layout = Layout(_load(tree, payload), [(_dtype(d), tuple(s)) for d, s in specs], offsets, len(payload))
            return rebuild(layout, payload)


def _add_leaf(tensor: torch.Tensor, out: _Payload) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return out.add(flat.data, flat.nbytes)


def _tensor(payload: bytearray, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(shape)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


# --- frames


def encode(kind: int, value: Any) -> bytearray:
    """`value` as one frame. Raises ChannelError for tensors without flat bytes, and what pickle raises."""
    payload = _Payload()
    header = json.dumps(_dump(value, payload), separators=(",", ":")).encode()
    start = _BODY.size + len(header)
    begin = -(-start // ALIGN) * ALIGN if payload.parts else start
    length = begin + payload.size
    if length > MAX_BODY:
        raise ValueError(f"a record of {length:,} bytes; the journal holds at most {MAX_BODY:,} in one")
    frame = bytearray(_HEAD.size + length)
    body = memoryview(frame)[_HEAD.size :]
    _BODY.pack_into(body, 0, kind, len(header))
    body[_BODY.size : start] = header
    for offset, data in payload.parts:
        body[begin + offset : begin + offset + len(data)] = data
    _HEAD.pack_into(frame, 0, MAGIC, length, _checksum(length, body))
    return frame


def _checksum(length: int, body: memoryview | bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=length)


@dataclass(frozen=True, slots=True)
class Frame:
    """An intact frame."""

    kind: int
    offset: int
    """Where it begins in its file, bytes."""
    end: int
    body: bytes

    def load(self) -> Any:
        """The value; its tensors share memory that nothing else uses."""
        _, size = _BODY.unpack_from(self.body)
        start = _BODY.size + size
        header = json.loads(self.body[_BODY.size : start])
        return _load(header, bytearray(self.body[-(-start // ALIGN) * ALIGN :]))


@dataclass(frozen=True, slots=True)
class Damage:
    """Where the intact frames of a file end although the file goes on."""

    path: Path
    offset: int
    nbytes: int
    """From there to the end of the file."""
    confirmed: bool
    """A mark behind it says that these bytes were on the disk: not the torn end of a crash."""


def read_frames(path: Path, found: Callable[[Damage], None]) -> Iterator[Frame]:
    """The intact frames of a file from its beginning, marks left out, one in memory at a time.

    Ends at the first that is not intact, after telling `found`. Raises OSError.
    """
    with path.open("rb") as file:
        offset = 0
        while (frame := _read_frame(file, offset)) is not None:
            if frame.kind != MARK:
                yield frame
            offset = frame.end
        size = file.seek(0, 2)
        if offset < size:
            found(Damage(path, offset, size - offset, _has_mark(file, offset + 1)))


def read_frame(path: Path, offset: int) -> Frame:
    """The frame that begins at `offset`. Raises OSError, and ValueError when there is none."""
    with path.open("rb") as file:
        frame = _read_frame(file, offset)
    if frame is None:
        raise ValueError(f"no intact record at byte {offset} of {path}")
    return frame


def _read_frame(file: BinaryIO, offset: int) -> Frame | None:
    file.seek(offset)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack(head)
    if magic != MAGIC or length < _BODY.size or length > file.seek(0, 2) - offset - _HEAD.size:
        return None
    file.seek(offset + _HEAD.size)
    body = file.read(length)
    if len(body) < length or _checksum(length, body) != checksum:
        return None
    kind, _ = _BODY.unpack_from(body)
    return Frame(kind, offset, offset + _HEAD.size + length, body)


def _has_mark(file: BinaryIO, offset: int) -> bool:
    block = 1 << 20
    while True:
        file.seek(offset)
        data = file.read(block)
        at = data.find(MAGIC)
        while at >= 0:
            frame = _read_frame(file, offset + at)
            if frame is not None and frame.kind == MARK:
                return True
            at = data.find(MAGIC, at + 1)
        if len(data) < block:
            return False
        offset += block - len(MAGIC) + 1
