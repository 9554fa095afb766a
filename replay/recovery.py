"""From a journal and the version of a checkpoint to the state in which the replay goes on.

    recovered = recover(folder, version)      # Recovered: .state is a ReplayState, .incarnation, .notes
    journal.rotate(version, recovered.state)  # first thing that the new incarnation writes

The state is that of the newest whole snapshot of `version`, with every event after it applied, in all segments up
to the last intact record, but for one thing: what was trained at `version` or later is rolled back. These batches
are `state.again`, in order; their groups are in `state.entries` as they were before, and `state.counts` leaves
them out. Groups that arrived later stay: their tokens come from versions that the batches of `again` make anew.

That holds over any number of crashes: a segment that a resumed run began continues the same story, since that run
began with what `recover` gave it. A batch that it served again is found twice, and must be the same both times.

Pure but for reading files: nothing in the folder is changed. Take the Journal first, so that nobody else writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from forge import supports
from forge.run_folder import folder_error
from replay.events import Add, Batch, Entry, Event, Gone, Partial, ReplayState, Reserve, Tokens, Trained
from replay.frames import Damage
from replay.segments import (
    JournalError,
    event_of,
    log_path,
    numbers,
    read_head,
    read_log,
    read_snapshot,
    snapshot_path,
)


@dataclass(slots=True)
class Recovered:
    """What a journal gives for one version."""

    state: ReplayState
    incarnation: int
    """The newest one that left a record; the one that resumes is the next."""
    num_events: int
    """Events applied to the snapshot."""
    notes: list[str] = field(default_factory=list)
    """What was dropped: torn records, snapshots that are not whole."""


def recover(folder: Path, version: int, *, run: str | None = None, allow_damage: bool = False) -> Recovered:
    """The state for a trainer that goes on at `version`.

    Raises JournalError when there is no journal, when it is not that of `run`, when no whole snapshot has `version`
    (the versions that have one are named), when a log is missing, and when a log is damaged before its end (file,
    byte, and what lies before it are named). With `allow_damage` the journal ends there instead, and a note says so.
    RunFolderError when the disk does not answer.
    """
    try:
        return _recover(folder, version, run, allow_damage)
    except OSError as error:
        raise folder_error(error.filename or folder, error, "read") from error


def versions(folder: Path) -> dict[int, int]:
    """The versions that `recover` finds a snapshot for, with the newest segment of each. Raises RunFolderError."""
    try:
        heads = {number: read_head(snapshot_path(folder, number)) for number in _snapshots(folder)}
    except OSError as error:
        raise folder_error(error.filename or folder, error, "read") from error
    return {head.start.version: number for number, head in sorted(heads.items()) if head is not None}


def newest_base(folder: Path, at_most: int | None = None) -> int:
    """The version of the newest segment that `recover` can begin with, of those up to version `at_most`.

    Raises JournalError when there is none, RunFolderError.
    """
    found = versions(folder)
    there = {number: version for version, number in found.items() if at_most is None or version <= at_most}
    if not there:
        raise JournalError(
            f"{folder} has no whole snapshot of version {at_most} or before, only of {sorted(found)}; keep the journal "
            "back to the oldest checkpoint that the trainer may be restored from"
        )
    return there[max(there)]


class Story:
    """Applies events to a state, one after the other. `state()` is a state of its own at any time."""

    def __init__(self, base: ReplayState) -> None:
        self._base = base
        self._next_seq = base.next_seq
        self._entries = dict(base.entries)
        self._parts: dict[int, dict[int, list[Tokens]]] = {}
        self._trained = {batch.version: batch for batch in base.again}
        self._taken = {seq for batch in base.again for seq in batch.seqs}
        self._counts = dict(base.counts)
        self._state = dict(base.state)

    def apply(self, event: Event) -> None:
        """Raises JournalError when the event cannot follow those before it."""
        entry = self._entries.get(event.seq) if not isinstance(event, Trained) else None
        running = entry is not None and entry.group is None
        match event:
            case Reserve():
                self._entries[event.seq] = Entry(event.seq, event.version, event.prompt)
                self._next_seq = max(self._next_seq, event.seq + 1)
            case Tokens():
                # Progress is reported from afar: it may arrive when the group is complete or gone.
                if running:
                    self._parts.setdefault(event.seq, {}).setdefault(event.episode, []).append(event)
                return
            case Add():
                if entry is not None and running:
                    self._entries[event.seq] = replace(entry, group=event.group, partials={})
                    self._parts.pop(event.seq, None)
            case Gone():
                # One that a batch has taken leaves with its last use; rolled back, it is needed once more.
                if entry is not None and not entry.uses and event.seq not in self._taken:
                    del self._entries[event.seq]
                    self._parts.pop(event.seq, None)
            case Trained():
                self._train(event)
        if not isinstance(event, Trained):
            for name, number in event.counts.items():
                self._counts[name] = self._counts.get(name, 0) + number
        self._state.update(event.state)

    def state(self) -> ReplayState:
        """The state now."""
        entries = {
            seq: replace(entry, partials=join(entry, self._parts[seq])) if seq in self._parts else entry
            for seq, entry in self._entries.items()
        }
        again = [self._trained[version] for version in sorted(self._trained)]
        return ReplayState(self._base.version, self._next_seq, entries, again, dict(self._counts), dict(self._state))

    def _train(self, event: Trained) -> None:
        before = self._trained.get(event.version)
        if before is not None and list(before.seqs) != list(event.seqs):
            raise JournalError(
                f"version {event.version} was trained from groups {list(before.seqs)} and, after a resume, from "
                f"{list(event.seqs)}; resume from a checkpoint behind it"
            )
        if event.version < self._base.version:
            raise JournalError(f"version {event.version} was trained after the snapshot of {self._base.version}")
        missing = [s for s in event.seqs if s not in self._entries or self._entries[s].group is None]
        if missing:
            raise JournalError(f"version {event.version} was trained from groups {missing}, which are not there")
        self._trained[event.version] = Batch(event.version, list(event.seqs), dict(event.stats))
        self._taken.update(event.seqs)


def _recover(folder: Path, version: int, run: str | None, allow_damage: bool) -> Recovered:
    notes: list[str] = []
    number, base = _base(folder, version, run, notes)
    story, num_events, incarnation = Story(base), 0, 0
    last = max(numbers(folder))
    for at in range(number, last + 1):
        path = log_path(folder, at)
        if not path.exists():
            raise JournalError(f"{path} is missing, and later segments are there; restore it, or remove the later ones")
        damaged: list[Damage] = []
        for frame in read_log(path, damaged.append):
            if frame.offset == 0:
                start = frame.load()
                _check_run(path, start.run, run)
                incarnation = max(incarnation, start.incarnation)
                continue
            try:
                story.apply(event_of(frame))
            except JournalError as error:
                raise JournalError(f"{path}, byte {frame.offset}: {error}") from None
            num_events += 1
        if damaged and not _tell(damaged[0], story, num_events, notes, allow_damage):
            break
    return Recovered(story.state(), incarnation, num_events, notes)


def _tell(damage: Damage, story: Story, num_events: int, notes: list[str], allow: bool) -> bool:
    """Notes the damage; whether what comes in later segments still counts."""
    where = f"{damage.path}, byte {damage.offset}"
    if not damage.confirmed:
        notes.append(f"{where}: the last {damage.nbytes:,} bytes are a torn record, dropped")
        return True
    state = story.state()
    again = f"batches of versions {[b.version for b in state.again]}" if state.again else "no batch"
    found = f"{num_events} events before it are intact: {len(state.entries)} groups, {again} after the checkpoint"
    if not allow:
        raise JournalError(
            f"{where}: damaged, and more was written behind it ({damage.nbytes:,} bytes to the end of the file); "
            f"{found}; restore the file, or recover with allow_damage to go on with these"
        )
    notes.append(f"{where}: damaged; everything later is dropped; {found}")
    return False


def _base(folder: Path, version: int, run: str | None, notes: list[str]) -> tuple[int, ReplayState]:
    """The newest whole snapshot of `version`: its segment and the state."""
    there = _snapshots(folder) if folder.is_dir() else []
    if not there:
        raise JournalError(f"{folder} holds no journal; start the run anew, or give the folder of the run to resume")
    found: dict[int, list[int]] = {}
    for number in there:
        path = snapshot_path(folder, number)
        head = read_head(path)
        if head is None:
            notes.append(f"{path}: damaged, not used")
            continue
        _check_run(path, head.start.run, run)
        found.setdefault(head.start.version, []).append(number)
    for number in reversed(found.get(version, [])):
        path = snapshot_path(folder, number)
        state = read_snapshot(path)
        if state is not None:
            return number, state
        notes.append(f"{path}: damaged, not used")
    raise JournalError(
        f"{folder} has no whole snapshot of version {version}; it has those of {sorted(set(found) - {version})}; "
        "resume from a checkpoint of one of these" + "".join(f"; {note}" for note in notes)
    )


def _snapshots(folder: Path) -> list[int]:
    return [number for number in numbers(folder) if snapshot_path(folder, number).exists()]


def _check_run(path: Path, found: str, wanted: str | None) -> None:
    if wanted is not None and found != wanted:
        raise JournalError(f"{path} belongs to the run {found}, not to {wanted}; give that run's own folder")


def join(entry: Entry, parts: Mapping[int, list[Tokens]]) -> dict[int, Partial]:
    """The partials of an entry, continued by the tokens that were reported since."""
    joined = dict(entry.partials)
    for episode, events in parts.items():
        so_far = joined.get(episode)
        chunks = [] if so_far is None else [begun(entry.seq, episode, so_far)]
        length = 0
        kept: list[Tokens] = []
        for event in [*chunks, *events]:
            if event.offset > length:
                raise JournalError(
                    f"episode {episode} of group {entry.seq} has {length} tokens, then some at {event.offset}"
                )
            kept = _cut(kept, event.offset)
            kept.append(event)
            length = event.offset + len(event.tokens)
        joined[episode] = Partial(
            torch.cat([e.tokens for e in kept]),
            torch.cat([e.logprobs for e in kept]),
            torch.cat([e.versions for e in kept]),
            kept[-1].finish,
            supports.joined([(e.kept, len(e.tokens)) for e in kept]),
        )
    return joined


def begun(seq: int, episode: int, part: Partial) -> Tokens:
    """All that an episode has, as if it had been reported at once."""
    return Tokens(seq, episode, 0, part.tokens, part.logprobs, part.versions, part.finish, part.kept)


def _cut(events: list[Tokens], length: int) -> list[Tokens]:
    """The first `length` tokens of `events`."""
    kept = [event for event in events if event.offset < length]
    if kept and kept[-1].offset + len(kept[-1].tokens) > length:
        last, keep = kept[-1], length - kept[-1].offset
        of_supports = None if last.kept is None else last.kept[:keep]
        columns = (last.tokens[:keep], last.logprobs[:keep], last.versions[:keep])
        kept[-1] = Tokens(last.seq, last.episode, last.offset, *columns, kept=of_supports)
    return kept
