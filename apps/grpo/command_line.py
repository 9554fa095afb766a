"""The command line of the apps that take the configuration of GRPO."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from apps.grpo import algorithms
from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_run
from forge import config, launch
from forge.launch import Hosts, Stopping


def start(
    main: Callable[[AppConfig, Hosts, Stopping], Awaitable[object]],
    *,
    prog: str,
    description: str,
    preset: Path = DEFAULT_PRESET,
    check: Callable[[AppConfig, int | None, int], object] = plan_run,
) -> NoReturn:
    """Reads the command line and runs `main` to its end; `check(cfg, slots, num_hosts)` refuses what cannot work."""
    slots, num_hosts = launch.leave_spare_ranks()
    cfg = config.parse(
        AppConfig,
        default_config=preset,
        prog=prog,
        description=description,
        validate=lambda c: check(c, slots, num_hosts),
        resume_key="run.resume",
        expand=algorithms.expand,
    )
    launch.run(lambda hosts, stopping: main(cfg, hosts, stopping), launch.bring_up())
