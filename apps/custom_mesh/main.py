"""Your own actor on its own mesh, wired into the GRPO loop.

    python apps/custom_mesh/main.py                       # takes the options of apps/grpo/main.py
    python apps/custom_mesh/main.py --trainer.steps=10 --mesh.debug

`judge.py` holds the actor. It is spawned like any other role, on a mesh of its own; here it takes the place of
the reward functions. The loops are those of apps/grpo, unchanged: they ask whatever has `score(samples)`.
"""

from __future__ import annotations

from pathlib import Path

from apps.custom_mesh.judge import Judge, JudgeReward
from apps.grpo.command_line import start
from apps.grpo.config import AppConfig, plan_run
from apps.grpo.main import Run, train
from apps.grpo.spawn import spawn_actors
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.run_log import RunLog

TINY = Path(__file__).parents[1] / "grpo" / "tiny.yaml"


async def main(cfg: AppConfig, hosts: Hosts, stopping: Stopping) -> None:
    """As `apps.grpo.main.main`, with a judge for a reward."""
    placement = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts)
    with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name="judge") as log:
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                judge = await cluster.spawn("judge", Judge, weight_of_length=0.1)
                run = Run(cfg, await spawn_actors(cfg, cluster, log, JudgeReward(judge)), log)
            await train(run, cluster, stopping)
    log.print_table(run.memory)


if __name__ == "__main__":
    start(main, prog="apps/custom_mesh/main.py", description=__doc__ or "", preset=TINY)
