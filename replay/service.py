"""The replay of a run: ReplayBuffer with waiting. Works in any asyncio loop, without Monarch.

    caller             call        waits for         unblocked by
    rollout loop x N   reserve()   a free slot       release, a dropped or failed group, close
    train loop         sample(v)   its next batch    add, a dropped or failed group, a straggler's timeout, close
    weight loop        release(v)  nothing

Call order of a rollout loop: reserve, then exactly one of add and fail. `close` ends every wait:
`reserve` and `sample` return None from then on, and late groups are discarded. A group that is complete only
after it was dropped as a straggler is no error: it is counted as wasted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from tensordict import TensorDict

import forge.channel
from forge.errors import DeadlineExceeded, StalenessError
from forge.registry import lookup
from forge.telemetry import span
from forge.trace import BATCHES
from replay.buffer import Choice, ReplayBuffer
from replay.config import ReplayConfig
from replay.events import Tokens, Trained
from replay.metrics import batch_stats, discard_rates, interval_stats
from replay.persistence import JournalPlace, Persistence, Prompts
from replay.policies import POLICIES
from replay.shards import plan_shards, send, waste
from replay.staleness import Admission, Known, Ticket
from replay.storage import MemoryBudget, Record, store


class Channel(Protocol):
    """The part of `forge.channel` that the replay uses."""

    def alloc(self, like: TensorDict) -> TensorDict: ...

    def put(self, td: TensorDict, readers: int = 1) -> Any: ...

    def open(self, handle: Any) -> TensorDict: ...

    def close(self, handle: Any) -> None: ...

    def withdraw(self, handle: Any) -> None: ...


@dataclass(frozen=True)
class SampledBatch:
    """One batch, ready for the trainer."""

    handles: list[Any]
    """One channel handle a data-parallel rank, to a packed batch of whole episodes (`forge/batch.py`)."""
    policy_version: int
    """The version that the trainer stands at; training on the batch makes the next one."""
    stats: dict[str, float]
    """Keys of `metrics.jsonl`, see `Replay.sample`."""


class Rewound(StalenessError):
    """A `sample` is void: the trainer went back while it waited."""


class Replay:
    """Admission, storage and sampling of whole groups, with deadlines."""

    def __init__(
        self,
        cfg: ReplayConfig,
        *,
        groups_per_step: int,
        degenerate: Literal["keep", "drop"] = "keep",
        start_version: int = 0,
        row_tokens: int = 4096,
        together: int = 1,
        readers: int = 1,
        reward_name: str = "the reward",
        seed: int = 0,
        prompts: Prompts | None = None,
        journal: JournalPlace | None = None,
        channel: Channel = forge.channel,
        known: Known | None = None,
    ) -> None:
        """`start_version` is the policy version that trainer and generators hold when the run begins.

        `row_tokens` is what a trainer's rank sees at once, at most: batches are packed into such rows, runs of
        `together` episodes of a group in one; `readers` processes open each shard. `seed` is that of policies that
        draw. With `prompts` each ticket carries one. With `journal` what happens is kept there; with its `resume_from`
        this replay goes on where the run before ended, and `start_version` is that of the checkpoint. With `known` it
        takes the place of one that died in a running run: it has all that was answered, and does again what was not.
        Raises
        ConfigError when `cfg.policy` names no function, JournalError when the journal cannot be gone on with,
        RunFolderError when the disk refuses.
        """
        self._cfg = cfg
        self._persistence = Persistence(journal, prompts, cfg.journal_interval_s, known)
        self._buffer = ReplayBuffer(
            Admission(cfg.max_staleness, groups_per_step, start_version, cfg.window),
            degenerate=degenerate,
            max_degenerate_in_a_row=cfg.max_degenerate_in_a_row,
            reward_name=reward_name,
            policy=lookup(cfg.policy, POLICIES, "replay.policy"),
            max_uses=cfg.max_uses,
            seed=seed,
            memory=MemoryBudget(cfg.memory_bytes),
            draw=self._persistence.draw,
            tell=None if journal is None else self._persistence.tell,
        )
        self._resumed = self._persistence.start(self._buffer, start_version)
        self._row_tokens, self._together, self._readers = row_tokens, together, readers
        self._channel = channel
        self._closed = known is not None and known.closed
        self._back_to = known.next if known is not None and known.next <= known.served else None
        self._reservers: deque[asyncio.Future[Ticket | None]] = deque()
        self._sampler: asyncio.Future[None] | None = None
        self._handed: list[Any] = []  # handles of the last batch
        self._rewinds = 0
        self._counts_at_sample = replace(self._buffer.counts)
        self._admission_waits: list[float] = []

    async def setup(self) -> str:
        """What this replay goes on from, in one line; "" in a new run. Before anything else is asked."""
        await self.marked()  # from here on there is a segment that another life can begin with
        if self._back_to is not None:
            await self.rewind(self._back_to)
        return self._resumed

    async def reserve(self) -> Ticket | None:
        """A slot for one group, first come, first served; None once the replay is closed.

        In a resumed run the groups that were running come first, with the tokens that they had (`Ticket.begun`).
        Raises DeadlineExceeded after `reserve_timeout_s`, naming what holds the slots.
        """
        if self._closed:
            return None
        start = time.monotonic()
        ticket = self._ticket() or await self._wait_for_slot()
        if ticket is not None:
            self._admission_waits.append(time.monotonic() - start)
        return ticket

    async def add(self, ticket: Ticket, group: Any) -> None:
        """Hands in the ticket's group: a Group `[G]`, or the channel handle of one. The replay owns it then.

        Sets `group_id` to the ticket's number. Raises SchemaError on a malformed group, whose slot is free
        then, StalenessError when the ticket is not running, MemoryBudgetError when it does not fit into
        `memory_bytes`, and RewardError when `max_degenerate_in_a_row` groups were dropped in a row.
        """
        if self._closed or ticket.seq in self._persistence.settled:
            if not isinstance(group, TensorDict):
                self._channel.close(group)
            return
        try:
            await self._persistence.room()
            record = store(group if isinstance(group, TensorDict) else self._channel.open(group), ticket.seq)
            self._buffer.add(ticket, record)
        except BaseException:
            self._buffer.fail(ticket)
            raise
        finally:
            self._wake()
        await self._persistence.written()

    async def fail(self, ticket: Ticket) -> None:
        """The ticket's group will never come: its slot is free at once. Harmless after `add` or `fail`."""
        self._buffer.fail(ticket)
        self._wake()
        await self._persistence.written()

    async def sample(self, policy_version: int, num_shards: int = 1) -> SampledBatch | None:
        """The next batch, cut for `num_shards` ranks, once its groups are complete; None once closed.

        `policy_version` is where the trainer stands; the batch makes the next version. `stats` says of the batch:
        staleness/{mean,max,bound} in versions, staleness/hist/<n> (share of the episodes that are n versions
        old), reward/{mean,std}, queue/age_{mean,max}_s (from `add` to here); of the time since the last batch:
        {tokens,episodes}/trained, tokens/wasted and episodes/dropped (too old, too late, or degenerate and
        dropped), waste/share, groups/{degenerate,degenerate_share,expired,straggled,failed} and the mean
        replay/admission_wait_s; of the last 1024 episodes that ended: discard/q1..q4, the share dropped in each
        quartile of length; replay/{queued,running}_groups that are left and the replay/held_bytes of the former; and
        pack/{waste,padded_waste} of the batch, see `replay.shards.waste`.

        Groups that must be in the batch and have run for `straggler_timeout_s`, while this call waited as long,
        are dropped.
        After `rewind` the batches that were taken before come first, with the `stats` that they had.
        Raises DeadlineExceeded after `sample_timeout_s`, naming the missing groups; StalenessError when
        `policy_version` went back or a second caller waits, Rewound when `rewind` was called meanwhile; ConfigError
        with fewer episodes than shards.
        """
        redone = None if self._closed else self._persistence.redo.serve(policy_version)
        if redone is not None:
            batch, records = redone
            return await self._hand_over(records, policy_version, num_shards, batch.stats)
        choice = self._served_again(policy_version) or await self._next_choice(policy_version)
        if choice is None:
            return None
        stats = self._stats_of(choice, policy_version)
        return await self._hand_over(choice.records, policy_version, num_shards, stats, choice.seqs)

    async def rewind(self, version: int) -> list[int]:
        """The trainer stands at `version` again, restored from a checkpoint; generators and groups go on untouched.

        From here on `sample(version)` and the next ones serve the batches that were taken at these versions, as they
        were; then the policy chooses again. Returns these versions; none where no batch was taken since. It may be
        called again meanwhile, with any version. A `sample` that waits ends with Rewound, and the handles of the last
        batch are taken back: nobody opens them any more. Raises ConfigError without a journal, JournalError when it
        does not reach back so far, RunFolderError when the disk refuses.
        """
        self._rewinds += 1
        self._wake()
        for handle in self._handed:
            self._channel.withdraw(handle)
        self._handed = []
        while self._sampler is not None:  # noqa: ASYNC110 - it leaves within a turn of the loop or two
            await asyncio.sleep(0)
        return await self._persistence.rewind(version, self._buffer.admission.next_version)

    async def release(self, version: int) -> None:
        """Every serving replica holds `version` or newer: frees the slots of the batches up to it."""
        self._buffer.release(version)
        self._wake()

    async def progress(self, parts: Sequence[Tokens]) -> None:
        """What unfinished episodes have sampled since the last call, for the journal; of others it is ignored."""
        self._persistence.tell_tokens(self._buffer, parts)
        await self._persistence.written()

    async def mark(self, version: int) -> None:
        """The state of now belongs to the checkpoint of `version`; to be called before `sample(version)`."""
        self._persistence.mark(self._buffer, version)

    async def marked(self) -> int:
        """Waits until the last `mark` is on the disk; returns what `prune` takes. -1 without a journal.

        Raises RunFolderError when the disk refuses.
        """
        marked = self._persistence.marked
        return -1 if marked is None else await asyncio.wrap_future(marked)

    async def prune(self, before: int) -> None:
        """Forgets what no checkpoint needs that was marked as number `before` or later."""
        self._persistence.prune(before)

    async def why_waiting(self) -> str:
        """What a `sample` that waits is waiting for, in one line."""
        return self._buffer.describe_wait()

    async def close(self) -> None:
        """Ends the run: every waiting and later `reserve` and `sample` returns None."""
        self._closed = True
        self._wake()

    async def shut_down(self) -> None:
        """After `close`: writes what the journal still has to; nothing is journalled any more.

        Raises RunFolderError when the disk refuses.
        """
        await asyncio.to_thread(self._persistence.close)

    async def stats(self) -> dict[str, float]:
        """Totals since the start, and the slots as they are now."""
        counts, admission = self._buffer.counts, self._buffer.admission
        return {
            "replay/slots": admission.slots,
            "replay/free_slots": admission.free,
            "replay/unreleased_slots": admission.unreleased,
            "replay/running_groups": self._buffer.num_running,
            "replay/queued_groups": self._buffer.num_queued,
            "replay/held_bytes": self._buffer.memory.held_bytes,
            "replay/memory_bytes": self._buffer.memory.limit_bytes,
            "replay/waiting_reserves": sum(not waiter.done() for waiter in self._reservers),
            "replay/released_version": admission.released,
            "replay/next_version": admission.next_version,
            **{f"total/{name}": value for name, value in asdict(counts).items()},
        }

    def _ticket(self) -> Ticket | None:
        unclaimed = self._persistence.unclaimed
        # A ticket that came after the checkpoint promises tokens of a version that is yet to be made again.
        if unclaimed and unclaimed[0].version <= self._buffer.admission.released:
            return unclaimed.popleft()
        return self._buffer.reserve()

    async def _wait_for_slot(self) -> Ticket | None:
        waiter: asyncio.Future[Ticket | None] = asyncio.get_running_loop().create_future()
        self._reservers.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=self._cfg.reserve_timeout_s)
        except asyncio.CancelledError:
            # The slot may have been granted in the same turn of the loop: nobody would ever use it.
            if waiter.done() and (ticket := waiter.result()) is not None:
                self._buffer.fail(ticket)
                self._wake()
            waiter.cancel()
            raise
        if waiter.done():
            return waiter.result()
        waiter.cancel()
        raise DeadlineExceeded(
            f"waited {self._cfg.reserve_timeout_s:g} s for a free replay slot: "
            f"{self._buffer.describe_slots()}; see whether the trainer steps and weight sync releases its "
            "versions, or raise replay.reserve_timeout_s"
        )

    def _served_again(self, policy_version: int) -> Choice | None:
        """The batch that the run before had trained at this version, if any."""
        again = self._persistence.again
        if self._closed or not again or again[0].version != policy_version:
            return None
        choice = self._buffer.take(policy_version, again[0].seqs)
        again.popleft()
        return choice

    async def _hand_over(
        self,
        records: Sequence[Record],
        policy_version: int,
        num_shards: int,
        stats: Mapping[str, float],
        new: Sequence[int] | None = None,
    ) -> SampledBatch:
        """The batch for the trainer; the journal is told of a `new` one, which consists of these groups."""
        rewinds = self._rewinds
        lengths = [n for record in records for n in record.lengths]
        cut = self._row_tokens, self._together
        plan = plan_shards(lengths, num_shards, *cut)
        row = {**stats, **waste(lengths, plan, *cut)}
        if new is not None:
            self._persistence.tell(Trained(policy_version, new, row))
        groups = [record.arrays for record in records]
        # In a thread: long episodes take long to copy, and `alloc` may wait until a trainer lets go of memory.
        sending = asyncio.to_thread(send, groups, plan, self._channel, self._readers)
        with span(BATCHES, "hand over", policy_version=policy_version, groups=len(groups)):
            handles, _ = await asyncio.gather(sending, self._persistence.written())
        if self._rewinds != rewinds:
            for handle in handles:
                self._channel.withdraw(handle)
            raise Rewound(f"the trainer went back while the batch of policy_version {policy_version} was handed over")
        self._handed = handles
        return SampledBatch(handles, policy_version, row)

    async def _next_choice(self, policy_version: int) -> Choice | None:
        if self._sampler is not None:
            raise StalenessError("sample was called while another sample waits; one loop takes the batches")
        rewinds, patient_since = self._rewinds, time.monotonic()
        deadline = patient_since + self._cfg.sample_timeout_s
        try:
            while not self._closed:
                if self._rewinds != rewinds:
                    raise Rewound(
                        f"the trainer went back while the batch of policy_version {policy_version} was awaited"
                    )
                choice = self._buffer.sample(policy_version)
                if choice is not None:
                    return choice
                since = self._buffer.straggling_since(default=time.monotonic())
                drop_at = max(since, patient_since) + self._cfg.straggler_timeout_s
                if await self._changed_until(min(deadline, drop_at)):
                    continue
                if drop_at >= deadline:
                    raise DeadlineExceeded(
                        f"waited {self._cfg.sample_timeout_s:g} s for the batch of policy_version "
                        f"{policy_version}: {self._buffer.describe_missing()}; see whether generators and "
                        "rewards answer, or raise replay.sample_timeout_s"
                    )
                if self._buffer.drop_stragglers(self._cfg.straggler_timeout_s):
                    patient_since = time.monotonic()
            return None
        finally:
            self._sampler = None
            self._wake_reservers()

    async def _changed_until(self, until: float) -> bool:
        """Waits for a change that may complete the batch; False when the clock reads `until` before."""
        self._sampler = asyncio.get_running_loop().create_future()
        self._wake_reservers()
        await asyncio.wait([self._sampler], timeout=max(0.0, until - time.monotonic()))
        return self._sampler.done()

    def _stats_of(self, choice: Choice, policy_version: int) -> dict[str, float]:
        counts = self._buffer.counts
        recent, self._counts_at_sample = counts.since(self._counts_at_sample), replace(counts)
        waits, self._admission_waits = self._admission_waits, []
        return {
            **batch_stats(choice.records, choice.ages_s, policy_version, self._cfg.max_staleness),
            **interval_stats(recent, waits),
            **discard_rates(self._buffer.outcomes),
            "replay/queued_groups": self._buffer.num_queued,
            "replay/running_groups": self._buffer.num_running,
            "replay/held_bytes": self._buffer.memory.held_bytes,
        }

    def _wake(self) -> None:
        self._wake_reservers()
        if self._sampler is not None and not self._sampler.done():
            self._sampler.set_result(None)

    def _wake_reservers(self) -> None:
        while self._reservers:
            waiter = self._reservers[0]
            if not waiter.done():
                ticket = None if self._closed else self._ticket()
                if ticket is None and not self._closed:
                    return
                waiter.set_result(ticket)
            self._reservers.popleft()
