"""How a TensorDict lies in flat bytes: the pure half of the data plane.

    TensorDict --flatten--> Layout (tree, specs, offsets) + leaves --write--> bytes --rebuild--> TensorDict

Each leaf is stored dense, 64-byte aligned, and comes back as a tensor with a storage of its own size,
so a view of a large tensor costs its own bytes here and in whatever pickles it later. The tree holds
nested TensorDicts with their batch sizes, lazy stacks, and non-tensor data (which is pickled, so it
travels beside the bytes: meant for labels and texts, not for arrays).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from forge.errors import ChannelError

ALIGN = 64
"""Offsets are multiples of this many bytes: a cache line, and wide enough for any vector load."""

Memory = memoryview | bytearray
# A node of the tree is a leaf's number or a tuple whose first word says what follows:
#   ("dict", batch_size, names, {key: node})   ("data", batch_size, object)
#   ("stack", dim, [node])                     ("objects", dim, [node])
Node = Any


@dataclass(frozen=True)
class Layout:
    """Everything but the bytes of the leaves."""

    tree: Node
    specs: list[tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape of each leaf."""
    offsets: list[int]
    """Where each leaf begins, bytes."""
    nbytes: int
    """Bytes from the first leaf's start to the last one's end."""

    def dumps(self) -> bytes:
        """As bytes for a message. Raises ChannelError when non-tensor data cannot be pickled."""
        try:
            return pickle.dumps((self.tree, self.specs, self.offsets, self.nbytes), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ChannelError(f"non-tensor data cannot be pickled: {error}; send plain values") from error

    @classmethod
    def loads(cls, data: bytes) -> Layout:
        """The inverse of `dumps`."""
        return cls(*pickle.loads(data))


def flatten(td: TensorDictBase) -> tuple[Layout, list[torch.Tensor]]:
    """The layout of `td` packed densely, and its leaves in the order of `layout.specs`.

    Raises ChannelError for what has no flat bytes: sparse, nested, quantized and distributed tensors,
    and tensor collections other than TensorDicts.
    """
    leaves: list[torch.Tensor] = []
    tree = _node(td, "", leaves)
    offsets, end = [], 0
    for leaf in leaves:
        start = -(-end // ALIGN) * ALIGN
        offsets.append(start)
        end = start + leaf.numel() * leaf.element_size()
    return Layout(tree, [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves], offsets, end), leaves


def rebuild(layout: Layout, memory: Memory, *, copy: bool = False) -> TensorDict:
    """The TensorDict whose leaves view `memory`, or with `copy` own their bytes; always on the CPU."""
    leaves = views(layout, memory)
    td = _build(layout.tree, [leaf.clone() for leaf in leaves] if copy else leaves)
    assert isinstance(td, TensorDictBase)
    return td


def write(layout: Layout, leaves: Sequence[torch.Tensor], memory: Memory) -> None:
    """Copies each leaf to its place: once, straight from wherever and however it lies."""
    for view, leaf in zip(views(layout, memory), leaves, strict=True):
        view.copy_(leaf.detach() if leaf.requires_grad else leaf)


def views(layout: Layout, memory: Memory) -> list[torch.Tensor]:
    """One tensor a leaf, over `memory`; each holds `memory` itself (not only its bytes) alive."""
    places = zip(layout.specs, layout.offsets, strict=True)
    return [_view(memory, dtype, shape, offset) for (dtype, shape), offset in places]


def _view(memory: Memory, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)


def _node(value: Any, key: str, leaves: list[torch.Tensor]) -> Node:
    if isinstance(value, torch.Tensor):
        _check_leaf(value, key)
        leaves.append(value)
        return len(leaves) - 1
    if isinstance(value, NonTensorData):
        return "data", tuple(value.batch_size), value.data
    if isinstance(value, LazyStackedTensorDict | NonTensorStack):
        kind = "objects" if isinstance(value, NonTensorStack) else "stack"
        children = [_node(child, f"{key}[{i}]", leaves) for i, child in enumerate(value.tensordicts)]
        return kind, value.stack_dim, children
    if isinstance(value, TensorDictBase):
        names = list(value.names) if any(value.names) else None
        entries = {k: _node(v, f"{key}.{k}" if key else k, leaves) for k, v in value.items()}
        return "dict", tuple(value.batch_size), names, entries
    what = key or "the value"
    raise ChannelError(f"{what} is a {type(value).__name__}, expected a TensorDict; try .to_tensordict()")


def _check_leaf(leaf: torch.Tensor, key: str) -> None:
    kind = None
    if leaf.is_nested:
        kind, remedy = "nested", "pad it, or keep the rows in a lazy stack"
    elif leaf.layout != torch.strided:
        kind, remedy = f"of layout {leaf.layout}", "call .to_dense()"
    elif leaf.is_quantized:
        kind, remedy = "quantized", "call .dequantize() or .int_repr()"
    elif hasattr(leaf, "full_tensor"):
        kind, remedy = "distributed", "call .full_tensor() or .to_local()"
    if kind is not None:
        raise ChannelError(f"{key} is a {kind} tensor, shape {list(leaf.shape)}; only dense ones travel: {remedy}")


def _build(node: Node, leaves: list[torch.Tensor]) -> Any:
    if isinstance(node, int):
        return leaves[node]
    kind, *rest = node
    if kind == "dict":
        batch_size, names, entries = rest
        values = {key: _build(child, leaves) for key, child in entries.items()}
        return TensorDict(values, batch_size=batch_size, names=names)
    if kind == "data":
        batch_size, data = rest
        return NonTensorData(data=data, batch_size=batch_size)
    dim, children = rest
    stack = NonTensorStack if kind == "objects" else LazyStackedTensorDict
    return stack(*[_build(child, leaves) for child in children], stack_dim=dim)
