"""Two policies on one cluster: role `r` of policy `p` is called `p_r` there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from forge.errors import ConfigError
from forge.mesh import Cluster
from forge.placement import Placement, RolePlacement
from forge.supervision import Guard


def side_by_side(plans: Mapping[str, Placement]) -> Placement:
    """One plan of several, by the policy's name. Pure. Raises ConfigError where two want the same GPU."""
    roles: dict[str, RolePlacement] = {}
    taken: dict[int, str] = {}
    for policy, plan in plans.items():
        for role, placed in plan.roles.items():
            replicas = tuple(replace(r, name=f"{policy}_{r.name}") for r in placed.replicas)
            roles[f"{policy}_{role}"] = RolePlacement(placed.procs, replicas)
            for device in {d for r in replicas for d in r.devices} if plan.device == "cuda" else ():
                if taken.setdefault(device, policy) != policy:
                    raise ConfigError(
                        f"{taken[device]} and {policy} would share device {device}; give each a pool of its own, such "
                        "as --mesh.pools='{proposer: 4, solver: 4}'"
                    )
    return Placement(next(iter(plans.values())).device, roles)


@dataclass(frozen=True)
class Part:
    """The part of the cluster that is one policy's, with the roles' own names (`apps.grpo.spawn.Meshes`)."""

    cluster: Cluster
    policy: str

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """See `Cluster.device`."""
        return self.cluster.device

    def procs(self, role: str) -> int:
        """See `Cluster.procs`."""
        return self.cluster.procs(f"{self.policy}_{role}")

    def replicas(self, role: str) -> int:
        """See `Cluster.replicas`."""
        return self.cluster.replicas(f"{self.policy}_{role}")

    def same_host(self, *roles: str) -> bool:
        """See `Cluster.same_host`."""
        return self.cluster.same_host(*(f"{self.policy}_{role}" for role in roles))

    async def begin(self, guard: Guard) -> str:
        """See `Cluster.begin`."""
        return await self.cluster.begin(guard)

    async def release(self, guard: Guard, goodbye: Callable[[], Awaitable[object]]) -> None:
        """See `Cluster.release`."""
        await self.cluster.release(guard, goodbye)

    async def spawn(self, role: str, actor_class: type[Any], *args: Any, **kwargs: Any) -> Any:
        """See `Cluster.spawn`."""
        return await self.cluster.spawn(f"{self.policy}_{role}", actor_class, *args, **kwargs)
