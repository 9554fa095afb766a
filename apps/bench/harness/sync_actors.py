"""The two ends of weight sync in `apps.bench.weightsync`: the project's actors, with clocks and yardsticks."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint, endpoint

from actors.generator import GeneratorActor
from actors.trainer_mesh import TrainerActor
from apps.bench.harness.token_gaps import Trace, Window
from forge.segment import Segment, SegmentRef
from weightsync.adapters import adapter_parameters, adapter_spec
from weightsync.checksums import verify
from weightsync.config import WeightSyncConfig
from weightsync.layout import Box, full_box
from weightsync.offer import Endpoint, Offer, RankOffer
from weightsync.publisher import Publisher
from weightsync.snapshot import NUM_BUFFERS
from weightsync.sync import Needed
from weightsync.transports import make_puller
from weightsync.transports.base import Puller
from weightsync.transports.context import PullerContext
from weightsync.transports.rdma import RdmaReader

T = TypeVar("T")
_GLOO_TIMEOUT = timedelta(seconds=120)
RANK = 8
"""Of adapters."""


@dataclass(frozen=True)
class Span:
    """From when to when something ran, in seconds of the clock that all processes of a host share, and the CPU seconds
    that its process spent meanwhile, in all threads.
    """

    begin: float
    end: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Stopwatch:
    """Started where it is made."""

    def __init__(self) -> None:
        self._cpu_s, self._begin = time.process_time(), time.monotonic()

    def stop(self) -> Span:
        return Span(self._begin, time.monotonic(), time.process_time() - self._cpu_s)


def pss_bytes(pid: int | str = "self") -> int:
    """Memory of a process in bytes; of pages that several processes map, its share."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


class BareHalf:
    """One side of the yardsticks: the same bytes, in one flat buffer, without anything of weight sync."""

    def __init__(self, nbytes: int, rank: int) -> None:
        self.flat = torch.ones(nbytes, dtype=torch.uint8)
        self._rank = rank
        self._group: Any = None

    def join(self, port: int) -> None:
        """Makes a group of gloo's of two, which meets at `port` of this host."""
        store = dist.TCPStore("127.0.0.1", port, 2, self._rank == 0, _GLOO_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=2, timeout=_GLOO_TIMEOUT)

    def broadcast(self) -> Span:
        watch = Stopwatch()
        dist.broadcast(self.flat, 0)
        return watch.stop()

    def close(self) -> None:
        dist.destroy_process_group()
        del self.flat


class BenchTrainer(TrainerActor):
    """The trainer; says how long what runs behind training took, and moves the same bytes by other means."""

    _bare: BareHalf
    _copies: list[torch.Tensor]
    _segment: Segment

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spans: dict[str, Span] = {}
        self._count = 0
        self._targets: list[str] = []
        self._peft: Any = None

    @concurrent_endpoint
    async def adapt(self, targets: Sequence[str]) -> None:
        """From the next connect on publishes an adapter of rank `RANK` on these modules, and nothing else."""
        self._targets = list(targets)

    @concurrent_endpoint
    async def connect(self, dtype: str, sync: WeightSyncConfig, transport: str, folder: str) -> Endpoint:
        connect = self._connect_adapter if self._targets else self._ready.connect
        return await self._run(lambda: connect(dtype, sync, transport, folder))

    def _connect_adapter(self, dtype: str, sync: WeightSyncConfig, transport: str, folder: str) -> Endpoint:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=self._targets)
        base = self._ready.policy.hf if self._peft is None else self._peft.unload()
        self._peft = get_peft_model(base, config)
        parameters = adapter_parameters(self._peft.named_parameters())
        with torch.no_grad():
            for _, parameter in parameters:
                parameter.normal_(std=0.01)
        spec = adapter_spec(config, parameters)
        publisher = Publisher(parameters, getattr(torch, dtype), sync, transport=transport, adapter=spec, folder=folder)
        self._ready._publisher = publisher
        return publisher.endpoint

    async def _timed(self, name: str, work: Callable[[], T]) -> T:
        def timed() -> T:
            watch = Stopwatch()
            try:
                return work()
            finally:
                self._spans[name] = watch.stop()

        return await self._run(timed, self._behind)

    @concurrent_endpoint
    async def offer(self, version: int, buffer: int, base: int) -> RankOffer:
        return await self._timed("offer", lambda: self._ready.publisher.offer(version, buffer, base))

    @concurrent_endpoint
    async def prepare(self, offer: Offer) -> dict[str, Any]:
        return await self._timed("prepare", lambda: self._ready.publisher.prepare(offer))

    @concurrent_endpoint
    async def send(self, peer: str, offer: Offer) -> None:
        await self._timed("send", lambda: self._ready.publisher.send(peer, offer))

    @concurrent_endpoint
    async def spans(self) -> dict[str, Span]:
        """Of "offer" (checksums), "prepare" and "send", the latest of each since the last call."""
        found, self._spans = self._spans, {}
        return found

    @concurrent_endpoint
    async def nbytes(self) -> int:
        """Of a version, once connected."""
        return int(self._ready.publisher.endpoint.layout.nbytes)

    @concurrent_endpoint
    async def cpu_s(self) -> float:
        """CPU seconds of this process so far, in all threads."""
        return time.process_time()

    @concurrent_endpoint
    async def pss(self) -> int:
        gc.collect()
        return pss_bytes()

    @concurrent_endpoint
    async def disconnect(self) -> None:
        """Gives up snapshots and transport."""
        await self._run(self._disconnect)

    def _disconnect(self) -> None:
        trainer = self._ready
        trainer.close()
        trainer._publisher = None
        gc.collect()

    # The yardsticks run in the thread that snapshots run in.

    @concurrent_endpoint
    async def bare(self, nbytes: int) -> SegmentRef:
        """Makes the flat buffers, and the segment that the other side reads."""
        self._bare = BareHalf(nbytes, 0)
        self._copies = [torch.zeros_like(self._bare.flat) for _ in range(NUM_BUFFERS)]
        self._segment = Segment.create(nbytes)
        return self._segment.ref

    @concurrent_endpoint
    async def memcpy(self) -> float:
        """Seconds of one copy within this process, into the buffer whose turn it is."""
        self._count += 1
        return await self._run(lambda: _copy(self._copies[self._count % NUM_BUFFERS], self._bare.flat))

    @concurrent_endpoint
    async def write(self) -> float:
        """Seconds of one copy into the shared segment."""
        return await self._run(lambda: _copy(self._segment.buffer, self._bare.flat))

    @concurrent_endpoint
    async def join(self, port: int) -> None:
        await self._run(lambda: self._bare.join(port))

    @concurrent_endpoint
    async def broadcast(self) -> Span:
        return await self._run(lambda: self._bare.broadcast())

    @concurrent_endpoint
    async def end_bare(self) -> None:
        """Frees what `bare` made."""
        self._bare.close()
        del self._bare, self._copies
        self._segment.close()
        del self._segment


def _copy(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of one copy of bytes; as float32, which torch copies faster."""
    into, of = target.view(torch.float32), source.view(torch.float32)
    begin = time.perf_counter()
    into.copy_(of)
    return time.perf_counter() - begin


class BenchReceiver(Actor):
    """A generator's worker without the engine: pulls what it is offered into its image, and reads it."""

    def __init__(self) -> None:
        self._reader: RdmaReader | None = None
        self._puller: Puller | None = None
        self._image: torch.Tensor | None = None

    @endpoint
    async def connect(self, endpoint: Endpoint, peer: str) -> Needed:
        needed: list[dict[str, Box]] = [{entry.name: full_box(entry.shape) for entry in endpoint.layout.entries}]
        self._remote = self._local = endpoint
        if endpoint.transport == "rdma":
            self._reader = RdmaReader(endpoint)
            self._local = self._reader.local
        self._needed = needed[0]
        context = PullerContext(
            peer=peer,
            tp_rank=0,
            tp_world=1,
            layout=endpoint.layout,
            sources=self._local.sources,
            needed=needed,
            links=self._local.links,
            device=torch.device("cpu"),
            deadline_s=endpoint.deadline_s,
        )
        self._puller = make_puller(self._local.transport, context)
        return needed

    @endpoint
    async def pull(self, offer: Offer) -> Span:
        """Until the image is complete."""
        watch = None
        if self._reader is not None:
            watch = Stopwatch()
            offer = await self._reader.read(offer)
        return await asyncio.to_thread(self._pull, offer, watch)

    def _pull(self, offer: Offer, watch: Stopwatch | None) -> Span:
        assert self._puller is not None, "connect comes first"
        watch = watch or Stopwatch()
        self._image = self._puller.pull(offer)
        return watch.stop()

    @endpoint
    async def check(self, offer: Offer) -> float:
        """Seconds that it takes to compare the image with the offer's checksums; raises when they differ."""
        assert self._image is not None, "pull comes first"
        layout, sources = self._local.layout, self._remote.sources
        begin = time.perf_counter()
        await asyncio.to_thread(verify, self._image, layout, sources, self._needed, offer.sums, offer.version)
        return time.perf_counter() - begin

    @endpoint
    async def read(self) -> float:
        """Seconds of one copy of the image into private memory."""
        assert self._image is not None, "pull comes first"
        return await asyncio.to_thread(_copy, self._bare.flat[: self._image.numel()], self._image)

    @endpoint
    async def pss(self) -> int:
        gc.collect()
        return pss_bytes()

    @endpoint
    async def disconnect(self) -> None:
        """Gives up image and transport."""
        self._image = None
        if self._puller is not None:
            self._puller.close()
        if self._reader is not None:
            self._reader.close()
        self._puller = self._reader = None
        gc.collect()

    @endpoint
    async def bare(self, ref: SegmentRef) -> None:
        self._bare = BareHalf(ref.nbytes, 1)
        self._segment = Segment.attach(ref)

    @endpoint
    async def read_segment(self) -> float:
        """Seconds of one copy of the shared segment into private memory."""
        return await asyncio.to_thread(_copy, self._bare.flat, self._segment.buffer)

    @endpoint
    async def join(self, port: int) -> None:
        await asyncio.to_thread(self._bare.join, port)

    @endpoint
    async def broadcast(self) -> Span:
        return await asyncio.to_thread(self._bare.broadcast)


def num_modules(worker: Any) -> int:
    """Modules of a vLLM worker's model."""
    return sum(1 for _ in worker.model_runner.model.modules())


def collect_garbage(worker: Any) -> None:
    """Frees a shadow that is no longer used: its modules refer to each other."""
    gc.collect()


class BenchGenerator(GeneratorActor):
    """The generator, with a record of every token's time and of every update.

    The times are the engine's own: it stamps each step's outputs. Requests run as they do in the app.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: list[tuple[float, list[str]]] = []
        self._stepped = asyncio.Event()
        self._stage: Window = (0.0, 0.0)
        self._flip: Window = (0.0, 0.0)
        self._staged_s = 0.0

    @property
    def _vllm(self) -> Any:
        return self._generator._engine._engine

    @endpoint
    async def setup(self, warm_up: Sequence[int] = ()) -> None:
        await self._generator.setup(warm_up)
        core = self._vllm.engine_core
        get_output = core.get_output_async

        async def watched() -> Any:
            outputs = await get_output()
            clients = [client_of(one.request_id) for one in outputs.outputs if one.new_token_ids]
            if clients:
                self._steps.append((outputs.timestamp, clients))
                self._stepped.set()
            return outputs

        core.get_output_async = watched
        engine: Any = self._generator._engine
        stage = engine.stage

        async def timed(offer: Offer) -> float:
            self._staged_s = await stage(offer)
            return float(self._staged_s)

        engine.stage = timed

    @endpoint
    async def num_modules(self) -> int:
        (count,) = await self._vllm.collective_rpc(num_modules)
        return int(count)

    @endpoint
    async def set_mode(self, kv: str, shadow: bool) -> str:
        """How updates are applied from now on; returns why they do not flip. Without a shadow connect anew."""
        engine = self._generator._engine
        engine.kv_mode = kv  # type: ignore[assignment]
        if shadow == bool(engine.why_no_shadow):
            engine.why_no_shadow = (await self._vllm.collective_rpc("forge_start", args=(shadow,)))[0]
            await self._vllm.collective_rpc(collect_garbage)
        return engine.why_no_shadow

    @concurrent_endpoint
    async def pause(self) -> None:
        """As the field does it, before the transfer."""
        await self._vllm.pause_generation(mode="keep", clear_cache=False)

    @concurrent_endpoint
    async def resume(self) -> None:
        await self._vllm.resume_generation()

    @concurrent_endpoint
    async def stage(self, offer: Offer) -> float:
        begin = time.monotonic()
        try:
            return await self._generator.stage(offer)
        finally:
            self._stage = (begin, time.monotonic())

    @concurrent_endpoint
    async def staged_s(self) -> float:
        """What the worker itself spent on the latest version that it staged, in seconds."""
        return self._staged_s

    @concurrent_endpoint
    async def flip(self, version: int) -> float:
        begin = time.monotonic()
        try:
            return await self._generator.flip(version)
        finally:
            self._flip = (begin, time.monotonic())

    @concurrent_endpoint
    async def steps(self, count: int, clients: int) -> None:
        """Returns after `count` more steps in which all `clients` got a token."""
        seen = len(self._steps)
        while sum(len(names) >= clients for _, names in self._steps[seen:]) < count:
            self._stepped.clear()
            await self._stepped.wait()

    @concurrent_endpoint
    async def forget(self) -> None:
        """Begins a new trace."""
        self._steps.clear()

    @concurrent_endpoint
    async def trace(self) -> Trace:
        """Of the steps since `forget`, and of the latest update."""
        return Trace(list(self._steps), self._stage, self._flip)


def client_of(request_id: str) -> str:
    """The client of a request "<client>:<number>/0.<n>-<x>", as vLLM calls it."""
    return request_id.partition(":")[0]
