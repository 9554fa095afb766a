"""What `apps.bench.replay` times between processes: the hand-over of a batch, our actor, a buffer behind HTTP."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host
from tensordict import TensorDict

from apps.bench.harness.replay_buffers import ROW_TOKENS, Work, make_groups
from apps.bench.peers import http_buffer
from forge.batch import check_packed
from forge.channel import Handle, Pool
from forge.memory import peak_rss_bytes
from forge.packing import first_fit, pack
from replay.actor import ReplayActor, ReplayClient
from replay.config import ReplayConfig
from replay.shards import hand_over
from replay.storage import store

SHARD, MEMCPY, EMPTY = "hand-over", "memcpy", "message"


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
            store(group, number).group for number, group in enumerate(make_groups(work, work.batch // work.group_size))
        ]
        lengths = [n for group in self._groups for n in group["lengths"].tolist()]
        self._row = max(ROW_TOKENS, *lengths)
        self.nbytes = pack(self._groups, first_fit(lengths, self._row)).bytes()
        self._source = torch.ones(self.nbytes, dtype=torch.uint8)
        self._copies = itertools.cycle([torch.zeros_like(self._source) for _ in range(3)])

    async def verify(self) -> None:
        """Raises when what arrives is not what was stored."""
        wanted = sum(float(group["behavior_logprobs"].double().sum()) for group in self._groups)
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


class HttpBuffer:
    """A program that serves groups over HTTP, and a client with one connection that makes tensors of its answers."""

    def __init__(self, work: Work) -> None:
        self._per_batch = work.batch // work.group_size
        self._start([sys.executable, http_buffer.__file__], None)

    def _start(self, command: list[str], port: int | None) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = port or int(self._process.stdout.readline())
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def add(self, groups: list[TensorDict]) -> float:
        """Seconds until all are in."""
        start = time.perf_counter()
        for group in groups:
            self._ask("POST", "/scored_data", self._plain(group))
        return time.perf_counter() - start

    def sample(self) -> float:
        """Seconds until the batch is there as tensors."""
        start = time.perf_counter()
        groups = self._batch()
        for key in groups[0]:
            torch.tensor([row for group in groups for row in group[key]])
        return time.perf_counter() - start

    def peak_bytes(self) -> int:
        """Memory, at most, of the server."""
        return peak_rss_bytes(self._process.pid)

    def close(self) -> None:
        """Ends the program."""
        self._connection.close()
        self._process.communicate(timeout=60)

    def _plain(self, group: TensorDict) -> dict[str, Any]:
        return {key: value.tolist() for key, value in group.items()}

    def _batch(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._ask("GET", f"/batch/{self._per_batch}", None)
        return groups

    def _ask(self, method: str, path: str, value: Any) -> Any:
        body = None if value is None else json.dumps(value)
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        return json.loads(self._connection.getresponse().read())


class Atropos(HttpBuffer):
    """The server of Atropos, in the Python of a venv that has it. It has no place for versions."""

    _KEYS = ("tokens", "masks", "inference_logprobs", "scores")

    def __init__(self, work: Work, python: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = ["-m", "uvicorn", "atroposlib.api.server:app", "--host", "127.0.0.1", "--port", str(port)]
        self._start([python, *server, "--log-level", "warning", "--timeout-keep-alive", "600"], port)
        self._wait_until_it_serves()
        registration = {"wandb_group": "", "wandb_project": "", "batch_size": work.batch, "max_token_len": work.tokens}
        registration |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10**9}
        self._ask("POST", "/register", registration)
        self._ask("GET", "/batch", None)  # the trainer has started

    def close(self) -> None:
        """Ends the program."""
        self._connection.close()
        self._process.terminate()
        self._process.communicate(timeout=60)

    def _wait_until_it_serves(self, deadline_s: float = 60.0) -> None:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                self._ask("GET", "/", None)
                return
            except ConnectionRefusedError:
                self._connection.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Atropos does not serve after {deadline_s:g} s; see its output above") from None
                time.sleep(0.05)

    def _plain(self, group: TensorDict) -> dict[str, Any]:
        keys = ("tokens", "loss_mask", "behavior_logprobs", "rewards")
        values = {name: group[key].tolist() for name, key in zip(self._KEYS, keys, strict=True)}
        return values | {"masks": group["loss_mask"].long().tolist()}

    def _batch(self) -> list[dict[str, Any]]:
        return [{key: group[key] for key in self._KEYS} for group in self._ask("GET", "/batch", None)["batch"]]
