"""Groups on their way to the trainer: reserved, complete, trained or dropped. Pure: no waiting, no processes.

reserve -> running -- add --> queued -- sample --> trained (slot held until release)
              |                 |
              +-- fail          +-- too stale, or degenerate in mode "drop": slot free at once
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Literal

from forge.errors import RewardError, StalenessError
from replay.staleness import Admission, Ticket
from replay.storage import Record


@dataclass(slots=True)
class Slot:
    """A live reservation."""

    ticket: Ticket
    since: float
    """Clock reading in seconds when it was reserved."""
    record: Record | None = None
    """None while it is running."""


Policy = Callable[[Mapping[int, Slot], int], Sequence[int] | None]
"""Chooses `count` sequence numbers among the live slots (in reservation order), or None to wait on."""


def strict_fifo(live: Mapping[int, Slot], count: int) -> Sequence[int] | None:
    """The `count` oldest reservations, once all are complete. The proof of the bound rests on this order."""
    head = list(islice(live.items(), count))
    if len(head) < count or any(slot.record is None for _, slot in head):
        return None
    return [seq for seq, _ in head]


@dataclass(slots=True)
class Counts:
    """What happened so far; the difference of two readings is what happened between them."""

    groups_reserved: int = 0
    groups_trained: int = 0
    groups_failed: int = 0
    groups_expired: int = 0
    groups_degenerate: int = 0
    episodes_trained: int = 0
    episodes_dropped: int = 0
    tokens_trained: int = 0
    tokens_wasted: int = 0

    def since(self, earlier: Counts) -> Counts:
        """This reading less an earlier one."""
        return Counts(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class ReplayBuffer:
    """The groups of one run, in reservation order. Invariant: every live sequence number holds one slot."""

    def __init__(
        self,
        admission: Admission,
        *,
        degenerate: Literal["keep", "drop"] = "keep",
        max_degenerate_in_a_row: int = 256,
        reward_name: str = "the reward",
        policy: Policy = strict_fifo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = admission
        self.counts = Counts()
        self._live: dict[int, Slot] = {}
        self._drop_degenerate = degenerate == "drop"
        self._max_degenerate_in_a_row = max_degenerate_in_a_row
        self._degenerate_in_a_row = 0
        self._reward_name = reward_name
        self._policy = policy
        self._clock = clock

    @property
    def num_running(self) -> int:
        """Groups reserved and not yet added."""
        return len(self._live) - self.num_queued

    @property
    def num_queued(self) -> int:
        """Complete groups that no batch has taken."""
        return sum(slot.record is not None for slot in self._live.values())

    def reserve(self) -> Ticket | None:
        """A ticket for one group, or None while no slot is free."""
        ticket = self.admission.reserve()
        if ticket is not None:
            self._live[ticket.seq] = Slot(ticket, self._clock())
            self.counts.groups_reserved += 1
        return ticket

    def add(self, ticket: Ticket, record: Record) -> None:
        """The ticket's group is complete; it is queued, or dropped when it is degenerate or already too old.

        Raises StalenessError when the ticket is not running, RewardError when too many degenerate groups
        were dropped in a row.
        """
        slot = self._live.get(ticket.seq)
        if slot is None or slot.record is not None:
            raise StalenessError(
                f"ticket {ticket.seq} is not running: it was added, failed or never reserved; "
                "reserve a ticket for each group and add it once"
            )
        slot.record = record
        if record.degenerate:
            self.counts.groups_degenerate += 1
        self._degenerate_in_a_row = self._degenerate_in_a_row + 1 if record.degenerate else 0
        if record.degenerate and self._drop_degenerate:
            self._drop(ticket.seq)
            self._check_reward_signal(record)
        elif record.is_stale(self.admission.next_version, self.admission.max_staleness):
            self._expire(ticket.seq)

    def fail(self, ticket: Ticket) -> None:
        """The ticket's group will never come: its slot is free at once. Harmless once it is done."""
        slot = self._live.get(ticket.seq)
        if slot is not None and slot.record is None:
            self._give_back(ticket.seq)
            self.counts.groups_failed += 1

    def release(self, version: int) -> None:
        """Every serving replica holds `version`: frees the slots of the batches up to it."""
        self.admission.release(version)

    def sample(self, policy_version: int) -> list[Record] | None:
        """The batch that turns `policy_version` into the next one, in reservation order, or None: not yet.

        Groups that are too old for it are dropped first. Raises StalenessError when `policy_version` went
        back, or when a group claims tokens of a version that does not exist yet.
        """
        self.admission.advance(policy_version)
        bound = self.admission.max_staleness
        for seq, slot in list(self._live.items()):
            if slot.record is not None and slot.record.is_stale(policy_version, bound):
                self._expire(seq)
        chosen = self._policy(self._live, self.admission.groups_per_step)
        if chosen is None:
            return None
        records = [self._record(seq) for seq in chosen]
        newest = max(record.newest for record in records)
        if newest > policy_version:
            raise StalenessError(
                f"a group holds tokens of version {newest}, the trainer stands at {policy_version}; "
                "sample with the version that the trainer reports, publish none before it is made"
            )
        for seq in chosen:
            del self._live[seq]
        self.admission.consume(policy_version)
        self.counts.groups_trained += len(records)
        self.counts.episodes_trained += sum(len(record.rewards) for record in records)
        self.counts.tokens_trained += sum(record.num_tokens for record in records)
        return records

    def describe_slots(self) -> str:
        """Who holds the slots, for the text of a deadline."""
        admission = self.admission
        trained = list(range(admission.released + 1, admission.next_version + 1))
        return (
            f"of {admission.slots} slots (max_staleness {admission.max_staleness}, "
            f"{admission.groups_per_step} groups a step) {admission.unreleased} are held by batches whose "
            f"weights are not released yet (versions: {_some(trained)}; released: {admission.released}), "
            f"{self.num_queued} by queued groups, {self.num_running} by running groups "
            f"({self._running(self._live.values())})"
        )

    def describe_missing(self) -> str:
        """Which groups the next batch lacks, for the text of a deadline."""
        wanted = self.admission.groups_per_step
        head = list(islice(self._live.values(), wanted))
        complete = sum(slot.record is not None for slot in head)
        return (
            f"{complete} of the next {wanted} groups are complete; running: {self._running(head)}; "
            f"not reserved by any rollout loop yet: {wanted - len(head)}"
        )

    def _running(self, slots: Iterable[Slot]) -> str:
        now = self._clock()
        return _some([f"seq {s.ticket.seq} since {now - s.since:.1f} s" for s in slots if s.record is None])

    def _record(self, seq: int) -> Record:
        record = self._live[seq].record
        assert record is not None, "the policy chose a group that is still running"
        return record

    def _check_reward_signal(self, record: Record) -> None:
        if self._degenerate_in_a_row >= self._max_degenerate_in_a_row:
            raise RewardError(
                f"{self._degenerate_in_a_row} groups in a row were dropped because {self._reward_name} gave "
                f"every episode of a group the same value (the last: {record.rewards[0]:g}), the limit is "
                f"replay.max_degenerate_in_a_row={self._max_degenerate_in_a_row}; check the reward on a few "
                "completions, choose an easier task, or train such groups with grpo.degenerate=keep"
            )

    def _expire(self, seq: int) -> None:
        self._drop(seq)
        self.counts.groups_expired += 1

    def _drop(self, seq: int) -> None:
        record = self._record(seq)
        self.counts.episodes_dropped += len(record.rewards)
        self.counts.tokens_wasted += record.num_tokens
        self._give_back(seq)

    def _give_back(self, seq: int) -> None:
        del self._live[seq]
        self.admission.give_back()


def _some(items: Sequence[object], shown: int = 8) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more if items else "none"
