"""GRPO in environments: the policy speaks, the world answers, turn by turn.

    python apps/worlds/main.py                                                       # tiny reverses digits, three times
    python apps/worlds/main.py --environment.path=my_world:World --data.task=my_world:tasks --model=org/chat

The loops are those of apps/grpo, and so are the options; rewards come from the environment. A row of data.task has the
environment's task as `metadata`. Each kind of environments is an actor on a mesh of its own; of several kinds, in the
section environments, a task's `environment` names its own, and quotas divides the groups among them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from actors.environments.episodes import EnvironmentRollout, Player
from actors.environments.parking import Parking
from actors.environments.pool_actor import EnvironmentActor, EnvironmentClient, Environments
from actors.environments.reports import Reports
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import ToolCallParser
from actors.reward_pools import RewardPools
from apps.grpo.command_line import start_app
from apps.grpo.main import Run, train
from apps.grpo.spawn import spawn_actors
from apps.worlds.config import WorldsConfig, plan_run
from apps.worlds.kinds import divided, shares_of
from apps.worlds.language import make_language
from forge import config
from forge.lasting import Spawn, lasting
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.run_log import RunLog


async def spawn_worlds(cfg: WorldsConfig, spawn: Spawn) -> dict[str, EnvironmentClient]:
    """The pool of each kind, on a mesh of its own."""
    clients = {}
    for name, kind in cfg.kinds.items():
        role = f"environment_{name}" if cfg.environments else name
        clients[name] = EnvironmentClient(await spawn(role, EnvironmentActor, kind, name), kind, name=name)
        await clients[name].setup()
    return clients


def make_player(
    cfg: WorldsConfig, worlds: Environments, run: Run, template: ChatTemplate, parser: ToolCallParser | None
) -> Player:
    """What episodes are played with."""
    actors = run.actors
    return Player(
        worlds,
        actors.generators,
        template,
        cfg.episodes,
        cfg.generator.max_model_len,
        parser,
        trace=run.log.trace,
        kind_of=worlds.kind_of,
        parking=Parking(cfg.episodes.round_tokens, len(actors.generators.replicas) * cfg.generator.max_num_seqs),
        rewards=actors.reward if isinstance(actors.reward, RewardPools) else None,
    )


async def main(cfg: WorldsConfig, hosts: Hosts, stopping: Stopping) -> None:
    """As `apps.grpo.main.main`, with environments for prompts and rewards."""
    placement, live = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts), False if cfg.mesh.debug else None
    with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=f"worlds-{cfg.model}", live=live) as log:
        if cfg.quotas:
            cfg = replace(cfg, data=divided(cfg.data, shares_of(list(cfg.kinds), cfg.quotas), cfg.seed))
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                template, parser = await asyncio.to_thread(make_language, cfg)
                run = Run(cfg, await spawn_actors(cfg, cluster, log, stop=template.end_of_turn[:1]), log)
                pools = await spawn_worlds(
                    cfg, lasting(cluster.spawn, cfg.failure_policy("environment"), log.note, run.actors.guards)
                )
                worlds = Environments(pools)
                player = make_player(cfg, worlds, run, template, parser)
            reports = Reports(pools, worlds.kind_of)
            run.rollout = reports.counting(EnvironmentRollout(player, turn_rewards=cfg.loss.per_token))
            run.meter.include(reports.row)
            run.meter.include(player.parking.row)
            async with reports.gathering():
                await train(run, cluster, stopping)
            await worlds.shutdown()
        reports.write(log.folder.absolute / "environments.json")
    log.print_table(run.memory, *reports.tables())


def start() -> NoReturn:
    """Reads the command line and runs `main` to its end."""
    preset = Path(__file__).with_name("tiny.yaml")
    start_app(WorldsConfig, main, prog="apps/worlds/main.py", description=__doc__ or "", preset=preset, check=plan_run)


if __name__ == "__main__":
    start()
