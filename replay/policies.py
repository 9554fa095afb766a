"""In which order groups are trained. Pure, and yours to replace: `replay.policy=module:function`.

A policy names groups, the preferred one first. The batch is the first B of them that leave room for the groups
whose deadline is near (`replay/staleness.py`), so a policy decides when a group is trained, never whether, and
none can break the bound. Naming a group that still runs means to wait for it; those left out come last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from replay.staleness import Ticket
from replay.storage import Record


@dataclass(slots=True)
class Slot:
    """One group on its way, as policies see it."""

    ticket: Ticket
    since: float
    """Clock reading in seconds when it was reserved."""
    version: int
    """The oldest version of its tokens; while it runs, or trains no token, that of its ticket."""
    record: Record | None = None
    """None while it is running."""
    added: float = 0.0
    """Clock reading in seconds when it was complete."""
    uses: int = 0
    """Batches that it was part of. From the first on it holds no slot."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy decides upon. It reads, and changes nothing."""

    groups: Mapping[int, Slot]
    """By number, in the order of reservation: running, complete, and trained ones that may be used again."""
    policy_version: int
    """Where the trainer stands."""
    max_staleness: int
    groups_per_step: int
    seed: int

    def rng(self) -> random.Random:
        """Draws that depend on the seed and `policy_version` alone, however often the buffer asks."""
        return random.Random(f"{self.seed}/{self.policy_version}")


Policy = Callable[[View], Iterable[int]]


def fifo(view: View) -> Iterator[int]:
    """Complete groups in the order of reservation; it waits only for running ones that are due."""
    return (number for number, slot in view.groups.items() if slot.record is not None)


def strict(view: View) -> Iterator[int]:
    """The order of reservation: a batch is the B oldest groups, and waits for all of them."""
    return iter(view.groups)


def uniform(view: View) -> list[int]:
    """Complete groups in random order."""
    rng = view.rng()
    draws = {number: rng.random() for number in view.groups}
    return _complete_by(view, lambda number, _slot, _record: draws[number])


def advantage(view: View) -> list[int]:
    """Complete groups, the largest mean magnitude of advantages first."""
    return _complete_by(view, lambda _number, _slot, record: -record.magnitude)


def staleness(view: View) -> list[int]:
    """Complete groups, the oldest version first."""
    return _complete_by(view, lambda _number, slot, _record: slot.version)


def _complete_by(view: View, key: Callable[[int, Slot, Record], float]) -> list[int]:
    keys = {n: key(n, slot, slot.record) for n, slot in view.groups.items() if slot.record is not None}
    return sorted(keys, key=keys.__getitem__)


POLICIES: dict[str, Policy] = {
    "fifo": fifo,
    "strict": strict,
    "uniform": uniform,
    "advantage": advantage,
    "staleness": staleness,
}
