"""Which role runs where: a pure plan from the mesh configuration to processes and device slots.

A *device slot* is one GPU, or on a CPU machine one rank of the trainer. Slots are numbered over all nodes in
order: slot `s` lies on node `s // slots_per_node`. Named pools cut the slots into consecutive ranges; roles
take slots from their pool in the order in which they are listed, and a slot belongs to one replica only. With
`colocate` the generators' slots are the trainer's.

    slots      0    1    2    3  |  4    5    6    7        two nodes with four slots each
    pools      [ train           ]  [ rollout         ]     pools: {train: 4, rollout: 4}
    roles      trainer_0 (procs 4)  generator_0, generator_1 (procs 2, replicas 2)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forge.errors import ConfigError
from forge.supervision import FailurePolicy

DEFAULT_POOL = "default"
ROLES = ("trainer", "generator", "reference")
RESPAWNED = ("trainer", "generator", "reference", "reward_model", "evaluator")
"""Roles whose replicas can be respawned."""
# vLLM starts its own tensor-parallel workers, so one actor process owns all the devices of a replica.
_ONE_PROCESS_ROLES = frozenset({"generator", "evaluator"})


@dataclass
class RoleConfig(FailurePolicy):
    """How many processes a role gets, and from which pool of device slots."""

    procs: int | None = None
    """Ranks of one replica, each on a device slot of its own; a generator's are its tensor-parallel ranks.
    Default: 1, except for the trainer on CPU under torchrun, which takes every slot."""
    replicas: int = 1
    """Independent copies of the role; the trainer has exactly 1."""
    max_replicas: int | None = None
    """Replicas that generators may grow to in a run (python -m apps.scale): their device slots are kept free. Default:
    replicas."""
    pool: str = DEFAULT_POOL
    """Name of the pool of device slots that the role draws from; a role on host cores runs on the pool's nodes."""
    threads: int = 1
    """CPU threads of each process (OMP_NUM_THREADS)."""

    @property
    def places(self) -> int:
        """Replicas that there is room for."""
        return max(self.replicas, self.max_replicas or 0)


@dataclass
class MeshConfig:
    """Where the roles of a run are placed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What a device slot is; auto takes CUDA where a GPU is visible."""
    debug: bool = False
    """Run every actor inside the main process, so that pdb.set_trace() works; one rank a role."""
    slots: int | None = None
    """Device slots of a node. Default: torchrun's --nproc-per-node, else the GPUs, else the CPU cores."""
    colocate: bool = False
    """Trainer and generators take turns on the same device slots: a step interrupts generation. For one GPU, or for as
    many as the trainer has ranks."""
    pools: dict[str, int] = field(default_factory=dict)
    """Named pools and their sizes in device slots; empty means one pool "default" with all slots."""
    trainer: RoleConfig = field(default_factory=RoleConfig)
    """The optimizer's ranks."""
    generator: RoleConfig = field(default_factory=RoleConfig)
    """The inference engines."""
    reference: RoleConfig = field(default_factory=RoleConfig)
    """The frozen reference policy, or a teacher; spawned only where the loss reads its log-probs."""
    critic: RoleConfig = field(default_factory=RoleConfig)
    """The critic of PPO. Without procs it shares the trainer's processes; with as many as the trainer's it has a mesh
    of its own, and both train at the same time."""
    reward_model: RoleConfig = field(default_factory=RoleConfig)
    """The reward model; spawned only where reward.model is set."""
    reward: FailurePolicy = field(default_factory=FailurePolicy)
    """Reward functions and judges; each pool is one process on host cores."""
    replay: FailurePolicy = field(default_factory=FailurePolicy)
    """The replay buffer; one process on host cores, whose state is in its journal."""
    environment: FailurePolicy = field(default_factory=FailurePolicy)
    """Pools of environments, and of agents; each is one process on host cores, whose episodes end with it."""
    evaluator: RoleConfig = field(default_factory=RoleConfig)
    """The inference engines of evaluations; spawned only where evaluation.every is set."""

    @property
    def fixed(self) -> bool:
        """Whether no replica may come or go: all take turns, or share a process."""
        return self.colocate or self.debug


@dataclass(frozen=True)
class ReplicaPlacement:
    """The processes of one replica of a role."""

    name: str
    """Unique in a run, such as "generator_0"; also the name of the replica's mesh."""
    devices: tuple[int, ...]
    """Device slots, numbered over all nodes; empty for a role that runs on host cores."""
    first_host: int
    """Index of the first node."""
    num_hosts: int
    """Consecutive nodes, each with the same number of processes."""
    processes_per_host: int
    """Processes on each of these nodes."""
    envs: tuple[Mapping[str, str], ...]
    """Environment of each process, by rank."""


@dataclass(frozen=True)
class RolePlacement:
    """The replicas of one role."""

    procs: int
    """Ranks of one replica."""
    replicas: tuple[ReplicaPlacement, ...]


@dataclass(frozen=True)
class Placement:
    """The whole plan: what `forge.mesh.Cluster` spawns."""

    device: Literal["cpu", "cuda"]
    roles: Mapping[str, RolePlacement]

    def replicas(self, role: str) -> tuple[ReplicaPlacement, ...]:
        """All of `role`, in order."""
        return self.roles[role].replicas if role in self.roles else (self.replica(role, 0),)

    def batches_leave_the_first_node(self) -> bool:
        """Whether a role that is handed episodes runs on other nodes than the replay, which is the controller's."""
        handed = [r for role, placed in self.roles.items() if role not in _ONE_PROCESS_ROLES for r in placed.replicas]
        return any(replica.first_host + replica.num_hosts > 1 for replica in handed)

    def replica(self, role: str, replica: int) -> ReplicaPlacement:
        """The processes of `role` number `replica`.

        A role that the plan does not know is a host role (replay, reward, a user's own): one process on the
        controller's node, without a device.
        """
        if role not in self.roles:
            name = role if replica == 0 else f"{role}_{replica}"
            return ReplicaPlacement(name, (), 0, 1, 1, (_env(1, self.device, ()),))
        replicas = self.roles[role].replicas
        if not 0 <= replica < len(replicas):
            raise ConfigError(
                f"role {role} has {len(replicas)} replica(s), so there is no replica {replica}; "
                f"raise mesh.{role}.replicas"
            )
        return replicas[replica]


@dataclass
class _Pool:
    """A range of slots that is handed out from its start."""

    name: str
    begin: int
    end: int
    cursor: int
    last_role: str = ""


def detect_device(cfg: MeshConfig, torchrun_slots: int | None) -> tuple[Literal["cpu", "cuda"], int]:
    """(device, device slots of a node) for this machine; torch is asked for GPUs unless `cfg` says cpu."""
    gpus = 0 if cfg.device == "cpu" else _num_gpus()
    if cfg.device == "cuda" and gpus == 0:
        raise ConfigError("mesh.device is cuda, but torch sees no GPU on this machine; use mesh.device=cpu")
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    found = torchrun_slots or gpus or os.cpu_count() or 1
    slots = found if cfg.slots is None else cfg.slots
    if device == "cuda" and slots > gpus:
        raise ConfigError(
            f"{slots} device slots a node (mesh.slots or --nproc-per-node), but torch sees {gpus} GPU(s); "
            "lower the former"
        )
    return device, slots


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def place(
    cfg: MeshConfig, *, torchrun_slots: int | None, num_hosts: int = 1, roles: Sequence[str] = ROLES
) -> Placement:
    """`plan_placement` for this machine: its device, its slots and their names."""
    device, slots = detect_device(cfg, torchrun_slots)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if device == "cuda" else None
    return plan_placement(
        cfg,
        device=device,
        slots=slots,
        torchrun_slots=torchrun_slots,
        roles=roles,
        num_hosts=num_hosts,
        device_names=visible.split(",") if visible else None,
    )


def plan_placement(
    cfg: MeshConfig,
    *,
    device: Literal["cpu", "cuda"],
    slots: int,
    torchrun_slots: int | None,
    roles: Sequence[str] = ROLES,
    num_hosts: int = 1,
    device_names: Sequence[str] | None = None,
) -> Placement:
    """Give every replica of every role in `roles` its processes and device slots.

    device: what a slot is. On "cpu" only the trainer takes slots, the other roles run on host cores.
    slots: device slots of a node.
    torchrun_slots: torchrun's --nproc-per-node, or None under plain python.
    num_hosts: nodes of the run.
    device_names: what CUDA_VISIBLE_DEVICES calls the slots of a node; default "0", "1", ...
    Raises ConfigError where the plan cannot work; nothing has been started by then.
    """
    _check(cfg, roles, slots)
    total = slots * num_hosts
    pools = _make_pools(cfg, total)
    names = tuple(device_names) if device_names else tuple(str(index) for index in range(slots))
    if len(names) < slots:
        raise ConfigError(
            f"{slots} device slots a node, but CUDA_VISIBLE_DEVICES lists {len(names)} device(s); lower mesh.slots"
        )
    placed: dict[str, RolePlacement] = {}
    for role in roles:
        role_cfg: RoleConfig = getattr(cfg, role)
        if role_cfg.pool not in pools:
            raise ConfigError(
                f"mesh.{role}.pool is {role_cfg.pool!r}, which is no pool of mesh.pools: {', '.join(pools)}"
            )
        pool = pools[role_cfg.pool]
        takes_slots = device == "cuda" or role == "trainer"
        all_slots = role == "trainer" and device == "cpu" and torchrun_slots is not None and not cfg.debug
        procs = role_cfg.procs or (pool.end - pool.begin if all_slots else 1)
        if takes_slots:
            if cfg.colocate and role == "generator":
                starts = _share_slots(role_cfg, procs, placed["trainer"].replicas[0].devices, slots)
            else:
                starts = _take_slots(role, role_cfg, procs, pool, slots)
            replicas = tuple(
                _on_slots(role, index, start, procs, slots, device, role_cfg.threads, names)
                for index, start in enumerate(starts)
            )
        else:
            nodes = range(pool.begin // slots, (pool.end - 1) // slots + 1)
            replicas = tuple(
                _on_cores(role, index, procs, nodes, device, role_cfg.threads) for index in range(role_cfg.places)
            )
        placed[role] = RolePlacement(procs, replicas)
    return Placement(device, placed)


def _check(cfg: MeshConfig, roles: Sequence[str], slots: int) -> None:
    """Raise ConfigError for numbers that no machine could satisfy."""
    if slots < 1:
        raise ConfigError(f"mesh.slots must be >= 1, got {slots}")
    for pool, size in cfg.pools.items():
        if size < 1:
            raise ConfigError(f"mesh.pools.{pool} must be >= 1 device slot, got {size}")
    if cfg.colocate:
        _check_colocated(cfg, roles)
    cfg.reward.check("mesh.reward")
    cfg.replay.check("mesh.replay")
    cfg.environment.check("mesh.environment")
    for role in roles:
        role_cfg: RoleConfig = getattr(cfg, role)
        role_cfg.check(f"mesh.{role}")
        if role_cfg.on_failure == "respawn" and role not in RESPAWNED:
            raise ConfigError(
                f"mesh.{role}.on_failure is respawn, but the {role}'s state is lost with its process; use end, and "
                "--resume to go on"
            )
        for name in ("procs", "replicas", "threads"):
            value = getattr(role_cfg, name)
            if value is not None and value < 1:
                raise ConfigError(f"mesh.{role}.{name} must be >= 1, got {value}")
        if role in ("trainer", "critic") and role_cfg.replicas != 1:
            raise ConfigError(
                f"mesh.{role}.replicas must be 1, got {role_cfg.replicas}; "
                f"raise mesh.trainer.procs to shard the {role} over more devices"
            )
        if (most := role_cfg.max_replicas) is not None:
            why_not = (
                "only generators come and go"
                if role != "generator"
                else f"it must be >= mesh.{role}.replicas, {role_cfg.replicas}"
                if most < role_cfg.replicas
                else "with mesh.debug or mesh.colocate none comes or goes"
                if cfg.fixed
                else ""
            )
            if why_not:
                raise ConfigError(f"mesh.{role}.max_replicas is {most}, but {why_not}; leave it out")
        if cfg.debug and (role_cfg.procs or 1) > 1:
            raise ConfigError(
                f"mesh.debug runs each role as one rank in the main process, but mesh.{role}.procs is "
                f"{role_cfg.procs}; use 1"
            )


def _make_pools(cfg: MeshConfig, total: int) -> dict[str, _Pool]:
    """Consecutive ranges of the `total` slots, in the order of the config."""
    sizes = dict(cfg.pools) or {DEFAULT_POOL: total}
    wanted = sum(sizes.values())
    if wanted > total:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ConfigError(f"mesh.pools ask for {wanted} device slots ({listed}), but there are {total}")
    pools: dict[str, _Pool] = {}
    begin = 0
    for name, size in sizes.items():
        pools[name] = _Pool(name, begin, begin + size, begin)
        begin += size
    return pools


def _take_slots(role: str, cfg: RoleConfig, procs: int, pool: _Pool, slots: int) -> list[int]:
    """First slot of each replica; advances the pool's cursor past them."""
    size = pool.end - pool.begin
    if procs * cfg.places > size:
        option = "max_replicas" if cfg.places > cfg.replicas else "replicas"
        raise ConfigError(
            f"{role} needs {procs * cfg.places} device(s) (mesh.{role}.procs={procs} x mesh.{role}.{option}="
            f"{cfg.places}), but pool {pool.name!r} has {size}; lower them, or raise --nproc-per-node or mesh.slots"
        )
    starts = []
    for _ in range(cfg.places):
        start = _fit(role, pool.cursor, procs, slots)
        if start + procs > pool.end:
            if not pool.last_role or pool.last_role == role:
                raise ConfigError(
                    f"{role} replicas of {procs} device(s) do not fit into pool {pool.name!r} (slots "
                    f"{pool.begin}-{pool.end - 1}) without crossing a node's end; a node has {slots} slots"
                )
            raise ConfigError(
                f"{pool.last_role} and {role} would share a device: pool {pool.name!r} has {size} device(s), "
                f"and {role} needs {procs * cfg.places} beside those taken; add devices, lower procs or "
                f"replicas of mesh.{role} or mesh.{pool.last_role}, or let trainer and generator take turns "
                "(mesh.colocate=true)"
            )
        starts.append(start)
        pool.cursor = start + procs
    pool.last_role = role
    return starts


def _check_colocated(cfg: MeshConfig, roles: Sequence[str]) -> None:
    if not {"trainer", "generator"} <= set(roles):
        raise ConfigError(
            f"mesh.colocate is true, but this run has the roles {', '.join(roles)} only: nobody takes turns; leave it "
            "false"
        )
    if cfg.trainer.pool != cfg.generator.pool:
        raise ConfigError(
            f"mesh.colocate is true, mesh.trainer.pool {cfg.trainer.pool!r} and mesh.generator.pool "
            f"{cfg.generator.pool!r}: they are to share their devices; name the same pool"
        )
    for role in ("trainer", "generator"):
        if getattr(cfg, role).on_failure == "respawn":
            raise ConfigError(
                f"mesh.colocate is true, mesh.{role}.on_failure respawn: a {role} cannot start on devices that it "
                "takes turns on; use end"
            )
    if "critic" in roles:
        raise ConfigError(
            f"mesh.colocate is true, mesh.critic.procs {cfg.critic.procs}: a critic on a mesh of its own takes no "
            "turns; leave the latter out, the critic shares the trainer's processes then"
        )


def _share_slots(cfg: RoleConfig, procs: int, devices: Sequence[int], slots: int) -> list[int]:
    """First slot of each generator replica, on the trainer's `devices`."""
    starts, cursor = [], devices[0]
    for _ in range(cfg.replicas):
        starts.append(_fit("generator", cursor, procs, slots))
        cursor = starts[-1] + procs
    if cursor > devices[-1] + 1:
        raise ConfigError(
            f"mesh.colocate is true, the generators need {procs * cfg.replicas} device(s) (mesh.generator.procs="
            f"{procs} x mesh.generator.replicas={cfg.replicas}, none across the end of a node of {slots}), the trainer "
            f"has {len(devices)}; lower them or raise mesh.trainer.procs"
        )
    return starts


def _fit(role: str, cursor: int, procs: int, slots: int) -> int:
    """The first slot at or after `cursor` where a replica lies on one node, or fills whole nodes."""
    into_node = cursor % slots
    if into_node + procs <= slots:
        return cursor
    if procs > slots and procs % slots:
        raise ConfigError(
            f"mesh.{role}.procs={procs} is more than the {slots} slots of a node and no multiple of them; "
            "a replica lies on one node or fills whole nodes"
        )
    return cursor if into_node == 0 else cursor + slots - into_node


def _on_slots(
    role: str,
    index: int,
    start: int,
    procs: int,
    slots: int,
    device: Literal["cpu", "cuda"],
    threads: int,
    names: Sequence[str],
) -> ReplicaPlacement:
    """A replica that owns the slots `start .. start + procs - 1`."""
    devices = tuple(range(start, start + procs))
    num_hosts = max(1, procs // slots)
    on_host = [names[slot % slots] for slot in devices]
    if role in _ONE_PROCESS_ROLES:
        if num_hosts > 1:
            raise ConfigError(
                f"mesh.{role}.procs={procs} spans {num_hosts} nodes, but a {role} lives on one; "
                f"use at most {slots} and raise mesh.{role}.replicas"
            )
        per_host, groups = 1, [on_host]
    else:
        per_host, groups = procs // num_hosts, [[name] for name in on_host]
    envs = tuple(_env(threads, device, group) for group in groups)
    return ReplicaPlacement(f"{role}_{index}", devices, start // slots, num_hosts, per_host, envs)


def _on_cores(
    role: str, index: int, procs: int, nodes: Sequence[int], device: Literal["cpu", "cuda"], threads: int
) -> ReplicaPlacement:
    """A replica without device slots; replicas go round the `nodes` of their pool."""
    per_host = 1 if role in _ONE_PROCESS_ROLES else procs
    envs = tuple(_env(threads, device, ()) for _ in range(per_host))
    return ReplicaPlacement(f"{role}_{index}", (), nodes[index % len(nodes)], 1, per_host, envs)


def _env(threads: int, device: Literal["cpu", "cuda"], names: Sequence[str]) -> dict[str, str]:
    """What a process may use; on CUDA a process without a slot sees no GPU at all."""
    env = {"OMP_NUM_THREADS": str(threads)}
    if device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return env
