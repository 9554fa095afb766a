"""Bare vLLM: an `AsyncLLM` that answers requests as our generator makes them, without actor and weight receiver.

    python apps/bench/peers/vllm_bare.py ENGINE.json

ENGINE.json is what `BareEngine` holds. Each line on stdin is a `Turn` in JSON; the answer is one line on stdout:
the seconds from the first request to the last completion, and the number of tokens. The end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BareEngine:
    """The engine and the sampler; fields as in `actors.vllm_engine`."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    enforce_eager: bool
    seed: int
    temperature: float
    top_p: float
    top_k: int

    def write(self, path: Path) -> None:
        """As the program reads it."""
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Turn:
    """Work for one measurement. `loops[i]` are the groups that loop i asks for, one after the other; a group is
    (prompt token ids, a seed for each completion). Every completion has exactly `max_tokens` tokens."""

    max_tokens: int
    loops: list[list[tuple[list[int], list[int]]]]

    def line(self) -> str:
        """As the program reads it."""
        return json.dumps(asdict(self))


def start(engine: BareEngine) -> Any:
    """The engine's process, with our generator's arguments less the weight receiver."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=engine.model,
        dtype=engine.dtype,  # type: ignore[arg-type, unused-ignore]
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_memory_bytes=engine.kv_cache_bytes or None,
        enforce_eager=engine.enforce_eager,
        tensor_parallel_size=1,
        seed=engine.seed,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        async_scheduling=False,
        enable_chunked_prefill=torch.cuda.is_available(),
        max_num_batched_tokens=max(engine.max_model_len, 8192),
    )
    return AsyncLLM.from_engine_args(arguments)


class Bare:
    """One engine under turns of work."""

    def __init__(self, settings: BareEngine) -> None:
        self._settings = settings
        self._llm: Any = start(settings)
        self._count = 0

    async def turn(self, turn: Turn) -> dict[str, float]:
        """All loops side by side."""
        begin = time.perf_counter()
        tokens = await asyncio.gather(*(self._loop(groups, turn.max_tokens) for groups in turn.loops))
        return {"seconds": time.perf_counter() - begin, "tokens": sum(tokens)}

    async def _loop(self, groups: list[tuple[list[int], list[int]]], max_tokens: int) -> int:
        tokens = 0
        for prompt, seeds in groups:
            requests = (self._request(prompt, seed, max_tokens) for seed in seeds)
            tokens += sum(await asyncio.gather(*requests))
        return tokens

    async def _request(self, prompt: list[int], seed: int, max_tokens: int) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=[],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._count += 1
        request = {"prompt_token_ids": prompt, "cache_salt": "v0"}
        final = None
        async for output in self._llm.generate(request, parameters, f"r{self._count}"):
            final = output
        assert final is not None, "the engine ended a request without an output"
        return len(final.outputs[0].token_ids)

    def shutdown(self) -> None:
        """Ends the engine's process. The engine is let go too: its finaliser fails at the interpreter's end."""
        self._llm.shutdown()
        self._llm = None


async def serve(settings: BareEngine) -> None:
    """Answers one line after the other."""
    # What vLLM prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bare = Bare(settings)
    try:
        # The engine's outputs arrive on this loop, so that reading must not hold it up.
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await bare.turn(Turn(**json.loads(line)))), file=answers, flush=True)
    finally:
        bare.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(BareEngine(**json.loads(Path(sys.argv[1]).read_text()))))
