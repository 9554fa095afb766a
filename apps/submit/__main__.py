"""A run on a cluster: prints what would be submitted, and submits it with --submit.

    python -m apps.submit slurm --partition=gpu --folder=/shared/me/meshforge -- apps/grpo/main.py --trainer.steps=100
    python -m apps.submit kubernetes --image=org/image:tag --claim=work --folder=/shared -- apps/grpo/main.py

Options before -- are those of the job (`--help` lists them; slurm.yaml and kubernetes.yaml in this folder are the
presets, `--config F.yaml` takes another), what stands behind is the app and its options. Printing needs neither a
cluster nor credentials; submitting takes what `sbatch` or `kubectl` on this machine are set up for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from apps.submit import kubernetes, slurm
from apps.submit.config import JobConfig, KubernetesConfig, SlurmConfig, check_command
from forge import config
from forge.errors import ConfigError

_ROOT = Path(__file__).parents[2]
CLUSTERS: dict[str, tuple[type[JobConfig], Callable[[Any, Sequence[str]], str], list[str]]] = {
    "slurm": (SlurmConfig, slurm.render, ["sbatch"]),
    "kubernetes": (KubernetesConfig, kubernetes.render, ["kubectl", "create", "-f", "-"]),
}
"""The configuration of a job, what it looks like, and what takes it from its standard input."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, 2 for a value that cannot work, else that of the cluster's own command."""
    before, command = _split(argv)
    kind = before.pop(0) if before else ""
    if kind in ("-h", "--help"):
        print((__doc__ or "").replace("`--help` lists them", "`apps.submit slurm --help` lists them"))
        return 0
    if kind not in CLUSTERS:
        _refuse(f"the first word must be one of {', '.join(CLUSTERS)}, got {kind or 'nothing'}")
    config_cls, render, submit = CLUSTERS[kind]

    def check(cfg: JobConfig) -> None:
        cfg.validate()
        check_command(command)
        if cfg.submit and not shutil.which(submit[0]):
            raise ConfigError(
                f"submit is true, but there is no {submit[0]} on this machine; leave it out to print only"
            )

    preset = Path(__file__).with_name(f"{kind}.yaml")
    options: dict[str, Any] = {"default_config": preset, "prog": f"apps.submit {kind}", "description": __doc__ or ""}
    cfg = config.parse(config_cls, before, validate=check, **options)
    text = render(cfg, command)
    print(text, end="", flush=True)
    if not cfg.submit:
        return 0
    _check_app(command)
    return subprocess.run(submit, input=text, text=True, check=False).returncode


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _check_app(command: Sequence[str]) -> None:
    """The app reads its options here too, where it is on this machine: a slip would wait in the queue for hours."""
    app = _ROOT / command[0]
    if app.exists():
        words = [sys.executable, str(app), *command[1:], "--print-config"]
        read = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, timeout=300, check=False)
        if read.returncode:
            _refuse(read.stderr.strip())


def _refuse(text: str) -> NoReturn:
    print(f"apps.submit: error: {text}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
