"""Bare vLLM against the same requests through the generator actor.

    python -m apps.bench.generator [--rounds 5] [--sequences 64]

The model and sampler of apps/grpo/tiny.yaml. Groups of 8 completions are asked for by as many loops as keep
`--sequences` sequences running; a loop asks for its next group when it has the last. Completions have exactly 8
or 64 tokens: nothing stops them earlier. Bare vLLM is an `AsyncLLM` in a program of its own, timed inside it; the
actor is timed where the app sits, in the controller, with its weight receiver in place. Both stay up, one works
at a time. At the end the actor gets new weights while it generates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from actors.generator import GeneratorActor, GeneratorConfig, Generators, Replica
from actors.model import load_hf, pick_dtype
from apps.bench.harness import processes, rates
from apps.bench.harness.anchor import Anchor, anchor_table
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.peers import vllm_bare
from apps.bench.peers.vllm_bare import BareEngine, Turn
from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from apps.grpo.spawn import QUIET
from forge import config, launch
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster, MeshConfig, place
from weightsync.publisher import NUM_BUFFERS, Publisher

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "apps" / "grpo" / "tiny.yaml"
BARE, ACTOR = "bare vLLM", "generator actor"
UPDATES = "generator actor, weights in flight"
GOAL = 0.95
GROUP_SIZE = 8
GROUPS_PER_LOOP = {8: 8, 64: 2}
"""Completion length in tokens to the groups that one loop asks for in a turn: seconds of work either way."""
NUM_UPDATES = 10
COLUMNS = (
    Column("", "name"),
    Column("tokens", "max_tokens"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("x bare", "over_bare", ".3f"),
    Column("turns", "turns"),
    Column("staging ms", "stage_ms", ".1f"),
    Column("flip pause ms", "pause_ms", ".2f"),
    Column("longest", "pause_max_ms", ".2f"),
)


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
        await self._replica.connect(publisher.endpoint)
        found, rate = [], []
        load: asyncio.Task[float] | None = None
        for version in range(1, NUM_UPDATES + 1):
            if load is None or load.done():
                rate += [load.result()] if load else []
                load = asyncio.create_task(self.turn(turn))
                await asyncio.sleep(0.2)
            publisher.snapshot(version % NUM_BUFFERS)
            found.append(await self._replica.apply(version, version % NUM_BUFFERS))
        assert load is not None
        rate.append(await load)
        return {
            "tokens_per_s": round(statistics.median(rate), 1),
            "turns": len(rate),
            "stage_ms": round(statistics.median(f.stage_s for f in found) * 1e3, 2),
            "pause_ms": round(statistics.median(f.pause_s for f in found) * 1e3, 3),
            "pause_max_ms": round(max(f.pause_s for f in found) * 1e3, 3),
        }


@dataclass
class Measured:
    """Tokens/s by (name, completion length), one a round."""

    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, name: str, max_tokens: int, rate: float) -> None:
        """One turn."""
        self.rates.setdefault((name, max_tokens), []).append(rate)

    def over_bare(self, name: str, max_tokens: int) -> float:
        """Median over the rounds of the ratio to bare vLLM inside the round."""
        return round(rates.ratio(self.rates[name, max_tokens], self.rates[BARE, max_tokens]), 4)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each name and length."""
        return [
            {
                "name": name,
                "max_tokens": max_tokens,
                "tokens_per_s": round(statistics.median(values), 1),
                "over_bare": self.over_bare(name, max_tokens),
                "turns": len(values),
            }
            for (name, max_tokens), values in self.rates.items()
        ]

    def goals(self) -> list[Goal]:
        """The actor costs at most a twentieth of the tokens per second."""
        return [
            Goal(f"actor over bare vLLM, {n} tokens", self.over_bare(ACTOR, n), GOAL, "least")
            for n in sorted({n for _, n in self.rates})
        ]


@dataclass(frozen=True)
class Bench:
    """What the command line asks for."""

    rounds: int
    sequences: int

    async def __call__(self, hosts: Hosts, stopping: Stopping) -> None:
        """Starts both engines, measures in turns, prints."""
        cfg = config.parse(AppConfig, [], default_config=PRESET, prog="apps.bench.generator", description="")
        model = await asyncio.to_thread(resolve_model, cfg.model)
        placement = place(MeshConfig(), torchrun_slots=hosts.slots_per_host, roles=["generator"])
        generator = replace(cfg.generator, max_model_len=128, max_num_seqs=self.sequences)
        dtype = str(pick_dtype(cfg.dtype, placement.device)).removeprefix("torch.")
        prompts = _prompts(cfg, model)
        with stopping.at_once(), tempfile.TemporaryDirectory(prefix="meshforge-bench-") as folder:
            async with Cluster(hosts, placement) as cluster:
                replica = await _start_actor(cluster, generator, model, dtype, prompts[0])
                with contextlib.closing(BareProgram(_bare_engine(generator, model, dtype), Path(folder))) as bare:
                    result, tables = await self._measure(bare, ActorProgram(replica), model, dtype, prompts)
                await Generators([replica]).shutdown()
        # After the cluster: nothing may be printed behind the last line.
        show(result, *tables)

    async def _measure(
        self, bare: BareProgram, actor: ActorProgram, model: str, dtype: str, prompts: Sequence[list[int]]
    ) -> tuple[Result, list[Any]]:
        programs: dict[str, BareProgram | ActorProgram] = {BARE: bare, ACTOR: actor}
        lengths = sorted(GROUPS_PER_LOOP)
        for max_tokens in lengths:
            for name, program in programs.items():
                print(f"warm-up: {name}, {max_tokens} tokens", file=sys.stderr, flush=True)
                await program.turn(make_turn(prompts, self.sequences, max_tokens, 0))
        measured, anchor, anchors = Measured(), Anchor(model), []
        for number in range(self.rounds):
            print(f"round {number + 1} of {self.rounds}", file=sys.stderr, flush=True)
            anchors.append(anchor.measure())
            for max_tokens in lengths:
                turn = make_turn(prompts, self.sequences, max_tokens, number + 1)
                for name in rates.turns(list(programs), number):
                    measured.add(name, max_tokens, await programs[name].turn(turn))
        publisher = Publisher(load_hf(model, torch.float32).named_parameters(), getattr(torch, dtype))
        with contextlib.closing(publisher):
            turn = make_turn(prompts, self.sequences, max(lengths), 0)
            updates = await actor.updates(publisher, turn)
        rows = [*measured.rows(), {"name": UPDATES, "max_tokens": max(lengths), **updates}]
        peaks = processes.peaks_by_role(os.getpid(), "controller", {bare.pid: BARE})
        settings = {"sequences": self.sequences, "group_size": GROUP_SIZE, "dtype": dtype}
        extra = {"settings": settings, "anchors": anchors}
        result = Result("generator", rows, measured.goals(), peaks, machine(), extra)
        title = f"{self.sequences} sequences in groups of {GROUP_SIZE}, {self.rounds} rounds"
        return result, [rows_table(title, rows, COLUMNS), anchor_table(anchors)]


def _prompts(cfg: AppConfig, model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    from forge.data import load_task, make_encoder

    encode, rows = make_encoder(AutoTokenizer.from_pretrained(model)), load_task(cfg.data)
    return [encode(rows[i])[1] for i in range(min(256, len(rows)))]


async def _start_actor(
    cluster: Cluster, generator: GeneratorConfig, model: str, dtype: str, warm_up: list[int]
) -> Replica:
    print("starting the generator actor and bare vLLM", file=sys.stderr, flush=True)
    mesh = await cluster.spawn("generator", GeneratorActor, generator, model, dtype, seed=0, stop_ids=[], env=QUIET)
    replica = Replica(mesh, "generator_0")
    await replica.setup(warm_up)
    return replica


def _bare_engine(generator: GeneratorConfig, model: str, dtype: str) -> BareEngine:
    return BareEngine(
        model=model,
        dtype=dtype,
        max_model_len=generator.max_model_len,
        max_num_seqs=generator.max_num_seqs,
        kv_cache_bytes=generator.kv_cache_bytes,
        enforce_eager=generator.enforce_eager,
        seed=0,
        temperature=generator.temperature,
        top_p=generator.top_p,
        top_k=generator.top_k,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.bench.generator", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each runs both engines once per length")
    parser.add_argument("--sequences", type=int, default=64, help=f"sequences at once, a multiple of {GROUP_SIZE}")
    args = parser.parse_args()
    if args.rounds < 1 or args.sequences < 1 or args.sequences % GROUP_SIZE:
        parser.error(f"--rounds must be >= 1 and --sequences a multiple of {GROUP_SIZE}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch.run(Bench(args.rounds, args.sequences), launch.bring_up())


if __name__ == "__main__":
    main()
