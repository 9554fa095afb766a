"""What the parts of `apps.bench.weightsync` run: a trainer, a generator or a bare receiver, weight sync between them,
clients that keep the generator busy, and the CPU seconds that all this costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from actors.generator import GeneratorConfig
from actors.generators import Replica
from actors.trainer import ModelSpec, TrainerConfig
from actors.trainer_mesh import TrainerMesh
from apps.bench.harness.llamas import VOCAB, Shape
from apps.bench.harness.sync_actors import RANK, BenchGenerator, BenchReceiver, BenchTrainer
from apps.grpo.spawn import QUIET
from forge.launch import Hosts
from forge.losses import LossConfig
from forge.mesh import Cluster, within
from forge.processes import MarkedProcess, marked_processes
from weightsync.config import WeightSyncConfig
from weightsync.sync import Applied, Sink, WeightSync

CLIENTS = 8
PROMPT_TOKENS = 16
MAX_LEN = 512
"""Tokens of a request, its prompt included, at most."""
TRAINER, GENERATOR, RECEIVER = "trainer", "generator", "receiver"
_ANSWER_S = 300.0
# So that the worker can be asked for more than the app asks it for.
_GENERATOR_ENV = {**QUIET, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def say(text: str) -> None:
    """Progress; stdout is for the tables."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Fleet:
    """One model's actors. `trainer` is a mesh of one `BenchTrainer`."""

    hosts: Hosts
    cluster: Cluster
    model: str
    mb: int
    shape: Shape
    folder: Path
    trainer: Any
    config: TrainerConfig
    version: int = 0
    """The last one that was published, by whichever weight sync."""

    @staticmethod
    async def start(hosts: Hosts, cluster: Cluster, model: str, mb: int, shape: Shape, folder: Path) -> Fleet:
        """With a trainer that has loaded the model; `folder` is for the file transport."""
        config, spec = TrainerConfig(), ModelSpec(model, "float32", cluster.device)
        mesh = await cluster.spawn(TRAINER, BenchTrainer, config, LossConfig(), spec, world=1, seed=0)
        fleet = Fleet(hosts, cluster, model, mb, shape, folder, mesh, config)
        await fleet.source("memory", WeightSyncConfig()).setup()
        return fleet

    def source(self, transport: str, sync: WeightSyncConfig) -> TrainerMesh:
        """The trainer as a source of that transport; `connect` makes its snapshots."""
        return TrainerMesh(
            self.trainer, self.config, 1, "float32", sync, transport=transport, folder=str(self.folder / "weights")
        )

    async def disconnect(self) -> None:
        """Frees the trainer's snapshots."""
        await self.ask(self.trainer.disconnect.call_one(), "the trainer to free its snapshots")

    async def receiver(self) -> Any:
        """A mesh of one `BenchReceiver`."""
        return await self.cluster.spawn(RECEIVER, BenchReceiver)

    async def generator(self, number: int = 0, adapted: Sequence[str] = ()) -> Replica:
        """Generator `number` with its engine running, as the app starts it; for adapters of these modules, if any."""
        name = f"{GENERATOR}_{number}"
        config = GeneratorConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=CLIENTS,
            # A quarter more than the clients can fill.
            kv_cache_bytes=5 * CLIENTS * MAX_LEN * self.shape.kv_bytes // 4 + (16 << 20),
            request_timeout_s=3600.0,
            lora_rank=RANK if adapted else 0,
            lora_targets=list(adapted),
        )
        arguments: dict[str, Any] = {"seed": 0, "stop_ids": [], "replica": number, "env": _GENERATOR_ENV}
        mesh = await self.cluster.spawn(GENERATOR, BenchGenerator, config, self.model, "float32", **arguments)
        replica = Replica(mesh, name, config)
        await replica.setup(make_prompt(0))
        return replica

    async def ask(self, call: Any, what: str) -> Any:
        """What an actor answers, or DeadlineExceeded."""
        return await within(_ANSWER_S, what, call)

    def pids(self, role: str) -> list[int]:
        """The processes of the first replica of `role`, engine processes included."""
        return [process.pid for process in self._processes(role)]

    def engine_pids(self) -> list[int]:
        """What the generator's actor has started: the processes that receive. The actor itself is not among them: one
        that is silent for half a minute is dead to Monarch.
        """
        parents = self.hosts.parents()
        return [process.pid for process in self._processes(GENERATOR) if process.parent not in parents]

    def _processes(self, role: str) -> Iterator[MarkedProcess]:
        name = f"{role}_0" if role in (TRAINER, GENERATOR) else role
        return marked_processes(self.hosts.run_id, name=name)


class Live:
    """A weight sync whose loop runs; an async context manager."""

    def __init__(self, fleet: Fleet, sinks: Sequence[Sink], transport: str, config: WeightSyncConfig) -> None:
        self._fleet = fleet
        self.sync = WeightSync(fleet.source(transport, config), sinks, config)
        self.last: Applied | None = None
        self._changed = asyncio.Event()

    @property
    def nbytes(self) -> int:
        """Of a version."""
        return self._nbytes

    async def __aenter__(self) -> Live:
        await self.sync.connect()
        self._nbytes = await self._fleet.ask(self._fleet.trainer.nbytes.call_one(), "the trainer's layout")
        self._loop = asyncio.create_task(self.sync.run(self._on_applied))
        return self

    async def _on_applied(self, applied: Applied) -> None:
        self.last = applied
        self._changed.set()

    async def publish(self) -> float:
        """The next version; returns the seconds that the train loop would have stood still."""
        self._fleet.version += 1
        return await self.sync.publish(self._fleet.version)

    async def applied(self) -> Applied:
        """Once the last published version serves. Raises what has ended the weight loop."""
        while self.last is None or self.last.version < self.sync.published_version:
            self._changed.clear()
            change = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({change, self._loop}, return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            if self._loop.done():
                self._loop.result()
                raise RuntimeError("the weight loop has ended")
        return self.last

    async def update(self) -> Applied:
        """One version, published and applied."""
        await self.publish()
        return await self.applied()

    async def __aexit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.sync.close()
        if kind is not None:
            self._loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop
        await self._fleet.disconnect()


def make_prompt(client: int) -> list[int]:
    """The prompt of a client, `[PROMPT_TOKENS]`."""
    rng = random.Random(client)
    return [rng.randrange(2, VOCAB) for _ in range(PROMPT_TOKENS)]


@contextlib.asynccontextmanager
async def load(replica: Replica, lengths: Sequence[int]) -> AsyncIterator[None]:
    """Inside, one client for each of `lengths` asks for completions of that many tokens, one after the other."""
    running: dict[int, str] = {}
    ended = asyncio.Event()

    async def client(number: int, length: int) -> None:
        count = 0
        while not ended.is_set():
            running[number] = f"client{number}:{count}"
            call = replica.mesh.generate.call_one([make_prompt(number)], [count], length, running[number])
            await within(replica.config.request_timeout_s, "a completion", call)
            count += 1
        del running[number]

    clients = asyncio.gather(*(client(number, length) for number, length in enumerate(lengths)))
    try:
        yield
    finally:
        ended.set()
        while not clients.done():
            # Again, for those that are still on their way to the actor.
            await asyncio.gather(*(replica.mesh.abort.call_one(name) for name in list(running.values())))
            await asyncio.wait({clients}, timeout=0.05)
        await clients


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds that these processes have spent so far, each with all its threads."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """CPU seconds by role since it was made."""

    def __init__(self, fleet: Fleet, roles: Sequence[str]) -> None:
        self._pids = {role: fleet.pids(role) for role in roles}
        self._before = {role: cpu_seconds(pids) for role, pids in self._pids.items()}
        self._begin = time.monotonic()

    def read(self) -> tuple[float, dict[str, float]]:
        """Wall seconds, and CPU seconds by role."""
        wall = time.monotonic() - self._begin
        return wall, {role: cpu_seconds(pids) - self._before[role] for role, pids in self._pids.items()}
