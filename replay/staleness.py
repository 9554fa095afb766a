"""How many groups may be under way, and which of them a batch must hold, so that no trained token is too old.

Symbols: S = max_staleness, B = groups per batch, w = window, g = the newest version that every serving replica
holds (`released`), k = the version that the next batch is sampled at (`next_version`), L = groups
that are reserved and neither trained nor given up (`live`). A group whose oldest token has version v
(while it runs: whose ticket has it) may be trained at d = v + S at the latest: its deadline.

The law, F: for every d >= k, at most (d - k + 1) * B live groups have a deadline <= d, which is as many
as the batches k..d hold. Two rules keep it. A group is admitted if and only if

    L + (k - g) * B < M        M = (S + 1) * B - W,  W = floor(w * S * B)

which reads as a count of slots: M of them, one held by each live group and B by each batch whose weights the
replicas do not hold yet. The law allows W = 0; the W slots that a window withholds are places in batches for groups
that were reserved after one that still runs. And a batch holds, for every d, at least the `needs` of d. Any B groups
that do so may be taken, in any order. `replay/README.md` has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from forge.errors import ConfigError, StalenessError
from replay.events import Partial


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to add one group: its number in the order of reservations, and how old its tokens may be."""

    seq: int
    version: int
    """No token of the group is older."""
    prompt: Any = field(default=None, compare=False)
    """What the group is to be made of, where the replay draws the prompts."""
    begun: Mapping[int, Partial] = field(default_factory=dict, compare=False)
    """The tokens that its unfinished episodes had before a crash, by the episode's place in the group."""


def num_slots(max_staleness: int, groups_per_step: int, window: float = 0.0) -> int:
    """(S + 1) * B less the share `window` of S * B, in whole groups: never below B, and never above what F allows."""
    # As it is written: 0.29 of 100 groups are 29, though the product of the floats is below that.
    withheld = math.floor(Fraction(str(window)) * max_staleness * groups_per_step)
    return (max_staleness + 1) * groups_per_step - withheld


@dataclass(frozen=True, slots=True)
class Known:
    """What the users of a replay know of it when its process has died."""

    tickets: Sequence[Ticket]
    """Given out, and neither added nor failed: somebody works on them."""
    released: int
    """The newest version that was released."""
    served: int
    """The newest version whose batch has arrived."""
    next: int
    """The version that the trainer stands at; smaller than `served` + 1 after a rewind."""
    closed: bool = False


class Admission:
    """Counts slots. Pure: no clock, no waiting, no groups.

    `reserve` charges a slot. `give_back` frees it at once (dropped, degenerate, failed). `consume`
    hands slots to the batch that makes version k + 1, and `release(v)` frees those of every
    batch that made a version <= v.
    """

    def __init__(self, max_staleness: int, groups_per_step: int, start_version: int = 0, window: float = 0.0) -> None:
        if max_staleness < 0:
            raise ConfigError(f"max_staleness must be >= 0, got {max_staleness}; 0 is strictly on-policy")
        if groups_per_step < 1:
            raise ConfigError(f"groups_per_step must be >= 1, got {groups_per_step}; a batch needs a group")
        if not 0 <= window <= 1:
            raise ConfigError(f"window must lie in [0, 1], got {window}; 0 hands out all slots")
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.window = window
        self.slots = num_slots(max_staleness, groups_per_step, window)
        """All slots, free or not."""
        self.released = start_version
        self.next_version = start_version
        self.live = 0
        self._next_seq = 0

    @property
    def unreleased(self) -> int:
        """Slots of trained batches whose weights the replicas do not hold yet: (k - g) * B."""
        return (self.next_version - self.released) * self.groups_per_step

    @property
    def free(self) -> int:
        """Slots that `reserve` can still hand out; 0 also while more are held than there are."""
        return max(0, self.slots - self.live - self.unreleased)

    def reserve(self, prompt: Any = None) -> Ticket | None:
        """The next ticket, with `prompt`, or None while no slot is free."""
        if self.free == 0:
            return None
        self.live += 1
        self._next_seq += 1
        return Ticket(self._next_seq - 1, self.released, prompt)

    def readmit(self, ticket: Ticket) -> None:
        """A ticket that was given out before, by an Admission whose state of then is lost."""
        self.live += 1
        self._next_seq = max(self._next_seq, ticket.seq + 1)

    @property
    def next_seq(self) -> int:
        """The number of the next ticket."""
        return self._next_seq

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

    def consume(self, policy_version: int, num_live: int | None = None) -> None:
        """The batch that turns `policy_version` into the next one takes `num_live` live groups, B if left out.

        It takes fewer where it holds groups that were trained before; it holds B slots all the same.
        """
        self.advance(policy_version)
        taken = self.groups_per_step if num_live is None else num_live
        assert self.live >= taken, "a batch was taken from fewer groups than it holds"
        self.live -= taken
        self.next_version += 1

    def release(self, version: int) -> None:
        """Every serving replica holds `version` or newer. Older calls change nothing."""
        self.released = max(self.released, version)
        self.next_version = max(self.next_version, version)

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs: the versions, the live groups and the next number."""
        return {
            "released": self.released,
            "next_version": self.next_version,
            "live": self.live,
            "next_seq": self._next_seq,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from `state`; S, B and the window stay those of this object."""
        self.released = state["released"]
        self.next_version = state["next_version"]
        self.live = state["live"]
        self._next_seq = state["next_seq"]


def needs(live: Mapping[int, int], policy_version: int, max_staleness: int, count: int) -> dict[int, int]:
    """How many groups of version v or older the batch at `policy_version` must hold: {v: number}, v ascending.

    `live` has the number of live groups of each version. With d = v + S: all that the batches of the versions
    after `policy_version`, up to d, have no place for. Under F it is `count` at most; where a caller broke F (a
    trainer that jumps, tokens older than their ticket) it is cut to that, and `ReplayBuffer` drops what expires.
    """
    needed: dict[int, int] = {}
    total = 0
    for version in sorted(live):
        total += live[version]
        later = max(0, version + max_staleness - policy_version) * count
        needed[version] = min(count, max(0, total - later))
    return needed


def choose(
    order: Iterable[int], version_of: Callable[[int], int | None], needed: Mapping[int, int], count: int
) -> list[int]:
    """The first `count` groups of `order` that leave room for what `needed` demands; fewer when `order` ends.

    `version_of` gives a group's version, None for a group that holds no slot and meets no need. A group is
    passed over only when every place that is left must go to older ones; that stays so, hence one pass will do.
    """
    missing = {version: lacking for version, lacking in needed.items() if lacking > 0}
    chosen: list[int] = []
    for number in order:
        if len(chosen) == count:
            break
        version, left = version_of(number), count - len(chosen) - 1
        if any(lacking > left for v, lacking in missing.items() if version is None or v < version):
            continue
        chosen.append(number)
        if version is not None:
            for v in missing:
                if v >= version:
                    missing[v] -= 1
    return chosen
