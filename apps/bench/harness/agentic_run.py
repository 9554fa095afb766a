"""One run of `apps.bench.agentic`: the loops of apps/grpo around compute that sleeps, and what came of it.

Replay -> rollout_loop x N -> EnvironmentRollout -> Player -> Generators -> SleepingEngine
                                                        |---> EnvironmentPool -> Waiting
Replay -> train_loop -> SleepingTrainer -> WeightSync -> weight_loop -> Replay.release
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from actors.environments.config import EnvironmentConfig
from actors.environments.episodes import EnvironmentRollout, EpisodesConfig, Player
from actors.environments.pool import EnvironmentPool
from actors.environments.templates import ChatTemplate
from actors.generators import Generators
from actors.reward_pools import RewardPools
from apps.bench.harness import agentic_clock
from apps.bench.harness.agentic_clock import Lag
from apps.bench.harness.agentic_scene import NAIVE, Case, Waits
from apps.bench.harness.agentic_stand_ins import (
    TOKENS,
    HoldingWorlds,
    Numbered,
    SleepingEngine,
    SleepingTrainer,
    WholeBatches,
)
from apps.grpo.config import AppConfig, GrpoConfig
from apps.grpo.main import Run, train
from apps.grpo.models import resolve_model
from apps.grpo.spawn import Actors
from forge.metrics import read_rows
from forge.run_log import RunConfig, RunLog
from replay.config import ReplayConfig
from replay.service import Replay
from replay.staleness import num_slots
from weightsync.config import WeightSyncConfig
from weightsync.sync import WeightSync

_NEVER_S = 1e9
"""A deadline of a wait whose seconds are virtual; the run's own is `deadline_s`."""
_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}={% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Figures:
    """What a run measured behind its warm-up, and what the simulation says of it; seconds are the run's clock's."""

    steps_per_s: float
    tokens_per_s: float
    """Of tokens that were trained."""
    generated_per_s: float
    """Tokens, whether trained or still on their way."""
    generator_busy: float
    """Share of the places that decode."""
    trainer_busy: float
    staleness_mean: float
    staleness_max: float
    wasted_share: float
    """Of the generated tokens, those of groups that were thrown away."""
    ceiling_steps_per_s: float
    """Simulated, as is the next."""
    ceiling_generated_per_s: float
    cpu_share: float
    """Of one core, by the whole process."""
    turn_cpu_s: float
    """Processor seconds for one turn of one episode, all parts of a run together."""
    lag_mean_s: float
    lag_longest_s: float


@dataclass(frozen=True)
class _Mark:
    """At the end of a step."""

    now: float
    decoded_s: float
    trained_s: float
    tokens: int
    cpu_s: float


class _Nobody:
    """A cluster without processes, and a user who never presses Ctrl-C."""

    async def watch(self) -> None:
        await asyncio.Event().wait()

    wait = watch


def measure(case: Case, *, virtual: bool = False, deadline_s: float = 3600.0) -> dict[str, float]:
    """Plays `case`; `Figures` as plain values. Raises TimeoutError after `deadline_s` seconds of the run's clock."""

    async def limited(folder: Path) -> Figures:
        async with asyncio.timeout(None if virtual else deadline_s):
            return await _play(case, folder, Lag(), virtual=virtual)

    with tempfile.TemporaryDirectory(prefix="agentic-") as folder:
        return asdict(agentic_clock.run(limited(Path(folder) / "run"), virtual=virtual))


async def _play(case: Case, folder: Path, lag: Lag, *, virtual: bool) -> Figures:
    scene, marks, loop = case.scene(), list[_Mark](), asyncio.get_running_loop()
    engines = [
        SleepingEngine(case.places, case.decode_s / TOKENS, scene.sync_s, holds=case.arm == NAIVE)
        for _ in range(case.replicas)
    ]

    def mark() -> None:
        decoded, tokens = sum(e.decoded_s for e in engines), sum(e.tokens for e in engines)
        marks.append(_Mark(loop.time(), decoded, trainer.trained_s, tokens, time.process_time()))

    trainer = SleepingTrainer(scene.step_s, mark)
    cfg = _config(case, folder)
    path = f"{Waits.__module__}:Waiting"
    waits = {"waits": Waits(scene, case.seed)}
    limits: dict[str, Any] = dict.fromkeys(
        ("place_timeout_s", "reset_timeout_s", "turn_timeout_s", "episode_timeout_s"), _NEVER_S
    )
    environment = EnvironmentConfig(path=path, kwargs=waits, concurrency=scene.environments, **limits)
    with RunLog(cfg.run, "", case.steps) as log:
        async with EnvironmentPool(environment) as pool:
            run = Run(cfg, await _actors(cfg, case, engines, trainer), log)
            run.rollout = _rollout(case, pool, run.actors.generators, engines)
            watching = None if virtual else asyncio.create_task(lag.watch())
            nobody: Any = _Nobody()
            await train(run, nobody, nobody)
            if watching is not None:
                watching.cancel()
    return _figures(case, marks, read_rows(log.folder.metrics_path), lag)


def _config(case: Case, folder: Path) -> AppConfig:
    deadlines: dict[str, Any] = dict.fromkeys(
        ("straggler_timeout_s", "reserve_timeout_s", "sample_timeout_s"), _NEVER_S
    )
    cfg = AppConfig(
        seed=case.seed,
        run=RunConfig(
            dir=str(folder),
            episodes_per_step=0,
            progress=False,
            tensorboard=False,
            checkpoint=False,
            checkpoint_every=0,
        ),
        replay=ReplayConfig(max_staleness=case.bound, journal=False, **deadlines),
        grpo=GrpoConfig(case.scene().group_size, case.scene().group_size * case.scene().groups_per_step),
    )
    cfg.trainer.steps = case.steps
    return cfg


async def _actors(cfg: AppConfig, case: Case, engines: list[SleepingEngine], trainer: Any) -> Actors:
    groups = cfg.grpo.groups_per_step
    generators = Generators([engine.replica(f"generator_{n}", case.places) for n, engine in enumerate(engines)])
    replay: Any = Replay(cfg.replay, groups_per_step=groups, seed=cfg.seed, prompts=Numbered())
    sync = WeightSync(trainer, generators.replicas, WeightSyncConfig(deadline_s=_NEVER_S, flips_at_once=case.replicas))
    await sync.connect()
    return Actors(
        model="tiny",
        decode=lambda ids: "",
        generators=generators,
        reward=RewardPools(None, {}, {}),  # the environment gives the rewards
        reference=None,
        reward_model=None,
        replay=replay,
        trainer=trainer,
        sync=sync,
        num_rollouts=num_slots(cfg.replay.max_staleness, groups),
    )


def _rollout(case: Case, pool: EnvironmentPool, generators: Generators, engines: list[SleepingEngine]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    tokenizer.chat_template = _TEMPLATE
    naive = case.arm == NAIVE
    player = Player(
        HoldingWorlds(pool, engines[0]) if naive else pool,
        generators,
        ChatTemplate(tokenizer),
        EpisodesConfig(max_turns=1000, turn_tokens=TOKENS),
        max_tokens=100_000,
    )
    rollout = EnvironmentRollout(player, turn_rewards=False)
    return WholeBatches(rollout, case.scene().groups_per_step) if naive else rollout


def _figures(case: Case, marks: list[_Mark], rows: list[Any], lag: Lag) -> Figures:
    begin, end, warm = marks[case.warm_up - 1], marks[-1], rows[case.warm_up :]
    wall_s = end.now - begin.now
    turns = (end.tokens - begin.tokens) / TOKENS
    places = case.replicas * case.places
    cpu_s = end.cpu_s - begin.cpu_s
    wasted = sum(row["tokens/wasted"] for row in warm)
    ceiling = case.ceiling()
    return Figures(
        steps_per_s=len(warm) / wall_s,
        tokens_per_s=sum(row["tokens/trained"] for row in warm) / wall_s,
        generated_per_s=(end.tokens - begin.tokens) / wall_s,
        generator_busy=(end.decoded_s - begin.decoded_s) / wall_s / places,
        trainer_busy=(end.trained_s - begin.trained_s) / wall_s,
        staleness_mean=sum(row["staleness/mean"] for row in warm) / len(warm),
        staleness_max=max(row["staleness/max"] for row in warm),
        wasted_share=wasted / max(1, end.tokens - begin.tokens),
        ceiling_steps_per_s=ceiling.steps_per_s,
        ceiling_generated_per_s=ceiling.generator_busy * places * TOKENS / case.decode_s,
        cpu_share=cpu_s / wall_s,
        turn_cpu_s=cpu_s / max(1.0, turns),
        lag_mean_s=lag.mean_s,
        lag_longest_s=lag.longest_s,
    )


def peak_bytes() -> int:
    """Of this process and of those that it has waited for, each at its own peak."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
