"""The controller's handle on weights: publish without waiting, apply the newest, say when it serves.

    train loop ── publish(v) ──► snapshot into the buffer that nobody reads ──► newest = v
    weight loop ── waits for a newer snapshot ──► each replica stages it while it decodes, then they flip in turn
                                                 ──► on_applied(v), once every replica holds v

One buffer at most is being read, so a publish always finds another: the trainer never waits for a receiver. A
version that is overtaken before anybody read it is counted as skipped; nobody may wait for one exact version, only
for "this version or newer".

A source that dies (`lose_source`) takes its snapshots with it: whoever wants weights waits until it has come back
(`reconnect`) and published again, the newest version that it had published or a later one. That reaches every replica,
whatever it holds; versions go on growing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forge.errors import ActorFailed, DeadlineExceeded, ForgeError, WeightSyncError
from forge.mesh import within
from forge.supervision import news
from weightsync.config import WeightSyncConfig
from weightsync.layout import Box
from weightsync.offer import Endpoint, Offer
from weightsync.snapshot import NUM_BUFFERS

Needed = Sequence[Mapping[str, Box]]
"""The boxes that each worker of a replica reads, by parameter."""
_NAMED = 3
"""Replicas whose versions are told one by one."""


class Source(Protocol):
    """The trainer as weight sync sees it; all its ranks at once."""

    async def connect(self) -> Endpoint: ...

    async def add_peer(self, peer: str, needed: Needed) -> None: ...

    async def remove_peer(self, peer: str) -> None: ...

    async def snapshot(self, version: int, buffer: int) -> float: ...

    async def offer(self, version: int, buffer: int, base: int) -> Offer: ...

    async def send(self, peer: str, offer: Offer) -> None: ...


class Sink(Protocol):
    """One generator replica as weight sync sees it."""

    name: str

    async def connect(self, endpoint: Endpoint) -> Needed: ...

    async def stage(self, offer: Offer) -> float: ...

    async def flip(self, version: int) -> float: ...


@dataclass(frozen=True)
class Applied:
    """Every serving replica holds `version`. `stage_s` and `pause_s` are the longest among them, in seconds.

    `skipped` versions were overtaken.
    """

    version: int
    stage_s: float
    pause_s: float
    skipped: int


@dataclass(eq=False)
class _Replica:
    """A sink and what it holds: `version` serves; `staged` is the one its image has, -1 when that is unknown."""

    sink: Sink
    version: int = 0
    staged: int = -1
    epoch: int = 0
    stage_s: float = 0.0
    pause_s: float = 0.0
    left: bool = False
    outdated: bool = False
    """What serves was made by a source that has died since."""

    def behind(self, newest: _Snapshot) -> bool:
        return self.outdated or self.version < newest.version


@dataclass(frozen=True)
class _Snapshot:
    version: int
    buffer: int


@dataclass
class _Joining:
    sink: Sink
    joined: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class _Departing:
    sink: Sink
    left: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class _Visit:
    sinks: Sequence[Sink]
    brought: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WeightSync:
    """Publishes versions of one source to several sinks.

    Call order: `connect` once, then `publish` from the train loop and `run` as a task of its own; `join` brings in a
    replica that comes later, `depart` lets one go, `visit` replicas that keep a version until their next visit;
    `lose_source` and `reconnect` where the source dies and comes back. Every wait ends at `config.deadline_s`.
    """

    def __init__(
        self, source: Source, sinks: Sequence[Sink], config: WeightSyncConfig | None = None, *, notice_s: float = 0.0
    ) -> None:
        """notice_s: where deaths are dealt with, how long the news of one may come behind the failure that it causes.
        That failure is none of the update's."""
        self._source, self._notice_s = source, notice_s
        self._config = config or WeightSyncConfig()
        self._replicas = [_Replica(sink) for sink in sinks]
        self._joining: list[_Joining] = []
        self._visits: list[_Visit] = []
        self._visitors: dict[str, _Replica] = {}
        self._departing: list[_Departing] = []
        self._gone: set[str] = set()
        self._source_lost = False
        self._reconnecting: asyncio.Future[None] | None = None
        self._endpoint: Endpoint | None = None
        self._newest: _Snapshot | None = None
        self._offered = -1
        self._reading: int | None = None
        self._wake = asyncio.Event()
        self._failures = 0
        self._skipped = 0
        self._closed = False
        self._ended = False
        self.published_version = 0
        self.applied_version = 0

    @property
    def skipped(self) -> int:
        """Versions that a newer one overtook before any replica read them."""
        return self._skipped

    @property
    def ended(self) -> bool:
        """Whether nobody can join any more."""
        return self._closed or self._ended

    @property
    def failures(self) -> int:
        """Updates in a row that failed on some replica; 0 once one has succeeded."""
        return self._failures

    def describe(self) -> str:
        """Who holds which version, in one line."""
        versions, few = [replica.version for replica in self._replicas], self._replicas[:_NAMED]
        held = ", ".join(f"{r.sink.name} serves {r.version}" for r in few) or "no replica serves"
        if len(versions) > _NAMED:
            held = f"{len(versions)} replicas serve {min(versions)} to {max(versions)}"
        failed = f", {self._failures} updates in a row failed" if self._failures else ""
        return f"the trainer has published version {self.published_version}, {held}{failed}"

    async def connect(self) -> None:
        """Once, before the first step; raises WeightSyncError when the two models do not fit each other."""
        self._endpoint = await self._within(self._source.connect(), "the trainer's weight layout")
        await self._meet_all()

    async def start_at(self, version: int) -> None:
        """Before `run`: brings all replicas to the weights that the trainer was restored to. Raises WeightSyncError."""
        await self.publish(version)
        assert self._newest is not None
        if errors := await self._bring(self._replicas, self._newest):
            raise errors[0]
        self.applied_version = version

    async def publish(self, version: int) -> float:
        """Snapshots `version`; returns the seconds that the trainer stood still for it.

        Versions only grow: WeightSyncError. One that came back publishes the newest that it had published once more.
        """
        again = version == self.published_version and self._newest is None
        if version <= self.published_version and not again:
            raise WeightSyncError(f"version {version} was published after {self.published_version}; versions only grow")
        begin = time.perf_counter()
        taken, newest = self._reading, self._newest
        if newest is not None and newest.version > self._offered:
            self._skipped += 1
        if newest is not None and taken is None:
            taken = newest.buffer
        buffer = next(b for b in range(NUM_BUFFERS) if b != taken)
        if newest is not None and newest.buffer == buffer:
            self._newest = None  # half-written from here on
        await self._within(self._source.snapshot(version, buffer), f"the trainer's snapshot of version {version}")
        self.published_version = version
        self._newest = _Snapshot(version, buffer)
        self._wake.set()
        return time.perf_counter() - begin

    async def join(self, sink: Sink) -> int:
        """Takes in a replica that comes late or came back, while `run` runs; returns the version it serves then.

        It is to get its first request after this call. Raises what went wrong with it, WeightSyncError when `run` has
        ended; the others go on.
        """
        if self.ended:
            raise WeightSyncError(f"{sink.name} cannot join: the weight loop has ended")
        joining = _Joining(sink)
        self._joining.append(joining)
        self._wake.set()
        return await joining.joined

    async def visit(self, sinks: Sequence[Sink]) -> int:
        """Brings `sinks` to the newest version, all to the same one; returns it. Before anything was published it is 0.

        They keep it until their next visit: they are no part of an update, none waits for them, and `on_applied` does
        not count them. Served behind the update of the replicas that are, while `run` runs. Raises what went wrong
        with one of them, WeightSyncError when `run` has ended.
        """
        if self._ended:
            raise WeightSyncError(f"{sinks[0].name} cannot get the newest weights: the weight loop has ended")
        visit = _Visit(tuple(sinks))  # the list may lose one that dies meanwhile
        self._visits.append(visit)
        self._wake.set()
        return await visit.brought

    def lose_source(self) -> None:
        """The source has died: nothing is offered, and nobody who waits for weights fails, until `reconnect`."""
        self._source_lost, self._newest = True, None

    async def reconnect(self) -> None:
        """Meets the source that came back, while `run` runs; what it publishes next goes to all replicas.

        Raises what goes wrong with that, WeightSyncError when `run` has ended.
        """
        if self.ended:
            raise WeightSyncError("the trainer cannot come back to its generators: the weight loop has ended")
        self._reconnecting = asyncio.get_running_loop().create_future()
        self._wake.set()
        await self._reconnecting

    async def depart(self, sink: Sink) -> None:
        """Forgets a replica that lives, between two updates; waits for the one that runs."""
        if self.ended:
            self.leave(sink)
            return
        self._excuse(sink)
        departing = _Departing(sink)
        self._departing.append(departing)
        self._wake.set()
        await departing.left

    def _excuse(self, sink: Sink) -> None:
        """What goes wrong with it from here on, in the update that runs, is no failure of that."""
        for replica in self._replicas:
            replica.left |= replica.sink is sink

    def leave(self, sink: Sink) -> None:
        """Forgets a replica that has died: no update waits for it, and what goes wrong with it fails none."""
        self._excuse(sink)
        self._gone.add(sink.name)
        self._replicas = [replica for replica in self._replicas if replica.sink is not sink]
        self._wake.set()

    async def run(self, on_applied: Callable[[Applied], Awaitable[None]]) -> None:
        """The weight loop. Waits for a newer snapshot; returns after `close`.

        Raises WeightSyncError after `max_failures` failed updates in a row.
        """
        try:
            while True:
                await self._wake.wait()
                if self._closed:
                    return
                self._wake.clear()
                self._let_depart()
                await self._forget_gone()
                await self._meet_again()
                await self._admit()
                if self._newest is not None:
                    await self._update(self._newest)
                version = min((r.version for r in self._replicas), default=self.published_version)
                if version > self.applied_version:
                    self.applied_version = version
                    await on_applied(self._report(version))
                await self._receive()
        finally:
            self._ended = True
            self._let_depart()
            if self._reconnecting is not None and not self._reconnecting.done():
                text = "the trainer cannot come back to its generators: the weight loop has ended"
                self._reconnecting.set_exception(WeightSyncError(text))
            for joining in self._joining:
                if not joining.joined.done():
                    text = f"{joining.sink.name} cannot join: the weight loop has ended"
                    joining.joined.set_exception(WeightSyncError(text))
            for visit in self._visits:
                visit.brought.cancel()

    def _let_depart(self) -> None:
        while self._departing:
            departing = self._departing.pop()
            self.leave(departing.sink)
            if not departing.left.done():
                departing.left.set_result(None)

    async def _forget_gone(self) -> None:
        """The source ends its transfers to those that have left."""
        while self._gone and not self._source_lost:
            name = next(iter(self._gone))
            try:
                await self._within(self._source.remove_peer(name), f"the trainer to forget {name}")
            except ForgeError as error:
                await self._news([])
                if not self._source_lost:
                    self._count(error)
                return
            self._gone.discard(name)

    async def _update(self, newest: _Snapshot) -> None:
        """Brings every replica that is behind to `newest`; a failure is raised, or leaves it behind for a retry."""
        behind = [replica for replica in self._replicas if replica.behind(newest)]
        if not behind:
            return
        errors = await self._bring(behind, newest)
        if self._source_lost:
            return  # that is why
        if errors:
            self._count(errors[0])
        else:
            self._failures = 0

    def _count(self, error: ForgeError) -> None:
        """A failure, after which it is tried again, or which is raised."""
        self._failures += 1
        if self._failures >= self._config.max_failures:
            raise error
        self._wake.set()

    async def _bring(self, replicas: Sequence[_Replica], newest: _Snapshot) -> list[ForgeError]:
        """Stages on all at once, flips in turn; returns what went wrong."""
        self._reading = newest.buffer
        try:
            return await self._offer_and_apply(replicas, newest)
        finally:
            self._reading = None

    async def _offer_and_apply(self, replicas: Sequence[_Replica], newest: _Snapshot) -> list[ForgeError]:
        base = self._offered if all(replica.staged == self._offered for replica in replicas) else -1
        self._offered = newest.version
        what = f"the trainer to offer version {newest.version}"
        try:
            offer = await self._within(self._source.offer(newest.version, newest.buffer, base), what)
        except ForgeError as error:
            return [error]
        turns = asyncio.Semaphore(self._config.flips_at_once)
        outcomes = await asyncio.gather(*(self._apply(replica, offer, turns) for replica in replicas))
        failed = [(r, error) for r, error in zip(replicas, outcomes, strict=True) if error is not None]
        if unexplained := [replica for replica, error in failed if not isinstance(error, ActorFailed)]:
            await self._news(unexplained)
        return [error for replica, error in failed if not replica.left]

    async def _news(self, replicas: Sequence[_Replica]) -> None:
        """Waits for word that the source, or all of `replicas`, have died, which may come behind what it causes."""
        await news(
            lambda: self._source_lost or (bool(replicas) and all(replica.left for replica in replicas)), self._notice_s
        )

    async def _apply(self, replica: _Replica, offer: Offer, turns: asyncio.Semaphore) -> ForgeError | None:
        what = f"version {offer.version} ({sum(offer.nbytes)} bytes by {self._transport})"
        name = replica.sink.name
        replica.staged = -1
        try:
            replica.stage_s = await self._within(self._transfer(replica, offer), f"{name} to stage {what}")
            replica.staged = offer.version
            async with turns:
                replica.pause_s = await self._within(replica.sink.flip(offer.version), f"{name} to flip to {what}")
        except DeadlineExceeded as error:
            replica.epoch += 1
            return WeightSyncError(f"{error}; it goes on serving version {replica.version}")
        except ForgeError as error:
            replica.epoch += 1
            return error
        replica.version, replica.outdated = offer.version, False
        return None

    async def _transfer(self, replica: _Replica, offer: Offer) -> float:
        offer = replace(offer, epoch=replica.epoch)
        halves = (
            asyncio.ensure_future(replica.sink.stage(offer)),
            asyncio.ensure_future(self._source.send(replica.sink.name, offer)),
        )
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
            if not all(half.done() for half in halves):
                await asyncio.wait(halves, timeout=self._notice_s)  # of a death it is the dead one's half that tells
            errors = [error for half in halves if half.done() and (error := half.exception()) is not None]
            if errors:
                raise next((error for error in errors if isinstance(error, ActorFailed)), errors[0])
            return halves[0].result()
        finally:
            for half in halves:
                half.cancel()

    async def _meet_again(self) -> None:
        """Connects the source that came back, and every replica to it."""
        reconnecting = self._reconnecting
        if reconnecting is None or reconnecting.done():
            return
        self._visitors.clear()
        self._offered, self._source_lost = -1, False
        try:
            self._endpoint = await self._within(self._source.connect(), "the trainer's weight layout")
            for replica in self._replicas:
                replica.outdated, replica.staged = True, -1
            await self._meet_all()
        except Exception as error:
            self._source_lost = True
            if not reconnecting.done():
                reconnecting.set_exception(error)
        else:
            if not reconnecting.done():
                reconnecting.set_result(None)

    @property
    def _nothing_to_read(self) -> bool:
        """Whether the newest version lies nowhere: its place is being written over, or its source has died.

        The publish that ends this wakes `run`.
        """
        return self._source_lost or (self._newest is None and self.published_version > 0)

    async def _admit(self) -> None:
        """Connects the replicas that want to join and brings each to the newest version before it counts."""
        while self._joining:
            joining = self._joining[0]  # stays there until it has been answered
            if self._nothing_to_read:
                return
            replica = _Replica(joining.sink)
            try:
                await self._meet(replica)
                while (newest := self._newest) is not None and replica.behind(newest):
                    if errors := await self._bring([replica], newest):
                        raise errors[0]
            except Exception as error:
                if self._source_lost:
                    return
                if not joining.joined.done():
                    joining.joined.set_exception(error)
            else:
                if self._source_lost:
                    return  # it may have met the one that died
                if not joining.joined.done():  # who asked for it may have left
                    self._replicas.append(replica)
                    joining.joined.set_result(replica.version)
            self._joining.pop(0)

    async def _receive(self) -> None:
        """Answers the visits."""
        while self._visits:
            visit = self._visits[0]  # stays there until it has been answered
            if self._nothing_to_read:
                return
            try:
                for sink in visit.sinks:
                    known = self._visitors.get(sink.name)
                    if known is None or known.sink is not sink:  # the name may be that of one that died
                        await self._meet(replica := _Replica(sink))
                        self._visitors[sink.name] = replica
                newest = self._newest
                if newest is None and self.published_version > 0:
                    return
                version = await self._host([self._visitors[sink.name] for sink in visit.sinks], newest)
            except Exception as error:
                if self._source_lost:
                    return
                if not visit.brought.done():
                    visit.brought.set_exception(error)
            else:
                if not visit.brought.done():
                    visit.brought.set_result(version)
            self._visits.pop(0)

    async def _host(self, visitors: Sequence[_Replica], newest: _Snapshot | None) -> int:
        behind = [visitor for visitor in visitors if newest and visitor.behind(newest)]
        if behind and newest and (errors := await self._bring(behind, newest)):
            raise errors[0]
        return visitors[0].version

    async def _meet_all(self) -> None:
        """Connects all replicas and the source; what goes wrong with one that has left meanwhile is nothing."""
        met = list(self._replicas)
        outcomes = await asyncio.gather(*(self._meet(replica) for replica in met), return_exceptions=True)
        for replica, outcome in zip(met, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not replica.left:
                raise outcome

    async def _meet(self, replica: _Replica) -> None:
        assert self._endpoint is not None, "connect comes first"
        name, nbytes = replica.sink.name, self._endpoint.layout.nbytes
        self._gone.discard(name)  # it is the successor of that one
        try:
            needed = await self._within(replica.sink.connect(self._endpoint), f"{name} to connect to {nbytes} bytes")
        except BaseException:
            self._gone.add(name)
            raise
        await self._within(self._source.add_peer(name, needed), f"the trainer to take in {name}")

    def _report(self, version: int) -> Applied:
        stage_s = max((r.stage_s for r in self._replicas), default=0.0)
        pause_s = max((r.pause_s for r in self._replicas), default=0.0)
        return Applied(version, stage_s, pause_s, self._skipped)

    @property
    def _transport(self) -> str:
        return self._endpoint.transport if self._endpoint else "not connected"

    async def _within(self, awaitable: Awaitable[Any], what: str) -> Any:
        return await within(self._config.deadline_s, what, awaitable)

    def close(self) -> None:
        """Lets `run` return after the apply that is under way; a version that still waits is applied nowhere."""
        self._closed = True
        self._wake.set()
