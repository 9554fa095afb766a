"""A reward model from pairs of a better and a worse answer (Bradley-Terry, as in Ouyang et al. 2022).

    python apps/reward_model/main.py                                       # the default preset, CPU, one machine
    python apps/reward_model/main.py --data.task=apps.sft.tasks:jsonl --data.path=pairs.jsonl --model=org/name
    torchrun --nproc-per-node 2 apps/reward_model/main.py                  # sharded over two ranks
    python apps/grpo/main.py --reward.model=runs/NAME/checkpoint           # and what it is good for

The loops are those of apps/sft, with another trainer: a head of one number on the model's backbone. The checkpoint is
one of transformers' AutoModelForSequenceClassification.
"""

from __future__ import annotations

from pathlib import Path

from actors.reward_trainer import RewardTrainerActor
from actors.trainer import ModelSpec
from actors.trainer_mesh import TrainerMesh
from apps.grpo.command_line import start_app
from apps.reward_model.config import RewardModelConfig
from apps.sft.config import OfflineConfig, plan_run
from apps.sft.main import train_on_rows
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster


async def start_reward_trainer(cfg: OfflineConfig, cluster: Cluster, spec: ModelSpec) -> TrainerMesh:
    """All ranks of the trainer of a reward model, set up."""
    world = cluster.procs("trainer")
    mesh = await cluster.spawn("trainer", RewardTrainerActor, cfg.trainer, spec, world=world, seed=cfg.seed)
    trainer = TrainerMesh(mesh, cfg.trainer, world, spec.dtype)
    await trainer.setup()
    return trainer


async def main(cfg: RewardModelConfig, hosts: Hosts, stopping: Stopping) -> None:
    """Trains the score of `chosen` to lie above that of `rejected`."""
    await train_on_rows(cfg, hosts, stopping, "chosen", "rejected", start=start_reward_trainer)


if __name__ == "__main__":
    prog, preset = "apps/reward_model/main.py", Path(__file__).with_name("tiny.yaml")
    start_app(RewardModelConfig, main, prog=prog, description=__doc__ or "", preset=preset, check=plan_run)
