"""Groups of processes that send each other messages, point to point: gloo in host memory, NCCL between GPUs.

They stand alone: nothing of `torch.distributed`'s global state is touched. Both sides keep the same order, message by
message over all members they speak with, so that nobody waits in a circle; while one is on its way the next is packed,
or the one before unpacked.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.layout import Entry, aligned
from weightsync.transports.board import BoardClient, Clock, GlooStore, Lost
from weightsync.transports.messages import BUCKET_BYTES, SLICE_BYTES, Asked

Round = list[tuple[int, list[torch.Tensor]]]
"""One message for each member that has one left: the member's rank in the group, the message's pieces."""


def rounds(
    lanes: Sequence[tuple[int, torch.Tensor, Mapping[str, Entry], Asked]],
) -> Iterator[Round]:
    """All messages of `lanes` (member, buffer, its entries, messages), one of each member in turn."""
    for index in range(max((len(messages) for *_, messages in lanes), default=0)):
        yield [
            (member, [region.tensor(buffer, entries) for region in messages[index]])
            for member, buffer, entries, messages in lanes
            if index < len(messages)
        ]


class Group(ABC):
    @abstractmethod
    def run(self, sending: bool, rounds: Iterable[Round], clock: Clock) -> None:
        """Sends or receives everything, in order; raises Lost."""

    @abstractmethod
    def abort(self) -> None:
        """Ends what another thread waits for in `run`."""

    @abstractmethod
    def close(self) -> None:
        """Gives up connections and threads; whoever is at the other end notices at once."""


def _in_one(pieces: Sequence[torch.Tensor], kind: str) -> torch.Tensor | None:
    """The bytes of a message that needs no bucket: one piece without gaps, on the kind of device the group serves."""
    first = pieces[0]
    if len(pieces) > 1 or first.device.type != kind or not first.is_contiguous():
        return None
    return first.reshape(-1).view(torch.uint8)


def _bucket_bytes(pieces: Sequence[torch.Tensor]) -> int:
    """A slice takes a bucket only where its memory is not the group's."""
    return BUCKET_BYTES if sum(aligned(piece.nbytes) for piece in pieces) <= BUCKET_BYTES else SLICE_BYTES


def _in_bucket(bucket: torch.Tensor, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The bytes of `bucket` that a message takes, and its pieces in there."""
    views: list[torch.Tensor] = []
    end = 0
    for piece in pieces:
        start = aligned(end)
        end = start + piece.nbytes
        views.append(bucket[start:end].view(piece.dtype).view(piece.shape))
    return bucket[:end], views


@dataclass
class _Flight:
    """A message on its way: what has to be unpacked when it lands."""

    member: int
    work: Any
    bucket: torch.Tensor | None
    unpack: list[tuple[torch.Tensor, torch.Tensor]]


class GlooGroup(Group):
    def __init__(self, client: BoardClient, name: str, rank: int, size: int, clock: Clock) -> None:
        self._store = GlooStore(client, f"{name}/")
        self._other = (rank + 1) % size
        self._flights: deque[_Flight] = deque()
        self._free: dict[int, list[torch.Tensor]] = {BUCKET_BYTES: [], SLICE_BYTES: []}
        gloo: Any = dist.ProcessGroupGloo  # whose type stub is behind
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=client.own_ip)]
        options._threads = 1  # collectives' threads, and there are none
        options._timeout = timedelta(seconds=clock.left())
        self._group = gloo(self._store, rank, size, options)

    def run(self, sending: bool, rounds: Iterable[Round], clock: Clock) -> None:
        for messages in rounds:
            for member, pieces in messages:
                if len(self._flights) > len(messages):
                    self._land(clock)
                self._launch(sending, member, pieces)
        while self._flights:
            self._land(clock)

    def _launch(self, sending: bool, member: int, pieces: list[torch.Tensor]) -> None:
        group = self._group
        assert group is not None, "a closed group is not used"
        data, bucket, unpack = _in_one(pieces, "cpu"), None, []
        if data is None:
            size = _bucket_bytes(pieces)
            bucket = self._free[size].pop() if self._free[size] else _host_bucket(size, pieces[0].is_cuda)
            data, views = _in_bucket(bucket, pieces)
            unpack = list(zip(pieces, views, strict=True))
            if sending:
                for piece, view in unpack:
                    view.copy_(piece)
        try:
            work = group.send([data], member, 0) if sending else group.recv([data], member, 0)
        except RuntimeError as error:
            raise Lost([member], first_words(error)) from None
        self._flights.append(_Flight(member, work, bucket, [] if sending else unpack))

    def _land(self, clock: Clock) -> None:
        flight = self._flights[0]
        lost: Lost | None = None
        try:
            if not flight.work.wait(timedelta(seconds=clock.left())):
                lost = Lost([flight.member], "gloo gave up the message")
        except (RuntimeError, TimeoutError) as error:
            lost = Lost([flight.member], first_words(error))
        if lost is not None:
            del flight  # in a traceback it would keep gloo's connections and threads alive
            raise lost
        for piece, view in flight.unpack:
            piece.copy_(view)
        if flight.bucket is not None:
            self._free[flight.bucket.numel()].append(flight.bucket)
        self._flights.popleft()

    def abort(self) -> None:
        group = self._group
        if group is not None:
            # gloo's own abort does nothing. A wait that runs out closes all connections of its group.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], self._other, 1).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None
        self._flights.clear()
        self._free.clear()


def _host_bucket(size: int, pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class NcclGroup(Group):
    """Messages of one round are one NCCL call, on a stream of their own, after what the round before left to do."""

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buckets: dict[tuple[int, int], torch.Tensor] = {}
        self._works: list[tuple[int, Any]] = []
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # Far beyond any transfer: this class keeps the deadline, the group's own watchdog would end the process.
        options._timeout = timedelta(days=1)
        with _nccl_errors_end_no_process():
            self._group = nccl(dist.PrefixStore(name, store), rank, size, options)
        # NCCL connects in the first call, and all members have to be in that.
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._group.allreduce([torch.zeros(1, device=device)]).wait()
            self._stream.synchronize()

    def run(self, sending: bool, rounds: Iterable[Round], clock: Clock) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for messages in rounds:
                data, unpack = self._pack(sending, messages)
                self._group._start_coalescing()
                for member, tensor in data:
                    if sending:
                        self._group.send([tensor], member, 0)
                    else:
                        self._group.recv([tensor], member, 0)
                work = self._group._end_coalescing()
                work.wait()  # the stream waits, the host does not
                self._works.append((data[0][0], work))
                if not all(piece.is_cuda for piece, _ in unpack):
                    self._settle(clock)  # a copy from or to the host waits for the stream, and has no deadline
                if not sending:
                    for piece, view in unpack:
                        piece.copy_(view)
            self._settle(clock)

    def _pack(
        self, sending: bool, messages: Round
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The bytes to send or fill, by member; the pieces that share a bucket, with their places in it."""
        data: list[tuple[int, torch.Tensor]] = []
        shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        for member, pieces in messages:
            whole = _in_one(pieces, "cuda")
            if whole is None:
                size = _bucket_bytes(pieces)
                if (member, size) not in self._buckets:
                    self._buckets[member, size] = torch.empty(size, dtype=torch.uint8, device=self._device)
                whole, views = _in_bucket(self._buckets[member, size], pieces)
                shared += zip(pieces, views, strict=True)
            data.append((member, whole))
        if sending:
            for piece, view in shared:
                view.copy_(piece)
        return data, shared

    def _settle(self, clock: Clock) -> None:
        """Waits for the stream, with an eye on the clock."""
        done = torch.cuda.Event()
        done.record(self._stream)
        while not done.query() and not clock.over:
            time.sleep(0.001)
        for member, work in self._works:
            if (error := work.exception()) is not None:
                raise Lost([member], first_words(error))
            if not done.query() and not work.is_completed():
                raise Lost([member])
        self._works.clear()

    def abort(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()
        self._group = None
        self._buckets.clear()
        self._works.clear()


@contextlib.contextmanager
def _nccl_errors_end_no_process() -> Iterator[None]:
    """A group that is made meanwhile closes connections upon an error; by default it would end the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def first_words(error: BaseException) -> str:
    """What an error says, without the place in gloo's source and its advice."""
    lines = str(error).splitlines() or [""]
    return re.sub(r"^\[[^\]]*\] ", "", lines[0]).split(". ")[0]


def nccl_device(device: torch.device) -> str:
    """A GPU's name that differs from every other GPU's, anywhere; empty where NCCL cannot be used."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_group(address: tuple[str, int], name: str, rank: int, size: int, device: torch.device, clock: Clock) -> Group:
    """Connects in a thread that is left behind when the deadline passes: NCCL has none for that.

    `address` is that of a TCPStore, which NCCL asks in C++, from threads of its own.
    """
    made: list[Group] = []
    problems: list[str] = []

    def make() -> None:
        try:
            timeout = timedelta(seconds=clock.left())
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
            group = NcclGroup(store, name, rank, size, device)
            if clock.over:
                group.close()
            made.append(group)
        except Exception as error:
            problems.append(first_words(error))

    thread = threading.Thread(target=make, name="NCCL connects", daemon=True)
    thread.start()
    thread.join(clock.left())
    if not made:
        raise RuntimeError("".join(problems) or "NCCL did not connect")
    return made[0]
