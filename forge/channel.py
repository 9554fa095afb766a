"""The data plane: TensorDicts between processes of one host, while messages carry only handles.

Between nodes the messages carry the bytes, some 100 MB/s: see ACROSS_NODES_ENV, which `forge.mesh.Cluster` sets.

    sender                            message            receiver
    put(td) -> Handle    (one copy)  --------->   open(handle) -> TensorDict  (no copy)
    td = alloc(like); fill it                     take(handle) -> TensorDict  (one copy, holds nothing)
    put(td) -> Handle    (no copy)                close(handle)               it will not be opened here

Laws:
- A block of memory is used again only when no tensor views it any more, in the sender or in a reader.
  What is counted are storages, so views, tensors saved for a backward pass and numpy arrays count too.
- A reader that was killed gives its blocks back. A sender that was killed takes nothing from those who
  opened in time; later ones get an error. When all are gone the memory is, it has no name to be left under.
- A handle can be opened `readers` times in all; once more is an error, never somebody else's data.

Who waits: only `put` and `alloc`, for memory, once `max_bytes` is reached; at most `wait_s` seconds. On
an event loop whose own work frees that memory, call them through `asyncio.to_thread`.
A forked child is no reader and starts with an empty pool; it must not touch tensors that it inherits.

The parts: segment.py (shared bytes), blocks.py (who uses which), layout.py (TensorDict <-> bytes).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from dataclasses import dataclass, field, replace

import torch
from tensordict import TensorDict, TensorDictBase

from forge.blocks import Block, BlockStore, Cells
from forge.errors import ChannelError
from forge.layout import Layout, flatten, rebuild, write
from forge.memory import memory_limit_bytes
from forge.segment import Segment, SegmentRef, identity

__all__ = ["Handle", "Pool", "PoolStats", "Segment", "SegmentRef"]
__all__ += ["alloc", "close", "default_pool", "open", "put", "reclaim", "set_default_pool", "take", "withdraw"]

ACROSS_NODES_ENV = "MESHFORGE_ACROSS_NODES"
"""Set in the processes of a run where memory is not enough: TensorDicts travel inside their handles, as messages."""
MAX_READERS = 64
"""Receivers that one handle can have."""


@dataclass(frozen=True)
class Handle:
    """What a message carries in place of a TensorDict: under 4 kB for 20 leaves, or all of a small one."""

    ticket: int
    """Number of this put in the sending pool."""
    readers: int
    """How often it can be opened; one that travels in `payload` any number of times."""
    nbytes: int
    """Bytes of the tensors, packed."""
    batch_size: tuple[int, ...]
    """Of the TensorDict, so that a queue can count rows without opening anything."""
    layout: bytes = field(repr=False)
    segment: SegmentRef | None = None
    """Where the data lies; None when it travels in `payload`."""
    offset: int = 0
    """Of the data inside the segment, bytes."""
    cells: tuple[int, ...] = field(default=(), repr=False)
    """Where in the segment its readers sign, one cell each."""
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds at the moment."""

    num_segments: int
    """Segments of its own."""
    owned_bytes: int
    """Their memory, at most `max_bytes`."""
    busy_bytes: int
    """The part of it that somebody may still see (as of the last sweep)."""
    num_attached: int
    """Segments of other processes that are mapped here."""


class Pool:
    """Sends from memory that it owns, opens what others sent. Any thread may call any method.

    max_bytes: shared memory that this pool may own; default a quarter of the machine's or the container's
    inline_bytes: TensorDicts of fewer bytes travel inside the handle; None: all do, as they must between nodes
    wait_s: how long `put` and `alloc` wait for memory once max_bytes is reached
    unopened_s: after how long the memory of a handle that nobody opened may be used again
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        inline_bytes: int | None = 64 * 1024,
        wait_s: float = 60.0,
        unopened_s: float = 3600.0,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ChannelError(f"max_bytes must be >= 1, got {max_bytes}; leave it out for 1/4 of memory")
        self.max_bytes = memory_limit_bytes() // 4 if max_bytes is None else max_bytes
        self.inline_bytes, self.wait_s, self.unopened_s = inline_bytes, wait_s, unopened_s
        self._tickets = itertools.count(1)
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self._store = BlockStore(self.max_bytes, self.wait_s, self.unopened_s)
        weakref.finalize(self, self._store.close)
        self._lock = self._store.lock
        self._attached: dict[str, Cells] = {}

    # ---- sending

    def put(self, td: TensorDictBase, readers: int = 1) -> Handle:
        """A handle that `readers` receivers may open (or take, or close) once each.

        One copy into shared memory, from any device and of the viewed bytes only. No copy when `td`, or
        rows or a selection of keys of it, came from `alloc`: readers then see later writes too, and the
        memory stays taken as long as the sender's tensors. Gradients do not travel.
        Raises ChannelError when `readers` is out of range, a leaf is not a dense tensor, or no memory came
        free within `wait_s` seconds.
        """
        if not 1 <= readers <= MAX_READERS:
            raise ChannelError(f"readers must lie in [1, {MAX_READERS}], got {readers}; put it several times")
        layout, leaves = flatten(td)
        if any(leaf.is_meta for leaf in leaves):
            raise ChannelError("a leaf is on the meta device and has no bytes; fill what `alloc` returns instead")
        handle = Handle(next(self._tickets), readers, layout.nbytes, tuple(td.batch_size), layout.dumps())
        resident = None if self.inline_bytes is None else self._put_resident(handle, layout, leaves)
        if resident is not None:
            return resident
        if self.inline_bytes is None or layout.nbytes < self.inline_bytes:
            memory = bytearray(layout.nbytes)
            write(layout, leaves, memory)
            return replace(handle, payload=bytes(memory))
        block = self._store.acquire(layout.nbytes, readers)
        try:
            write(layout, leaves, block.memory())
            return self._offer(block, handle)
        finally:
            block.held = False

    def alloc(self, like: TensorDictBase) -> TensorDict:
        """A TensorDict with the keys, shapes and dtypes of `like` in shared memory; contents undefined.

        `like` may lie on any device, `meta` included. Non-tensor data is carried over. Raises as `put` does.
        """
        layout, _ = flatten(like)
        block = self._store.acquire(layout.nbytes, 0)
        try:
            memory = block.memory()
            block.tensors = weakref.ref(memory)
            return rebuild(layout, memory)
        finally:
            block.held = False

    def _put_resident(self, handle: Handle, layout: Layout, leaves: list[torch.Tensor]) -> Handle | None:
        """The handle when all leaves already lie in one block that `alloc` gave out, else None."""
        full = [leaf for leaf in leaves if leaf.numel()]
        with self._lock:
            block = self._store.at(full[0].data_ptr()) if full else None
            if block is None or not block.allocated() or not all(_is_plain(leaf) for leaf in full):
                return None
            start = block.arena.address + block.offset
            stop = start + block.size
            if not all(start <= x.data_ptr() and x.data_ptr() + x.nbytes <= stop for x in full):
                return None
            offsets = [leaf.data_ptr() - start if leaf.numel() else 0 for leaf in leaves]
            return self._offer(block, replace(handle, layout=replace(layout, offsets=offsets).dumps()))

    def _offer(self, block: Block, handle: Handle) -> Handle:
        with self._lock:
            block.settle(self.unopened_s)
            cells = block.offer(handle.ticket, handle.readers)
        return replace(handle, segment=block.arena.segment.ref, offset=block.offset, cells=cells)

    # ---- receiving

    def open(self, handle: Handle) -> TensorDict:
        """The TensorDict, mapped, on the CPU: no copy. Its memory goes back with the last tensor viewing it.

        Other readers, and a sender that keeps tensors from `alloc`, see the same bytes: with them, read only.
        Raises ChannelError when all readers have opened it, it expired, or its sender closed or ended.
        """
        if handle.segment is None:
            return rebuild(Layout.loads(handle.layout), bytearray(handle.payload))
        cells, cell = self._claim(handle)
        # A buffer object of this open alone: its end is the end of the last storage made of it.
        memory = cells.segment.memory[handle.offset :]
        weakref.finalize(memory, cells.release, cell, os.getpid()).atexit = False
        return rebuild(Layout.loads(handle.layout), memory)

    def take(self, handle: Handle) -> TensorDict:
        """The TensorDict as a private copy; the sender's memory is free on return. Raises as `open` does."""
        if handle.segment is None:
            return self.open(handle)
        cells, cell = self._claim(handle)
        try:
            memory = cells.segment.memory[handle.offset :]
            return rebuild(Layout.loads(handle.layout), memory, copy=True)
        finally:
            cells.release(cell, os.getpid())

    def close(self, handle: Handle) -> None:
        """Gives a share of `handle` back unopened; does nothing when this process has opened or closed it.

        What is open goes back with its last tensor, and only then. Nothing happens when the sender is gone.
        """
        with self._lock:
            cells = self._still_there(handle)
            if cells is not None and identity() not in cells.readers(handle.ticket, handle.cells):
                cell = cells.claim(handle.ticket, handle.cells)
                if cell is not None:
                    cells.release(cell, os.getpid())

    def withdraw(self, handle: Handle) -> None:
        """Gives all shares of `handle` back that nobody has opened: nobody will. What is open stays so."""
        with self._lock:
            cells = self._still_there(handle)
            while cells is not None and (cell := cells.claim(handle.ticket, handle.cells)) is not None:
                cells.release(cell, os.getpid())

    def _still_there(self, handle: Handle) -> Cells | None:
        """Its readers' cells; None for one that travels in its payload, and where the sender is gone."""
        with contextlib.suppress(ChannelError):
            return self._reach(handle.segment) if handle.segment is not None else None
        return None

    def _claim(self, handle: Handle) -> tuple[Cells, int]:
        ref = handle.segment
        assert ref is not None
        with self._lock:
            cells = self._reach(ref)
            cell = cells.claim(handle.ticket, handle.cells)
            if cell is not None:
                return cells, cell
            pids = sorted({pid for pid, _ in cells.readers(handle.ticket, handle.cells)})
        why = f"its {handle.readers} reader(s) have opened or closed it, processes {pids}; put more readers"
        if not pids:
            why = f"its {handle.readers} reader(s) are done, or none came for unopened_s; put it again"
        raise ChannelError(f"handle {handle.ticket} of process {ref.pid} cannot be opened: {why}")

    def _reach(self, ref: SegmentRef) -> Cells:
        if ref.id in self._store.arenas:
            return self._store.arenas[ref.id].cells
        if ref.id in self._attached:
            ref.check_open()
        else:
            self._forget_closed()
            self._attached[ref.id] = Cells(Segment.attach(ref))
        return self._attached[ref.id]

    def _forget_closed(self) -> None:
        # What stays mapped here would keep alive the memory of senders that have ended or given it up.
        for name, cells in list(self._attached.items()):
            try:
                cells.segment.ref.check_open()
            except ChannelError:
                cells.segment.close()
                del self._attached[name]

    # ---- upkeep

    def reclaim(self) -> int:
        """Takes back now what `put` and `alloc` would take back on demand; returns how many bytes came free.

        Also forgets segments whose sender has closed them or has ended.
        """
        with self._lock:
            self._forget_closed()
            return self._store.sweep()

    def stats(self) -> PoolStats:
        """What the pool holds; does not reclaim."""
        with self._lock:
            store = self._store
            return PoolStats(len(store.arenas), store.owned_bytes, store.busy_bytes(), len(self._attached))

    def shutdown(self) -> None:
        """Closes every segment: handles not yet opened become errors, what is open stays valid."""
        with self._lock:
            self._store.close()
            for cells in self._attached.values():
                cells.segment.close()
            self._attached.clear()

    def _after_fork(self) -> None:
        self._store.close()
        for cells in self._attached.values():
            cells.segment.close()
        self._begin()  # a new lock too: another thread of the parent may have held the old one


def _is_plain(leaf: torch.Tensor) -> bool:
    """Whether the bytes in memory are the values, in order."""
    return leaf.device.type == "cpu" and leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_default: list[Pool] = []
_default_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _default_lock
    _default_lock = threading.Lock()
    for pool in list(_pools):
        pool._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def default_pool() -> Pool:
    """The pool of this process, made with default limits on first use; ACROSS_NODES_ENV makes one of messages."""
    with _default_lock:
        if not _default:
            _default.append(Pool(inline_bytes=None) if os.environ.get(ACROSS_NODES_ENV) else Pool())
        return _default[0]


def set_default_pool(pool: Pool) -> None:
    """Makes `pool` the one behind the functions of this module; call it before the first of them."""
    with _default_lock:
        _default[:] = [pool]


def put(td: TensorDictBase, readers: int = 1) -> Handle:
    """`Pool.put` of the default pool."""
    return default_pool().put(td, readers)


def alloc(like: TensorDictBase) -> TensorDict:
    """`Pool.alloc` of the default pool."""
    return default_pool().alloc(like)


def open(handle: Handle) -> TensorDict:
    """`Pool.open` of the default pool."""
    return default_pool().open(handle)


def take(handle: Handle) -> TensorDict:
    """`Pool.take` of the default pool."""
    return default_pool().take(handle)


def close(handle: Handle) -> None:
    """`Pool.close` of the default pool."""
    default_pool().close(handle)


def withdraw(handle: Handle) -> None:
    """`Pool.withdraw` of the default pool."""
    default_pool().withdraw(handle)


def reclaim() -> int:
    """`Pool.reclaim` of the default pool."""
    return default_pool().reclaim()
