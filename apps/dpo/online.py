"""Online DPO: the best and the worst of a prompt's rollouts are a pair (Guo et al. 2024).

    python apps/dpo/online.py                                     # takes the options of apps/grpo/main.py
    python apps/dpo/online.py --grpo.group_size=8 --loss.params='{beta: 0.3}'

The loops are those of apps/grpo, with a rollout of its own. Groups whose rewards are all equal hold no pair and are
replaced. A step trains grpo.batch_size / grpo.group_size pairs, at any staleness: who wrote them is not asked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actors.reward import Scores
from actors.rollout import References, Rollout, rollout_group
from apps.dpo.config import plan_online
from apps.grpo.command_line import start
from apps.grpo.config import AppConfig
from apps.grpo.main import Run, train
from apps.grpo.spawn import spawn_actors
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.metrics import Meter
from forge.run_log import RunLog


async def rollout_pair(*args: Any, meter: Meter, reference: References, **options: Any) -> Rollout:
    """`rollout_group`, of which two episodes are trained: the best, then the worst.

    `extra/sampled_reward` over `extra/sampled_episodes` is the mean reward of all that were sampled.
    """
    rollout = await rollout_group(*args, **options)
    meter.add("extra/sampled_reward", sum(rollout.scores.total))
    meter.add("extra/sampled_episodes", len(rollout.samples))
    pair = best_and_worst(rollout)
    pair.group["ref_logprobs"] = await reference.logprobs(pair.group)
    return pair


def best_and_worst(rollout: Rollout) -> Rollout:
    """Those two episodes, in that order, the first of equals; what the others sampled counts as cut."""
    total = rollout.scores.total
    two = [total.index(max(total)), total.index(min(total))]
    parts = {name: [values[i] for i in two] for name, values in rollout.scores.parts.items()}
    pair = replace(
        rollout,
        group=rollout.group[two].contiguous(),
        samples=[rollout.samples[i] for i in two],
        scores=Scores([total[i] for i in two], parts),
    )
    return replace(pair, num_tokens_cut=rollout.num_tokens_cut + rollout.num_tokens - pair.num_tokens)


async def main(cfg: AppConfig, hosts: Hosts, stopping: Stopping) -> None:
    """As `apps.grpo.main.main`, on pairs."""
    placement = plan_online(cfg, hosts.slots_per_host, hosts.num_hosts)
    with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=f"dpo-{cfg.model}") as log:
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                run = Run(cfg, await spawn_actors(cfg, cluster, log), log)
            run.rollout = partial(rollout_pair, meter=run.meter)
            await train(run, cluster, stopping)
    log.print_table(run.memory)


if __name__ == "__main__":
    preset = Path(__file__).with_name("online.yaml")
    start(main, prog="apps/dpo/online.py", description=__doc__ or "", preset=preset, check=plan_online)
