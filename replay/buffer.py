"""Groups on their way to the trainer: reserved, complete, trained or dropped. Pure: no waiting, no processes.

reserve -> running -- add --> queued -- sample --> trained (slots held until release) -> perhaps again
              |                 |
              +-- fail          +-- too stale, or degenerate in mode "drop": slot free at once
              +-- drop_stragglers: slot free at once; a late add is counted, nothing else
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, Literal

from forge.errors import ConfigError, RewardError, StalenessError
from replay.events import Add, Event, Gone, Reserve
from replay.metrics import OUTCOMES, Counts
from replay.policies import Policy, Slot, View, fifo
from replay.staleness import Admission, Ticket, choose, needs
from replay.storage import MemoryBudget, Record


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups of one batch, in the order of their reservation."""

    seqs: list[int]
    records: list[Record]
    ages_s: list[float]
    """Of each group: seconds from `add` to here."""


class ReplayBuffer:
    """The groups of one run, in reservation order. Invariant: every group that no batch took holds one slot."""

    def __init__(
        self,
        admission: Admission,
        *,
        degenerate: Literal["keep", "drop"] = "keep",
        max_degenerate_in_a_row: int = 256,
        reward_name: str = "the reward",
        policy: Policy = fifo,
        max_uses: int = 1,
        seed: int = 0,
        memory: MemoryBudget | None = None,
        draw: Callable[[], Any] = lambda: None,
        tell: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`draw` gives the prompt of a ticket; `tell` is told what happens to groups, batches excepted."""
        self.admission = admission
        self.memory = memory or MemoryBudget()
        self.counts = Counts()
        self.outcomes: deque[tuple[int, bool]] = deque(maxlen=OUTCOMES)
        """Of the last episodes that ended: length in tokens, prompt included, and whether it was dropped."""
        self._slots: dict[int, Slot] = {}
        self._versions: Counter[int] = Counter()  # of the groups that hold a slot
        self._num_queued = 0
        self._straggled: set[int] = set()
        self._drop_degenerate = degenerate == "drop"
        self._max_degenerate_in_a_row = max_degenerate_in_a_row
        self._degenerate_in_a_row = 0
        self._reward_name = reward_name
        self._policy = policy
        self._max_uses = max_uses
        self._seed = seed
        self._draw = draw
        self._tell = tell
        self._clock = clock

    @property
    def num_running(self) -> int:
        """Groups reserved and not yet added."""
        return self.admission.live - self._num_queued

    @property
    def num_queued(self) -> int:
        """Complete groups that no batch has taken."""
        return self._num_queued

    @property
    def running(self) -> list[Ticket]:
        """The tickets of the running groups, in order; after a resume nobody works on them yet."""
        return [slot.ticket for slot in self._slots.values() if slot.record is None]

    def reserve(self) -> Ticket | None:
        """A ticket for one group, or None while no slot is free, or no memory for what runs already and one more."""
        if self.admission.free == 0 or not self._has_memory():
            return None
        prompt = self._draw()  # first: where it raises, no slot is taken
        ticket = self.admission.reserve(prompt)
        assert ticket is not None
        self._begin(ticket)
        return ticket

    def readmit(self, ticket: Ticket) -> None:
        """A ticket of the life before this one, which had no time to write it down."""
        self.admission.readmit(ticket)
        self._begin(ticket)

    def excuse(self, ticket: Ticket) -> bool:
        """What comes of a ticket of the life before this one is no error; whether its group is here already.

        Where it has left untrained, what comes is counted as a straggler's.
        """
        slot = self._slots.get(ticket.seq)
        if slot is None:
            self._straggled.add(ticket.seq)
        return slot is not None and slot.record is not None

    def add(self, ticket: Ticket, record: Record) -> None:
        """The ticket's group is complete; it is queued, or dropped when it is degenerate or already too old.

        A group that was dropped as a straggler is counted as wasted. Raises StalenessError when the ticket is
        not running, MemoryBudgetError when the group does not fit into the memory that is left, RewardError when
        too many degenerate groups were dropped in a row.
        """
        if ticket.seq in self._straggled:
            self._straggled.remove(ticket.seq)
            self._count_dropped(record)
            return
        slot = self._slots.get(ticket.seq)
        if slot is None or slot.record is not None:
            raise StalenessError(
                f"ticket {ticket.seq} is not running: it was added, failed or never reserved; "
                "reserve a ticket for each group and add it once"
            )
        self._drop_spent(record.nbytes)
        self.memory.hold(record.nbytes)
        self._forget_version(slot.version)
        slot.record, slot.added = record, self._clock()
        slot.version = record.oldest_version(ticket.version)
        self._versions[slot.version] += 1
        self._num_queued += 1
        self._degenerate_in_a_row = self._degenerate_in_a_row + 1 if record.degenerate else 0
        counts = self._count(groups_added=1, groups_degenerate=int(record.degenerate))
        if self._tell is not None:  # tensors are made for the journal only
            self._tell(Add(ticket.seq, record.group, counts, {"degenerate_in_a_row": self._degenerate_in_a_row}))
        if record.degenerate and self._drop_degenerate:
            self._drop(slot, "degenerate")
            self._check_reward_signal(record)
        elif record.is_stale(self.admission.next_version, self.admission.max_staleness):
            self._expire(slot)

    def fail(self, ticket: Ticket) -> None:
        """The ticket's group will never come: its slot is free at once. Harmless once it is done."""
        self._straggled.discard(ticket.seq)
        slot = self._slots.get(ticket.seq)
        if slot is not None and slot.record is None:
            self._give_back(slot)
            self._say(Gone(ticket.seq, "failed", self._count(groups_failed=1)))

    def release(self, version: int) -> None:
        """Every serving replica holds `version`: frees the slots of the batches up to it."""
        self.admission.release(version)

    def sample(self, policy_version: int) -> Choice | None:
        """The batch that turns `policy_version` into the next one, or None: not yet.

        Groups that are too old for it are dropped first. Raises StalenessError when `policy_version` went
        back, or when a group claims tokens of a version that does not exist yet.
        """
        self._advance(policy_version)
        chosen = self._choose()
        return self._take(sorted(chosen)) if self._is_ready(chosen) else None

    def take(self, policy_version: int, seqs: Sequence[int]) -> Choice:
        """The batch of these groups, whatever the policy says: a resumed run serves a recorded batch again.

        Raises StalenessError as `sample` does, and when one of them is not complete here.
        """
        self._advance(policy_version)
        missing = [seq for seq in seqs if seq not in self._slots or self._slots[seq].record is None]
        if missing or len(seqs) != self.admission.groups_per_step:
            raise StalenessError(
                f"the batch of policy_version {policy_version} cannot be served again: groups {_some(seqs)}, of "
                f"which {_some(missing)} are not complete here, and a batch has {self.admission.groups_per_step}; "
                "resume with the batch size of the recorded run, from its own run folder"
            )
        return self._take(seqs)

    def straggling_since(self, default: float) -> float:
        """Clock reading at which the oldest running group that the next batch waits for was reserved."""
        return min((slot.since for slot in self._running_of(self._choose())), default=default)

    def drop_stragglers(self, timeout_s: float) -> int:
        """Drops the groups that the next batch waits for and that have run for `timeout_s`; their number.

        No fewer would complete it: without one of them the batch waits for the others all the same. Where even all
        do not complete it, what it lacks can be started in their place.
        """
        started_before = self._clock() - timeout_s
        late = [slot for slot in self._running_of(self._choose()) if slot.since <= started_before]
        for slot in late:
            seq = slot.ticket.seq
            self._give_back(slot)
            self._straggled.add(seq)
            self._say(Gone(seq, "straggled", self._count(groups_straggled=1)))
        return len(late)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next: plain values and the Records. Times are kept as ages."""
        now = self._clock()
        return {
            "admission": self.admission.state_dict(),
            "slots": [
                {
                    "ticket": {f.name: getattr(slot.ticket, f.name) for f in fields(slot.ticket)},
                    "record": slot.record,
                    "version": slot.version,
                    "uses": slot.uses,
                    "reserved_s_ago": now - slot.since,
                    "added_s_ago": now - slot.added,
                }
                for slot in self._slots.values()
            ],
            "straggled": sorted(self._straggled),
            "degenerate_in_a_row": self._degenerate_in_a_row,
            "counts": asdict(self.counts),
            "outcomes": list(self.outcomes),
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. What the configuration says (S, B, window, policy, ...) stays that of this buffer."""
        now = self._clock()
        self.admission.load_state_dict(state["admission"])
        self._slots = {
            saved["ticket"]["seq"]: Slot(
                ticket=Ticket(**saved["ticket"]),
                since=now - saved["reserved_s_ago"],
                version=saved["version"],
                record=saved["record"],
                added=now - saved["added_s_ago"],
                uses=saved["uses"],
            )
            for saved in state["slots"]
        }
        self.memory = MemoryBudget(self.memory.limit_bytes)
        for slot in self._slots.values():
            if slot.record is not None:
                self.memory.hold(slot.record.nbytes)
        live = [slot for slot in self._slots.values() if slot.uses == 0]
        self._versions = Counter(slot.version for slot in live)
        self._num_queued = sum(slot.record is not None for slot in live)
        self._straggled = set(state["straggled"])
        self._degenerate_in_a_row = state["degenerate_in_a_row"]
        self.counts = Counts(**state["counts"])
        self.outcomes = deque((tuple(outcome) for outcome in state["outcomes"]), maxlen=OUTCOMES)
        self._seed = state["seed"]

    def describe_slots(self) -> str:
        """Who holds the slots, for the text of a deadline."""
        admission = self.admission
        trained = list(range(admission.released + 1, admission.next_version + 1))
        return (
            f"of {admission.slots} slots (max_staleness {admission.max_staleness}, "
            f"{admission.groups_per_step} groups a step, window {admission.window:g}) "
            f"{admission.unreleased} are held by batches whose "
            f"weights are not released yet (versions: {_some(trained)}; released: {admission.released}), "
            f"{self.num_queued} by queued groups, {self.num_running} by running groups "
            f"({self._running_text(self._slots)}); {self.memory.held_bytes} of {self.memory.limit_bytes} bytes of "
            f"memory (replay.memory_bytes) are held, the largest group took {self.memory.largest_bytes}"
        )

    def describe_wait(self) -> str:
        """What a batch that does not come waits for, in the few words that a terminal holds."""
        wanted, (_, complete) = self.admission.groups_per_step, self._next()
        running, now = self._running_of(self._slots), self._clock()
        since = f", the oldest for {now - min(slot.since for slot in running):.0f} s" if running else ""
        held = self.admission.unreleased
        slots = f"; {held} of {self.admission.slots} slots are held by batches whose weights are not released yet"
        return f"{complete} of {wanted} groups are there, {len(running)} run{since}{slots if held else ''}"

    def describe_missing(self) -> str:
        """Which groups the next batch lacks, for the text of a deadline."""
        wanted, (chosen, complete) = self.admission.groups_per_step, self._next()
        return (
            f"{complete} of the next {wanted} groups are complete; running: {self._running_text(chosen)}; "
            f"not reserved by any rollout loop yet: {wanted - len(chosen)}"
        )

    def _advance(self, policy_version: int) -> None:
        self.admission.advance(policy_version)
        oldest = policy_version - self.admission.max_staleness
        if self._max_uses == 1 and min(self._versions, default=oldest) >= oldest:
            return
        for slot in list(self._slots.values()):
            if slot.uses and slot.version < oldest:
                self._remove(slot)
            elif slot.record is not None and slot.record.is_stale(policy_version, self.admission.max_staleness):
                self._expire(slot)

    def _choose(self) -> list[int]:
        """The next batch as far as its groups exist, running ones included."""
        admission, groups = self.admission, self._slots
        bound, count, now_at = admission.max_staleness, admission.groups_per_step, admission.next_version
        view = View(groups, now_at, bound, count, self._seed)
        order = _each_once(chain(self._policy(view), groups))

        def version_of(seq: int) -> int | None:
            if seq not in groups:
                raise ConfigError(f"replay.policy named group {seq}, which is none of view.groups; name those only")
            return None if groups[seq].uses else groups[seq].version

        return choose(order, version_of, needs(self._versions, now_at, bound, count), count)

    def _is_ready(self, chosen: Sequence[int]) -> bool:
        return len(chosen) == self.admission.groups_per_step and not self._running_of(chosen)

    def _take(self, seqs: Sequence[int]) -> Choice:
        slots, now, version = [self._slots[seq] for seq in seqs], self._clock(), self.admission.next_version
        records = [slot.record for slot in slots if slot.record is not None]
        newest = max(record.newest for record in records)
        if newest > version:
            raise StalenessError(
                f"a group holds tokens of version {newest}, the trainer stands at {version}; "
                "sample with the version that the trainer reports, publish none before it is made"
            )
        fresh = [slot for slot in slots if slot.uses == 0]
        for slot in fresh:
            self._forget_version(slot.version)
            self._num_queued -= 1
        self.admission.consume(version, len(fresh))
        for slot in slots:
            slot.uses += 1
            if slot.uses >= self._max_uses:
                self._remove(slot)
        self._count(
            groups_trained=len(records),
            episodes_trained=sum(len(record.rewards) for record in records),
            tokens_trained=sum(record.num_tokens for record in records),
        )
        self.outcomes.extend((n, False) for slot in fresh if slot.record is not None for n in slot.record.lengths)
        return Choice(list(seqs), records, [now - slot.added for slot in slots])

    def _running_of(self, seqs: Iterable[int]) -> list[Slot]:
        return [self._slots[seq] for seq in seqs if self._slots[seq].record is None]

    def _next(self) -> tuple[list[int], int]:
        """The next batch as far as its groups exist, and how many of them are complete."""
        chosen = self._choose()
        return chosen, len(chosen) - len(self._running_of(chosen))

    def _running_text(self, seqs: Iterable[int]) -> str:
        now = self._clock()
        return _some([f"seq {slot.ticket.seq} since {now - slot.since:.1f} s" for slot in self._running_of(seqs)])

    def _check_reward_signal(self, record: Record) -> None:
        if self._degenerate_in_a_row >= self._max_degenerate_in_a_row:
            raise RewardError(
                f"{self._degenerate_in_a_row} groups in a row were dropped because {self._reward_name} gave "
                f"every episode of a group the same value (the last: {record.rewards[0]:g}), the limit is "
                f"replay.max_degenerate_in_a_row={self._max_degenerate_in_a_row}; check the reward on a few "
                "completions, choose an easier task, or train such groups with grpo.degenerate=keep"
            )

    def _expire(self, slot: Slot) -> None:
        self._drop(slot, "expired", groups_expired=1)

    def _drop(self, slot: Slot, reason: str, **counts: int) -> None:
        record = slot.record
        assert record is not None
        wasted = self._count_dropped(record)
        self._num_queued -= 1
        self._give_back(slot)
        self._say(Gone(slot.ticket.seq, reason, {**wasted, **self._count(**counts)}))

    def _begin(self, ticket: Ticket) -> None:
        self._slots[ticket.seq] = Slot(ticket, self._clock(), ticket.version)
        self._versions[ticket.version] += 1
        self._say(Reserve(ticket.seq, ticket.version, ticket.prompt, self._count(groups_reserved=1)))

    def _say(self, event: Event) -> None:
        if self._tell is not None:
            self._tell(event)

    def _count_dropped(self, record: Record) -> dict[str, int]:
        self.outcomes.extend((length, True) for length in record.lengths)
        return self._count(episodes_dropped=len(record.rewards), tokens_wasted=record.num_tokens)

    def _count(self, **amounts: int) -> dict[str, int]:
        """Adds to the counters what the returned amounts say: the journal is told the same numbers."""
        for name, amount in amounts.items():
            setattr(self.counts, name, getattr(self.counts, name) + amount)
        return amounts

    def _give_back(self, slot: Slot) -> None:
        self._remove(slot)
        self._forget_version(slot.version)
        self.admission.give_back()

    def _remove(self, slot: Slot) -> None:
        del self._slots[slot.ticket.seq]
        if slot.record is not None:
            self.memory.free(slot.record.nbytes)

    def _has_memory(self) -> bool:
        # The groups of one batch are always begun: until it is complete nothing frees memory.
        if self.admission.live < self.admission.groups_per_step:
            return True
        wanted = self.memory.estimate(self.num_running + 1)
        self._drop_spent(wanted)
        return self.memory.fits(wanted)

    def _drop_spent(self, nbytes: int) -> None:
        """Groups that were trained already make room for new ones, oldest first."""
        if not self.memory.fits(nbytes):
            for slot in [slot for slot in self._slots.values() if slot.uses]:
                self._remove(slot)
                if self.memory.fits(nbytes):
                    return

    def _forget_version(self, version: int) -> None:
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]


def _each_once(seqs: Iterable[int]) -> Iterator[int]:
    seen: set[int] = set()
    for seq in seqs:
        if seq not in seen:
            seen.add(seq)
            yield seq


def _some(items: Sequence[object], shown: int = 8) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more if items else "none"
