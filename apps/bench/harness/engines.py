"""The two engines of `apps.bench.generator` behind one verb, and the work that they are given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.generators import Generators, Replica
from apps.bench.harness import processes
from apps.bench.peers import vllm_bare
from apps.bench.peers.vllm_bare import BareEngine, Turn
from apps.grpo.spawn import QUIET
from weightsync.publisher import Publisher, combine
from weightsync.snapshot import NUM_BUFFERS

GROUP_SIZE = 8
GROUPS_PER_LOOP = {8: 8, 64: 2}
"""Completion length in tokens to the groups that one loop asks for in a turn: seconds of work either way."""
NUM_UPDATES = 10


def make_turn(prompts: Sequence[list[int]], sequences: int, max_tokens: int, seed: int) -> Turn:
    """The requests of one turn: equal for both engines, other ones in every round."""
    rng = random.Random(seed)
    loops = [
        [
            (rng.choice(prompts), [rng.getrandbits(31) for _ in range(GROUP_SIZE)])
            for _ in range(GROUPS_PER_LOOP[max_tokens])
        ]
        for _ in range(sequences // GROUP_SIZE)
    ]
    return Turn(max_tokens, loops)


class BareProgram:
    """apps/bench/peers/vllm_bare.py, driven over pipes so that it can take turns."""

    def __init__(self, engine: BareEngine, folder: Path) -> None:
        engine.write(folder / "engine.json")
        command = [sys.executable, vllm_bare.__file__, str(folder / "engine.json")]
        env = {**os.environ, **QUIET, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self.pid = self._process.pid

    async def turn(self, turn: Turn) -> float:
        """Tokens per second."""
        found = await asyncio.to_thread(self._ask, turn.line())
        return float(found["tokens"] / found["seconds"])

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"bare vLLM ended with code {self._process.wait()}; see its output above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it by the end of its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            processes.end(self._process)


class ActorProgram:
    """The generator actor as the app's controller uses it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._generators = Generators([replica])

    async def turn(self, turn: Turn) -> float:
        """Tokens per second."""
        begin = time.perf_counter()
        tokens = await asyncio.gather(*(self._loop(groups, turn.max_tokens) for groups in turn.loops))
        return sum(tokens) / (time.perf_counter() - begin)

    async def _loop(self, groups: Sequence[tuple[list[int], list[int]]], max_tokens: int) -> int:
        tokens = 0
        for prompt, seeds in groups:
            completions = await self._generators.generate([prompt] * len(seeds), seeds, max_tokens)
            tokens += sum(len(completion.token_ids) for completion in completions)
        return tokens

    async def updates(self, publisher: Publisher, turn: Turn) -> dict[str, Any]:
        """Applies versions one after the other while a turn runs, again and again until `NUM_UPDATES` are in."""
        publisher.add_peer(self._replica.name, await self._replica.connect(publisher.endpoint))
        staged, paused, rate = [], [], []
        load: asyncio.Task[float] | None = None
        for version in range(1, NUM_UPDATES + 1):
            if load is None or load.done():
                rate += [load.result()] if load else []
                load = asyncio.create_task(self.turn(turn))
                await asyncio.sleep(0.2)
            buffer = version % NUM_BUFFERS
            publisher.snapshot(version, buffer)
            share = publisher.offer(version, buffer, -1)
            staged.append(await self._replica.stage(combine([share], publisher.endpoint, version, buffer, -1)))
            paused.append(await self._replica.flip(version))
        assert load is not None
        rate.append(await load)
        return {
            "tokens_per_s": round(statistics.median(rate), 1),
            "turns": len(rate),
            "stage_ms": round(statistics.median(staged) * 1e3, 2),
            "pause_ms": round(statistics.median(paused) * 1e3, 3),
            "pause_max_ms": round(max(paused) * 1e3, 3),
        }
