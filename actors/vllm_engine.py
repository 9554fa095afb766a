"""vLLM behind five verbs: start, generate, abort, stage, flip.

Token ids in and out, no detokenisation: what was sampled is what is trained. Log-probs are those of the
distribution that was sampled from (after temperature, top-k, top-p).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from actors.vllm_adapters import EngineAdapters, LoraOptions
from actors.vllm_progress import read_logprobs, running_tokens
from forge.child import LOG_ENV, scratch_folder
from forge.errors import ActorFailed, ConfigError, LaunchError, WeightSyncError
from forge.failure import logged_error
from forge.routes import continued
from forge.supports import fitted, joined
from weightsync.config import KvMode
from weightsync.layout import Box
from weightsync.offer import Endpoint, Offer
from weightsync.worker.door import Doors

_POLL_S = 0.005
_HEALTH_S = 1.0
"""How often a wait for the engine looks whether it lives, seconds."""
_SHUTDOWN_S = 20.0
"""How long the engine's processes may take to end by themselves, seconds; killed ones leave semaphores behind."""
_GOLDEN = 0x9E3779B1
_LOGPROBS = 20
"""Log-probs that a request may ask for at least."""
_BATCHED_TOKENS = 8192
"""Tokens of one forward pass at most: prompts that enter, and one token of each running request."""


T = TypeVar("T")


@dataclass
class Completion:
    """What one request produced: `token_ids`, and along them the sampled `logprobs` and policy `versions`.

    `finish_reason` is "stop" (end of text), "length" (token budget) or "abort" (partial). `kept` are the recorded
    supports `[n, K]` (`forge/supports.py`), `routes` the routed experts `[m, layers, k]` from the prompt's first token
    on (`forge/routes.py`); None where none are recorded.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    kept: torch.Tensor | None = field(default=None, compare=False)
    routes: torch.Tensor | None = field(default=None, compare=False)

    def extend(self, part: Completion) -> None:
        """Goes on with what another request has continued this one by."""
        self.kept = joined([(self.kept, len(self.token_ids)), (part.kept, len(part.token_ids))])
        self.routes = continued(self.routes, part.routes)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.finish_reason = part.finish_reason

    def after(self, count: int) -> Completion:
        """Without the first `count` tokens, and without routes."""
        columns = (self.token_ids[count:], self.logprobs[count:], self.versions[count:])
        return Completion(*columns, self.finish_reason, None if self.kept is None else self.kept[count:])


@dataclass(frozen=True)
class EngineOptions:
    """What starts an engine; sizes in tokens, sequences or bytes."""

    model: str
    dtype: Any
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    enforce_eager: bool
    tensor_parallel: int
    seed: int
    shadow: bool = True
    kv_mode: KvMode = "keep"
    lora: LoraOptions | None = None
    keep_support: int = 0
    keep_routes: bool = False
    sleep_mode: bool = False
    """Give the device's memory back while the engine sleeps; vLLM can do that on GPUs only."""


@dataclass(frozen=True)
class Sampling:
    """The distribution that is sampled from. `top_k` 0 and `top_p` 1 mean the whole vocabulary.

    Supports of up to `keep` tokens are recorded; 0 records none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    keep: int = 0


@dataclass
class _Running:
    """A request that the engine has: its id there, what the completion had before it, the adapter's version."""

    id: str
    before: Completion
    adapter: int | None = None


class VllmEngine:
    """One AsyncLLM. All methods belong to one event loop."""

    def __init__(self, config: EngineOptions) -> None:
        self._config = config
        self._ids = itertools.count()
        self._engine: Any = None
        self._doors: Doors | None = None
        self._version = 0
        self._running: dict[str, _Running] = {}
        self._interrupted: set[str] = set()
        self._left = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._doors_shut = 0
        self._asleep = False
        self._turning = asyncio.Lock()
        # Why the weights are a mix of two versions, until a whole one comes; and how often that has happened.
        self._broken, self._breaks = "", 0
        # A flip that nobody waits for any more may still land: which version serves is not known until another has.
        self._unsure = False
        self.kv_mode = config.kv_mode
        self.adapters: EngineAdapters | None = None
        """With LoRA: the adapters, which are all that travels then."""
        self.why_no_shadow = ""
        """Why updates load into the live model while decoding is paused; "" where they flip."""
        # Who has no place in the engine waits here: a request takes the version that serves when it enters.
        self._places = asyncio.Semaphore(config.max_num_seqs)

    async def start(self) -> None:
        """Starts the engine's process, builds the shadow model and labels the loaded weights version 0."""
        c = self._config
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if LOG_ENV in os.environ else "ERROR")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # On CPUs each number of tokens in a step has kernels of its own, 1,024 of which would be kept: 350 MiB.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(scratch_folder()))  # its sockets go with this process
        if c.tensor_parallel == 1:
            # Without it vLLM forks the worker off the engine process on CPUs: one hop more for every step.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        else:
            # On CPUs "auto" binds each worker to a NUMA node of its own, and does not start where there are fewer.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        arguments = AsyncEngineArgs(
            model=c.model,
            dtype=c.dtype,
            max_model_len=c.max_model_len,
            max_num_seqs=c.max_num_seqs,
            kv_cache_memory_bytes=c.kv_cache_bytes or None,
            enforce_eager=c.enforce_eager,
            tensor_parallel_size=c.tensor_parallel,
            seed=c.seed,
            logprobs_mode="processed_logprobs",
            max_logprobs=max(_LOGPROBS, c.keep_support + 1),
            skip_tokenizer_init=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            async_scheduling=False,  # a step in flight during a flip would carry the wrong version
            worker_extension_cls="actors.vllm_extension.WorkerExtension",
            weight_transfer_config=WeightTransferConfig(backend="forge"),
            # On CPUs vLLM dies of a seeded request whose prompt is cut in two: it cannot rewind the generator.
            enable_chunked_prefill=torch.cuda.is_available(),
            max_num_batched_tokens=max(c.max_model_len, _BATCHED_TOKENS),
            enable_sleep_mode=c.sleep_mode,
            **(c.lora.engine_arguments() if c.lora else {}),
            **(_routing_arguments() if c.keep_routes else {}),
        )
        self._engine = await asyncio.to_thread(_make_engine, arguments)
        if c.keep_support >= (vocabulary := self._engine.model_config.get_vocab_size()):
            raise ConfigError(
                f"generator.keep_support is {c.keep_support}, the model has {vocabulary} tokens; lower it, or set it "
                "to 0: the trainer computes large supports itself"
            )
        self.why_no_shadow = (await self._call("forge_start", c.shadow and c.lora is None))[0]
        if c.keep_routes:
            await self._call("forge_record_routes")
        self._doors = await Doors.open(await self._call("forge_door"))
        if c.lora:
            self.adapters = EngineAdapters(self._stage, c.lora.adapters)
        await self._engine.update_weight_version("0")

    async def beat(self) -> None:
        """Every worker answers, between two steps."""
        await self._call("check_health")

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls `method` of the receiver in every worker. Raises WeightSyncError when one of them raises."""
        return await self._answer(self._engine.collective_rpc(method, args=arguments), method)

    async def _answer(self, call: Awaitable[T], what: str) -> T:
        """The engine's answer, or WeightSyncError saying that `what` failed."""
        try:
            return await self._unless_dead(call)
        except Exception as error:
            if self._engine.errored:
                raise self._dead from error
            raise WeightSyncError(f"{what} failed in the engine: {error}") from error

    @property
    def _dead(self) -> ActorFailed:
        """There is no engine any more, only the process that started it."""
        return ActorFailed("engine", f"its process has ended: {self._engine.dead_error}".splitlines()[0])

    async def _unless_dead(self, call: Awaitable[T]) -> T:
        """An answer that never comes from an engine that has died, which its own calls do not notice."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([answer], timeout=_HEALTH_S))[0]:
                if self._engine.errored:
                    raise self._dead
            return answer.result()
        finally:
            answer.cancel()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        seed: int,
        stop_ids: Sequence[int],
        request_id: str = "",
        begun: Completion | None = None,
    ) -> Completion:
        """Continues one prompt `[tokens]` by at most `max_tokens`; cancelling the call aborts the request.

        `begun` is what an earlier engine had of the completion: it counts as the first of the `max_tokens`.

        `abort(request_id)` ends it early with what it has, `finish_reason` "abort". An update that aborts running
        requests (`kv_mode` "abort") does not end it: it goes on from its tokens, under the new weights.

        Raises ConfigError when the prompt leaves no room for a token, WeightSyncError when an update has broken the
        engine.
        """
        room = self._config.max_model_len - len(prompt)
        if room < 1:
            raise ConfigError(
                f"a prompt has {len(prompt)} tokens, generator.max_model_len is {self._config.max_model_len}; "
                "raise it or shorten the prompt"
            )
        name, limit = request_id or f"r{next(self._ids)}", min(max_tokens, room)
        whole = Completion([], [], [], "abort")
        if begun is not None:
            whole.extend(begun)
            # An engine before this one may have recorded none, or others.
            whole.kept = fitted(whole.kept, len(whole.token_ids), sampling.keep) if sampling.keep else None
            limit -= len(begun.token_ids)
            seed = _later_seed(seed, whole)
            if limit < 1 or begun.finish_reason in ("stop", "length"):
                return whole
        async with self._places:
            while True:
                while not self._open.is_set():
                    await self._open.wait()  # it may have been shut again by the time that this goes on
                part = await self._run(name, prompt, whole, sampling, limit, seed, stop_ids)
                whole.extend(part)
                limit -= len(part.token_ids)
                interrupted = name in self._interrupted and part.finish_reason == "abort"
                self._interrupted.discard(name)
                if not interrupted or limit < 1:
                    return whole
                seed = _later_seed(seed, whole)

    def sampled(self, told: Mapping[str, int] | None = None) -> dict[str, Completion]:
        """What the running requests have, by `request_id`; `finish_reason` "abort", as if they ended here.

        Without the first `told` tokens: reading those costs nothing.
        """
        told, so_far = told or {}, {}
        skips = {r.id: max(0, told.get(name, 0) - len(r.before.token_ids)) for name, r in self._running.items()}
        tokens = running_tokens(self._engine, skips)
        for name, running in self._running.items():
            if running.id in tokens:
                ids, logprobs, labels, kept = tokens[running.id]
                adapter = running.adapter
                versions = [int(label) for label in labels] if adapter is None else [adapter] * len(ids)
                rest = running.before.after(told.get(name, 0))
                rest.extend(Completion(ids, logprobs, versions, "abort", kept))
                so_far[name] = rest
        return so_far

    async def _run(
        self,
        name: str,
        prompt: Sequence[int],
        before: Completion,
        sampling: Sampling,
        limit: int,
        seed: int,
        stop_ids: Sequence[int],
    ) -> Completion:
        """What follows `before`: one request to the engine, from now on under the version that serves now."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._broken:
            raise self._dead if self._engine.errored else WeightSyncError(self._broken)
        breaks = self._breaks
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=limit,
            seed=seed,
            logprobs=sampling.keep + 1 if sampling.keep else 0,  # one more shows that a support is whole
            flat_logprobs=True,
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # what ends a completion is said by stop_ids alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        running = self._running[name] = _Running(f"{name}.{next(self._ids)}", before)
        request = {
            "prompt_token_ids": [*prompt, *before.token_ids],
            # Salted by version: no block of an older version's prefix cache serves a newer one.
            "cache_salt": running.id if self._unsure else f"v{self._version}",
        }
        final = None
        try:
            with self.adapters.use() if self.adapters else contextlib.nullcontext() as adapter:
                lora = self.adapters.request(adapter) if self.adapters else None
                running.adapter = adapter
                async for output in self._engine.generate(request, parameters, running.id, lora_request=lora):
                    final = output
        except Exception as error:
            if self._engine.errored:
                raise self._dead from error
            raise
        finally:
            del self._running[name]
            self._left.set()
        if self._breaks != breaks:
            raise WeightSyncError(self._broken or "while this request ran the weights were a mix of two versions")
        assert final is not None, "the engine ended a request without an output"
        return _completion(final.outputs[0], adapter)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends running requests early; unknown and finished ones are ignored."""
        self._interrupted.difference_update(request_ids)
        await self._engine.abort([self._running[name].id for name in request_ids if name in self._running])

    async def connect(self, endpoint: Endpoint, peer: str) -> list[dict[str, Box]]:
        """Tells the workers where versions come from; returns what each of them reads of every parameter.

        Raises WeightSyncError listing names that do not pair up.
        """
        if (endpoint.adapter is not None) != (self.adapters is not None):
            raise WeightSyncError(
                f"the trainer publishes {'an adapter' if endpoint.adapter else 'all weights'}, the engine was started "
                f"{'with' if self.adapters else 'without'} LoRA; set both sides alike"
            )
        answers = await self._call("forge_connect", endpoint.plain(), peer)
        if problem := next((answer["problem"] for answer in answers if answer["problem"]), ""):
            raise WeightSyncError(problem)
        needed = answers[0]["needed"]
        return [{name: tuple((a, b) for a, b in box) for name, box in worker.items()} for worker in needed]

    async def stage(self, offer: Offer) -> float:
        """Brings the offered version to the workers while decoding goes on, into their shadow models where they have
        them; returns its seconds.

        Raises WeightSyncError with the worker's traceback; the live weights are untouched then.
        """
        if self.adapters:
            return await self.adapters.stage(offer)
        return await self._stage(offer, None, f"version {self._version}")

    async def _stage(self, offer: Offer, slot: int | None, serving: str) -> float:
        """Has every worker bring the offered version in, by its side door; returns the seconds of the slowest.

        `slot` is where an adapter goes. Decode steps neither wait for this nor are waited for.
        """
        assert self._doors is not None, "start comes first"
        try:
            return float(max(await self._unless_dead(self._doors.ask({"offer": offer.plain(), "slot": slot}))))
        except ConnectionError as error:  # the first to notice
            raise ActorFailed("engine", str(error)) from error
        except WeightSyncError as error:
            raise WeightSyncError(
                f"version {offer.version} could not be staged, {serving} goes on serving:\n{error}"
            ) from error

    async def flip(self, version: int) -> float:
        """Makes the staged `version` live between two decode steps; returns the seconds nothing decoded.

        Whatever happens, nothing is left paused. Raises WeightSyncError; where that may have left a mix of two versions
        the engine answers every request with it until a whole version comes.
        """
        if self.adapters:
            self.adapters.check_serving(version)
            return 0.0
        assert not self._asleep, f"{version} is to be made live while the engine sleeps"
        old = self._version
        async with self._quiet() as begin:
            try:
                # Requests built from here on reach the engine after the flip: they may share the new prefix cache.
                self._version = version
                pause_s = await self._make_live(version)
            except asyncio.CancelledError:
                self._version, self._unsure = old, True
                raise
            except ActorFailed:
                self._version = old
                raise
            except Exception as error:
                self._version = old
                why = self._broken or f"version {version} could not be made live, {old} goes on:\n{error}"
                raise WeightSyncError(why) from error
        self._unsure = False
        return time.perf_counter() - begin if begin else pause_s

    async def _make_live(self, version: int) -> float:
        """The flip itself, or the load where there is no shadow; returns its seconds."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        begin, alone = time.perf_counter(), self._config.tensor_parallel == 1
        try:
            if self.why_no_shadow:
                load = WeightTransferUpdateRequest({"version": version})
                await self._answer(self._engine.start_weight_update(), "start_weight_update")
                await self._answer(self._engine.update_weights(load), "update_weights")
                await self._answer(self._engine.finish_weight_update(str(version)), "finish_weight_update")
                pause_s = time.perf_counter() - begin
            else:
                results = await self._call("forge_flip", version)
                if not all(result["labelled"] for result in results):
                    assert not alone, "the engine was not among the flip's callers; tokens would carry the old version"
                    await self._answer(self._engine.update_weight_version(str(version)), "update_weight_version")
                pause_s = float(max(result["pause_s"] for result in results))
            self._broken = ""
            return pause_s
        except BaseException as error:
            # A single worker exchanges all or nothing; several, or a load into the live model, may stop half-way.
            if self.why_no_shadow or not alone:
                self._breaks += 1
                self._broken = (
                    f"an update to version {version} stopped half-way, the weights are of two versions: {error}"
                )
            raise

    @contextlib.asynccontextmanager
    async def _quiet(self) -> AsyncIterator[float]:
        """Inside, the weights may be exchanged: what runs is treated as `kv_mode` says. Yields since when nothing
        decodes, 0.0 when it goes on up to the exchange. Everything goes on afterwards.
        """
        mode = self.kv_mode
        if mode in ("drain", "abort"):
            self._shut()
            try:
                begin = time.perf_counter()
                if mode == "abort":
                    await self._interrupt()
                while self._running:
                    await self._someone_left(None)
                yield begin if mode == "abort" else time.perf_counter()
            finally:
                self._unshut()
        elif mode == "recompute" or self.why_no_shadow or self._config.tensor_parallel > 1:
            begin = time.perf_counter()
            try:
                pause = self._engine.pause_generation(mode="keep", clear_cache=mode == "recompute")
                await self._answer(pause, "pause_generation")
                yield begin
            finally:
                await self._answer(self._engine.resume_generation(), "resume_generation")
        else:
            yield 0.0

    def _shut(self) -> None:
        """No request enters until as many `_unshut`."""
        self._doors_shut += 1
        self._open.clear()

    def _unshut(self) -> None:
        self._doors_shut -= 1
        if not self._doors_shut:
            self._open.set()

    async def _interrupt(self) -> None:
        """Takes what runs out of the engine; it goes on from its tokens once requests may enter again."""
        while self._running:
            # Again until they are gone: the engine ignores requests that are still on their way to it.
            self._interrupted.update(self._running)
            await self._engine.abort([running.id for running in self._running.values()])
            await self._someone_left(_POLL_S)

    async def sleep(self) -> None:
        """Nothing is decoded when this returns, until `wake`: requests that run are interrupted, new ones wait. With
        `sleep_mode` the device's memory is free then, the weights lie in host memory.

        When it fails the engine is awake. Weights must not be exchanged meanwhile, adapters not be staged.
        """
        async with self._turning:
            if self._asleep:
                return
            self._shut()
            try:
                await self._interrupt()
                if self._config.sleep_mode:
                    # Level 2 would drop the weights too: nothing could serve if the next version did not arrive.
                    await self._answer(self._engine.sleep(level=1), "sleep")
                else:
                    await self.beat()  # answered between two steps: the last one is over
                self._asleep = True
            except BaseException:
                await self._get_up()
                raise

    async def wake(self) -> None:
        """Interrupted requests go on from their tokens, waiting ones enter. What does not sleep is awake already.

        Raises WeightSyncError when the engine does not wake; so does every request then.
        """
        async with self._turning:
            if self._asleep:
                await self._get_up()

    async def _get_up(self) -> None:
        try:
            if self._config.sleep_mode:
                await self._answer(self._engine.wake_up(), "wake_up")
        except BaseException as error:
            self._broken = f"the engine did not wake from its sleep: {error}"
            raise
        finally:
            self._asleep = False
            self._unshut()

    async def _someone_left(self, timeout_s: float | None) -> None:
        self._left.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown(timeout=_SHUTDOWN_S)
            self._engine = None


def _make_engine(arguments: Any) -> Any:
    """The engine, started. What its own process ended with is a LaunchError, which vLLM tells its log only."""
    from vllm.v1.engine.async_llm import AsyncLLM

    log = os.environ.get(LOG_ENV)
    begin = os.path.getsize(log) if log else 0
    try:
        return AsyncLLM.from_engine_args(arguments)
    except RuntimeError as error:
        if log and (cause := logged_error(Path(log), begin)):
            raise LaunchError(f"vLLM's engine did not start: {cause}\nmore in {log}") from error
        raise


def _later_seed(seed: int, whole: Completion) -> int:
    """A stream of random numbers of its own for what follows `whole`: the old one would begin anew."""
    return (seed + _GOLDEN * len(whole.token_ids)) % (1 << 31)


def _routing_arguments() -> dict[str, Any]:
    """Has vLLM return the experts of every token; see `actors/vllm_extension.py`."""
    if torch.cuda.is_available():
        return {"enable_return_routed_experts": True}
    return {"scheduler_cls": "actors.vllm_extension.RoutingScheduler"}


def _completion(output: Any, adapter: int | None) -> Completion:
    tokens = list(output.token_ids)
    logprobs, kept = read_logprobs(output.logprobs, len(tokens))
    routes = output.routed_experts
    wide = (kept, None if routes is None else torch.from_numpy(routes.astype(np.int16)))
    if adapter is not None:
        return Completion(tokens, logprobs, [adapter] * len(tokens), output.finish_reason or "abort", *wide)
    versions = [-1] * len(tokens)
    for span in output.weight_versions or []:
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    assert -1 not in versions, f"tokens without a version: {output.weight_versions} over {len(tokens)}"
    return Completion(tokens, logprobs, versions, output.finish_reason or "abort", *wide)
