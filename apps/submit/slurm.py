"""The batch script of a run on Slurm; pure.

One task a node, each of them a torchrun agent. `monarch.job.SlurmJob` is not used: it renders and submits in one call,
starts bare Monarch workers without the leash that ends them with the controller, and gives the app no device slots.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from apps.submit.config import SlurmConfig, environment, torchrun


def render(cfg: SlurmConfig, command: Sequence[str]) -> str:
    """What sbatch is given to run `command` (an app and its options) on all nodes."""
    launch = torchrun(cfg, "python", '"$SLURM_NODEID"', '"$1"')
    each = "; ".join(["set -e", *cfg.setup, f'exec {" ".join(launch)} "${{@:2}}"'])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in _directives(cfg)),
        "set -eu",
        f"cd {shlex.quote(cfg.folder)}",
        *(f"export {key}={shlex.quote(value)}" for key, value in environment(cfg).items()),
        "# The first node has the controller.",
        'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "# A node that fails ends the job; the run's own error stands above Slurm's.",
        f'srun --kill-on-bad-exit=1 bash -c {shlex.quote(each)} bash "$first" {shlex.join(command)}',
    ]
    return "\n".join(lines) + "\n"


def _directives(cfg: SlurmConfig) -> list[str]:
    wanted = {
        "job-name": cfg.name,
        "nodes": cfg.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": cfg.gpus_per_node,
        "cpus-per-task": cfg.cpus,
        "mem": cfg.memory,
        "partition": cfg.partition,
        "account": cfg.account,
        "qos": cfg.qos,
        "time": cfg.time,
        # To the tasks, as Ctrl-C is: the step ends, the checkpoint is written.
        "signal": f"INT@{cfg.stop_s}" if cfg.stop_s else "",
        "output": f"{cfg.folder}/{cfg.name}-%j.log",
    }
    flags = ["--no-requeue", *(["--exclusive"] if cfg.exclusive else [])]
    return [*(f"--{key}={value}" for key, value in wanted.items() if value), *flags, *cfg.options]
