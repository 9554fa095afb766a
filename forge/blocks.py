"""The memory behind a pool: blocks of segments, used again and again so that their pages are there.

At the head of each block lie reader cells in shared memory, one for each reader of each handle to it:

    FREE -> OFFERED (sender offers) -> OPEN (a reader claims it) -> DONE (its last tensor is gone) -> FREE
               |                         |
               +-> DONE: nobody          +-> DONE: the reader's process has ended
                   claimed it in time

There is no compare-and-swap in Python, so each step has one writer: whoever takes a cell out of OFFERED
holds the segment's lock; a reader alone ends its own OPEN, the owner only when that reader is dead; all
else is the owner's. A block is idle, and may serve again, when it has no cells in use, no `put` or
`alloc` is at work on it, and no tensor that `alloc` made of it is left in the owner.
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

MAX_READERS = 32
"""Readers that one block can have at a time, over all handles to it."""
_FREE, _OFFERED, _OPEN, _DONE = range(4)
_TICKET, _PID, _START, _STATE, _WORDS = range(5)
StartTime = Callable[[int], int | None]
HEADER = MAX_READERS * _WORDS * 8
"""Bytes of the cells at the head of a block."""


class Cells:
    """The reader cells of the block at `offset` of a segment, in the owner and in each reader."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self.segment = segment
        self.payload_start = offset + HEADER
        self._words = segment.memory[offset : offset + HEADER].cast("q")

    def get(self, cell: int, word: int) -> int:
        return int(self._words[cell * _WORDS + word])

    def set(self, cell: int, word: int, value: int) -> None:
        self._words[cell * _WORDS + word] = value

    def offer(self, cell: int, ticket: int) -> None:
        """Owner: FREE -> OFFERED."""
        for word, value in ((_TICKET, ticket), (_PID, 0), (_START, 0), (_STATE, _OFFERED)):
            self.set(cell, word, value)

    def claim(self, ticket: int) -> int | None:
        """Reader: OFFERED -> OPEN for one cell of this ticket, which it returns; None when none is left."""
        with self.segment.locked():
            for cell in self._of(ticket):
                if self.get(cell, _STATE) == _OFFERED:
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

    def readers(self, ticket: int) -> list[tuple[int, int]]:
        """(pid, start_time) of those who have claimed this ticket."""
        return [(self.get(c, _PID), self.get(c, _START)) for c in self._of(ticket) if self.get(c, _PID)]

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

    def _of(self, ticket: int) -> list[int]:
        cells = [cell for cell in range(MAX_READERS) if self.get(cell, _TICKET) == ticket]
        return [cell for cell in cells if self.get(cell, _STATE) != _FREE]


@dataclass(eq=False)
class Block:
    """A slice of an owned segment: cells, then the payload."""

    cells: Cells
    offset: int
    size: int
    """Bytes, cells included."""
    offers: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    """ticket -> when it was offered (monotonic seconds), its cells."""
    held: bool = True
    """A `put` or `alloc` is at work on it."""
    tensors: weakref.ref[memoryview] | None = None
    """Alive as long as a tensor of the owner, made by `alloc`, views the payload."""

    @property
    def address(self) -> int:
        """Of the payload in this process."""
        return self.cells.segment.buffer.data_ptr() + self.cells.payload_start

    def payload(self) -> memoryview:
        """A new view of the payload; tensors made of it are what keeps it alive."""
        return self.cells.segment.memory[self.cells.payload_start : self.offset + self.size]

    def allocated(self) -> bool:
        """Whether tensors from `alloc` still view the payload."""
        return self.tensors is not None and self.tensors() is not None

    def settle(self, unopened_s: float, started: StartTime = start_time) -> None:
        """Ends the offers whose readers are all done, dead, or did not come for `unopened_s` seconds."""
        for ticket, (since, cells) in list(self.offers.items()):
            expired = time.monotonic() - since >= unopened_s
            # A ticket's cells go together: until then they tell who has opened it.
            if all(self.cells.settle(cell, expired, started) for cell in cells):
                for cell in cells:
                    self.cells.free(cell)
                del self.offers[ticket]

    def offer(self, ticket: int, readers: int) -> None:
        """Opens `readers` cells for this ticket. Raises ChannelError when too few are free."""
        taken = {cell for _, cells in self.offers.values() for cell in cells}
        free = [cell for cell in range(MAX_READERS) if cell not in taken]
        if len(free) < readers:
            raise ChannelError(
                f"this memory is already offered to {len(taken)} readers and {readers} more exceed "
                f"the limit of {MAX_READERS}; wait until some have let go, or put a clone"
            )
        self.offers[ticket] = time.monotonic(), free[:readers]
        for cell in free[:readers]:
            self.cells.offer(cell, ticket)

    def idle(self) -> bool:
        """Whether nobody, here or elsewhere, can still see the payload."""
        return not (self.offers or self.held or self.allocated())


class BlockStore:
    """The segments that one process owns, within a budget. Callers hold `lock`, except around `acquire`."""

    def __init__(self, max_bytes: int, wait_s: float, unopened_s: float) -> None:
        self.max_bytes, self.wait_s, self.unopened_s = max_bytes, wait_s, unopened_s
        self.lock = threading.RLock()
        self.owned_bytes = 0
        """Bytes of the segments that exist or are being made."""
        self.segments: dict[str, Segment] = {}
        self.busy: set[Block] = set()
        self._idle: dict[int, list[Block]] = {}
        self._blocks: dict[int, list[Block]] = {}  # by the address of the segment
        self._addresses: list[int] = []

    def acquire(self, nbytes: int) -> Block:
        """A block for `nbytes` of payload, `held` for the caller, who resets that.

        Waits until one comes free when the budget is reached. Raises ChannelError after `wait_s` seconds,
        and at once for what can never fit.
        """
        size = _size_class(nbytes + HEADER)
        if size > self.max_bytes:
            raise ChannelError(
                f"a TensorDict of {nbytes} bytes needs a block of {size}, max_bytes is {self.max_bytes}; "
                "raise max_bytes or send smaller pieces"
            )
        deadline, pause = time.monotonic() + self.wait_s, 0.0002
        while True:
            with self.lock:
                block = self._pop_idle(size, 2 * size)
                room = 0 if block else self._make_room(size)
                self.owned_bytes += room
                if block is None and room == 0:
                    block = self._pop_idle(size, self.max_bytes)
            if room:
                block = self._grow(size, room)
            if block is not None:
                return block
            if time.monotonic() >= deadline:
                raise ChannelError(
                    f"no block of {size} bytes came free within {self.wait_s} s: {self.busy_bytes()} bytes "
                    f"are offered, open or allocated, max_bytes is {self.max_bytes}; raise max_bytes, or "
                    "drop received TensorDicts sooner"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def busy_bytes(self) -> int:
        """Bytes of the blocks that somebody may still see."""
        with self.lock:
            return sum(block.size for block in self.busy)

    def at(self, address: int) -> Block | None:
        """The block that this address of the process lies in."""
        place = bisect_right(self._addresses, address) - 1
        if place < 0:
            return None
        start = self._addresses[place]
        blocks = self._blocks[start]
        index = (address - start) // blocks[0].size
        return blocks[index] if index < len(blocks) else None

    def sweep(self) -> int:
        """Moves the blocks that nobody can see any more to the idle ones; returns their bytes."""
        freed = 0
        started = cache(start_time)  # a few readers hold many blocks
        for block in list(self.busy):
            block.settle(self.unopened_s, started)
            if block.idle():
                self.busy.remove(block)
                self._idle.setdefault(block.size, []).append(block)
                freed += block.size
        return freed

    def close(self) -> None:
        """Gives up everything; mappings last as long as the tensors that view them."""
        for segment in self.segments.values():
            segment.close()
        self.owned_bytes = 0
        for container in (self.segments, self.busy, self._idle, self._blocks, self._addresses):
            container.clear()

    def _pop_idle(self, least: int, most: int) -> Block | None:
        for sweep_first in (False, True):
            if sweep_first:
                self.sweep()
            fits = [size for size, blocks in self._idle.items() if blocks and least <= size <= most]
            if fits:
                block = self._idle[min(fits)].pop()
                block.held, block.tensors = True, None
                self.busy.add(block)
                return block
        return None

    def _make_room(self, size: int) -> int:
        """By how many bytes the store may grow for a block of `size`; closes idle segments if it must."""
        for room in (size * _blocks_per_segment(size), size):
            if self.owned_bytes + room <= self.max_bytes:
                return room
        for start, blocks in list(self._blocks.items()):
            if self.busy.isdisjoint(blocks):
                self._drop(start, blocks)
                if self.owned_bytes + size <= self.max_bytes:
                    return size
        return 0

    def _grow(self, size: int, room: int) -> Block:
        try:
            segment = Segment.create(room)  # outside the lock: touching the pages takes about 1 ms a MB
        except ChannelError:
            with self.lock:
                self.owned_bytes -= room
            raise
        blocks = [Block(Cells(segment, at), at, size) for at in range(0, room, size)]
        start = segment.buffer.data_ptr()
        with self.lock:
            self.segments[segment.ref.id] = segment
            self._blocks[start] = blocks
            insort(self._addresses, start)
            self.busy.add(blocks[0])
            self._idle.setdefault(size, []).extend(blocks[1:])
        return blocks[0]

    def _drop(self, start: int, blocks: list[Block]) -> None:
        segment = blocks[0].cells.segment
        del self.segments[segment.ref.id], self._blocks[start]
        self._addresses.remove(start)
        self._idle[blocks[0].size] = [b for b in self._idle[blocks[0].size] if b.cells.segment is not segment]
        self.owned_bytes -= segment.nbytes
        segment.close()


def _size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of eight sizes an octave, so that blocks of like size serve each other."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _blocks_per_segment(size: int) -> int:
    """Small blocks share a segment: thousands of queued groups must not take as many descriptors."""
    return max(1, min(16, (16 << 20) // size))
