"""Batches that are served once more, because the trainer was restored from a checkpoint while the replay lived on.

The buffer goes on as if nothing had happened: it does not hold these groups any more, the journal does. A batch is
served from here, as it was, at its own version; behind the last one the buffer serves again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from replay.events import Batch, Entry, ReplayState
from replay.storage import Record, summarize


@dataclass(slots=True)
class Redo:
    """What is left to serve, in order. Pure; its groups lie in memory, outside of the replay's budget."""

    batches: deque[Batch] = field(default_factory=deque)
    entries: dict[int, Entry] = field(default_factory=dict)
    """The groups of `batches` by seq, as they were before the first of these: `uses` counts the batches before."""

    @property
    def versions(self) -> list[int]:
        """Of the batches that are left."""
        return [batch.version for batch in self.batches]

    def serve(self, version: int) -> tuple[Batch, list[Record]] | None:
        """The batch that was taken at `version`, once; None where that is the buffer's to choose.

        What lies before `version` is forgotten: the trainer has it.
        """
        while self.batches and self.batches[0].version < version:
            self._leave(self.batches.popleft())
        if not self.batches or self.batches[0].version != version:
            return None
        batch = self.batches.popleft()
        records = _records(self.entries[seq] for seq in batch.seqs)
        self._leave(batch)
        return batch, records

    def add_to(self, state: ReplayState) -> None:
        """Makes the buffer's `state` that of before these batches: they come first, and are not counted."""
        state.entries |= self.entries
        state.again[:0] = self.batches
        for batch in self.batches:
            records = _records(self.entries[seq] for seq in batch.seqs)
            state.counts["groups_trained"] -= len(records)
            state.counts["episodes_trained"] -= sum(len(record.rewards) for record in records)
            state.counts["tokens_trained"] -= sum(record.num_tokens for record in records)

    def _leave(self, batch: Batch) -> None:
        wanted = {seq for left in self.batches for seq in left.seqs}
        for seq in batch.seqs:
            if seq in wanted:
                self.entries[seq] = replace(self.entries[seq], uses=self.entries[seq].uses + 1)
            else:
                del self.entries[seq]


def redo(state: ReplayState, first: int, before: int) -> Redo:
    """Of the batches that `state` rolls back those of the versions from `first` on and below `before`."""
    batches = deque(batch for batch in state.again if first <= batch.version < before)
    earlier = Counter(seq for batch in state.again if batch.version < first for seq in batch.seqs)
    wanted = {seq for batch in batches for seq in batch.seqs}
    entries = {seq: replace(state.entries[seq], uses=state.entries[seq].uses + earlier[seq]) for seq in wanted}
    return Redo(batches, entries)


def _records(entries: Iterable[Entry]) -> list[Record]:
    return [summarize(entry.group) for entry in entries if entry.group is not None]
