"""A run that was recorded, trained again without generators: that is how an asynchronous bug is debugged.

    recording = Recording(run_folder / "journal")     # the journal of a run that was not pruned
    replay = RecordedReplay(recording, hand_over)     # takes the place of replay.service.Replay
    await replay.sample(version, num_shards)          # the batch that was trained at `version`; None after the last

A batch has the groups that were trained, byte for byte, in their order, and is cut for the ranks by `hand_over`, the
same as in the run. So from the same weights, seeds and number of ranks the same losses follow, as far as the
trainer itself is deterministic. What was trained twice because of a crash is in the recording once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from forge.errors import StalenessError
from forge.run_folder import folder_error
from replay.events import Add, Entry, Event, Trained
from replay.frames import Damage, Frame, read_frame, read_frames
from replay.metrics import Counts, batch_stats, interval_stats
from replay.segments import EVENTS, KINDS, JournalError, event_of, log_path, numbers, read_log, snapshot_path
from replay.service import SampledBatch
from replay.staleness import Ticket
from replay.storage import Record, summarize

HandOver = Callable[[list[TensorDict], int], list[Any]]
"""Flat groups and a number of ranks to the channel handle of each rank's shard; called in a thread."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """What was trained at one version."""

    version: int
    seqs: list[int]
    groups: list[TensorDict]
    """In the order of `seqs`, as they were added."""
    stats: dict[str, float]
    """Metrics of that step, as far as they were recorded."""


class Recording:
    """The journal of a run, by version. Keeps where things are, about 200 bytes a group, and reads them when asked.

    Raises JournalError for a folder without a journal, for damage, for two resumes that trained different batches at
    one version; RunFolderError when the disk does not answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """Torn ends that were left out."""
        self._groups: dict[int, tuple[Path, int]] = {}
        self._batches: dict[int, Trained] = {}
        try:
            self._index()
        except OSError as error:
            raise folder_error(error.filename or folder, error, "read") from error

    @property
    def versions(self) -> list[int]:
        """The versions that a batch was trained at, ascending."""
        return sorted(self._batches)

    def batch(self, version: int) -> RecordedBatch:
        """The batch that was trained at `version`. Raises JournalError when it, or a group of it, is not recorded."""
        trained = self._batches.get(version)
        if trained is None:
            raise JournalError(f"{self.folder} has no batch of version {version}; it has those of {self._range()}")
        groups = [self._group(seq, version) for seq in trained.seqs]
        return RecordedBatch(version, list(trained.seqs), groups, dict(trained.stats))

    def events(self) -> Iterator[Event]:
        """Everything that happened, in order, one event in memory at a time. Raises as the constructor does."""
        for number in numbers(self.folder):
            yield from (event_of(f) for f in self._log(number) if f.kind in EVENTS)

    def _index(self) -> None:
        segments = numbers(self.folder) if self.folder.is_dir() else []
        if not segments:
            raise JournalError(f"{self.folder} holds no journal; give the journal of a run that was recorded")
        self._index_snapshot(segments)
        for number in segments:
            for frame in self._log(number):
                if frame.kind == KINDS[Add]:
                    added: Add = frame.load()
                    self._groups[added.seq] = (log_path(self.folder, number), frame.offset)
                elif frame.kind == KINDS[Trained]:
                    self._add_batch(frame.load(), log_path(self.folder, number))

    def _index_snapshot(self, segments: list[int]) -> None:
        """Where the run was resumed, or pruned before, its first groups are in the first snapshot only."""
        first = next((n for n in segments if snapshot_path(self.folder, n).exists()), None)
        if first is not None:
            path = snapshot_path(self.folder, first)
            for frame in read_frames(path, self._found):
                if frame.kind == KINDS[Entry] and (entry := frame.load()).group is not None:
                    self._groups[entry.seq] = (path, frame.offset)

    def _log(self, number: int) -> Iterator[Frame]:
        path = log_path(self.folder, number)
        if not path.exists():
            raise JournalError(f"{path} is missing, and other segments are there; restore it")
        return read_log(path, self._found)

    def _found(self, damage: Damage) -> None:
        where = f"{damage.path}, byte {damage.offset}"
        if damage.confirmed or damage.path.suffix == ".snapshot":
            raise JournalError(f"{where}: damaged, and more was written behind it; restore the file")
        self.notes.append(f"{where}: the last {damage.nbytes:,} bytes are a torn record, left out")

    def _add_batch(self, trained: Trained, path: Path) -> None:
        before = self._batches.setdefault(trained.version, trained)
        if list(before.seqs) != list(trained.seqs):
            raise JournalError(
                f"{path}: version {trained.version} was trained from groups {list(before.seqs)} and, after a resume, "
                f"from {list(trained.seqs)}; a recording holds one run"
            )

    def _group(self, seq: int, version: int) -> TensorDict:
        if seq not in self._groups:
            raise JournalError(
                f"group {seq} of the batch of version {version} is not in {self.folder}; was it pruned? "
                f"batches of {self._range()} are there"
            )
        path, offset = self._groups[seq]
        try:
            value: Add | Entry = read_frame(path, offset).load()
        except OSError as error:
            raise folder_error(path, error, "read") from error
        except ValueError as error:
            raise JournalError(f"{error}; was it damaged after it had been opened?") from error
        assert value.group is not None
        return value.group

    def _range(self) -> str:
        found = self.versions
        return f"{found[0]} to {found[-1]}, {len(found)} in all" if found else "no version"


class RecordedReplay:
    """`replay.service.Replay` for a trainer without generators: `sample` gives what was trained, `reserve` nothing.

    Waits for nothing but the disk and the channel. Its versions are those of the recording, so the trainer starts
    with the weights of the first one.
    """

    def __init__(self, recording: Recording, hand_over: HandOver) -> None:
        self._recording = recording
        self._hand_over = hand_over
        self._closed = False
        self._served = 0

    async def reserve(self) -> Ticket | None:
        """None: no group is missing, so every rollout loop ends at once."""
        return None

    async def sample(self, policy_version: int, num_shards: int = 1) -> SampledBatch | None:
        """The recorded batch, cut for `num_shards` ranks; None behind the last one, and once closed.

        `stats` are those that were recorded; where they were not, what the groups say. Raises StalenessError for a
        version that was not recorded though later ones were, and as `Recording.batch` does.
        """
        versions = self._recording.versions
        if self._closed or not versions or policy_version > versions[-1]:
            return None
        if policy_version not in versions:
            later = next(version for version in versions if version > policy_version)
            raise StalenessError(
                f"no batch was recorded at policy_version {policy_version}, the next one is that of {later}; "
                "start the trainer from the checkpoint of that version"
            )
        # In a thread: a disk is read, tensors are copied, and `put` may wait for memory.
        handles, stats = await asyncio.to_thread(self._serve, policy_version, num_shards)
        self._served += 1
        return SampledBatch(handles, policy_version, stats)

    async def release(self, version: int) -> None:
        """Nothing waits for it."""

    async def why_waiting(self) -> str:
        """What a `sample` that waits is waiting for."""
        return f"the disk that holds the recording {self._recording.folder}"

    async def close(self) -> None:
        """Later `sample`s return None."""
        self._closed = True

    async def stats(self) -> dict[str, float]:
        """How many batches there are, and were served."""
        return {"recording/batches": len(self._recording.versions), "recording/served": self._served}

    def _serve(self, version: int, num_shards: int) -> tuple[list[Any], dict[str, float]]:
        batch = self._recording.batch(version)
        records = [summarize(group) for group in batch.groups]
        handles = self._hand_over([record.group for record in records], num_shards)
        return handles, {**_stats(records, version), **batch.stats}


def _stats(records: list[Record], version: int) -> dict[str, float]:
    oldest = min(record.oldest_version(version) for record in records)
    trained = Counts(
        groups_trained=len(records),
        episodes_trained=sum(len(record.rewards) for record in records),
        tokens_trained=sum(record.num_tokens for record in records),
    )
    return {**batch_stats(records, [0.0] * len(records), version, version - oldest), **interval_stats(trained, [])}
