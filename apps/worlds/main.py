"""GRPO in an environment: the policy speaks, the world answers, turn by turn.

    python apps/worlds/main.py                                                       # tiny reverses digits, three times
    python apps/worlds/main.py --environment.path=my_world:World --data.task=my_world:tasks --model=org/chat

The loops are those of apps/grpo, and so are the options; rewards come from the environment. A row of data.task has the
environment's task as `metadata`. The environment's pool is an actor on a mesh of its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from transformers import AutoTokenizer

from actors.environments.episodes import EnvironmentRollout, Player
from actors.environments.pool_actor import EnvironmentActor, EnvironmentClient
from actors.environments.template_check import check_template
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import ToolCallParser
from actors.reward import Sample, Scores
from apps.grpo.command_line import start_app
from apps.grpo.main import Run, train
from apps.grpo.models import resolve_model
from apps.grpo.spawn import spawn_actors
from apps.worlds.config import WorldsConfig, plan_run
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.report import RunLog


class FromTheWorld:
    """Stands where reward functions stand, and is never asked."""

    async def score(self, samples: list[Sample]) -> Scores:
        """Raises, since the environment has given the rewards already."""
        raise AssertionError(f"{len(samples)} samples came to be scored; their environment has done that")


def make_template(cfg: WorldsConfig, model: str) -> ChatTemplate:
    """The chat template of the run. Raises ConfigError where conversations cannot be continued by it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if cfg.chat_template:
        tokenizer.chat_template = cfg.chat_template
    check_template(tokenizer, cfg.data.template_args)
    return ChatTemplate(tokenizer, cfg.data.template_args)


async def main(cfg: WorldsConfig, hosts: Hosts, stopping: Stopping) -> None:
    """As `apps.grpo.main.main`, with an environment for prompts and rewards."""
    placement, live = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts), False if cfg.mesh.debug else None
    with RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=f"worlds-{cfg.model}", live=live) as log:
        async with Cluster(hosts, placement, debug=cfg.mesh.debug) as cluster:
            with stopping.at_once():
                model = await asyncio.to_thread(resolve_model, cfg.model)
                template = await asyncio.to_thread(make_template, cfg, model)
                stop = template.end_of_turn[:1]
                run = Run(cfg, await spawn_actors(cfg, cluster, log, FromTheWorld(), stop=stop), log)
                worlds = EnvironmentClient(
                    await cluster.spawn("environment", EnvironmentActor, cfg.environment), cfg.environment
                )
                parser = (
                    await asyncio.to_thread(ToolCallParser, cfg.tool_parser, template.tokenizer)
                    if cfg.tool_parser
                    else None
                )
            limit = cfg.generator.max_model_len
            player = Player(worlds, run.actors.generators, template, cfg.episodes, limit, parser)
            run.rollout = EnvironmentRollout(player, turn_rewards=cfg.loss.per_token)
            await train(run, cluster, stopping)
            await worlds.shutdown()
    log.print_table(run.memory)


def start() -> NoReturn:
    """Reads the command line and runs `main` to its end."""
    preset = Path(__file__).with_name("tiny.yaml")
    start_app(WorldsConfig, main, prog="apps/worlds/main.py", description=__doc__ or "", preset=preset, check=plan_run)


if __name__ == "__main__":
    start()
