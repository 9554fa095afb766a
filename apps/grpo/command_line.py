"""From a command line to a run: of the apps that take the configuration of GRPO, and of others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from apps.grpo import algorithms
from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_whole_groups
from apps.grpo.shakeout import Shakeout
from forge import config, launch
from forge.launch import Hosts, Stopping

C = TypeVar("C")


def start(
    main: Callable[[AppConfig, Hosts, Stopping], Awaitable[object]],
    *,
    prog: str,
    description: str,
    preset: Path = DEFAULT_PRESET,
    check: Callable[[AppConfig, int | None, int], object] = plan_whole_groups,
) -> NoReturn:
    """`start_app` for GRPO's configuration."""
    start_app(AppConfig, main, prog=prog, description=description, preset=preset, check=check, expand=algorithms.expand)


def start_app(
    config_cls: type[C],
    main: Callable[[C, Hosts, Stopping], Awaitable[object]],
    *,
    prog: str,
    description: str,
    preset: Path,
    check: Callable[[C, int | None, int], object],
    expand: Callable[[Sequence[str]], Sequence[str]] = list,
) -> NoReturn:
    """Reads the command line and runs `main` to its end; `check(cfg, slots, num_hosts)` refuses what cannot work.

    With `--shakeout N`, a short run that ends with what holds whom back (`apps/grpo/shakeout.py`).
    """
    slots, num_hosts = launch.leave_spare_ranks()
    shakeout = Shakeout(config_cls)
    cfg = config.parse(
        config_cls,
        default_config=preset,
        prog=prog,
        description=description,
        validate=lambda c: check(c, slots, num_hosts),
        resume_key="run.resume",
        expand=lambda words: shakeout.expand(expand(words)),
    )
    launch.run(lambda hosts, stopping: shakeout.around(main(cfg, hosts, stopping), cfg), launch.bring_up())
