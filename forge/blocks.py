"""The memory behind a pool: blocks of segments, used again and again so that their pages are there.

A segment of a pool begins with a table of reader cells in shared memory; blocks lie behind it. A handle
owns one cell for each of its readers:

    FREE -> OFFERED (sender offers) -> OPEN (a reader claims it) -> DONE (its last tensor is gone) -> FREE
               |                         |
               +-> DONE: nobody          +-> DONE: the reader's process has ended
                   claimed it in time

There is no compare-and-swap in Python, so each step has one writer: whoever takes a cell out of OFFERED
holds the segment's lock; a reader alone ends its own OPEN, the owner only when that reader is dead; all
else is the owner's. A block serves again when none of its handles has a cell in use, no `put` or `alloc`
is at work on it, and no tensor that `alloc` made of it is left in the owner.

Large blocks have a segment each. Small ones share segments, cut to size and merged again when free, so
that thousands of queued groups of many lengths need few descriptors and leave no memory idle.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from forge.errors import ChannelError
from forge.segment import Segment, identity, start_time

NUM_CELLS = 1024
"""Reader cells of a segment: so many shares of its blocks can be in use at a time."""
_FREE, _OFFERED, _OPEN, _DONE = range(4)
_TICKET, _PID, _START, _STATE, _WORDS = range(5)
TABLE = NUM_CELLS * _WORDS * 8
"""Bytes at the head of a segment before its first block."""
_LARGE = 4 << 20
_PAGE = 4096
StartTime = Callable[[int], int | None]


class Cells:
    """The reader cells of a segment, as the owner or as a reader of it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._words = segment.memory[:TABLE].cast("q")

    def get(self, cell: int, word: int) -> int:
        return int(self._words[cell * _WORDS + word])

    def set(self, cell: int, word: int, value: int) -> None:
        self._words[cell * _WORDS + word] = value

    def offer(self, cell: int, ticket: int) -> None:
        """Owner: FREE -> OFFERED."""
        for word, value in ((_TICKET, ticket), (_PID, 0), (_START, 0), (_STATE, _OFFERED)):
            self.set(cell, word, value)

    def claim(self, ticket: int, cells: tuple[int, ...]) -> int | None:
        """Reader: OFFERED -> OPEN for one cell of this ticket, which it returns; None when none is left."""
        with self.segment.locked():
            for cell in cells:
                if self.get(cell, _TICKET) == ticket and self.get(cell, _STATE) == _OFFERED:
                    pid, started = identity()
                    for word, value in ((_PID, pid), (_START, started), (_STATE, _OPEN)):
                        self.set(cell, word, value)
                    return cell
        return None

    def release(self, cell: int, pid: int) -> None:
        """Reader `pid`: OPEN -> DONE.

        One store and no lock: it runs wherever the last tensor dies, inside the garbage collector too. A
        forked child inherits its parent's finalizers and must not release what the parent still reads.
        """
        if os.getpid() == pid:
            self.set(cell, _STATE, _DONE)

    def readers(self, ticket: int, cells: tuple[int, ...]) -> list[tuple[int, int]]:
        """(pid, start_time) of those who have claimed this ticket, as long as some of them are not done."""
        live = [c for c in cells if self.get(c, _TICKET) == ticket and self.get(c, _STATE) != _FREE]
        return [(self.get(c, _PID), self.get(c, _START)) for c in live if self.get(c, _PID)]

    def settle(self, cell: int, expired: bool, started: StartTime) -> bool:
        """Owner: whether this cell is DONE, having ended it if its reader died, or if `expired` unclaimed."""
        state = self.get(cell, _STATE)
        if state == _OPEN and started(self.get(cell, _PID)) != self.get(cell, _START):
            self.set(cell, _STATE, _DONE)
        elif state == _OFFERED and expired:
            with self.segment.locked():
                if self.get(cell, _STATE) == _OFFERED:
                    self.set(cell, _STATE, _DONE)
        return self.get(cell, _STATE) == _DONE

    def free(self, cell: int) -> None:
        """Owner: DONE -> FREE."""
        self.set(cell, _STATE, _FREE)


class Arena:
    """A segment of this process, cut into blocks; a `whole` one is a single block or free."""

    def __init__(self, segment: Segment, *, whole: bool) -> None:
        self.segment, self.whole = segment, whole
        self.cells = Cells(segment)
        self.address = segment.buffer.data_ptr()
        self.free_cells = list(range(NUM_CELLS))
        self.blocks: set[Block] = set()
        self._free = [(TABLE, segment.nbytes - TABLE)]  # (offset, size), by offset, no two adjacent

    def fit(self, size: int) -> tuple[int, int] | None:
        """The smallest free range that takes `size` bytes, as (its size, offset)."""
        if self.whole:
            return min(((s, at) for at, s in self._free if size <= s <= 2 * size), default=None)
        return min(((s, at) for at, s in self._free if size <= s), default=None)

    def cut(self, offset: int, size: int) -> Block:
        """A block at the start of the free range at `offset`."""
        place = bisect_right(self._free, (offset, 0))
        start, length = self._free.pop(place)
        if self.whole:
            size = length
        if length > size:
            self._free.insert(place, (start + size, length - size))
        block = Block(self, start, size)
        self.blocks.add(block)
        return block

    def give_back(self, block: Block) -> None:
        """Merges a block into the free ranges."""
        self.blocks.remove(block)
        offset, size = block.offset, block.size
        place = bisect_right(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + size:
            size += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == offset:
            offset, before = self._free.pop(place - 1)
            size, place = size + before, place - 1
        self._free.insert(place, (offset, size))


@dataclass(eq=False)
class Block:
    """A slice of an arena that holds the leaves of one TensorDict."""

    arena: Arena
    offset: int
    """Into the segment, bytes."""
    size: int
    offers: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    """ticket -> when it was offered (monotonic seconds), its cells."""
    held: bool = True
    """A `put` or `alloc` is at work on it."""
    tensors: weakref.ref[memoryview] | None = None
    """Alive as long as a tensor of the owner, made by `alloc`, views the block."""

    def memory(self) -> memoryview:
        """A new view of the bytes; tensors made of it are what keeps it alive."""
        return self.arena.segment.memory[self.offset : self.offset + self.size]

    def allocated(self) -> bool:
        """Whether tensors from `alloc` still view the block."""
        return self.tensors is not None and self.tensors() is not None

    def offer(self, ticket: int, readers: int) -> tuple[int, ...]:
        """The cells for this ticket, now open to `readers` claims. Raises ChannelError when too few are free."""
        free = self.arena.free_cells
        if len(free) < readers:
            raise ChannelError(
                f"this memory is already offered to {NUM_CELLS - len(free)} readers and {readers} more exceed "
                f"the limit of {NUM_CELLS}; wait until some have let go, or put a clone"
            )
        cells = tuple(free.pop() for _ in range(readers))
        self.offers[ticket] = time.monotonic(), cells
        for cell in cells:
            self.arena.cells.offer(cell, ticket)
        return cells

    def settle(self, unopened_s: float, started: StartTime = start_time) -> None:
        """Ends the offers whose readers are all done, dead, or did not come for `unopened_s` seconds."""
        for ticket, (since, cells) in list(self.offers.items()):
            expired = time.monotonic() - since >= unopened_s
            # A ticket's cells go together: until then they tell who has opened it.
            if all(self.arena.cells.settle(cell, expired, started) for cell in cells):
                for cell in cells:
                    self.arena.cells.free(cell)
                self.arena.free_cells.extend(cells)
                del self.offers[ticket]

    def idle(self) -> bool:
        """Whether nobody, here or elsewhere, can still see the bytes."""
        return not (self.offers or self.held or self.allocated())


class BlockStore:
    """The segments that one process owns, within a budget. Callers hold `lock`, except around `acquire`."""

    def __init__(self, max_bytes: int, wait_s: float, unopened_s: float) -> None:
        self.max_bytes, self.wait_s, self.unopened_s = max_bytes, wait_s, unopened_s
        self.lock = threading.RLock()
        self.owned_bytes = 0
        """Bytes of the segments that exist or are being made."""
        self.arenas: dict[str, Arena] = {}
        """By the id of the segment."""
        self._addresses: list[tuple[int, str]] = []

    def acquire(self, nbytes: int, readers: int) -> Block:
        """A block for `nbytes` with cells for `readers`, `held` for the caller, who resets that.

        Waits until one comes free when the budget is reached. Raises ChannelError after `wait_s` seconds,
        and at once for what can never fit.
        """
        size = _rounded(nbytes)
        if TABLE + size > self.max_bytes:
            raise ChannelError(
                f"a TensorDict of {nbytes} bytes needs {TABLE + size} of shared memory, max_bytes is "
                f"{self.max_bytes}; raise max_bytes or send smaller pieces"
            )
        deadline, pause = time.monotonic() + self.wait_s, 0.0002
        while True:
            with self.lock:
                block = self._find(size, readers)
                room = 0 if block else self._make_room(size)
                self.owned_bytes += room
            if room:
                block = self._grow(size, room)
            if block is not None:
                return block
            if time.monotonic() >= deadline:
                raise ChannelError(
                    f"no {size} bytes came free within {self.wait_s} s: {self.busy_bytes()} bytes are offered, "
                    f"open or allocated, max_bytes is {self.max_bytes}; raise max_bytes, or drop received "
                    "TensorDicts sooner"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def busy_bytes(self) -> int:
        """Bytes of the blocks that somebody may still see."""
        with self.lock:
            return sum(block.size for arena in self.arenas.values() for block in arena.blocks)

    def at(self, address: int) -> Block | None:
        """The block that this address of the process lies in."""
        place = bisect_right(self._addresses, (address, "~")) - 1  # "~" sorts behind every id
        if place < 0:
            return None
        arena = self.arenas[self._addresses[place][1]]
        offset = address - arena.address
        return next((b for b in arena.blocks if b.offset <= offset < b.offset + b.size), None)

    def sweep(self) -> int:
        """Frees the blocks that nobody can see any more; returns how many bytes."""
        freed = 0
        started = cache(start_time)  # a few readers hold many blocks
        for arena in self.arenas.values():
            for block in list(arena.blocks):
                block.settle(self.unopened_s, started)
                if block.idle():
                    arena.give_back(block)
                    freed += block.size
        return freed

    def close(self) -> None:
        """Gives up everything; mappings last as long as the tensors that view them."""
        for arena in list(self.arenas.values()):
            self._drop(arena)

    def _find(self, size: int, readers: int) -> Block | None:
        for sweep_first in (False, True):
            if sweep_first:
                self.sweep()
            fits = [
                (*fit, arena.segment.ref.id)
                for arena in self.arenas.values()
                if arena.whole == (size >= _LARGE) and len(arena.free_cells) >= readers and (fit := arena.fit(size))
            ]
            if fits:
                _, offset, name = min(fits)
                return self.arenas[name].cut(offset, size)
        return None

    def _make_room(self, size: int) -> int:
        """By how many bytes the store may grow for a block of `size`; closes idle segments if it must."""
        shared = max(4 * size, min(max(self.owned_bytes, 2 << 20), 16 << 20))
        for room in (TABLE + (size if size >= _LARGE else shared), TABLE + size):
            if self.owned_bytes + room <= self.max_bytes:
                return room
        for arena in [arena for arena in self.arenas.values() if not arena.blocks]:
            self._drop(arena)
            if self.owned_bytes + TABLE + size <= self.max_bytes:
                return TABLE + size
        return 0

    def _grow(self, size: int, room: int) -> Block:
        try:
            segment = Segment.create(room)  # outside the lock: touching the pages takes about 1 ms a MB
        except ChannelError:
            with self.lock:
                self.owned_bytes -= room
            raise
        arena = Arena(segment, whole=size >= _LARGE)
        with self.lock:
            self.arenas[segment.ref.id] = arena
            insort(self._addresses, (arena.address, segment.ref.id))
            return arena.cut(TABLE, size)

    def _drop(self, arena: Arena) -> None:
        del self.arenas[arena.segment.ref.id]
        self._addresses.remove((arena.address, arena.segment.ref.id))
        self.owned_bytes -= arena.segment.nbytes
        arena.segment.close()
        arena.blocks.clear()  # they refer back, and memory should not wait for the garbage collector


def _rounded(nbytes: int) -> int:
    """Small blocks to pages; large ones to eight sizes an octave, so that those of like size serve each other."""
    step = _PAGE if nbytes < _LARGE else 1 << (nbytes.bit_length() - 4)
    return max(1, -(-nbytes // step)) * step
