"""On-policy distillation: the student samples, the teacher says of each token how likely it was (Agarwal et al. 2024).

    python apps/sft/main.py --run.dir runs/teacher                                    # makes a teacher
    python apps/distill/main.py --teacher=runs/teacher/checkpoint                     # the default preset, CPU
    python apps/distill/main.py --model=org/small --teacher=org/large --config mine.yaml

The loops are those of apps/grpo, and so are the options. The teacher stands where a reference stands, its log-probs
come with each group, and the loss `reverse_kl` takes no reward: loss/kl is what falls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from apps.distill.config import DistillConfig, plan_run, resolve_teacher
from apps.grpo.command_line import start_app
from apps.grpo.main import Run, train
from apps.grpo.spawn import spawn_actors
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.run_log import RunLog


async def main(cfg: DistillConfig, hosts: Hosts, stopping: Stopping) -> None:
    """As `apps.grpo.main.main`, with a teacher."""
    placement = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts)
    with stopping.at_once():
        teacher = await asyncio.to_thread(resolve_teacher, cfg)
    with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=f"distill-{cfg.model}") as log:
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                run = Run(cfg, await spawn_actors(cfg, cluster, log, teacher=teacher), log)
            await train(run, cluster, stopping)
    log.print_table(run.memory)


if __name__ == "__main__":
    preset = Path(__file__).with_name("tiny.yaml")
    start_app(
        DistillConfig, main, prog="apps/distill/main.py", description=__doc__ or "", preset=preset, check=plan_run
    )
