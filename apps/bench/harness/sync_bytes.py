"""Bytes on their way from a trainer to another process, beside a memcpy, shared memory and gloo with as many bytes."""

from __future__ import annotations

import asyncio
import socket
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.trainer_mesh import TrainerMesh
from apps.bench.harness import rates
from apps.bench.harness.sync_actors import Span
from apps.bench.harness.sync_fleet import Fleet, say
from weightsync.config import WeightSyncConfig
from weightsync.snapshot import NUM_BUFFERS

MEMCPY, SHARED, GLOO = "one memcpy", "shared memory, write + read", "gloo broadcast"
YARDSTICKS = (MEMCPY, SHARED, GLOO)
PEER = "receiver"


@dataclass(frozen=True)
class Cost:
    """What a transport costs by its design, where one trainer rank feeds one receiver that needs everything.

    `copies` of a byte from the parameter to where the receiver reads it, the snapshot included; `trainer` and
    `receiver` are memory kept, in models.
    """

    copies: int
    how: str
    trainer: int
    receiver: int
    disk: int = 0


COSTS: Mapping[str, Cost] = {
    "memory": Cost(1, "snapshot; mapped by the receiver", 2, 0),
    "collective": Cost(3, "snapshot, into the socket, out of it into the image", 2, 1),
    "file": Cost(3, "snapshot, into the page cache, out of it into the image; the disk writes on its own", 2, 1, 3),
    "rdma": Cost(4, "snapshot, then by TCP into a message, into the socket, out of it into the image", 2, 1),
}
"""rdma is counted as its TCP fallback makes it at least."""
PIECES = Cost(2, "snapshot, put together in the image", 2, 1)
"""memory, where a receiver cannot read the snapshots in place."""


@dataclass
class Rounds:
    """Seconds of one transport and of its yardsticks, one a round."""

    stall: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    check: list[float] = field(default_factory=list)
    trainer_cpu: list[float] = field(default_factory=list)
    receiver_cpu: list[float] = field(default_factory=list)
    bare: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in YARDSTICKS})

    def total(self) -> list[float]:
        """From the parameters to a private copy in the other process."""
        return [sum(parts) for parts in zip(self.stall, self.transfer, self.read, strict=True)]

    def row(self, mb: int, transport: str, cost: Cost, nbytes: int, memory: Mapping[str, int]) -> dict[str, Any]:
        """Medians in ms over the rounds; ratios are medians of the ratios inside a round."""
        moves = cost.copies > 1
        transfer, total = statistics.median(self.transfer), statistics.median(self.total())
        return {
            "part": "bytes",
            "mb": mb,
            "name": transport,
            "nbytes": nbytes,
            "stall_ms": _ms(self.stall),
            "memcpy_ms": _ms(self.bare[MEMCPY]),
            "stall_over_memcpy": round(rates.ratio(self.stall, self.bare[MEMCPY]), 3),
            "transfer_ms": _ms(self.transfer),
            "transfer_gb_s": round(nbytes / transfer / 1e9, 3) if moves else None,
            "over_gloo": round(rates.ratio(self.bare[GLOO], self.transfer), 3) if moves else None,
            "gloo_ms": _ms(self.bare[GLOO]),
            "gloo_gb_s": round(nbytes / statistics.median(self.bare[GLOO]) / 1e9, 3),
            "total_ms": _ms(self.total()),
            "total_gb_s": round(nbytes / total / 1e9, 3),
            "shared_ms": _ms(self.bare[SHARED]),
            "over_shared": round(rates.ratio(self.bare[SHARED], self.total()), 3),
            "sums_ms": _ms(self.sums),
            "check_ms": _ms(self.check),
            "trainer_cpu_s_per_gb": round(statistics.median(self.trainer_cpu) / nbytes * 1e9, 3),
            "receiver_cpu_s_per_gb": round(statistics.median(self.receiver_cpu) / nbytes * 1e9, 3),
            "copies": cost.copies,
            "copied_by": cost.how,
            "trainer_models": cost.trainer,
            "receiver_models": cost.receiver,
            "disk_models": cost.disk,
            **{f"{side}_measured": round(more / nbytes, 2) for side, more in memory.items()},
            "rounds": len(self.stall),
        }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


class Bytes:
    """Both ends of one model, with the yardsticks set up."""

    def __init__(self, fleet: Fleet, receiver: Any) -> None:
        self._fleet, self._receiver, self._trainer = fleet, receiver, fleet.trainer

    async def set_up(self) -> None:
        """The yardsticks' buffers and group."""
        ref = await self._ask(self._trainer.bare.call_one(self._fleet.shape.nbytes))
        await self._ask(self._receiver.bare.call_one(ref))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        joins = asyncio.gather(self._trainer.join.call_one(port), self._receiver.join.call_one(port))
        await self._ask(joins)

    async def transport(self, name: str, rounds: int) -> dict[str, Any]:
        """A row. Every round runs the transport and each yardstick once, in turns; the first counts for nothing."""
        source = self._fleet.source(name, WeightSyncConfig())
        before = await self._memory()
        endpoint = await self._ask(source.connect())
        await source.add_peer(PEER, await self._ask(self._receiver.connect.call_one(endpoint, PEER)))
        measured = Rounds()
        for number in range(rounds + 1):
            into = measured if number else Rounds()
            for what in rates.turns([name, *YARDSTICKS], number):
                if what == name:
                    await self._transfer(source, into)
                else:
                    into.bare[what].append(await self._yardstick(what))
        after = await self._memory()
        await self._ask(self._receiver.disconnect.call_one())
        await self._fleet.disconnect()
        more = {side: after[side] - before[side] for side in before}
        in_pieces = name == "memory" and not endpoint.links[0]["shared"]
        return measured.row(self._fleet.mb, name, PIECES if in_pieces else COSTS[name], endpoint.layout.nbytes, more)

    async def _transfer(self, source: TrainerMesh, into: Rounds) -> None:
        self._fleet.version += 1
        version = self._fleet.version
        buffer = version % NUM_BUFFERS
        into.stall.append(await self._ask(source.snapshot(version, buffer)))
        offer = await self._ask(source.offer(version, buffer, -1))
        cpu = await self._ask(self._trainer.cpu_s.call_one())
        pulled, _ = await self._ask(
            asyncio.gather(self._receiver.pull.call_one(offer), source.send(PEER, offer)),
        )
        cpu = await self._ask(self._trainer.cpu_s.call_one()) - cpu
        spans: dict[str, Span] = await self._ask(self._trainer.spans.call_one())
        prepared = spans.get("prepare", Span(0.0, 0.0, 0.0))
        into.transfer.append(prepared.seconds + since_both(pulled, spans.get("send", pulled)))
        into.trainer_cpu.append(cpu + prepared.cpu_s)
        into.receiver_cpu.append(pulled.cpu_s)
        into.sums.append(spans["offer"].seconds)
        into.read.append(await self._ask(self._receiver.read.call_one()))
        into.check.append(await self._ask(self._receiver.check.call_one(offer)))

    async def _yardstick(self, name: str) -> float:
        if name == MEMCPY:
            return float(await self._ask(self._trainer.memcpy.call_one()))
        if name == SHARED:
            written = await self._ask(self._trainer.write.call_one())
            return float(written + await self._ask(self._receiver.read_segment.call_one()))
        both = asyncio.gather(self._receiver.broadcast.call_one(), self._trainer.broadcast.call_one())
        return since_both(*await self._ask(both))

    async def _memory(self) -> dict[str, int]:
        calls = asyncio.gather(self._trainer.pss.call_one(), self._receiver.pss.call_one())
        return dict(zip(("trainer", "receiver"), await self._ask(calls), strict=True))

    async def _ask(self, call: Any) -> Any:
        return await self._fleet.ask(call, "an end of the transfer to answer")

    async def close(self) -> None:
        await self._ask(self._trainer.end_bare.call_one())


def since_both(receiver: Span, sender: Span) -> float:
    """Seconds until the receiver had everything, from when both had been told to begin."""
    return receiver.end - max(receiver.begin, sender.begin)


async def measure(fleet: Fleet, rounds: int) -> list[dict[str, Any]]:
    """A row for each transport."""
    both = Bytes(fleet, await fleet.receiver())
    await both.set_up()
    rows = []
    for name in COSTS:
        say(f"bytes, {fleet.mb} MB: {name}")
        rows.append(await both.transport(name, rounds))
    await both.close()
    return rows
