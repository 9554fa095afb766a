"""Runs of the real app, one after the other on one engine and one trainer process, that tests can look into.

Importable in actor and engine processes as a user's module would be.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from app_run import NANO
from monarch.actor import concurrent_endpoint, endpoint

import apps.grpo.spawn
from actors.generator import GeneratorActor, GeneratorConfig
from actors.generators import Replica
from actors.reward import Sample, Scores
from actors.trainer import Trainer, TrainerConfig
from actors.trainer_mesh import TrainerActor, TrainerMesh
from actors.vllm_engine import Completion, Sampling
from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_run
from apps.grpo.main import Run, train
from apps.grpo.spawn import Actors, spawn_actors
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.run_log import RunLog

Interval = tuple[float, float]
"""From when to when something was computed, by the clock that all processes of a machine share."""
BUDGET = 24
"""Tokens of every completion: nothing stops one earlier."""
OPTIONS = [f"--generator.max_new_tokens={BUDGET}", "--generator.max_model_len=40", "--run.checkpoint=false"]


class TracedTrainer(TrainerActor):
    """A trainer that notes when it computes, and begins anew with each `setup`; `slow_s` makes its steps longer."""

    slow_s = 0.0

    def _build(self, address: str) -> Trainer:
        if self._trainer is not None:
            self._trainer.close()
        trainer = super()._build(address)
        self._steps: list[Interval] = []
        original = trainer.step

        def step(*args: Any) -> Any:
            begin = time.monotonic()
            try:
                time.sleep(self.slow_s)
                return original(*args)
            finally:
                self._steps.append((begin, time.monotonic()))

        trainer.step = step  # type: ignore[method-assign, assignment]
        return trainer

    @concurrent_endpoint
    async def be_slow(self, slow_s: float) -> None:
        self.slow_s = slow_s

    @concurrent_endpoint
    async def fail(self) -> None:
        """A step that takes a while and fails."""
        begin = time.monotonic()
        await self._run(lambda: time.sleep(self.slow_s))
        self._steps.append((begin, time.monotonic()))
        raise FloatingPointError("the loss is gone")

    @concurrent_endpoint
    async def steps(self) -> list[Interval]:
        return self._steps


class TracedGenerator(GeneratorActor):
    """A generator whose worker notes when it computes; its engine serves one run after the other."""

    started = False

    @endpoint
    async def setup(self, warm_up: Sequence[int] = ()) -> None:
        engine = self._generator._engine
        if not self.started:
            self.started, self._interrupted = True, 0
            await self._generator.setup(warm_up)
            original = engine._interrupt

            async def interrupt() -> None:
                self._interrupted += len(engine._running)
                await original()

            engine._interrupt = interrupt  # type: ignore[method-assign]
        await engine._engine.reset_prefix_cache()
        await engine._engine.collective_rpc(note_steps)

    @concurrent_endpoint
    async def steps(self) -> list[Interval]:
        (steps,) = await self._generator._engine._engine.collective_rpc(noted_steps)
        return [(begin, end) for begin, end in steps]

    @concurrent_endpoint
    async def greedy(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """The likeliest completions of `BUDGET` tokens."""
        requests = (
            self._generator._engine.generate(prompt, Sampling(0.0), max_tokens=BUDGET, seed=0, stop_ids=[])
            for prompt in prompts
        )
        return list(await asyncio.gather(*requests))

    @concurrent_endpoint
    async def interrupted(self) -> int:
        """How many requests were taken out of the engine for a training turn."""
        return self._interrupted

    @endpoint
    async def shutdown(self) -> None:
        """The next run needs it."""


def note_steps(worker: Any) -> None:
    """In vLLM's worker: begins a new list of when it computes."""
    worker = getattr(worker, "worker", worker)
    runner = worker.model_runner
    if not hasattr(runner, "noted_steps"):
        for name in ("execute_model", "sample_tokens"):
            setattr(runner, name, noting(runner, getattr(runner, name)))
    runner.noted_steps = []


def noting(runner: Any, original: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        output = original(*args, **kwargs)
        if getattr(args[0] if args else None, "total_num_scheduled_tokens", 1):
            runner.noted_steps.append([begin, time.monotonic()])
        return output

    return step


def noted_steps(worker: Any) -> list[list[float]]:
    noted: list[list[float]] = getattr(worker, "worker", worker).model_runner.noted_steps
    return noted


class DigitSum:
    """A reward without processes."""

    async def score(self, samples: list[Sample]) -> Scores:
        totals = [sum(c.isdigit() for c in sample.completion) / BUDGET for sample in samples]
        return Scores(totals, {"digits": totals})


class KeptCluster(Cluster):
    """Spawns trainer and generator once, whatever the number of runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, Any] = {}
        self.runs = 0

    async def spawn(self, role: str, actor_class: Any, *args: Any, **kwargs: Any) -> Any:
        traced = {"trainer": TracedTrainer, "generator": TracedGenerator}.get(role)
        if traced is None:
            return await super().spawn(role, actor_class, *args, **{**kwargs, "replica": self.runs})
        if role not in self.kept:
            self.kept[role] = await super().spawn(role, traced, *args, **kwargs)
        return self.kept[role]


class Colocated:
    """Runs of `apps.grpo` on CPU, with turns or without."""

    def __init__(self, hosts: Hosts, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(apps.grpo.spawn, "stop_ids", lambda *_: [])
        insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # lets functions into the worker
        patch.setattr(apps.grpo.spawn, "QUIET", {**apps.grpo.spawn.QUIET, **insecure})
        self._runner = asyncio.Runner()
        self.cluster = KeptCluster(hosts, plan_run(parse(), None))
        self._runner.run(self.cluster.__aenter__())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 200))

    def close(self) -> None:
        try:
            self._runner.run(self.cluster.__aexit__(None, None, None))
        finally:
            self._runner.close()

    async def train(self, folder: Path, *options: str, slow_s: float = 0.0) -> list[dict[str, Any]]:
        """A whole run from the first weights on, by the app's own loops; the rows of its metrics.jsonl."""
        cfg = parse(f"--run.dir={folder}", *options)
        if self.cluster.runs:
            await self._first_weights()
        self.cluster.runs += 1
        with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, live=False) as log:
            self.actors: Actors = await spawn_actors(cfg, self.cluster, log, DigitSum())
            await self.cluster.kept["trainer"].be_slow.call_one(slow_s)
            await train(Run(cfg, self.actors, log), self.cluster, Stopping())
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    async def _first_weights(self) -> None:
        """Version 0 for the engine, as it was when it started."""
        trainer = TrainerMesh(self.cluster.kept["trainer"], TrainerConfig(), 1, "float32")
        replica = Replica(self.cluster.kept["generator"], "generator_0", GeneratorConfig())
        await trainer.setup()
        await trainer.add_peer(replica.name, await replica.connect(await trainer.connect()))
        await trainer.snapshot(0, 0)
        await replica.stage(await trainer.offer(0, 0, -1))
        await replica.flip(0)

    async def traces(self) -> tuple[list[Interval], list[Interval], int]:
        """When the last run trained, when it decoded, and how many requests have been interrupted by now."""
        trainer, generator = self.cluster.kept["trainer"], self.cluster.kept["generator"]
        trained, decoded = await trainer.steps.call_one(), await generator.steps.call_one()
        return trained, decoded, await generator.interrupted.call_one()


def parse(*options: str) -> AppConfig:
    """The configuration of nano's preset with these options, checked."""
    argv = [*NANO, *OPTIONS, *options]
    cfg = config.parse(AppConfig, argv, default_config=DEFAULT_PRESET, prog="test", description="")
    plan_run(cfg, None)
    return cfg
