"""Supervised fine-tuning.

    python apps/sft/main.py                                       # the default preset, CPU, one machine
    python apps/sft/main.py --data.task=apps.sft.tasks:jsonl --data.path=rows.jsonl --model=org/name
    torchrun --nproc-per-node 2 apps/sft/main.py                  # trainer sharded over two ranks
    python apps/sft/main.py --resume runs/NAME                    # goes on where that run ended, or was killed

    rows -> data_loop -> train_loop -> checkpoint

`data_loop` works ahead of the trainer, which waits for nothing but its own step. `apps/sft/spawn.py` spawns the actors.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from apps.grpo.command_line import start_app
from apps.sft.batches import Batch
from apps.sft.config import OfflineConfig, SftConfig, plan_run
from apps.sft.spawn import Run, StartsTrainer, start_run, start_trainer
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster, within
from forge.metrics import METRIC_KEYS
from forge.run_log import RunLog

OF_SAMPLERS = ("ratio/", "extra/kl_behavior", "extra/engine_", "extra/staleness_", "extra/effective_")
"""Metrics that compare with the policy that sampled; nobody sampled these rows."""
OF_GENERATORS = ("generator/", "tokens/", "time/publish")
AHEAD = 1
"""Batches that wait for the trainer, beside the one that is being made."""


async def data_loop(run: Run, ready: asyncio.Queue[Batch]) -> None:
    """Waits for the trainer to take a batch."""
    while True:
        await ready.put(await run.batches.next())


async def train_loop(run: Run, ready: asyncio.Queue[Batch], stopping: Stopping) -> None:
    """Waits for a batch, which is there by the end of a step unless making one takes longer."""
    meter, version = run.meter, run.log.start
    while version < run.cfg.trainer.steps and not stopping.is_set():
        with meter.timed("time/wait_batch_s"):
            wait = within(run.cfg.batch.timeout_s, f"a batch of {run.cfg.data.task}", ready.get())
            batch = await run.log.patiently(wait, run.batches.why_waiting)
        with meter.timed("time/step_s"):
            result = await run.trainer.step(batch.handles)
        version, run.cursor.now = result.policy_version, batch.cursor
        measured = {key: value for key, value in result.metrics.items() if not key.startswith(OF_SAMPLERS)}
        timed = {key: value for key, value in meter.lap().items() if not key.startswith(OF_GENERATORS)}
        numbers = {"step": version, "policy_version": version, **batch.stats, **measured, **timed}
        run.log.step(dict.fromkeys(METRIC_KEYS) | numbers)
        run.memory["trainer"] = result.peak_rss_bytes
        await run.saver.after_step(version)
    await run.saver.finish(version)


async def train(run: Run, cluster: Cluster, stopping: Stopping) -> None:
    """Both loops side by side; an error in any of them, or a dead actor, ends all. Ends with the checkpoint."""
    ready: asyncio.Queue[Batch] = asyncio.Queue(AHEAD)
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(cluster.watch()), tasks.create_task(data_loop(run, ready))]
        await train_loop(run, ready, stopping)
        if run.log.checkpoint is not None:
            run.log.note("writing the checkpoint")
            await run.trainer.save(str(run.log.checkpoint), run.model)
        for task in others:
            task.cancel()


async def train_on_rows(
    cfg: OfflineConfig, hosts: Hosts, stopping: Stopping, *keys: str, start: StartsTrainer = start_trainer
) -> None:
    """A whole run on rows whose completions are under `keys`, until the last step or Ctrl-C."""
    placement, live = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts), False if cfg.mesh.debug else None
    with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=cfg.model, live=live) as log:
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                run = await start_run(cfg, cluster, log, *keys, start=start)
            await train(run, cluster, stopping)
    log.print_table(run.memory)


async def main(cfg: SftConfig, hosts: Hosts, stopping: Stopping) -> None:
    """Trains `completion` behind `prompt` or `messages`."""
    await train_on_rows(cfg, hosts, stopping, "completion")


if __name__ == "__main__":
    preset = Path(__file__).with_name("tiny.yaml")
    start_app(SftConfig, main, prog="apps/sft/main.py", description=__doc__ or "", preset=preset, check=plan_run)
