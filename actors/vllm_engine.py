"""vLLM behind five verbs: start, generate, abort, stage, flip. The only importer of vllm besides the receiver.

Token ids in and out, no detokenisation: what was sampled is what is trained. Log-probs are those of the
distribution that was sampled from (after temperature, top-k, top-p).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forge.child import scratch_folder
from forge.errors import ConfigError, WeightSyncError
from weightsync.publisher import Endpoint

_POLL_S = 0.005
_BATCHED_TOKENS = 8192
"""Tokens of one forward pass at most: prompts that enter, and one token of each running request."""


@dataclass(frozen=True)
class Completion:
    """What one request produced: `token_ids`, and along them the sampled `logprobs` and policy `versions`.

    `finish_reason` is "stop" (end of text), "length" (token budget) or "abort" (partial).
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


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


@dataclass(frozen=True)
class Sampling:
    """The distribution that is sampled from. `top_k` 0 and `top_p` 1 mean the whole vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class VllmEngine:
    """One AsyncLLM. All methods belong to one event loop."""

    def __init__(self, config: EngineOptions) -> None:
        self._config = config
        self._ids = itertools.count()
        self._engine: Any = None
        self._version = 0
        # Who has no place in the engine waits here: a request takes the version that serves when it enters.
        self._places = asyncio.Semaphore(config.max_num_seqs)

    async def start(self) -> None:
        """Starts the engine's process, builds the shadow model and labels the loaded weights version 0."""
        c = self._config
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(scratch_folder()))  # its sockets go with this process
        if c.tensor_parallel == 1:
            # Without it vLLM forks the worker off the engine process on CPUs: one hop more for every step.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

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
            skip_tokenizer_init=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            async_scheduling=False,  # a step in flight during a flip would carry the wrong version
            worker_extension_cls="weightsync.receiver.WeightReceiver",
            # On CPUs vLLM dies of a seeded request whose prompt is cut in two: it cannot rewind the generator.
            enable_chunked_prefill=torch.cuda.is_available(),
            max_num_batched_tokens=max(c.max_model_len, _BATCHED_TOKENS),
        )
        self._engine = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        await self._engine.collective_rpc("forge_start")
        await self._engine.update_weight_version("0")

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        seed: int,
        stop_ids: Sequence[int],
        request_id: str = "",
    ) -> Completion:
        """Continues one prompt `[tokens]` by at most `max_tokens`; cancelling the call aborts the request.

        `abort(request_id)` ends it early with what it has, `finish_reason` "abort".

        Raises ConfigError when the prompt leaves no room for a token.
        """
        room = self._config.max_model_len - len(prompt)
        if room < 1:
            raise ConfigError(
                f"a prompt has {len(prompt)} tokens, generator.max_model_len is {self._config.max_model_len}; "
                "raise it or shorten the prompt"
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(max_tokens, room),
            seed=seed,
            logprobs=0,
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # what ends a completion is said by stop_ids alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        async with self._places:
            # Salted by version: no block of an older version's prefix cache serves a newer one.
            request = {"prompt_token_ids": list(prompt), "cache_salt": f"v{self._version}"}
            async for output in self._engine.generate(request, parameters, request_id or f"r{next(self._ids)}"):
                final = output
        assert final is not None, "the engine ended a request without an output"
        return _completion(final.outputs[0])

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends running requests early; unknown and finished ones are ignored."""
        await self._engine.abort(list(request_ids))

    async def connect(self, endpoint: Endpoint) -> None:
        """Tells the worker where versions come from. Raises WeightSyncError listing names that do not pair up."""
        segments = [asdict(ref) for ref in endpoint.segments]
        for problem in await self._engine.collective_rpc("forge_connect", args=(endpoint.layout.plain(), segments)):
            if problem:
                raise WeightSyncError(problem)

    async def stage(self, version: int, buffer: int) -> float:
        """Loads `version` beside the live weights while decoding goes on; returns its seconds.

        Raises WeightSyncError with the worker's traceback; the live weights are untouched then.
        """
        await self._engine.collective_rpc("forge_stage", args=(version, buffer))
        while True:
            await asyncio.sleep(_POLL_S)
            states = await self._engine.collective_rpc("forge_staged")
            failed = next((s for s in states if s["state"] == "failed"), None)
            if failed is not None:
                raise WeightSyncError(
                    f"version {version} could not be staged, version {self._version} goes on serving:\n"
                    f"{failed['error']}"
                )
            if all(s["state"] == "ready" for s in states):
                return max(s["stage_s"] for s in states)

    async def flip(self, version: int) -> float:
        """Makes the staged `version` live between two decode steps; returns the seconds nothing decoded."""
        old, begin = self._version, time.perf_counter()
        pauses = self._config.tensor_parallel > 1
        try:
            # Requests built from here on reach the engine after the flip: they may share the new prefix cache.
            self._version = version
            if pauses:
                await self._engine.pause_generation(mode="keep", clear_cache=False)
            results = await self._engine.collective_rpc("forge_flip", args=(version,))
            if not all(result["labelled"] for result in results):
                assert pauses, "the engine was not among the flip's callers; tokens would carry the old version"
                await self._engine.update_weight_version(str(version))
        except BaseException:
            self._version = old
            raise
        finally:
            if pauses:
                await self._engine.resume_generation()
        return time.perf_counter() - begin if pauses else max(result["pause_s"] for result in results)

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def _completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(output.logprobs or [], tokens, strict=True)]
    versions = [-1] * len(tokens)
    for span in output.weight_versions or []:
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    assert -1 not in versions, f"tokens without a version: {output.weight_versions} over {len(tokens)}"
    return Completion(tokens, logprobs, versions, output.finish_reason or "abort")
