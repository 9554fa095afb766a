"""The files of a journal: their names, which record is which, and how they are read.

A snapshot is a head, then one record for each group, then an end that counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import RunFolderError
from replay.events import Add, Batch, Entry, Event, Gone, Partial, ReplayState, Reserve, Start, Tokens, Trained
from replay.frames import Damage, Frame, plain, read_frames


class JournalError(RunFolderError):
    """A journal cannot be read, or does not hold what is asked of it."""


@plain
@dataclass(frozen=True, slots=True)
class Head:
    """First record of a snapshot: everything but the groups."""

    start: Start
    next_seq: int
    again: Sequence[Batch]
    counts: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


@plain
@dataclass(frozen=True, slots=True)
class End:
    """Last record of a snapshot."""

    num_entries: int


# Append only: the numbers stand in files.
_RECORDS: tuple[type, ...] = (Start, Head, Entry, End, Reserve, Tokens, Add, Gone, Trained)
KINDS: dict[type, int] = {cls: kind for kind, cls in enumerate(_RECORDS, start=1)}
EVENTS = frozenset(KINDS[cls] for cls in (Reserve, Tokens, Add, Gone, Trained))
for _cls in (*_RECORDS, Partial, Batch):
    plain(_cls)


def log_path(folder: Path, number: int) -> Path:
    """The events of a segment."""
    return folder / f"{number:06d}.log"


def snapshot_path(folder: Path, number: int) -> Path:
    """The state that a segment begins with."""
    return folder / f"{number:06d}.snapshot"


def numbers(folder: Path) -> list[int]:
    """The segments of which something is there, ascending. Raises OSError."""
    names = [path for path in folder.iterdir() if path.suffix in (".log", ".snapshot")]
    return sorted({int(path.stem) for path in names if path.stem.isdigit()})


def state_records(start: Start, state: ReplayState) -> Iterator[tuple[int, Any]]:
    """A snapshot's records, kind and value each."""
    yield KINDS[Head], Head(start, state.next_seq, list(state.again), dict(state.counts), dict(state.state))
    for entry in state.entries.values():
        yield KINDS[Entry], entry
    yield KINDS[End], End(len(state.entries))


def read_head(path: Path) -> Head | None:
    """What a snapshot says of itself; None when its first record is damaged. Raises OSError."""
    frame = next(read_frames(path, lambda _: None), None)
    return frame.load() if frame is not None and frame.kind == KINDS[Head] else None


def read_snapshot(path: Path) -> ReplayState | None:
    """The state in a snapshot; None when it is not whole. Raises OSError."""
    frames = read_frames(path, lambda _: None)
    head = next(frames, None)
    if head is None or head.kind != KINDS[Head]:
        return None
    values = [frame.load() for frame in frames]
    if not values or values[-1] != End(len(values) - 1):
        return None
    said: Head = head.load()
    entries = {entry.seq: entry for entry in values[:-1]}
    return ReplayState(
        said.start.version, said.next_seq, entries, list(said.again), dict(said.counts), dict(said.state)
    )


def read_log(path: Path, found: Callable[[Damage], None]) -> Iterator[Frame]:
    """The frames of a segment's log: its Start, then its events. Nothing when a kill left no whole Start.

    Raises JournalError when it begins with something else, OSError.
    """
    for index, frame in enumerate(read_frames(path, found)):
        if (frame.kind == KINDS[Start]) != (index == 0) or (index and frame.kind not in EVENTS):
            raise JournalError(
                f"{path} holds a record of kind {frame.kind} at byte {frame.offset}: not a journal's log"
            )
        yield frame


def event_of(frame: Frame) -> Event:
    """The event in a frame of a log, its Start left out."""
    event: Event = frame.load()
    return event
