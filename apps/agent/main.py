"""GRPO for an agent that you already have: it speaks to an OpenAI-compatible server, and that server trains it.

    python apps/agent/main.py                                                        # learns to use a tool, on a CPU
    python apps/agent/main.py --agent.path=my_agent:run --data.task=my_agent:tasks --model=org/chat --tool_parser=hermes
    python apps/agent/main.py --agent.command='[my-agent, "{prompt}"]' --agent.check=my_agent:passed ...

    rollout_loop -> AgentRollout ── session ──► Gateway ──► generators
                         └── task ──► agents, one process each ── chat calls ──► Gateway

The loops are those of apps/grpo, and so are the options. The gateway listens in this process; the agents are on a mesh
of their own, as environments are. A row of data.task has the agent's task as `metadata`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from actors.environments.pool_actor import EnvironmentActor, EnvironmentClient
from actors.environments.reports import Reports
from actors.gateway.gateway import Gateway
from actors.gateway.rollout import AgentRollout
from apps.agent.config import AgentAppConfig, gateway_config, plan_run
from apps.grpo.command_line import start_app
from apps.grpo.main import Run, train
from apps.grpo.spawn import spawn_actors
from apps.worlds.language import make_language
from forge import config
from forge.lasting import Spawn, lasting
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.run_log import RunLog


async def spawn_agents(cfg: AgentAppConfig, spawn: Spawn, folder: str) -> EnvironmentClient:
    """The agents, on a mesh of their own; programs get their folders in `folder`."""
    pool = cfg.agent.environment(folder)
    client = EnvironmentClient(await spawn("agent", EnvironmentActor, pool, "agent"), pool, name="agent")
    await client.setup()
    return client


async def main(cfg: AgentAppConfig, hosts: Hosts, stopping: Stopping) -> None:
    """As `apps.grpo.main.main`, with a gateway and agents for prompts and rewards."""
    placement, live = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts), False if cfg.mesh.debug else None
    with (
        RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=f"agent-{cfg.model}", live=live) as log,
        TemporaryDirectory(prefix="agents-") as folder,
    ):
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=log.folder.logs) as cluster:
            with stopping.at_once():
                template, parser = await asyncio.to_thread(make_language, cfg)
                run = Run(cfg, await spawn_actors(cfg, cluster, log, stop=template.end_of_turn[:1]), log)
                spawn = lasting(cluster.spawn, cfg.failure_policy("environment"), log.note, run.actors.guards)
                agents = await spawn_agents(cfg, spawn, folder)
            async with Gateway(run.actors.generators, template, parser, gateway_config(cfg)) as gateway:
                reports, turn_rewards = Reports({"agent": agents}, lambda task: "agent"), cfg.loss.per_token
                rollout = AgentRollout(gateway, agents, cfg.agent, cfg.episodes, turn_rewards=turn_rewards)
                run.rollout = reports.counting(rollout)
                run.meter.include(reports.row)
                async with reports.gathering():
                    await train(run, cluster, stopping)
            await agents.shutdown()
        reports.write(log.folder.absolute / "environments.json")
    log.print_table(run.memory, *reports.tables())


def start() -> NoReturn:
    """Reads the command line and runs `main` to its end."""
    preset = Path(__file__).with_name("tiny.yaml")
    start_app(AgentAppConfig, main, prog="apps/agent/main.py", description=__doc__ or "", preset=preset, check=plan_run)


if __name__ == "__main__":
    start()
