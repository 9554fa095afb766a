"""Generators: requests in, completions out, weights replaced in between.

A generator waits for a request. It never waits for weights: a version is staged while it decodes and flipped
between two decode steps. `actors/generators.py` is the controller's view of all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch.actor import concurrent_endpoint, endpoint

from actors.turns import Clock
from actors.vllm_adapters import LoraOptions
from actors.vllm_engine import Completion, EngineOptions, Sampling, VllmEngine
from forge.errors import ConfigError
from forge.lasting import Beating
from forge.logprobs import MIN_TEMPERATURE
from forge.memory import peak_rss_bytes
from forge.mesh import within
from forge.telemetry import record, span
from forge.trace import WEIGHTS
from weightsync.config import WeightSyncConfig
from weightsync.layout import Box
from weightsync.offer import Endpoint, Offer
from weightsync.transports.rdma import RdmaReader

_ANONYMOUS = "~"
"""What the names of calls begin with that nobody has named."""
_ABORT_AGAIN_S = 0.01
_LOCAL_SHARE = 0.9


@dataclass(frozen=True)
class Progress:
    """Tokens of a call that still runs: those of completion `place` behind its first `offset`.

    `finish` says why the completion ended with them, and is empty while it goes on.
    """

    request_id: str
    place: int
    offset: int
    tokens: Completion
    finish: str


@dataclass
class GeneratorConfig:
    """Sampling and the engine."""

    temperature: float = 1.0
    """Sampling temperature, at least 0.01; the trainer applies the same to its log-probs."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 keeps the whole vocabulary."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps the whole vocabulary."""
    keep_support: int = 0
    """Tokens of the largest support (what top_p and top_k leave) that is recorded for the trainer's log-probs; 0, and a
    larger support, lets the trainer compute it under its own weights, which differ at a staleness above 0."""
    keep_routes: bool = False
    """Record the experts that a mixture of experts chose for each token, for the trainer's routers to replay; takes
    2 bytes a token, layer and chosen expert in every batch."""
    max_new_tokens: int = 16
    """Tokens sampled at most for one completion."""
    max_model_len: int = 512
    """Tokens of prompt and completion together, at most."""
    max_num_seqs: int = 64
    """Sequences decoded at once by one replica; more wait until one of them ends."""
    kv_cache_bytes: int = 268435456
    """Bytes of KV cache of one replica; 0 lets vLLM fill the device."""
    enforce_eager: bool = True
    """Run without compilation; must be true on CPUs. On GPUs compiling costs a minute and pays in long runs."""
    lora_rank: int = 0
    """Largest rank of the LoRA adapters that the engine serves; with them nothing else travels. 0 serves none."""
    lora_targets: list[str] = field(default_factory=list)
    """Modules that adapters may adapt, by the last part of their names, such as q_proj."""
    lora_adapters: int = 4
    """Adapter versions that the engine holds at a time; a new one waits while all have requests running."""
    start_timeout_s: float = 600.0
    """Seconds that an engine may take to start."""
    request_timeout_s: float = 600.0
    """Seconds that a request may take, queueing included, training turns of a colocated run not."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        if not self.temperature >= MIN_TEMPERATURE:
            raise ConfigError(
                f"generator.temperature must be >= {MIN_TEMPERATURE}, got {self.temperature}; "
                "greedy decoding has no policy gradient"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"generator.top_p must lie in (0, 1], got {self.top_p}; use 1 for the whole vocabulary")
        for name in ("top_k", "kv_cache_bytes", "keep_support"):
            if getattr(self, name) < 0:
                raise ConfigError(f"generator.{name} must be >= 0, got {getattr(self, name)}")
        if self.keep_support and self.top_p == 1 and not 0 < self.top_k <= self.keep_support:
            raise ConfigError(
                f"generator.keep_support is {self.keep_support} with top_p 1 and top_k {self.top_k}: no support is "
                "that small; set it to top_k at least, use top_p, or leave it 0"
            )
        for name in ("max_new_tokens", "max_num_seqs", "start_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"generator.{name} must be > 0, got {getattr(self, name)}")
        if self.lora_rank and (not self.lora_targets or self.lora_adapters < 2):
            raise ConfigError(
                f"generator.lora_rank is {self.lora_rank} with lora_targets {self.lora_targets} and lora_adapters "
                f"{self.lora_adapters}: name at least one module, and hold at least 2 adapters"
            )
        if self.max_model_len <= self.max_new_tokens:
            raise ConfigError(
                f"generator.max_model_len is {self.max_model_len}, max_new_tokens {self.max_new_tokens}: "
                "no room for a prompt; raise max_model_len"
            )

    @property
    def lora(self) -> LoraOptions | None:
        """What the engine makes room for, if for any adapters."""
        return LoraOptions(self.lora_rank, tuple(self.lora_targets), self.lora_adapters) if self.lora_rank else None

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.keep_support)


class Generator:
    """One replica, without Monarch."""

    def __init__(
        self,
        config: GeneratorConfig,
        model: str,
        dtype: str,
        *,
        seed: int,
        stop_ids: Sequence[int],
        procs: int = 1,
        sync: WeightSyncConfig | None = None,
        sleep_mode: bool = False,
    ) -> None:
        """`sleep_mode`: to `sleep` gives the device's memory back, too."""
        sync = sync or WeightSyncConfig()
        self._config = config
        self._label = "generator"
        self._stop_ids = list(stop_ids)
        self._engine = VllmEngine(
            EngineOptions(
                model=model,
                dtype=dtype,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                kv_cache_bytes=config.kv_cache_bytes,
                enforce_eager=config.enforce_eager,
                tensor_parallel=procs,
                seed=seed,
                shadow=sync.shadow,
                kv_mode=sync.kv,
                lora=config.lora,
                keep_support=config.keep_support,
                keep_routes=config.keep_routes,
                sleep_mode=sleep_mode,
            )
        )
        # An answer has to be back before the controller stops waiting for it.
        self._deadline_s = _LOCAL_SHARE * sync.deadline_s
        self._reader: RdmaReader | None = None
        self._clock = Clock()
        self._calls = itertools.count()
        self._request_ids: dict[str, list[str]] = {}
        self._ended: dict[str, Completion] = {}
        self._told: dict[str, int] = {}

    async def setup(self, warm_up: Sequence[int] = ()) -> None:
        """Starts the engine; a first request on `warm_up` pays for what the engine compiles lazily."""
        await within(self._config.start_timeout_s, "the vLLM engine to start", self._engine.start())
        if warm_up:
            warm = self._engine.generate(warm_up, self._config.sampling, max_tokens=2, seed=0, stop_ids=self._stop_ids)
            await within(self._config.start_timeout_s, "the engine's first request", warm)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        *,
        begun: Mapping[int, Completion] | None = None,
        wanted: int = 0,
    ) -> list[Completion]:
        """One completion for each prompt, sampled concurrently. Cancelling aborts what still runs.

        `request_id` (unique among running calls) is what `abort` takes and `progress` tells; without it a call is in
        neither. `begun` has what an
        earlier engine had of the completions, by their place. Once `wanted` (0: all) have ended, the others are cut
        where they are: `finish_reason` "cut".
        """
        limit = max_new_tokens or self._config.max_new_tokens
        name = request_id or f"{_ANONYMOUS}{next(self._calls)}"
        ids = self._request_ids[name] = [f"{name}/{i}" for i in range(len(prompts))]
        begun = begun or {}
        self._told |= {ids[place]: len(part.token_ids) for place, part in begun.items()}
        requests: list[asyncio.Future[Completion]] = []
        try:
            requests = [
                asyncio.ensure_future(self._request(prompt, limit, seed, id, begun.get(place)))
                for place, (prompt, seed, id) in enumerate(zip(prompts, seeds, ids, strict=True))
            ]
            return await self._clock.within(
                self._config.request_timeout_s,
                f"{len(prompts)} completions of {name}",
                self._first(wanted or len(prompts), requests, name),
            )
        finally:
            # Left early, by an error, a deadline or a cancellation: what still runs is aborted.
            for request in requests:
                request.cancel()
            del self._request_ids[name]
            for id in ids:
                self._ended.pop(id, None)
                self._told.pop(id, None)

    async def _first(self, wanted: int, requests: list[asyncio.Future[Completion]], name: str) -> list[Completion]:
        """All completions; those that were not among the first `wanted` to end are cut."""
        running, ended = set(requests), list[asyncio.Future[Completion]]()
        while len(ended) < wanted:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended += [request for request in requests if request in done]  # of one moment, in their order
            for request in done:
                request.result()  # raises what went wrong with it
        if running:
            aborting = asyncio.ensure_future(self.abort(name))
            try:
                await asyncio.wait(running)
            finally:
                aborting.cancel()
        for request in (*ended[wanted:], *running):
            request.result().finish_reason = "cut"
        return [request.result() for request in requests]

    async def _request(
        self, prompt: Sequence[int], limit: int, seed: int, request_id: str, begun: Completion | None
    ) -> Completion:
        start = time.monotonic()
        with span("requests", request_id, prompt_tokens=len(prompt)) as about:
            completion = await self._engine.generate(
                prompt,
                self._config.sampling,
                max_tokens=limit,
                seed=seed,
                stop_ids=self._stop_ids,
                request_id=request_id,
                begun=begun,
            )
            about |= {"tokens": len(completion.token_ids), "finish": completion.finish_reason}
        record("extra/generator/request_s", time.monotonic() - start, "percentiles")
        self._ended[request_id] = completion
        return completion

    def progress(self) -> list[Progress]:
        """What the running calls have sampled since this was called last, a part for each completion."""
        sampled, parts = self._engine.sampled(self._told), []
        named = ((name, ids) for name, ids in self._request_ids.items() if not name.startswith(_ANONYMOUS))
        for name, ids in named:
            for place, id in enumerate(ids):
                ended, told = self._ended.pop(id, None), self._told.get(id, 0)
                rest = ended.after(told) if ended else sampled.get(id)
                if rest and (ended or rest.token_ids):
                    parts.append(Progress(name, place, told, rest, ended.finish_reason if ended else ""))
                    self._told[id] = told + len(rest.token_ids)
        return parts

    async def abort(self, request_id: str) -> None:
        """Ends the call `request_id` early; it returns what was sampled, `finish_reason` "abort"."""
        # Again until the call is over: the engine ignores ids of requests that are still on their way to it.
        while ids := self._request_ids.get(request_id):
            await self._engine.abort(ids)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def connect(self, endpoint: Endpoint, peer: str = "generator") -> list[dict[str, Box]]:
        """Reaches for the trainer as replica `peer`; returns what each worker of the engine reads of each parameter."""
        self._label = peer
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if endpoint.transport == "rdma":
            self._reader = RdmaReader(endpoint)
            endpoint = self._reader.local
        return await within(self._deadline_s, f"{self._label} to connect", self._engine.connect(endpoint, self._label))

    async def stage(self, offer: Offer) -> float:
        """Brings a version beside the live weights, behind decoding; returns its seconds."""
        begin = time.perf_counter()
        with span(WEIGHTS, "transfer", version=offer.version):
            await within(self._deadline_s, f"{self._label} to stage version {offer.version}", self._stage(offer))
        return time.perf_counter() - begin

    async def _stage(self, offer: Offer) -> None:
        if self._reader is not None:
            offer = await self._reader.read(offer)
        await self._engine.stage(offer)

    async def flip(self, version: int) -> float:
        """Makes the staged version live; returns the seconds that nothing decoded. On failure the old one serves."""
        what = f"{self._label} to flip to version {version}"
        with span(WEIGHTS, "flip", version=version):
            return await within(self._deadline_s, what, self._engine.flip(version))

    async def sleep(self) -> None:
        """Decodes nothing until `wake`; see `VllmEngine.sleep`. Deadlines of requests stand still."""
        self._clock.stop()
        try:
            await within(self._deadline_s, f"{self._label} to interrupt its requests and sleep", self._engine.sleep())
        except BaseException:
            self._clock.go_on()
            raise

    async def wake(self) -> None:
        """Requests go on from their tokens; works after a `sleep` that failed, too."""
        try:
            await within(self._deadline_s, f"{self._label} to wake", self._engine.wake())
        finally:
            self._clock.go_on()

    async def beat(self) -> None:
        """The engine answers, and not this process alone."""
        await self._engine.beat()

    def shutdown(self) -> None:
        self._engine.shutdown()
        if self._reader is not None:
            self._reader.close()


class GeneratorActor(Beating):
    """Monarch shell of `Generator`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._generator = Generator(*args, **kwargs)

    @endpoint
    async def setup(self, warm_up: Sequence[int] = ()) -> None:
        await self._generator.setup(warm_up)

    @concurrent_endpoint
    async def beat(self) -> None:
        await self._generator.beat()

    @concurrent_endpoint
    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        begun: Mapping[int, Completion] | None = None,
        wanted: int = 0,
    ) -> list[Completion]:
        return await self._generator.generate(prompts, seeds, max_new_tokens, request_id, begun=begun, wanted=wanted)

    @concurrent_endpoint
    async def progress(self) -> list[Progress]:
        return self._generator.progress()

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        await self._generator.abort(request_id)

    @concurrent_endpoint
    async def connect(self, endpoint: Endpoint, peer: str = "generator") -> list[dict[str, Box]]:
        return await self._generator.connect(endpoint, peer)

    @concurrent_endpoint
    async def stage(self, offer: Offer) -> float:
        return await self._generator.stage(offer)

    @concurrent_endpoint
    async def flip(self, version: int) -> float:
        return await self._generator.flip(version)

    @concurrent_endpoint
    async def sleep(self) -> None:
        await self._generator.sleep()

    @concurrent_endpoint
    async def wake(self) -> None:
        await self._generator.wake()

    @endpoint
    async def peak_memory(self) -> int:
        return peak_rss_bytes()

    @endpoint
    async def shutdown(self) -> None:
        self._generator.shutdown()

    async def __cleanup__(self, exc: Exception | None) -> None:
        self._generator.shutdown()
