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
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from actors.generator import GeneratorActor, GeneratorConfig
from actors.generators import Generators, Replica
from actors.model import load_hf, pick_dtype
from apps.bench.harness import processes, rates
from apps.bench.harness.anchor import Anchor, anchor_table
from apps.bench.harness.engines import GROUP_SIZE, GROUPS_PER_LOOP, ActorProgram, BareProgram, make_turn
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from apps.bench.peers.vllm_bare import BareEngine
from apps.grpo.config import AppConfig
from apps.grpo.models import resolve_model
from apps.grpo.spawn import QUIET
from forge import config, launch
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster, MeshConfig, place
from weightsync.publisher import Publisher

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "apps" / "grpo" / "tiny.yaml"
BARE, ACTOR = "bare vLLM", "generator actor"
UPDATES = "generator actor, weights in flight"
GOAL = 0.95
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
        hf = load_hf(model, torch.float32)
        publisher = Publisher(hf.named_parameters(), getattr(torch, dtype), model_type=hf.config.model_type)
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
    replica = Replica(mesh, "generator_0", generator)
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
