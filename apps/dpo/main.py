"""Direct preference optimisation on pairs that are there (Rafailov et al. 2023).

    python apps/dpo/main.py                                       # the default preset, CPU, one machine
    python apps/dpo/main.py --data.task=apps.sft.tasks:jsonl --data.path=pairs.jsonl --model=org/name
    python apps/dpo/main.py --loss.params='{beta: 0.3, label_smoothing: 0.1}'
    torchrun --nproc-per-node 2 apps/dpo/main.py                  # trainer sharded over two ranks

The loops are those of apps/sft. Here a row has two completions, the loss keeps them together, and a frozen reference
gives its log-probs of both, ahead of the trainer. `online.py` makes its pairs itself.
"""

from __future__ import annotations

from pathlib import Path

from apps.dpo.config import DpoConfig
from apps.grpo.command_line import start_app
from apps.sft.config import plan_run
from apps.sft.main import train_on_rows
from forge.launch import Hosts, Stopping


async def main(cfg: DpoConfig, hosts: Hosts, stopping: Stopping) -> None:
    """Trains `chosen` against `rejected`."""
    await train_on_rows(cfg, hosts, stopping, "chosen", "rejected")


if __name__ == "__main__":
    preset = Path(__file__).with_name("tiny.yaml")
    start_app(DpoConfig, main, prog="apps/dpo/main.py", description=__doc__ or "", preset=preset, check=plan_run)
