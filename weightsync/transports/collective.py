"""Trainer ranks push over a process group: gloo between host memories, NCCL where everybody has a GPU of its own.

Every replica (peer) has a group of its own: trainer ranks 0..R-1 and the replica's workers R..R+W-1. So a replica that
dies breaks nobody else's transfer, and one that comes late joins without the others. The first transfer of an epoch
makes the group, under that transfer's deadline; a failure or a newer epoch drops it.

    worker         cuts what it needs into messages, says which bytes of each trainer rank go into which ──► board
    trainer rank   does as it says: it knows nothing but its own buffers
    board          keys in the memory of trainer rank 0, where the members of a group find each other

`board.py` is the last of these, `messages.py` says what a message is, `groups.py` sends and receives them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from forge.errors import WeightSyncError
from forge.launch import NODE_IP_ENV
from weightsync.layout import Box
from weightsync.offer import FULL, Offer
from weightsync.plan import pair
from weightsync.transports.base import Puller, Sender
from weightsync.transports.board import Board, BoardClient, Clock, Lost
from weightsync.transports.context import PullerContext, SenderContext, make_image
from weightsync.transports.groups import GlooGroup, Group, first_words, nccl_device, nccl_group, rounds
from weightsync.transports.messages import Asked, cut, read_plan, slices, write_plan

_CLOSE_S = 5.0


@dataclass(eq=False)
class _Seat:
    """This process's place in the groups of one peer, of which there is one at a time.

    When members join, they `tell` each other what they have to (keys and values on the board); what one wants to
    `learn` is read by `read` and handed to what it does in the group.
    """

    peer: str
    rank: int
    num_ranks: int
    num_workers: int
    board: tuple[str, int]
    device: torch.device
    deadline_s: float
    tell: Mapping[str, str] = field(default_factory=dict)
    learn: Sequence[str] = ()
    read: Callable[[str], Any] = str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = Clock(0.0)
        self._group: Group | None = None
        self._learnt: list[Any] = []
        self._tcp_store: dist.TCPStore | None = None
        self._epoch, self._broken, self._closed = -1, False, False
        self._newest = -1  # asked for by any thread; a transfer of an older epoch ends

    def transfer(self, offer: Offer, nbytes: int, act: Callable[[Group, Clock, list[Any]], None]) -> None:
        """Does `act` in the group of the offer's epoch, which is made where there is none. Raises WeightSyncError."""
        clock = Clock(self.deadline_s)
        self.supersede(offer.epoch)
        problem = f"an earlier transfer still runs after {self.deadline_s:g} s"
        if self._lock.acquire(timeout=self.deadline_s):
            try:
                problem = self._enter(offer.epoch) or self._attempt(offer.epoch, clock, act)
            finally:
                self._lock.release()
        if problem:
            raise WeightSyncError(
                f"{self._name(self.rank)}: the collective transfer of version {offer.version} with {self.peer} "
                f"({nbytes} bytes, {offer.kind}, epoch {offer.epoch}) failed: {problem}"
            )

    def _enter(self, epoch: int) -> str:
        """Takes up `epoch`; returns why that cannot be."""
        if self._closed:
            return "this side has been closed"
        if epoch < self._newest or (epoch == self._epoch and self._broken):
            return f"epoch {epoch} is over; after a failure a version is offered with a larger epoch"
        if epoch > self._epoch:
            self._drop()
            self._epoch, self._broken = epoch, False
        return ""

    def _attempt(self, epoch: int, clock: Clock, act: Callable[[Group, Clock, list[Any]], None]) -> str:
        """Empty when all went well; else what did not, and the group is gone."""
        self._clock, self._broken = clock, True
        # Whoever supersedes this epoch from now on finds the clock; before, it left word.
        clock.called_off |= self._closed or epoch < self._newest
        try:
            if self._group is None:
                self._group = self._join(clock)
            act(self._group, clock, self._learnt)
            self._broken = False
            return ""
        except Lost as lost:
            return self._why(clock, ", ".join(self._name(member) for member in lost.members), lost.cause)
        except (OSError, RuntimeError, ValueError) as error:
            return self._why(clock, "somebody", first_words(error))
        finally:
            if self._broken:
                self._drop()

    def _why(self, clock: Clock, who: str, cause: str) -> str:
        if clock.called_off:
            return "it was called off, by a newer epoch or because this side was closed"
        if clock.over or not cause:
            return (
                f"no answer from {who} within {self.deadline_s:g} s: hung, gone, or weightsync.deadline_s is too short"
            )
        return f"{who} broke off: {cause}"

    def _name(self, member: int) -> str:
        return (
            f"trainer rank {member}" if member < self.num_ranks else f"worker {member - self.num_ranks} of {self.peer}"
        )

    def _join(self, clock: Clock) -> Group:
        size = self.num_ranks + self.num_workers
        client = BoardClient(self.board, f"{self.peer}/{self._epoch}/", clock)
        own = {"token": secrets.token_hex(8), "gpu": nccl_device(self.device), "port": self._nccl_port()}
        client.ask(put={**self.tell, f"member/{self.rank}": json.dumps(own)})
        found = client.wait_for({f"member/{member}": member for member in range(size)})
        members = [json.loads(found[f"member/{member}"]) for member in range(size)]
        told = client.ask(get=self.learn)
        self._learnt = [self.read(told[key]) for key in self.learn]
        # What a member left here that died and came back fits nobody's name.
        name = hashlib.sha256("".join(member["token"] for member in members).encode()).hexdigest()[:16]
        gpus = {member["gpu"] for member in members}
        if "" not in gpus and len(gpus) == size:
            address = self.board[0], members[0]["port"]
            return nccl_group(address, name, self.rank, size, self.device, clock)
        return GlooGroup(client, name, self.rank, size, clock)

    def _nccl_port(self) -> int:
        """Of the store where NCCL's members meet: its groups ask there in C++, from threads of their own."""
        if self.rank != 0 or not nccl_device(self.device):
            return 0
        if self._tcp_store is None:
            self._tcp_store = dist.TCPStore(self.board[0], 0, is_master=True, wait_for_workers=False)
        return self._tcp_store.port

    def supersede(self, epoch: int) -> None:
        """Ends a transfer of an epoch before `epoch` that another thread is in, or is about to begin."""
        if epoch > self._newest:
            self._newest = epoch
            self.call_off()

    def call_off(self) -> None:
        """Ends a transfer that another thread is in; its group is gone then."""
        self._clock.called_off = True
        group = self._group
        if group is not None:
            group.abort()

    def _drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Ends a transfer that is under way, and gives up the group."""
        self._closed = True
        self.call_off()
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._drop()
                self._tcp_store = None
            finally:
                self._lock.release()


def _close_all(seats: Mapping[str, _Seat], board: Board | None) -> None:
    for seat in seats.values():
        seat.close()
    if board is not None:
        board.close()


class CollectiveSender(Sender):
    """Sends each worker of each peer what that worker asks of this rank."""

    name = "collective"

    def __init__(self, context: SenderContext) -> None:
        self._context = context
        self._entries = context.layout.by_name
        self._seats: dict[str, _Seat] = {}
        self._board = Board(os.environ.get(NODE_IP_ENV, "127.0.0.1")) if context.rank == 0 else None
        self._address = self._board.address if self._board else ("", 0)
        # At the interpreter's exit too: a thread that waits in gloo has to be out of there before.
        self._finalizer = weakref.finalize(self, _close_all, self._seats, self._board)

    @staticmethod
    def available(same_host: bool, device: str) -> str:
        return "" if dist.is_gloo_available() else "this build of torch has no gloo"

    def link(self) -> dict[str, Any]:
        return {"host": self._address[0], "port": self._address[1]} if self._board else {}

    def meet(self, links: Sequence[Any]) -> None:
        self._address = links[0]["host"], links[0]["port"]

    def add_peer(self, peer: str, needed: Sequence[Mapping[str, Box]]) -> None:
        context = self._context
        self.remove_peer(peer)  # its earlier life; the new one writes nothing to the board before the first transfer
        self._seats[peer] = _Seat(
            peer=peer,
            rank=context.rank,
            num_ranks=context.world,
            num_workers=len(needed),
            board=self._address,
            device=context.buffers[0].device,
            deadline_s=context.deadline_s,
            learn=[f"plan/{worker}/{context.rank}" for worker in range(len(needed))],
            read=partial(read_plan, context.layout.key),
        )

    def remove_peer(self, peer: str) -> None:
        seat = self._seats.pop(peer, None)
        if seat is not None:
            seat.close()
        if self._board:
            self._board.forget(f"{peer}/")

    def send(self, peer: str, offer: Offer) -> None:
        """Returns when all of it has left this rank's buffers. Raises WeightSyncError."""
        context, nbytes = self._context, offer.nbytes[self._context.rank]
        if peer not in self._seats:
            raise WeightSyncError(f"{peer} is unknown to trainer rank {context.rank}; add_peer comes before send")
        if self._board and offer.epoch:
            self._board.forget(f"{peer}/{offer.epoch - 1}/")
        buffer = context.buffers[offer.buffer] if offer.kind == FULL else context.payload
        if buffer is None or buffer.numel() < nbytes:
            raise WeightSyncError(
                f"version {offer.version} is offered to {peer} as a {offer.kind} of {nbytes} bytes from trainer rank "
                f"{context.rank}, which has {0 if buffer is None else buffer.numel()} bytes for it"
            )
        source, entries = buffer, self._entries

        def act(group: Group, clock: Clock, asked: list[Asked]) -> None:
            if offer.kind != FULL:
                asked = [slices(nbytes)] * len(asked)
            lanes = [(context.world + worker, source, entries, messages) for worker, messages in enumerate(asked)]
            group.run(True, rounds(lanes), clock)

        self._seats[peer].transfer(offer, nbytes, act)

    def close(self) -> None:
        self._finalizer()


class CollectivePuller(Puller):
    """Says what it needs of each trainer rank, and receives that into an image of its own."""

    def __init__(self, context: PullerContext) -> None:
        self._context = context
        self._entries = context.layout.by_name
        self._image: torch.Tensor | None = None
        moves = [move for move in pair(context.sources, context.needed) if move.target == context.tp_rank]
        messages = [
            cut([move for move in moves if move.source == rank], source, context.layout)
            for rank, source in enumerate(context.sources)
        ]
        self._expected: list[Asked] = [[[there for _, there in message] for message in lane] for lane in messages]
        num_ranks, link = len(context.sources), context.links[0]
        self._seat = _Seat(
            peer=context.peer,
            rank=num_ranks + context.tp_rank,
            num_ranks=num_ranks,
            num_workers=context.tp_world,
            board=(link["host"], link["port"]),
            device=context.device,
            deadline_s=context.deadline_s,
            tell={
                f"plan/{context.tp_rank}/{rank}": write_plan(source, lane)
                for rank, (source, lane) in enumerate(zip(context.sources, messages, strict=True))
            },
        )
        self._finalizer = weakref.finalize(self, self._seat.close)

    def pull(self, offer: Offer) -> torch.Tensor:
        """The same image each time: the next pull writes over it, and one that fails leaves a mixture in it."""
        if offer.kind != FULL:
            raise WeightSyncError(f"version {offer.version} is offered as a {offer.kind}, which pull_payloads receives")
        if self._image is None:
            self._image = make_image(self._context.layout.nbytes, self._context.device)
        self._receive(offer, [self._image] * len(self._expected), self._expected)
        return self._image

    def pull_payloads(self, offer: Offer) -> list[torch.Tensor]:
        """In host memory."""
        payloads = [make_image(nbytes) for nbytes in offer.nbytes]
        self._receive(offer, payloads, [slices(nbytes) for nbytes in offer.nbytes])
        return payloads

    def _receive(self, offer: Offer, buffers: Sequence[torch.Tensor], messages: Sequence[Asked]) -> None:
        nbytes = sum(region.nbytes for lane in messages for message in lane for region in message)
        lanes = [
            (rank, buffer, self._entries, lane)
            for rank, (buffer, lane) in enumerate(zip(buffers, messages, strict=True))
        ]
        self._seat.transfer(offer, nbytes, lambda group, clock, _: group.run(False, rounds(lanes), clock))

    def interrupt(self, epoch: int) -> None:
        self._seat.supersede(epoch)

    def close(self) -> None:
        self._finalizer()
