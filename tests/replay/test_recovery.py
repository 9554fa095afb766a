"""Recovery: any prefix of what was written is a state, and resumes from resumes tell one story."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forge.batch import make_group
from forge.data import Prompt
from forge.errors import RunFolderError
from replay.events import Add, Batch, Entry, Event, Gone, Partial, ReplayState, Reserve, Tokens, Trained
from replay.frames import _CLASSES, encode, read_frames
from replay.recovery import Story, recover, versions
from replay.segments import JournalError, log_path, snapshot_path
from replay.writer import Writer, measure

ENDLESS_S = 1e9
BATCH = 2


def group(seq: int, width: int = 3) -> TensorDict:
    rows = [[seq] * width, [seq + 1]]
    versions = [[0] * len(row) for row in rows]
    td = make_group([7], rows, [[-0.25 * seq] * len(row) for row in rows], versions, group_id=seq)
    td["rewards"] = torch.tensor([0.0, 1.0])
    return td


def tokens(seq: int, episode: int, offset: int, count: int, finish: str = "") -> Tokens:
    at = torch.arange(offset, offset + count, dtype=torch.int32)
    return Tokens(seq, episode, offset, at + 100 * seq, -at.float(), torch.zeros_like(at), finish)


class Disk:
    """A Writer without its thread: every event is in the file when `write` returns."""

    def __init__(self, folder: Path, incarnation: int = 0, run: str = "run") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.writer = Writer(folder, run, incarnation, ENDLESS_S)
        self.writer.open()

    def rotate(self, state: ReplayState) -> int:
        done = self.writer.push_rotate(state)
        while self.writer.has_work():
            self.writer.turn()
        return done.result(0)

    def write(self, *events: Event) -> None:
        for event in events:
            self.writer.push(event, measure(event))
        self.writer.turn()
        assert self.writer.failure is None

    def sync(self) -> None:
        done = self.writer.push_sync()
        self.writer.turn()
        done.result(0)


def told(entry: Entry) -> tuple[Any, ...]:
    """An entry as plain values."""
    parts = {
        episode: (part.tokens.tolist(), part.logprobs.tolist(), part.versions.tolist(), part.finish)
        for episode, part in entry.partials.items()
    }
    rows = None if entry.group is None else entry.group["tokens"].tolist()
    return entry.version, entry.prompt, rows, parts, entry.uses


def plain(state: ReplayState) -> dict[str, Any]:
    """A state as plain values."""
    return {
        "version": state.version,
        "next_seq": state.next_seq,
        "entries": {seq: told(entry) for seq, entry in state.entries.items()},
        "again": [(batch.version, list(batch.seqs)) for batch in state.again],
        "counts": dict(state.counts),
        "state": dict(state.state),
    }


# --- the property: any prefix, after any number of crashes


@dataclass
class Segment:
    """What the model knows of one segment: the state that it begins with, its events and where each ends."""

    number: int
    begins: dict[str, Any] | None
    """None when its snapshot was never finished."""
    version: int
    events: list[tuple[Event, int]] = field(default_factory=list)


def expected(segments: Sequence[Segment], version: int) -> dict[str, Any]:
    """The model: the state at `version`, told by the events from the newest snapshot of `version` on."""
    first = max(i for i, s in enumerate(segments) if s.begins is not None and s.version == version)
    base = segments[first].begins
    assert base is not None
    state = {**base, **{key: dict(base[key]) for key in ("entries", "counts", "state")}}
    again = dict(base["again"])
    for event, _ in (pair for segment in segments[first:] for pair in segment.events):
        match event:
            case Reserve():
                state["entries"][event.seq] = (event.version, event.prompt, None, {}, 0)
                state["next_seq"] = event.seq + 1
            case Tokens():
                ticket, prompt, _, parts, uses = state["entries"][event.seq]
                old = parts.get(event.episode, ([], [], [], ""))
                new = (event.tokens.tolist(), event.logprobs.tolist(), event.versions.tolist())
                joined = [a[: event.offset] + b for a, b in zip(old[:3], new, strict=True)]
                part = {event.episode: (*joined, event.finish)}
                state["entries"][event.seq] = (ticket, prompt, None, {**parts, **part}, uses)
            case Add():
                ticket, prompt, _, _, uses = state["entries"][event.seq]
                state["entries"][event.seq] = (ticket, prompt, event.group["tokens"].tolist(), {}, uses)
            case Gone():
                del state["entries"][event.seq]
            case Trained():
                again[event.version] = list(event.seqs)
        if not isinstance(event, Tokens):
            state["state"].update(event.state)
        if isinstance(event, Reserve | Add | Gone):
            for name, number in event.counts.items():
                state["counts"][name] = state["counts"].get(name, 0) + number
    return {**state, "again": sorted(again.items())}


@dataclass
class World:
    """A run that writes a journal, crashes, and goes on from what `recover` says."""

    folder: Path
    version: int = 0
    incarnation: int = 0
    next_seq: int = 0
    running: dict[int, dict[int, int]] = field(default_factory=dict)
    """Tokens of each episode of each running group."""
    complete: list[int] = field(default_factory=list)
    again: list[Batch] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    state: ReplayState = field(default_factory=lambda: ReplayState(0))
    """What the next snapshot holds."""

    def __post_init__(self) -> None:
        self.disk = Disk(self.folder)
        self.rotate(whole=True)

    def rotate(self, *, whole: bool) -> None:
        state = Story(self.state).state() if self.segments else self.state
        number = self.disk.rotate(state)
        if not whole:
            snapshot_path(self.folder, number).unlink()
        self.segments.append(Segment(number, plain(state) if whole else None, state.version))
        self.story = Story(state)

    def write(self, event: Event) -> None:
        self.disk.write(event)
        self.story.apply(event)
        size = log_path(self.folder, self.segments[-1].number).stat().st_size
        self.segments[-1].events.append((event, size))

    def reserve(self) -> None:
        seq = self.next_seq
        prompt = Prompt(seq, 0, f"{seq}?", [seq], answer={1: "a"})
        self.write(Reserve(seq, self.version, prompt, {"groups_reserved": 1}, {"cursor": seq + 1}))
        self.running[seq] = {}
        self.next_seq += 1

    def progress(self, pick: int) -> None:
        if self.running:
            seq = list(self.running)[pick % len(self.running)]
            episode, count = pick % 2, pick % 3
            offset = self.running[seq].get(episode, 0)
            offset = offset // 2 if pick % 7 == 0 else offset
            self.write(tokens(seq, episode, offset, count, "stop" if pick % 5 == 0 else ""))
            self.running[seq][episode] = offset + count

    def add(self, pick: int) -> None:
        if self.running:
            seq = list(self.running)[pick % len(self.running)]
            self.write(Add(seq, group(seq), {"groups_added": 1}))
            del self.running[seq]
            self.complete.append(seq)

    def fail(self, pick: int) -> None:
        if self.running:
            seq = list(self.running)[pick % len(self.running)]
            self.write(Gone(seq, "failed", {"groups_failed": 1}))
            del self.running[seq]

    def train(self) -> None:
        if self.again:
            batch = self.again.pop(0)
            assert batch.version == self.version
            seqs = list(batch.seqs)
        elif len(self.complete) >= BATCH:
            seqs = [self.complete.pop(0) for _ in range(BATCH)]
        else:
            return
        self.write(Trained(self.version, seqs, state={"rng": self.version}))
        self.version += 1

    def checkpoint(self, *, whole: bool) -> None:
        """The state at the trainer's version: what was trained before it is gone, the rest is as it is."""
        now = self.story.state()
        trained = {seq for batch in now.again if batch.version < self.version for seq in batch.seqs}
        self.state = ReplayState(
            self.version,
            now.next_seq,
            {seq: entry for seq, entry in now.entries.items() if seq not in trained},
            [batch for batch in now.again if batch.version >= self.version],
            now.counts,
            now.state,
        )
        self.rotate(whole=whole)

    def crash(self, cut: float, pick: int) -> None:
        """The end of the newest log is lost; the run goes on from one of its checkpoints."""
        last = self.segments[-1]
        path = log_path(self.folder, last.number)
        begin = next(read_frames(path, lambda _: None)).end
        size = begin + round(cut * (path.stat().st_size - begin))
        with path.open("r+b") as file:
            file.truncate(size)
        last.events = [(event, end) for event, end in last.events if end <= size]
        for version in self.checkpoints():
            recovered = recover(self.folder, version, run="run")
            assert plain(recovered.state) == expected(self.segments, version)
            assert recovered.incarnation == self.incarnation
        self.resume(self.checkpoints()[pick % len(self.checkpoints())])

    def checkpoints(self) -> list[int]:
        found = sorted({s.version for s in self.segments if s.begins is not None})
        assert sorted(versions(self.folder)) == found
        return found

    def resume(self, version: int) -> None:
        self.state = recover(self.folder, version).state
        self.version, self.next_seq, self.again = version, self.state.next_seq, list(self.state.again)
        taken = {seq for batch in self.again for seq in batch.seqs}
        entries = self.state.entries
        self.running = {
            seq: {e: len(part.tokens) for e, part in entry.partials.items()}
            for seq, entry in entries.items()
            if entry.group is None
        }
        self.complete = [seq for seq, entry in entries.items() if entry.group is not None and seq not in taken]
        self.incarnation += 1
        self.disk = Disk(self.folder, self.incarnation)
        self.rotate(whole=True)


NAMES = [
    "reserve",
    "reserve",
    "progress",
    "progress",
    "add",
    "add",
    "train",
    "train",
    "fail",
    "sync",
    "checkpoint",
    "crash",
]
ACTIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 104), st.floats(0, 1)), min_size=20, max_size=40)


@settings(max_examples=40)
@given(ACTIONS, st.floats(0, 1))
def test_any_prefix_of_what_was_written_recovers_to_the_state_of_the_events_in_it(
    actions: list[tuple[str, int, float]], end: float
) -> None:
    # Syncs say what a power cut leaves; what lies in the files is the same without them.
    with tempfile.TemporaryDirectory() as folder, mock.patch("replay.writer.os.fsync"):
        world = World(Path(folder) / "journal")
        do: dict[str, Callable[[int, float], None]] = {
            "reserve": lambda pick, cut: world.reserve(),
            "progress": lambda pick, cut: world.progress(pick),
            "add": lambda pick, cut: world.add(pick),
            "train": lambda pick, cut: world.train(),
            "fail": lambda pick, cut: world.fail(pick),
            "sync": lambda pick, cut: world.disk.sync(),
            "checkpoint": lambda pick, cut: world.checkpoint(whole=pick % 4 > 0),
            "crash": lambda pick, cut: world.crash(cut, pick),
        }
        for name, pick, cut in actions:
            do[name](pick, cut)
        world.crash(end, 0)


# --- laws, one by one


def live(*seqs: int, version: int = 0) -> dict[int, Entry]:
    return {seq: Entry(seq, version, f"prompt {seq}", group(seq)) for seq in seqs}


def test_batches_trained_behind_the_checkpoint_are_served_again_over_three_incarnations(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    first.rotate(ReplayState(3, 6, live(*range(6)), counts={"groups_trained": 6}))
    first.write(Trained(3, [1, 0]), Trained(4, [2, 3]))
    rolled_back = recover(tmp_path, 3)
    assert rolled_back.state.again == [Batch(3, [1, 0]), Batch(4, [2, 3])]
    assert sorted(rolled_back.state.entries) == list(range(6))
    assert rolled_back.state.counts == {"groups_trained": 6}, "counted now, and once more when it is served again"

    second = Disk(tmp_path, incarnation=1)
    second.rotate(rolled_back.state)
    second.write(Trained(3, [1, 0]))
    third = Disk(tmp_path, incarnation=2)
    third.rotate(recover(tmp_path, 3).state)
    third.write(Trained(3, [1, 0]), Trained(4, [2, 3]), Trained(5, [5, 4]))
    end = recover(tmp_path, 3)
    assert end.state.again == [Batch(3, [1, 0]), Batch(4, [2, 3]), Batch(5, [5, 4])]
    assert end.incarnation == 2
    assert (end.state.entries[4].group == group(4)).all()  # type: ignore[union-attr]


def test_a_resume_from_an_older_checkpoint_serves_what_every_later_one_trained(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0, 6, live(*range(6))))
    disk.write(Trained(0, [0, 1]))
    disk.rotate(ReplayState(1, 6, live(2, 3, 4, 5)))
    disk.write(Trained(1, [2, 3]))
    resumed = Disk(tmp_path, incarnation=1)
    resumed.rotate(recover(tmp_path, 1).state)
    resumed.write(Trained(1, [2, 3]), Trained(2, [4, 5]))
    assert [batch.version for batch in recover(tmp_path, 0).state.again] == [0, 1, 2]
    assert [batch.version for batch in recover(tmp_path, 1).state.again] == [1, 2]
    assert versions(tmp_path) == {0: 0, 1: 2}


def test_a_group_that_was_used_and_let_go_is_there_for_its_batch_to_be_served_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    spent = Entry(0, 0, group=group(0), uses=1)
    disk.rotate(ReplayState(1, 3, {0: spent, **live(1, 2)}))
    disk.write(Trained(1, [0, 1]), Gone(0, "used"), Gone(1, "used"), Gone(2, "expired"))
    state = recover(tmp_path, 1).state
    assert {seq: entry.uses for seq, entry in state.entries.items()} == {0: 1, 1: 0}


def test_progress_and_groups_that_arrive_after_their_ticket_was_dropped_change_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0))
    disk.write(Reserve(0, 0), Gone(0, "straggled"), tokens(0, 0, 5, 3), Add(0, group(0)))
    assert recover(tmp_path, 0).state.entries == {}


def test_an_unfinished_episode_comes_back_with_all_its_tokens_and_one_that_began_anew_with_the_new_ones(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path)
    saved = tokens(0, 0, 0, 4)
    part = Partial(saved.tokens, saved.logprobs, saved.versions)
    disk.rotate(ReplayState(0, 1, {0: Entry(0, 0, partials={0: part})}))
    disk.write(tokens(0, 0, 4, 2, "stop"), tokens(0, 1, 0, 5), tokens(0, 1, 0, 2))
    got = recover(tmp_path, 0).state.entries[0].partials
    assert got[0].tokens.tolist() == list(range(6))
    assert (got[0].finish, got[1].finish) == ("stop", "")
    assert got[1].tokens.tolist() == [0, 1]
    assert (got[0].tokens.dtype, got[0].logprobs.dtype) == (torch.int32, torch.float32)
    disk.write(Add(0, group(0)))
    assert recover(tmp_path, 0).state.entries[0].partials == {}, "the complete group has them"


def test_a_snapshot_that_is_not_whole_yields_to_the_one_before(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0, 2, live(0, 1)))
    disk.write(Trained(0, [1]))
    number = Disk(tmp_path, 1).rotate(ReplayState(0, 2, live(0)))
    path = snapshot_path(tmp_path, number)
    path.write_bytes(path.read_bytes()[:-1])
    recovered = recover(tmp_path, 0)
    assert recovered.state.again == [Batch(0, [1])]
    assert recovered.notes == [f"{path}: damaged, not used"]


def test_what_cannot_be_recovered_is_said_with_what_can(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal; start the run anew"):
        recover(tmp_path / "nothing", 0)
    with pytest.raises(JournalError, match="holds no journal"):
        recover(tmp_path, 0)
    disk = Disk(tmp_path, run="mine")
    for version in (0, 4, 8):
        disk.rotate(ReplayState(version))
    with pytest.raises(JournalError, match=r"no whole snapshot of version 5; it has those of \[0, 4, 8\]"):
        recover(tmp_path, 5)
    with pytest.raises(JournalError, match="belongs to the run mine, not to another"):
        recover(tmp_path, 4, run="another")
    log_path(tmp_path, 1).unlink()
    assert recover(tmp_path, 8).num_events == 0
    with pytest.raises(JournalError, match=r"000001\.log is missing"):
        recover(tmp_path, 0)


def test_events_that_cannot_follow_each_other_are_an_error_with_their_place(tmp_path: Path) -> None:
    wrong: list[tuple[list[Event], str]] = [
        ([Trained(0, [0]), Trained(0, [1])], r"version 0 was trained from groups \[0\] and, after a resume, from"),
        ([Trained(0, [0, 7])], r"version 0 was trained from groups \[7\], which are not there"),
        ([Trained(-1, [0])], "version -1 was trained after the snapshot of 0"),
    ]
    for number, (events, text) in enumerate(wrong):
        disk = Disk(tmp_path / str(number))
        disk.rotate(ReplayState(0, 2, live(0, 1)))
        disk.write(*events)
        with pytest.raises(JournalError, match=rf"000000\.log, byte \d+: {text}"):
            recover(disk.folder, 0)
    disk = Disk(tmp_path / "gap")
    disk.rotate(ReplayState(0))
    disk.write(Reserve(0, 0), tokens(0, 1, 0, 3), tokens(0, 1, 4, 1))
    with pytest.raises(JournalError, match="episode 1 of group 0 has 3 tokens, then some at 4"):
        recover(disk.folder, 0)


def test_a_disk_that_does_not_answer_is_a_run_folder_error(tmp_path: Path) -> None:
    Disk(tmp_path).rotate(ReplayState(0))
    log_path(tmp_path, 0).unlink()
    log_path(tmp_path, 0).mkdir()
    with pytest.raises(RunFolderError, match=r"cannot read .*000000\.log: Is a directory"):
        recover(tmp_path, 0)


# --- damage


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int, list[dict[str, Any]]]:
    """A log with a mark in its middle, where that begins, and the state after each number of events."""
    folder = tmp_path_factory.mktemp("damage")
    disk, story = Disk(folder), Story(ReplayState(0))
    disk.rotate(ReplayState(0))
    states = [plain(story.state())]
    events: list[Event] = [Reserve(0, 0, "a"), tokens(0, 0, 0, 3), Add(0, group(0)), Trained(0, [0])]
    events += [Reserve(1, 0, "b"), tokens(1, 0, 0, 4), Add(1, group(1)), Gone(1, "late")]
    confirmed = 0
    for number, event in enumerate(events, start=1):
        disk.write(event)
        story.apply(event)
        states.append(plain(story.state()))
        if number == 4:
            confirmed = log_path(folder, 0).stat().st_size
            disk.sync()
    return folder, log_path(folder, 0).read_bytes(), confirmed, states


@settings(max_examples=300)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_is_an_error_where_the_disk_had_confirmed_it_and_a_dropped_end_behind_that(
    damaged: tuple[Path, bytes, int, list[dict[str, Any]]], where: float, bit: int
) -> None:
    folder, whole, confirmed, states = damaged
    at = int(where * len(whole))
    log_path(folder, 0).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    if at < confirmed:
        with pytest.raises(JournalError, match=r"000000\.log, byte \d+: damaged, and more was written behind it"):
            recover(folder, 0)
    recovered = recover(folder, 0, allow_damage=True)
    assert plain(recovered.state) == states[recovered.num_events]
    assert len(recovered.notes) == 1
    assert recovered.num_events < len(states) - 1 or at >= confirmed


def test_what_lies_before_the_damage_can_be_had_and_later_segments_are_dropped_with_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0, 4, live(0, 1, 2, 3)))
    disk.write(Trained(0, [0, 1]))
    end = log_path(tmp_path, 0).stat().st_size
    disk.write(Trained(1, [2, 3]))
    disk.rotate(ReplayState(2, 4))
    disk.write(Reserve(4, 2))
    data = bytearray(log_path(tmp_path, 0).read_bytes())
    data[end + 20] ^= 1
    log_path(tmp_path, 0).write_bytes(data)
    said = rf"byte {end}: damaged.*; 1 events before it are intact: 4 groups, batches of versions \[0\] after"
    with pytest.raises(JournalError, match=said):
        recover(tmp_path, 0)
    kept = recover(tmp_path, 0, allow_damage=True)
    assert kept.state.again == [Batch(0, [0, 1])]
    assert kept.state.next_seq == 4
    assert "everything later is dropped" in kept.notes[0]
    assert recover(tmp_path, 2).notes == [], "what lies before the snapshot is not read"


# --- recorded supports


def supports(first: int, count: int, size: int) -> torch.Tensor:
    """`[count, size]`: token t was sampled from itself and t + 1."""
    rows = torch.full((count, size), -1, dtype=torch.int32)
    rows[:, 0] = torch.arange(first, first + count)
    rows[:, 1] = rows[:, 0] + 1
    return rows


def kept_tokens(seq: int, offset: int, count: int, size: int = 3) -> Tokens:
    return replace(tokens(seq, 0, offset, count), kept=supports(100 * seq + offset, count, size))


def test_supports_of_an_unfinished_episode_come_back_with_its_tokens_whatever_was_lost(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0))
    disk.write(Reserve(1, 0), kept_tokens(1, 0, 4), kept_tokens(1, 4, 2), kept_tokens(1, 3, 5))
    part = recover(tmp_path, 0).state.entries[1].partials[0]
    assert part.tokens.tolist() == list(range(100, 108))
    assert part.kept is not None
    assert torch.equal(part.kept, supports(100, 8, 3))
    # A snapshot holds it, and later tokens continue it; the last of them are torn off by a crash.
    disk.rotate(recover(tmp_path, 0).state)
    disk.write(kept_tokens(1, 8, 2))
    whole = log_path(tmp_path, 1).stat().st_size
    disk.write(kept_tokens(1, 10, 2))
    with log_path(tmp_path, 1).open("r+b") as file:
        file.truncate(whole + 40)
    part = recover(tmp_path, 0).state.entries[1].partials[0]
    assert part.kept is not None
    assert torch.equal(part.kept, supports(100, 10, 3))


def test_tokens_that_recorded_no_support_or_a_wider_one_stay_beside_the_others(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0))
    disk.write(Reserve(1, 0), tokens(1, 0, 0, 2), kept_tokens(1, 2, 2, size=3), kept_tokens(1, 4, 1, size=5))
    kept = recover(tmp_path, 0).state.entries[1].partials[0].kept
    assert kept is not None
    assert kept.tolist() == [[-1] * 5] * 2 + [[102, 103, -1, -1, -1], [103, 104, -1, -1, -1], [104, 105, -1, -1, -1]]


def test_a_journal_from_before_supports_were_recorded_is_read(tmp_path: Path) -> None:
    """A record is read field by field: those that it lacks have their defaults."""
    old = tokens(1, 0, 0, 2)
    fewer = dataclasses.make_dataclass("Tokens", [f.name for f in dataclasses.fields(Tokens)][:-1], frozen=True)
    with mock.patch.dict(_CLASSES, Tokens=fewer):
        values = [getattr(old, f.name) for f in dataclasses.fields(Tokens)][:-1]
        (tmp_path / "old").write_bytes(encode(7, fewer(*values)))
    (frame,) = read_frames(tmp_path / "old", lambda damage: pytest.fail(str(damage)))
    read = frame.load()
    assert type(read) is Tokens
    assert read.kept is None
    assert read.tokens.tolist() == old.tokens.tolist()


def test_a_complete_group_keeps_its_supports_and_counts_them(tmp_path: Path) -> None:
    plain_add = Add(1, group(1))
    td = group(1)
    kept = torch.full((*td["tokens"].shape, 4), -1, dtype=torch.int32)
    kept[..., 0] = torch.where(td["loss_mask"], td["tokens"], -1)
    td["kept_tokens"] = kept
    assert measure(Add(1, td)) == measure(plain_add) + kept.nbytes
    assert measure(kept_tokens(1, 0, 2)) == measure(tokens(1, 0, 0, 2)) + 2 * 3 * 4
    disk = Disk(tmp_path)
    disk.rotate(ReplayState(0))
    disk.write(Reserve(1, 0), Add(1, td))
    found = recover(tmp_path, 0).state.entries[1].group
    assert found is not None
    assert torch.equal(found["kept_tokens"], kept)
