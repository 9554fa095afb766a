"""The configuration of two policies: GRPO's for each of them, and what they share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from apps.grpo.config import AppConfig, plan_whole_groups
from apps.two_agents.meshes import side_by_side
from forge import registry
from forge.errors import ConfigError
from forge.placement import DEFAULT_POOL, MeshConfig, Placement, RoleConfig
from forge.run_log import RunConfig, check_run
from forge.supervision import FailurePolicy

POLICIES = ("proposer", "solver")


@dataclass
class EpisodeConfig:
    """What an episode is."""

    task: str = "apps.two_agents.digits:to_task"
    """module:function from a proposal's text to the solver's row, as those of data.task are; None for no legal task."""
    patience_s: float = 0.2
    """Seconds that a trainer waits for a batch before its episodes go on without a slot of the other policy's: what
    that one samples for them is not trained then."""
    timeout_s: float = 1200.0
    """Seconds that an episode waits for the other policy before the run fails; longer than any step takes."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit; imports the function."""
        registry.load(self.task, "episode.task")
        if not self.patience_s >= 0:
            raise ConfigError(f"episode.patience_s must be >= 0, got {self.patience_s}; 0 waits for nobody")
        if not self.timeout_s > 0:
            raise ConfigError(f"episode.timeout_s must be > 0, got {self.timeout_s}; leave it out for the default")


@dataclass
class SharedMeshConfig:
    """Where both policies are placed; which roles each has is said by proposer.mesh and solver.mesh."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What a device slot is; auto takes CUDA where a GPU is visible."""
    debug: bool = False
    """Run every actor inside the main process, so that pdb.set_trace() works; one rank a role."""
    slots: int | None = None
    """Device slots of a node. Default: torchrun's --nproc-per-node, else the GPUs, else the CPU cores."""
    pools: dict[str, int] = field(default_factory=dict)
    """Named pools and their sizes in device slots. Roles of a policy draw from the pool with its name, such as
    {proposer: 4, solver: 4}, unless they name another."""


@dataclass
class TwoAgentsConfig:
    """A proposer and a solver, trained in the same episodes."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where the run is written and what it shows; each policy has a folder in it."""
    mesh: SharedMeshConfig = field(default_factory=SharedMeshConfig)
    """Where the policies are placed."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """What an episode is."""
    proposer: AppConfig = field(default_factory=AppConfig)
    """The policy that writes tasks. Its data.task gives what it is asked; its rewards see as a sample's `answer` the
    rewards of the solver's answers, None for no legal task."""
    solver: AppConfig = field(default_factory=AppConfig)
    """The policy that answers them, grpo.group_size times each. Its data are the proposals, not data.task."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        check_run(self.run)
        self.episode.validate()
        for name in POLICIES:
            policy: AppConfig = getattr(self, name)
            for section, shared in (("run", RunConfig), ("mesh", SharedMeshConfig)):
                own = getattr(policy, section)
                for key in fields(shared):
                    value = getattr(own, key.name)
                    if value != getattr(type(own)(), key.name):
                        raise ConfigError(
                            f"{name}.{section}.{key.name} is {value}, but both policies share it; "
                            f"set {section}.{key.name}"
                        )


def policies(cfg: TwoAgentsConfig, folder: Path | None = None) -> dict[str, AppConfig]:
    """The configuration of each policy by name, with what is shared, and its run in `folder`/NAME. Pure."""
    folder = folder or (Path(cfg.run.resume) if cfg.run.resume else None)
    out = {}
    for name in POLICIES:
        policy: AppConfig = getattr(cfg, name)
        own = None if folder is None else str(folder / name)
        run = replace(cfg.run, dir=own, resume=own if cfg.run.resume else None)
        out[name] = replace(policy, run=run, mesh=_mesh(cfg.mesh, policy.mesh, name), data=cfg.proposer.data)
    return out


def _mesh(shared: SharedMeshConfig, own: MeshConfig, name: str) -> MeshConfig:
    every = {f.name: getattr(own, f.name) for f in fields(own) if isinstance(getattr(own, f.name), FailurePolicy)}
    # Two policies wait for each other in an episode: what a death does to that was never tried.
    roles = {role: policy.settled(possible=False) for role, policy in every.items()}
    if name in shared.pools:
        at_home = {r: c for r, c in roles.items() if isinstance(c, RoleConfig) and c.pool == DEFAULT_POOL}
        roles |= {role: replace(placed, pool=name) for role, placed in at_home.items()}
    common = {f.name: getattr(shared, f.name) for f in fields(shared)}
    return replace(own, **common, **roles)


def plan_run(cfg: TwoAgentsConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """Checks the whole configuration and says where every role of both goes; raises ConfigError. Starts nothing."""
    cfg.validate()
    plans = {}
    for name, policy in policies(cfg).items():
        try:
            plans[name] = plan_whole_groups(policy, torchrun_slots, num_hosts)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return side_by_side(plans)


def folder_of(cfg: TwoAgentsConfig) -> Path:
    """The folder that the run is written to, which may not exist yet."""
    return Path(cfg.run.resume or cfg.run.dir or f"runs/two_agents-{time.strftime('%Y%m%d-%H%M%S')}")
