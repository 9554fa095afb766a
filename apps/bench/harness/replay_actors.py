"""What `apps.bench.replay` times between processes: the hand-over of a batch; our actor, its limit and its peers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host
from tensordict import TensorDict

from apps.bench.harness import rates
from apps.bench.harness.replay_buffers import OURS, ROW_TOKENS, Times, Work, make_groups
from apps.bench.harness.replay_http import Atropos, HttpBuffer
from apps.bench.peers.torchrl_replay import SAMPLE
from forge.batch import check_packed
from forge.channel import Handle, Pool
from forge.memory import peak_rss_bytes
from forge.packing import first_fit, pack
from replay.actor import ReplayActor, ReplayClient
from replay.config import ReplayConfig
from replay.shards import hand_over
from replay.storage import store

SHARD, MEMCPY, EMPTY = "hand-over", "memcpy", "message"
HTTP, ATROPOS, LIMIT = "plain HTTP", "Atropos", "limit"
HAND_OVER_TOKENS = (512, 4096, 32768)
"""Of each of the 64 episodes: about 1, 9 and 70 MB."""
ACTOR_GROUPS = 64
PRODUCERS = 8


class Rank(Actor):
    """A trainer's rank, as far as it receives: notes the time (ns, one clock for the host) when it has its batch."""

    def __init__(self) -> None:
        self._pool = Pool()

    @endpoint
    async def receive(self, handle: Handle | None) -> int:
        batch = None if handle is None else self._pool.open(handle)
        now = time.monotonic_ns()
        del batch  # from here on the sender may use the memory again
        return now

    @endpoint
    async def checked_sum(self, handle: Handle) -> float:
        """Of what can be trained, after a check of the batch."""
        batch = self._pool.open(handle)
        check_packed(batch)
        return float(batch["behavior_logprobs"].double().sum())

    @endpoint
    async def peak_bytes(self) -> int:
        return peak_rss_bytes()


class HandOver:
    """Stored groups of this process -> a packed batch that another process has mapped."""

    def __init__(self, work: Work, rank: Any) -> None:
        self._rank, self._pool = rank, Pool()
        self._groups = [
            store(group, number).arrays for number, group in enumerate(make_groups(work, work.batch // work.group_size))
        ]
        lengths = [n for arrays in self._groups for n in arrays["lengths"].tolist()]
        self._row = max(ROW_TOKENS, *lengths)
        self.nbytes = pack(self._groups, first_fit(lengths, self._row)).bytes()
        self._source = torch.ones(self.nbytes, dtype=torch.uint8)
        self._copies = itertools.cycle([torch.zeros_like(self._source) for _ in range(3)])

    async def verify(self) -> None:
        """Raises when what arrives is not what was stored."""
        wanted = sum(float(arrays["behavior_logprobs"].sum(dtype="float64")) for arrays in self._groups)
        got = await self._rank.checked_sum.call_one(self._send())
        if abs(got - wanted) > 1e-6 * abs(wanted):
            raise RuntimeError(f"the batch arrived with sum {got}, {wanted} was sent; do not trust the times")

    async def seconds(self, name: str) -> float:
        """One round of one way."""
        target = next(self._copies)
        start = time.monotonic_ns()
        if name == MEMCPY:
            target.copy_(self._source)
            end = time.monotonic_ns()
        else:
            end = await self._rank.receive.call_one(self._send() if name == SHARD else None)
        return float(end - start) / 1e9

    def _send(self) -> Handle:
        handle: Handle = hand_over(self._groups, 1, self._row, self._pool)[0]
        return handle


class OurActor:
    """A ReplayActor and its client. What its samples take is opened here."""

    def __init__(self, work: Work) -> None:
        # Slots for all groups of a round and those that are left of the one before.
        cfg = ReplayConfig(max_staleness=31, journal=False)
        self.mesh = (
            this_host().spawn_procs(name="replay").spawn("replay", ReplayActor, cfg, work.batch // work.group_size)
        )
        self._client, self._pool, self._version = ReplayClient(self.mesh), Pool(), 0

    async def add(self, groups: list[TensorDict], producers: int) -> float:
        """Seconds until all are in, by so many rollout loops at a time."""
        left = iter(groups)

        async def produce() -> None:
            for group in left:
                ticket = await self._client.reserve()
                assert ticket is not None
                group["token_versions"].masked_fill_(group["loss_mask"], ticket.version)
                await self._client.add(ticket, group)

        start = time.perf_counter()
        await asyncio.gather(*(produce() for _ in range(producers)))
        return time.perf_counter() - start

    async def sample(self) -> float:
        """Seconds until the batch is mapped here."""
        start = time.perf_counter()
        batch = await self._client.sample(self._version)
        assert batch is not None
        opened = self._pool.open(batch.handles[0])
        seconds = time.perf_counter() - start
        del opened
        self._version += 1
        await self._client.release(self._version)
        return seconds


class EmptyMessages:
    """The limit of an actor: what the messages of the same work take when they carry and cause nothing.

    Adding a group is two, `reserve` and `add`. A sample is one, and the copy that makes a batch of groups: in a
    thread, since it may have to wait for memory.
    """

    def __init__(self, work: Work) -> None:
        self._actor = this_host().spawn_procs(name="idle").spawn("idle", Rank)
        nbytes = work.batch // work.group_size * make_groups(work, 1)[0].bytes()
        self._batch, self._copy = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    async def add(self, groups: list[TensorDict], producers: int) -> float:
        """Seconds, as `OurActor.add`."""
        left = iter(groups)

        async def produce() -> None:
            for _ in left:
                await self._actor.receive.call_one(None)
                await self._actor.receive.call_one(None)

        start = time.perf_counter()
        await asyncio.gather(*(produce() for _ in range(producers)))
        return time.perf_counter() - start

    async def sample(self) -> float:
        """Seconds, as `OurActor.sample`."""
        start = time.perf_counter()
        await self._actor.receive.call_one(None)
        await asyncio.to_thread(self._copy.copy_, self._batch)
        return time.perf_counter() - start


async def measure_hand_over(work: Work, rounds: int, peaks: dict[str, int]) -> list[dict[str, Any]]:
    """One row a length of episodes."""
    rank = this_host().spawn_procs(name="rank").spawn("rank", Rank)
    rows = []
    for tokens in HAND_OVER_TOKENS:
        shard = HandOver(replace(work, tokens=tokens), rank)
        await shard.verify()
        ways: dict[str, list[float]] = {SHARD: [], MEMCPY: [], EMPTY: []}
        for number in range(-3, rounds):
            for name in rates.turns(list(ways), number):
                seconds = await shard.seconds(name)
                if number >= 0:
                    ways[name].append(seconds)
        rows.append(
            {
                "part": "hand-over",
                "name": f"{work.batch} episodes of {tokens} tokens",
                "mb": round(shard.nbytes / 1e6, 1),
                **{f"{name}, ms": round(1e3 * statistics.median(values), 3) for name, values in ways.items()},
                "over_memcpy": round(rates.ratio(ways[SHARD], ways[MEMCPY]), 3),
            }
        )
    peaks["trainer's rank"] = await rank.peak_bytes.call_one()
    return rows


async def measure_actor(work: Work, rounds: int, atropos: str | None, peaks: dict[str, int]) -> list[dict[str, Any]]:
    """Adding and sampling through messages, and through HTTP."""
    groups = make_groups(work, ACTOR_GROUPS)
    per_group = 1 / len(groups)
    times: Times = {}

    def note(system: str, one: float, producers: float, samples: list[float]) -> None:
        found = {
            "one producer": per_group * one,
            "producers": per_group * producers,
            SAMPLE: statistics.median(samples),
        }
        for key, seconds in found.items():
            times.setdefault((key, system), []).append(seconds)

    with contextlib.ExitStack() as stack:
        served = {HTTP: stack.enter_context(contextlib.closing(HttpBuffer(work)))}
        if atropos is not None:
            served[ATROPOS] = stack.enter_context(contextlib.closing(Atropos(work, atropos)))
        actors: dict[str, OurActor | EmptyMessages] = {OURS: OurActor(work), LIMIT: EmptyMessages(work)}
        for number in range(rounds + 1):
            for name in rates.turns(list(actors), number):
                actor = actors[name]
                one, many = await actor.add(groups, 1), await actor.add(groups, PRODUCERS)
                note(name, one, many, [await actor.sample() for _ in range(16)])
            for name, peer in served.items():
                seconds = await asyncio.to_thread(peer.add, groups)
                note(name, seconds, seconds, [await asyncio.to_thread(peer.sample) for _ in range(8)])
        peaks |= {name: peer.peak_bytes() for name, peer in served.items()}
    times = {key: values[1:] for key, values in times.items()}  # the first round warms up
    titles = {
        "one producer": "add one group, one producer",
        "producers": f"add one group, {PRODUCERS} producers",
        SAMPLE: f"sample {work.batch} episodes",
    }
    rows = []
    for key, title in titles.items():
        row: dict[str, Any] = {"part": "actor", "name": title}
        row |= {f"{name}, ms": round(1e3 * statistics.median(times[key, name]), 3) for name in (OURS, LIMIT, *served)}
        row |= {f"x {name}": round(rates.ratio(times[key, name], times[key, OURS]), 2) for name in served}
        rows.append(
            row | {f"{LIMIT} x {name}": round(rates.ratio(times[key, name], times[key, LIMIT]), 2) for name in served}
        )
    return rows
