"""What outlives a replay's process: the journal that it tells, and the state in which the next one goes on.

    run folder/journal ── recover(version) ──► Persistence.restore ──► buffer, prompts, unfinished episodes
         ▲                                                                   │
         └── events as they happen, and the whole state at each checkpoint ──┘

Without a folder nothing is written and every method is cheap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from forge.errors import ConfigError
from replay.buffer import ReplayBuffer
from replay.events import Add, Batch, Entry, Event, Gone, Partial, ReplayState, Tokens
from replay.journal import Journal
from replay.metrics import Counts
from replay.recovery import Recovered, begun, join, newest_base, recover, versions
from replay.redo import Redo, redo
from replay.staleness import Known, Ticket
from replay.storage import summarize

_TOGETHER_S = 0.002


class Prompts(Protocol):
    """Where tickets get their prompts from: `forge.data.PromptStream`, or a user's own."""

    def draw(self) -> Any:
        """The next one, for ever."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values: where it stands."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class JournalPlace:
    """Where a replay keeps its journal, and what it goes on from."""

    folder: str
    run: str
    """Names the run; a journal of another one is refused."""
    resume_from: int | None = None
    """The policy version of the checkpoint that the trainer was restored from; None when the run is new."""


class Persistence:
    """The journal of one Replay and all that a resume needs besides the buffer. Raises RunFolderError once it failed.

    With `resume_from` the constructor reads the journal and raises what `recovery.recover` raises.
    """

    def __init__(
        self, place: JournalPlace | None, prompts: Prompts | None, interval_s: float, known: Known | None = None
    ) -> None:
        self._prompts, self._known = prompts, known
        self._partials: dict[int, dict[int, list[Tokens]]] = {}
        self._journal: Journal | None = None
        self._recovered: Recovered | None = None
        self._marked: Future[int] | None = None
        self._writing: asyncio.Future[None] | None = None
        self.again: deque[Batch] = deque()
        """Batches that were trained behind the checkpoint: to be served again, as they were."""
        self.redo = Redo()
        """Batches that are served once more, before those of `again`, while the buffer keeps its state."""
        self.unclaimed: deque[Ticket] = deque()
        """Running groups of the run before, which nobody works on yet."""
        self.settled: set[int] = set()
        """Tickets that somebody holds although their groups are here: the answer to `add` was lost."""
        if place is not None:
            # The lock first: nobody else may write while this one reads.
            journal = Journal(Path(place.folder), run=place.run, interval_s=interval_s)
            try:
                if known is not None and place.resume_from is None and not versions(journal.folder):
                    known = self._known = None  # the life before had not begun
                base = newest_base(journal.folder, known.served + 1) if known else place.resume_from
                if base is not None:
                    self._recovered = recover(journal.folder, base, run=place.run)
            except BaseException:
                journal.close()
                raise
            if self._recovered is not None:
                journal.incarnation = self._recovered.incarnation + 1
            self._journal = journal

    def draw(self) -> Any:
        return self._prompts.draw() if self._prompts else None

    async def room(self) -> None:
        """Waits while the disk is behind; raises RunFolderError when it does not catch up."""
        if self._journal is not None:
            await self._journal.room()

    async def written(self) -> None:
        """Waits until what was told survives a kill of this process. Callers of the same 2 ms wait as one."""
        if self._journal is None:
            return
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_soon(self._journal))
            self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # callers may be gone
        await asyncio.shield(self._writing)

    async def _write_soon(self, journal: Journal) -> None:
        await asyncio.sleep(_TOGETHER_S)
        self._writing = None  # what is told from here on is not in it
        await asyncio.wrap_future(journal.when_written(lambda: None))

    def tell(self, event: Event) -> None:
        """Hands an event to the journal."""
        if isinstance(event, Add | Gone):
            self._partials.pop(event.seq, None)
        if self._journal is not None:
            self._journal.append(event)

    def tell_tokens(self, buffer: ReplayBuffer, parts: Sequence[Tokens]) -> None:
        """Keeps what unfinished episodes have sampled; of groups that are no longer running nothing."""
        if self._journal is None:
            return
        running = {ticket.seq for ticket in buffer.running}
        for part in parts:
            if part.seq in running:
                self._partials.setdefault(part.seq, {}).setdefault(part.episode, []).append(part)
                self._journal.append(part)

    def start(self, buffer: ReplayBuffer, version: int) -> str:
        """Once, before the first event: goes on from what was recovered. Returns what that was, or ""."""
        recovered, known, told = self._recovered, self._known, ""
        if recovered is not None:
            told, version = self._restore(buffer, recovered), recovered.state.version
        self._recovered = self._known = None
        self.mark(buffer, version)
        if known is not None:
            self._take_over(buffer, known)
        return told

    def _take_over(self, buffer: ReplayBuffer, known: Known) -> None:
        """From the state that the last life's newest segment gives to the one that it died in."""
        trained = {seq for batch in self.again for seq in batch.seqs}
        while self.again and self.again[0].version <= known.served:
            batch = self.again.popleft()
            buffer.take(batch.version, batch.seqs)
        buffer.release(known.released)
        held, written = {ticket.seq: ticket for ticket in known.tickets}, buffer.admission.next_seq
        for seq in range(written, max(held, default=-1) + 1):
            prompt = self.draw()
            ticket = held.get(seq)
            if ticket is None:  # its reserve was never answered
                ticket = Ticket(seq, buffer.admission.released, prompt)
                self.unclaimed.append(ticket)
            buffer.readmit(ticket)
        self.unclaimed = deque(ticket for ticket in self.unclaimed if ticket.seq not in held)
        self.settled = {
            seq for seq, ticket in held.items() if seq in trained or (seq < written and buffer.excuse(ticket))
        }

    def mark(self, buffer: ReplayBuffer, version: int) -> None:
        """The state of now belongs to the checkpoint of `version`: the journal begins a segment with it."""
        if self._journal is not None:
            self._marked = self._journal.rotate(version, self._state(buffer, version))

    async def rewind(self, version: int, before: int) -> list[int]:
        """The batches of the versions from `version` on and below `before` are to be served once more; which they are.

        Raises ConfigError without a journal, JournalError when it does not reach back so far.
        """
        journal, marked = self._journal, self._marked
        if journal is None or marked is None:
            raise ConfigError(
                f"the replay cannot serve again what was trained from version {version} on: replay.journal is false, "
                "and trained groups are kept nowhere else; set --replay.journal=true, or mesh.trainer.on_failure=end"
            )

        def read() -> Redo:
            state = recover(journal.folder, newest_base(journal.folder, version)).state
            return redo(state, version, before)

        await asyncio.wrap_future(marked)  # the segment to begin with may be the last one
        self.redo = await asyncio.wrap_future(journal.when_written(read))
        return self.redo.versions

    @property
    def marked(self) -> Future[int] | None:
        """Done, with the segment's number, once the last `mark` is on the disk."""
        return self._marked

    def prune(self, before: int) -> None:
        """Forgets the segments before number `before`, which no checkpoint needs any more."""
        if self._journal is not None:
            self._journal.prune(before)

    def close(self) -> None:
        """Writes what is queued, and is told nothing from here on. Raises RunFolderError when the disk refuses."""
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()

    def _state(self, buffer: ReplayBuffer, version: int) -> ReplayState:
        saved = buffer.state_dict()
        entries = {}
        for slot in saved["slots"]:
            ticket, record = slot["ticket"], slot["record"]
            seq, group = ticket["seq"], None if record is None else record.group
            partials = self._join(seq) if group is None else {}
            entries[seq] = Entry(seq, ticket["version"], ticket["prompt"], group, partials, slot["uses"])
        next_seq = saved["admission"]["next_seq"]
        rest: dict[str, Any] = {key: saved[key] for key in ("degenerate_in_a_row", "outcomes", "seed")}
        if self._prompts is not None:
            rest |= {"prompts": dict(self._prompts.state_dict()), "prompts_at": next_seq}
        state = ReplayState(version, next_seq, entries, list(self.again), dict(saved["counts"]), rest)
        self.redo.add_to(state)
        return state

    def _join(self, seq: int) -> Mapping[int, Partial]:
        return join(Entry(seq, 0), self._partials.get(seq, {}))

    def _restore(self, buffer: ReplayBuffer, recovered: Recovered) -> str:
        state = recovered.state
        slots, unclaimed = [], []
        for entry in sorted(state.entries.values(), key=lambda entry: entry.seq):
            record = None if entry.group is None else summarize(entry.group)
            oldest = entry.version
            if record is None:
                unclaimed.append(Ticket(entry.seq, entry.version, entry.prompt, entry.partials))
                self._partials[entry.seq] = {place: [begun(entry.seq, place, p)] for place, p in entry.partials.items()}
            else:
                oldest = record.oldest_version(entry.version)
            ticket = {"seq": entry.seq, "version": entry.version, "prompt": entry.prompt}
            times = {"reserved_s_ago": 0.0, "added_s_ago": 0.0}
            slots.append({"ticket": ticket, "record": record, "version": oldest, "uses": entry.uses, **times})
        known = {field.name for field in fields(Counts)}
        buffer.load_state_dict(
            {
                "admission": {
                    "released": state.version,
                    "next_version": state.version,
                    "live": sum(slot["uses"] == 0 for slot in slots),
                    "next_seq": state.next_seq,
                },
                "slots": slots,
                "straggled": [],
                "counts": {name: value for name, value in state.counts.items() if name in known},
                **{key: state.state[key] for key in ("degenerate_in_a_row", "outcomes", "seed")},
            }
        )
        if self._prompts is not None:
            self._prompts.load_state_dict(state.state["prompts"])
            for _ in range(state.next_seq - state.state["prompts_at"]):
                self._prompts.draw()  # by tickets that came after the checkpoint, and have their prompts
        self.again, self.unclaimed = deque(state.again), deque(unclaimed)
        complete = sum(slot["record"] is not None for slot in slots)
        tokens = sum(len(part.tokens) for ticket in unclaimed for part in ticket.begun.values())
        return "; ".join(
            (
                f"the journal has {complete} complete groups, of which {len(state.again)} batches are trained again, "
                f"and {len(unclaimed)} unfinished ones with {tokens} tokens",
                *recovered.notes,
            )
        )
