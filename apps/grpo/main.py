"""Asynchronous GRPO.

    python apps/grpo/main.py                                              # CPU, one machine, the default preset
    python apps/grpo/main.py --config apps/grpo/tiny.yaml --mesh.debug    # every actor in this process, for pdb
    torchrun --nproc-per-node 8 apps/grpo/main.py --config apps/grpo/qwen3_1_7b.yaml

    python apps/grpo/main.py --resume runs/NAME                           # goes on where that run ended, or was killed

    prompts -> rollout_loop x N -> replay -> train_loop -> weight_loop -> generators

Each loop waits for one thing only, named in its docstring. `apps/grpo/spawn.py` spawns the actors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from actors.evaluator import Evaluations
from actors.rollout import Rewards, Rollout, TimedRewards, rollout_group
from actors.trainer import StepResult
from apps.grpo.command_line import start
from apps.grpo.config import AppConfig, plan_run
from apps.grpo.evaluation import make_evaluations
from apps.grpo.fleet import WISH
from apps.grpo.recovery import Recovery
from apps.grpo.spawn import Actors, spawn_actors, tokens_event
from forge import config
from forge.checkpoints import Saver
from forge.errors import ActorFailed, ChannelError
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.metrics import Meter
from forge.run_folder import EpisodeRecord
from forge.run_log import RunLog
from replay.actor import SampledBatch
from weightsync.sync import Applied


@dataclass
class Run:
    """What the loops share."""

    cfg: AppConfig
    actors: Actors
    log: RunLog
    rollout: Callable[..., Awaitable[Rollout | None]] = rollout_group
    """From a ticket's prompt to its group; None drops it. Called like `actors.rollout.rollout_group`."""
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered while the train loop waits for a batch."""
    ended: Callable[[], Awaitable[object]] | None = None
    """Awaited behind the last step and its checkpoint, while the generators still serve."""
    meter: Meter = field(init=False)
    reward: Rewards = field(init=False)
    saver: Saver = field(init=False)
    recovery: Recovery = field(init=False)
    evaluations: Evaluations | None = field(init=False)
    episodes: list[EpisodeRecord] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cfg, actors = self.cfg, self.actors
        self.meter = Meter(elapsed_s=self.log.elapsed_s, trace=self.log.trace)
        self.meter.include(actors.restarts)
        self.reward = TimedRewards(actors.reward, self.meter.add, "extra/reward_s")
        every, record = cfg.run.checkpoint_every, cfg.replay.record
        start = self.log.start
        self.saver = Saver(self.log.checkpoints, actors.trainer, actors.replay, every, start=start, record=record)
        lives = (actors.trainer, actors.replay, actors.sync, self.saver, self.log.checkpoints, start)
        self.recovery = Recovery(*lives, told=self.log.note)
        self.evaluations = make_evaluations(cfg, actors, self.log)

    async def why_waiting(self) -> str:
        """What the train loop waits for, when it waits long."""
        return f"waiting for a batch: {await self.actors.replay.why_waiting()}; {self.actors.sync.describe()}"


async def rollout_loop(run: Run) -> None:
    """Waits for a free slot; unblocked when the generators hold newer weights."""
    actors, grpo = run.actors, run.cfg.grpo
    while (ticket := await actors.replay.reserve()) is not None:
        begin = time.monotonic()
        try:
            rollout = await run.rollout(
                ticket.prompt,
                actors.generators,
                run.reward,
                group_id=ticket.seq,
                group_size=grpo.group_size,
                advantage=grpo.advantage,
                decode=actors.decode,
                seed=run.cfg.seed,
                reference=actors.reference,
                reward_model=actors.reward_model,
                oversample=grpo.oversample,
                begun=ticket.begun,
            )
        except Exception:
            await actors.replay.fail(ticket)
            raise
        run.meter.add("extra/rollout_s", time.monotonic() - begin)
        run.meter.add("extra/rollouts", 1)
        if rollout is None:
            run.meter.add("extra/groups_dropped", 1)
            await actors.replay.fail(ticket)
            continue
        run.meter.add("tokens/generated", rollout.num_tokens + rollout.num_tokens_cut)
        run.meter.add("extra/tokens_cut", rollout.num_tokens_cut)
        run.episodes = rollout.records(actors.decode, run.cfg.run.episodes_per_step)
        await actors.replay.add(ticket, rollout.group)


async def train_loop(run: Run) -> None:
    """Waits for a batch, never for a generator or a transfer; where the trainer has died, for another one."""
    actors, meter, version, logged = run.actors, run.meter, run.log.start, run.log.start
    while version < run.cfg.trainer.steps:
        try:
            with meter.timed("time/wait_batch_s"), run.waiting():
                batch = await run.log.patiently(run.recovery.sample(version), run.why_waiting)
            if batch is None:
                break
            with meter.timed("time/step_s"):
                result = await actors.trainer.step(batch.handles)
            version = result.policy_version
            meter.add("extra/steps_again", version <= logged)
            if version < actors.sync.published_version:
                continue  # it is trained again, after a death
            with meter.timed("time/publish_stall_s"):
                await actors.sync.publish(version)
            if version > logged:
                logged = version
                await step_done(run, batch, result)
        except ActorFailed as error:
            version = await run.recovery.restored(error)
        except ChannelError as error:
            version = await run.recovery.batch_again(version, error)
    run.recovery.disarm()
    if version >= logged:
        await run.saver.finish(version)
    await actors.replay.close()
    if run.evaluations is not None and version == run.cfg.trainer.steps:
        await run.evaluations.finish(version)
    actors.sync.close()


async def step_done(run: Run, batch: SampledBatch, result: StepResult) -> None:
    """Logs the step, begins its checkpoint and its evaluation; waits for none of them."""
    version = result.policy_version
    numbers = {"step": version, "policy_version": version, **batch.stats, **result.metrics}
    run.log.step({**numbers, **run.meter.lap()}, run.episodes)
    run.memory["trainer"] = result.peak_rss_bytes
    await run.saver.after_step(version)
    if run.evaluations is not None:
        run.evaluations.due(version)


async def weight_loop(run: Run) -> None:
    """Waits for a newer snapshot; frees the slots of batches whose weights the generators now hold."""

    async def on_applied(applied: Applied) -> None:
        run.meter.longest("generator/pause_s", applied.pause_s)
        await run.actors.replay.release(applied.version)

    await run.actors.sync.run(on_applied)


async def evaluation_loop(run: Run) -> None:
    """Waits for a version whose evaluation is due; nobody waits for it."""
    if run.evaluations is not None:
        run.evaluations.due(run.log.start)
        await run.evaluations.run()


async def scaling_loop(run: Run) -> None:
    """Waits for `python -m apps.scale`; generators come and go, and nobody waits for that."""
    if run.actors.fleet is not None and not run.cfg.mesh.fixed:
        await run.actors.fleet.follow(run.log.folder.absolute / WISH)


async def progress_loop(run: Run) -> None:
    """Waits for a moment; brings the tokens of unfinished episodes to the journal, for a resume."""
    while run.cfg.replay.journal:
        await asyncio.sleep(run.cfg.replay.journal_interval_s / 2)
        await run.actors.replay.progress([tokens_event(p) for p in await run.actors.generators.progress()])


async def main(cfg: AppConfig, hosts: Hosts, stopping: Stopping) -> None:
    """Spawns the actors, runs the loops until the last step or Ctrl-C, writes the checkpoint."""
    yaml, live = config.to_yaml(cfg), False if cfg.mesh.debug else None
    placement = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts)
    with RunLog(cfg.run, yaml, cfg.trainer.steps, name=cfg.model, live=live) as log:
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                run = Run(cfg, await spawn_actors(cfg, cluster, log), log)
            await train(run, cluster, stopping)
    log.print_table(run.memory)


async def train(run: Run, cluster: Cluster, stopping: Stopping) -> None:
    """All loops side by side; an error in any of them, or a dead actor, ends all. Ends with the checkpoint."""
    actors = run.actors
    if actors.trainer_guard is not None:
        run.recovery.arm(actors.trainer_guard)
    async with asyncio.TaskGroup() as tasks:
        watchers = [tasks.create_task(cluster.watch()), tasks.create_task(_close_on(stopping, run))]
        rollouts = [tasks.create_task(rollout_loop(run)) for _ in range(actors.num_rollouts)]
        weights, progress = tasks.create_task(weight_loop(run)), tasks.create_task(progress_loop(run))
        evaluation, scaling = tasks.create_task(evaluation_loop(run)), tasks.create_task(scaling_loop(run))
        await train_loop(run)
        if run.log.checkpoint is not None:
            run.log.note("writing the checkpoint")
            await actors.trainer.save(str(run.log.checkpoint), actors.model)
        for task in (*rollouts, progress, evaluation, scaling):
            task.cancel()
        await weights
        if run.ended is not None:
            await run.ended()
        run.memory |= await actors.shut_down()
        for task in watchers:
            task.cancel()


async def _close_on(stopping: Stopping, run: Run) -> None:
    """After the first Ctrl-C nobody waits for a batch any more; a step that runs ends as usual."""
    await stopping.wait()
    await run.actors.replay.close()


if __name__ == "__main__":
    start(main, prog="apps/grpo/main.py", description=__doc__ or "")
