"""How many groups may be under way, so that no trained token is older than the bound.

Symbols: S = max_staleness, B = groups per batch, g = the newest version that every serving replica
holds (`released`), k = the version that the next batch is sampled at (`next_version`), L = groups
that are reserved and neither trained nor given up (`live`).

The law: groups are trained in the order of their reservations, B at a time. A group reserved now
has L live groups before it, so it is trained at version k + L // B at the latest, from tokens no
older than g. It is admitted if and only if

    k + L // B - g <= S        which is        L + (k - g) * B < (S + 1) * B.

The right side reads as a count of slots: (S + 1) * B of them, one held by each live group and B by
each batch whose weights the replicas do not hold yet. `replay/README.md` has the proof.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.errors import ConfigError, StalenessError


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to add one group: its place in the order, and the oldest version its tokens may have."""

    seq: int
    version: int


class Admission:
    """Counts slots. Pure: no clock, no waiting, no groups.

    `reserve` charges a slot. `give_back` frees it at once (dropped, degenerate, failed). `consume`
    hands B of them to the batch that makes version k + 1, and `release(v)` frees those of every
    batch that made a version <= v.
    """

    def __init__(self, max_staleness: int, groups_per_step: int, start_version: int = 0) -> None:
        if max_staleness < 0:
            raise ConfigError(f"max_staleness must be >= 0, got {max_staleness}; 0 is strictly on-policy")
        if groups_per_step < 1:
            raise ConfigError(f"groups_per_step must be >= 1, got {groups_per_step}; a batch needs a group")
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.released = start_version
        self.next_version = start_version
        self.live = 0
        self._next_seq = 0

    @property
    def slots(self) -> int:
        """All slots, free or not: (S + 1) * B."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def unreleased(self) -> int:
        """Slots of trained batches whose weights the replicas do not hold yet: (k - g) * B."""
        return (self.next_version - self.released) * self.groups_per_step

    @property
    def free(self) -> int:
        """Slots that `reserve` can still hand out; 0 also while the trainer is more than S ahead."""
        return max(0, self.slots - self.live - self.unreleased)

    def reserve(self) -> Ticket | None:
        """The next place in the order, or None while no slot is free."""
        if self.free == 0:
            return None
        self.live += 1
        self._next_seq += 1
        return Ticket(self._next_seq - 1, self.released)

    def give_back(self) -> None:
        """A live group will never be trained: its slot is free at once."""
        assert self.live > 0, "a slot was returned twice"
        self.live -= 1

    def advance(self, policy_version: int) -> None:
        """The trainer stands at `policy_version`. Raises StalenessError when that is a step back."""
        if policy_version < self.next_version:
            raise StalenessError(
                f"policy_version {policy_version} is behind {self.next_version}, which an earlier batch or "
                "release implies; pass the version that the trainer reports after its last step"
            )
        self.next_version = policy_version

    def consume(self, policy_version: int) -> None:
        """B live groups become the batch that turns `policy_version` into the next one."""
        self.advance(policy_version)
        assert self.live >= self.groups_per_step, "a batch was taken from fewer groups than it holds"
        self.live -= self.groups_per_step
        self.next_version += 1

    def release(self, version: int) -> None:
        """Every serving replica holds `version` or newer. Older calls change nothing."""
        self.released = max(self.released, version)
        self.next_version = max(self.next_version, version)
