"""Two policies trained in the same episodes: a proposer writes tasks, a solver answers them.

    python apps/two_agents/main.py                                         # nano against nano, reversing digits
    python apps/two_agents/main.py --proposer.replay.max_staleness=1 --solver.replay.max_staleness=2
    python apps/two_agents/main.py --resume runs/NAME                      # both go on from their last checkpoints

    prompts -> rollout_loop x N -> replay -> train_loop -> weight_loop -> generators     the proposer, as apps/grpo
                   proposal |  ^ rewards of its answers
                            v  |
    replay  <- rollout_loop x M                                                          the solver, as apps/grpo
       +-----> train_loop -> weight_loop -> generators

Each policy is a run of apps/grpo of its own: generators, replay, trainer, versions, bound, folder. Its rollout loops
wait for a slot of its own replay, its train loop for a batch of its own. `handover.py` says how long an episode of one
waits for the other, and why neither trainer waits for the other's; `episodes.py` what the groups of both are made of.

Checkpoints are those of two runs: each policy goes on from its own last one, so the two need not be of one moment.
The bound of each is that of its own versions, before and after.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from apps.grpo.command_line import start_app
from apps.grpo.config import AppConfig
from apps.grpo.main import Run, train
from apps.grpo.spawn import spawn_actors
from apps.two_agents.config import POLICIES, TwoAgentsConfig, folder_of, plan_run, policies
from apps.two_agents.episodes import Episodes
from apps.two_agents.handover import Handover, Side
from apps.two_agents.meshes import Part
from forge import config
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster
from forge.run_folder import check_dir, folder_error
from forge.run_log import RunLog


async def main(cfg: TwoAgentsConfig, hosts: Hosts, stopping: Stopping) -> None:
    """Spawns the actors of both, trains them side by side, writes both checkpoints."""
    placement, folder = plan_run(cfg, hosts.slots_per_host, hosts.num_hosts), make_folder(cfg)
    own = policies(cfg, folder)
    with ExitStack() as open_logs:
        logs = {name: open_logs.enter_context(open_log(name, own[name])) for name in POLICIES}
        async with Cluster(hosts, placement, debug=cfg.mesh.debug, logs=folder / "logs") as cluster:
            with stopping.at_once():
                async with asyncio.TaskGroup() as tasks:
                    starts = [
                        tasks.create_task(spawn_actors(own[name], Part(cluster, name), logs[name])) for name in POLICIES
                    ]
                runs = [
                    Run(own[name], start.result(), logs[name]) for name, start in zip(POLICIES, starts, strict=True)
                ]
                join(cfg, *runs)
            async with asyncio.TaskGroup() as tasks:
                for run in runs:
                    tasks.create_task(train(run, cluster, stopping))
    for run in runs:
        run.log.print_table(run.memory)


def join(cfg: TwoAgentsConfig, proposer: Run, solver: Run) -> None:
    """Makes the episodes of the two runs the same ones. Whoever ends first serves the other until it ends."""
    episodes, last = Episodes(cfg.episode, proposer, solver), asyncio.Barrier(len(POLICIES))
    handover = episodes.handover
    proposer.rollout, solver.rollout = episodes.propose, episodes.answer
    for run, side in ((proposer, handover.proposer), (solver, handover.solver)):
        run.waiting, run.ended = partial(handover.waiting, side), partial(_end, handover, side, last)


async def _end(handover: Handover, side: Side, last: asyncio.Barrier) -> None:
    handover.end(side)
    await last.wait()


def open_log(name: str, cfg: AppConfig) -> RunLog:
    """The log of one policy, whose lines begin with its name."""
    return RunLog(cfg.run, config.to_yaml(cfg), cfg.trainer.steps, name=name, live=False, label=f"{name}: ")


def make_folder(cfg: TwoAgentsConfig) -> Path:
    """The folder of the run, with the configuration of both. Raises ConfigError or RunFolderError as RunFolder does."""
    folder = folder_of(cfg)
    if not cfg.run.resume:
        check_dir(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / "config.yaml.new"
        new.write_text(config.to_yaml(cfg), encoding="utf-8")
        os.replace(new, folder / "config.yaml")
    except OSError as error:
        raise folder_error(folder, error) from error
    return folder


def start() -> NoReturn:
    """Reads the command line and runs `main` to its end."""
    preset = Path(__file__).with_name("nano.yaml")
    text = __doc__ or ""
    start_app(TwoAgentsConfig, main, prog="apps/two_agents/main.py", description=text, preset=preset, check=plan_run)


if __name__ == "__main__":
    start()
