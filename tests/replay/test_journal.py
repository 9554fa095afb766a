"""The journal: what is written comes back, in time, whatever the disk and the kernel's signals do."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

import replay.journal
import replay.writer
from forge.batch import make_group
from forge.data import Prompt
from forge.errors import RunFolderError
from replay.events import Add, Entry, Event, Gone, ReplayState, Reserve, Tokens, Trained
from replay.frames import Frame, encode, read_frame, read_frames
from replay.journal import Journal
from replay.recording import Recording
from replay.recovery import recover, versions
from replay.segments import numbers
from replay.writer import Writer, measure


def no_damage(damage: object) -> None:
    raise AssertionError(damage)


def through(folder: Path, value: Any) -> Any:
    """`value`, written and read."""
    path = folder / "file"
    path.write_bytes(encode(7, value))
    (frame,) = read_frames(path, no_damage)
    return frame.load()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


# --- bytes

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner),
        st.dictionaries(st.integers() | st.tuples(st.integers()), inner),
        st.sets(st.integers()),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down: 1, 1.0 and True are three things."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    return bool(a == b)


@given(PLAIN)
def test_any_value_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert same(through(tmp_path_factory.getbasetemp(), value), value)


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    wide = torch.arange(24).reshape(4, 6)
    values = [
        *(torch.arange(5).to(dtype) for dtype in (torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float64)),
        torch.tensor(3.5),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.empty(0, 7),
        wide[:, ::2],
        wide.T,
        torch.nn.Parameter(torch.ones(2)),
    ]
    for value in values:
        got = through(tmp_path, {"x": [value]})["x"][0]
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert (
            got.reshape(-1).view(torch.uint8).tolist()
            == value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        )


def test_nested_and_stacked_tensordicts_come_back(tmp_path: Path) -> None:
    inner = TensorDict({"a": torch.ones(2, 3), "label": NonTensorData("x", batch_size=[2])}, batch_size=[2])
    ragged = LazyStackedTensorDict(*[TensorDict({"r": torch.arange(n)}, batch_size=[]) for n in (1, 3)])
    got = through(tmp_path, TensorDict({"inner": inner, "ragged": ragged}, batch_size=[2]))
    assert got.batch_size == torch.Size([2])
    assert got["inner", "label"] == "x"
    assert [row["r"].tolist() for row in got["ragged"].unbind(0)] == [[0], [0, 1, 2]]


def test_no_tensor_and_nothing_plain_goes_through_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: object, *_: object) -> bytes:
        raise AssertionError(f"pickled {value!r}")

    monkeypatch.setattr(pickle, "dumps", refuse)
    prompt = Prompt(3, 1, "2 + 2?", [1, 2], answer="4", metadata={"n": [1.5]})
    state = {"rng": torch.arange(3), "td": TensorDict({"x": torch.ones(2)}, batch_size=[2]), "t": ("a", 1)}
    got = through(tmp_path, Reserve(5, 2, prompt, {"n": 1}, state))
    assert (got.seq, got.version, got.prompt, got.counts) == (5, 2, prompt, {"n": 1})
    assert got.state["rng"].tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="pickled"):
        through(tmp_path, Reserve(5, 2, Prompt(3, 1, "", [1], answer=object())))


def test_a_frame_is_read_by_its_place_and_its_tensors_have_memory_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(encode(1, [torch.arange(4)]) + encode(2, torch.arange(3)))
    second = list(read_frames(path, no_damage))[1]
    got = read_frame(path, second.offset)
    assert isinstance(got, Frame)
    assert got.kind == 2
    a, b = got.load(), got.load()
    a.zero_()
    assert b.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=f"no intact record at byte {second.offset + 1} of {path}"):
        read_frame(path, second.offset + 1)


# --- time


@dataclass
class SlowDisk:
    """A disk of `rate` bytes a second, whose syncs take 50 ms, on a clock of its own."""

    rate: float
    now: float = 0.0
    num_syncs: int = 0

    def writev(self, fd: int, parts: list[bytearray]) -> int:
        written = real_writev(fd, parts)
        self.now += written / self.rate
        return written

    def fsync(self, fd: int) -> None:
        self.now += 0.05
        self.num_syncs += 1


real_writev = os.writev


def progress(seq: int, offset: int = 0, count: int = 32) -> Tokens:
    at = torch.arange(offset, offset + count, dtype=torch.int32)
    return Tokens(seq, 0, offset, at, at.float(), at)


def test_every_event_is_on_the_disk_within_two_seconds_under_load_and_beside_a_snapshot_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake clock: events for half of what the disk takes, a snapshot that takes it six seconds."""
    disk = SlowDisk(rate=1e6)
    monkeypatch.setattr(replay.writer.os, "writev", disk.writev)
    monkeypatch.setattr(replay.writer.os, "fsync", disk.fsync)
    monkeypatch.setattr(replay.writer, "CHUNK", 50_000)
    writer = Writer(tmp_path, "run", 0, 1.0, clock=lambda: disk.now)
    writer.open()
    rows = TensorDict({"x": torch.zeros(25, 500)}, batch_size=[])
    writer.push_rotate(ReplayState(0))
    snapshot: Future[int] | None = None
    pushed: list[float] = []
    durable: list[float] = []
    owed = 0.0
    while disk.now < 20:
        before = disk.now
        writer.turn()
        disk.now += 0.01
        durable += [disk.now] * (writer.num_durable - len(durable))
        owed += (disk.now - before) * 500_000
        while owed > 0:
            event = progress(len(pushed), count=512)
            owed -= len(encode(1, event))
            pushed.append(before)
            writer.push(event, measure(event))
        if snapshot is None and disk.now > 3:
            snapshot = writer.push_rotate(ReplayState(0, entries={n: Entry(n, 0, group=rows) for n in range(60)}))
    assert snapshot is not None
    assert snapshot.done()
    assert writer.failure is None
    waits = [end - start for start, end in zip(pushed, durable, strict=False)]
    assert len(waits) > 1_000
    assert max(waits) <= 2.0
    assert max(pushed) - pushed[len(durable)] <= 2.0, "what is not on the disk yet is younger too"


def test_an_idle_journal_syncs_once_for_each_interval_with_events_and_not_for_each_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(rate=1e12)
    monkeypatch.setattr(replay.writer.os, "fsync", disk.fsync)
    writer = Writer(tmp_path, "run", 0, 1.0, clock=lambda: disk.now)
    writer.open()
    writer.push_rotate(ReplayState(0))
    writer.turn()
    begun = disk.num_syncs
    for _ in range(100):
        disk.now += 0.1
        writer.push(Gone(0, "failed"), 1)
        writer.turn()
    assert 8 <= disk.num_syncs - begun <= 10
    disk.now += 0.95
    assert writer.due_in() is not None
    writer.turn()
    settled = disk.num_syncs
    for _ in range(50):
        disk.now += 1.0
        writer.turn()
    assert (disk.num_syncs, writer.lag_s) == (settled, 0.0)


def test_what_was_written_before_a_sync_is_durable_when_it_is_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path, run="run", interval_s=1e6)
    journal.rotate(0, ReplayState(0)).result(30)
    for seq in range(100):
        journal.append(Reserve(seq, 0, f"prompt {seq}"))
    journal.sync().result(30)
    assert sorted(recover(tmp_path, 0).state.entries) == list(range(100))
    assert (journal.lag_s, journal.queued_bytes) == (0.0, 0)
    journal.close()


@dataclass
class StuckDisk:
    """Syncs that take until `go`."""

    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def fsync(self, fd: int) -> None:
        self.reached.set()
        assert self.go.wait(60)

    def hold(self, journal: Journal) -> Future[None]:
        """A sync that hangs; what is appended now stays in the queue."""
        journal.append(Gone(0, "failed"))
        done = journal.sync()
        assert self.reached.wait(30)
        return done


def test_producers_wait_for_a_disk_that_is_behind_and_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = Journal(tmp_path, run="run", queue_bytes=1000)
        journal.rotate(0, ReplayState(0)).result(30)
        disk = StuckDisk()
        monkeypatch.setattr(replay.writer.os, "fsync", disk.fsync)
        done = disk.hold(journal)
        while journal.queued_bytes < 1000:
            await journal.room()
            journal.append(Gone(0, "failed"))
        waiting = [asyncio.create_task(journal.room()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        while journal.queued_bytes <= 2000:
            journal.append(Gone(0, "failed"))
        with pytest.raises(RunFolderError, match=r"bytes and [\d.]+ s behind .* wait for Journal\.room before"):
            journal.append(Gone(0, "failed"))
        disk.go.set()
        await asyncio.gather(*waiting)
        await asyncio.wrap_future(done)
        journal.close()

    run(main)


def test_a_disk_that_never_catches_up_is_an_error_with_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = Journal(tmp_path, run="run", queue_bytes=1000, wait_s=0.01)
        journal.rotate(0, ReplayState(0)).result(30)
        disk = StuckDisk()
        monkeypatch.setattr(replay.writer.os, "fsync", disk.fsync)
        disk.hold(journal)
        while journal.queued_bytes < 1000:
            journal.append(Gone(0, "failed"))
        with pytest.raises(
            RunFolderError, match=r"limits are 1,000 bytes and 2 s: it has not caught up within 0\.01 s"
        ):
            await journal.room()
        with pytest.raises(RunFolderError, match=r"it has not taken the rest within 0\.01 s"):
            journal.close(0.01)
        disk.go.set()
        journal._thread.join(30)

    run(main)


# --- segments


def test_events_after_a_rotate_belong_to_the_new_segment_and_older_ones_can_be_pruned(tmp_path: Path) -> None:
    journal = Journal(tmp_path, run="run")
    assert journal.rotate(0, ReplayState(0)).result(30) == 0
    journal.append(Reserve(0, 0))
    state = ReplayState(2, 1, {0: Entry(0, 0)})
    assert journal.rotate(2, state).result(30) == 1
    journal.append(Reserve(1, 2))
    assert sorted(recover(tmp_path, 2).state.entries) == [0, 1] or journal.sync().result(30) is None
    assert versions(tmp_path) == {0: 0, 2: 1}
    journal.prune(1)
    journal.sync().result(30)
    assert numbers(tmp_path) == [1]
    journal.prune(99)
    journal.close()
    assert numbers(tmp_path) == [1], "the segment that is being written stays"
    assert sorted(recover(tmp_path, 2).state.entries) == [0, 1]
    again = Journal(tmp_path, run="run", incarnation=1)
    assert again.rotate(2, recover(tmp_path, 2).state).result(30) == 2
    again.close()


def test_a_batch_of_a_version_before_the_rotate_and_a_state_of_another_version_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, run="run")
    with pytest.raises(ValueError, match=r"rotate\(3, \.\.\.\) got the state of version 2"):
        journal.rotate(3, ReplayState(2))
    journal.rotate(3, ReplayState(3)).result(30)
    with pytest.raises(ValueError, match=r"a batch of version 2 after rotate\(3, \.\.\.\); rotate after the sample"):
        journal.append(Trained(2, [0]))
    journal.close()
    journal.close()
    with pytest.raises(RunFolderError, match="is closed"):
        journal.append(Gone(0, "failed"))


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.journal, "_LOCK_S", 0.01)
    first = Journal(tmp_path, run="run")
    with pytest.raises(RunFolderError, match=r"another process writes the journal .* wait for that run or end it"):
        Journal(tmp_path, run="run")
    first.close()
    Journal(tmp_path, run="run").close()


def test_what_a_kill_left_of_a_snapshot_is_removed(tmp_path: Path) -> None:
    (tmp_path / "000003.tmp").write_bytes(b"half")
    Journal(tmp_path, run="run").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]


# --- disks that refuse


def test_what_the_disk_refuses_is_raised_by_every_later_call_and_told_to_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, run="run", interval_s=1e6)
    journal.rotate(0, ReplayState(0)).result(30)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(replay.writer.os, "fsync", broken)
    journal.append(Reserve(0, 0))
    text = r"cannot write .*000000\.log: Input/output error \(EIO\)"
    with pytest.raises(RunFolderError, match=text):
        journal.sync().result(30)
    calls: list[Callable[[], object]] = [
        lambda: journal.append(Gone(0, "failed")),
        lambda: journal.rotate(1, ReplayState(1)),
        journal.sync,
        lambda: asyncio.run(journal.room()),
        journal.close,
    ]
    for call in calls:
        with pytest.raises(RunFolderError, match=text):
            call()
    monkeypatch.undo()
    assert recover(tmp_path, 0).state.next_seq == 1, "what was written is whole"


def test_a_value_that_cannot_be_written_is_an_error_and_not_a_thread_that_ends_in_silence(tmp_path: Path) -> None:
    journal = Journal(tmp_path, run="run")
    journal.rotate(0, ReplayState(0)).result(30)
    journal.append(Reserve(0, 0, prompt=lambda: None))
    with pytest.raises(RunFolderError, match=r"cannot write .*000000\.log: .*pickle"):
        journal.sync().result(30)
    with pytest.raises(RunFolderError, match="pickle"):
        journal.close()


FULL = """
import resource, sys
from pathlib import Path
import torch
from replay.events import ReplayState, Reserve
from replay.journal import Journal
folder = Path(sys.argv[1])
journal = Journal(folder, run="run", interval_s=0.01)
journal.rotate(0, ReplayState(0)).result(30)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
durable = 0
try:
    for seq in range(10_000):
        journal.append(Reserve(seq, 0, "x" * 100))
        if seq % 10 == 0:
            journal.sync().result(30)
            durable = seq + 1
except Exception as error:
    print(durable, type(error).__name__, error)
"""


def test_a_disk_that_fills_up_is_one_error_and_whole_records(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    durable, kind, text = done.stdout.split(" ", 2)
    assert kind == "RunFolderError"
    assert "000000.log: File too large (EFBIG)" in text
    recovered = recover(tmp_path, 0)
    assert int(durable) > 20
    assert recovered.state.next_seq >= int(durable)
    assert recovered.notes == []


# --- kill -9


def text_of(seq: int, episode: int, at: int) -> int:
    return seq * 1000 + episode * 100 + at


LENGTH, STEP, GROUP = 12, 4, 2


def group_of(seq: int) -> TensorDict:
    rows = [[text_of(seq, episode, at) for at in range(LENGTH)] for episode in range(GROUP)]
    zeros = [[0] * LENGTH] * GROUP
    return make_group([1], rows, [[0.5] * LENGTH] * GROUP, zeros, group_id=seq)


class Run:
    """The process that is killed: a rollout loop and a trainer that only write the journal."""

    def __init__(self, folder: Path) -> None:
        known = versions(folder) if folder.exists() else {}
        incarnation, state = 0, ReplayState(0)
        if known:
            recovered = recover(folder, max(known), run="run")
            incarnation, state = recovered.incarnation + 1, recovered.state
        self.journal = Journal(folder, run="run", incarnation=incarnation)
        self.version, self.entries, self.again = state.version, dict(state.entries), list(state.again)
        self.next_seq, self.cursor = state.next_seq, state.state.get("cursor", 0)
        self.said: list[str] = []
        self.rotate()

    def rotate(self) -> None:
        """Between two groups: then no running one has tokens of this incarnation."""
        state = ReplayState(
            self.version, self.next_seq, dict(self.entries), list(self.again), state={"cursor": self.cursor}
        )
        self.journal.rotate(self.version, state).result(60)

    def write(self, event: Event, said: str) -> None:
        self.journal.append(event)
        self.said.append(said)

    def make(self, seq: int) -> None:
        parts = dict(self.entries[seq].partials)
        for episode in range(GROUP):
            begun = len(parts[episode].tokens) if episode in parts else 0
            for offset in range(begun, LENGTH, STEP):
                values = torch.tensor([text_of(seq, episode, offset + i) for i in range(STEP)], dtype=torch.int32)
                self.write(
                    Tokens(seq, episode, offset, values, values * 0.5, values), f"tokens {seq} {episode} {offset}"
                )
                self.tick()
        self.entries[seq] = Entry(seq, self.version, self.entries[seq].prompt, group_of(seq))
        self.write(Add(seq, self.entries[seq].group), f"add {seq}")  # type: ignore[arg-type]

    def tick(self) -> None:
        """Says what is durable, once it is."""
        said, self.said = "\n".join([*self.said, "."]), []
        self.journal.sync().add_done_callback(lambda _: os.write(1, f"{said}\n".encode()))

    def step(self) -> None:
        while sum(entry.group is None for entry in self.entries.values()) < 2:
            seq = self.next_seq
            self.next_seq, self.cursor = seq + 1, self.cursor + 1
            self.entries[seq] = Entry(seq, self.version, f"prompt {self.cursor - 1}")
            self.write(
                Reserve(seq, self.version, f"prompt {self.cursor - 1}", state={"cursor": self.cursor}), f"reserve {seq}"
            )
        self.make(min(seq for seq, entry in self.entries.items() if entry.group is None))
        if self.again:
            seqs = list(self.again.pop(0).seqs)
        else:
            seqs = [seq for seq, entry in self.entries.items() if entry.group is not None][:2]
        if len(seqs) == 2:
            self.write(Trained(self.version, seqs), f"trained {self.version} {seqs[0]} {seqs[1]}")
            self.version += 1
            for seq in seqs:
                del self.entries[seq]
            if self.version % 3 == 0:
                self.rotate()
        self.tick()


def nursery(folder: Path) -> None:
    """Has imported everything, and forks a Run for each line that it reads: starting one takes no time."""
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            run = Run(folder)
            while True:
                run.step()
        os.write(1, f"pid {child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"dead {status}\n".encode())


def kill_at_random_moments(folder: Path, times: int) -> None:
    rng = random.Random(times)
    said: list[list[str]] = []
    script = f"from test_journal import nursery, Path; nursery(Path({str(folder)!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(times):
            print("go", file=process.stdin, flush=True)
            victim, left = 0, rng.randrange(1, 60)
            while not (line := process.stdout.readline()).startswith("dead"):
                assert line, "the nursery ended by itself"
                if line.startswith("pid"):
                    victim = int(line.split()[1])
                said.append(line.split())
                left -= line == ".\n"
                if left <= 0 and victim:
                    os.kill(victim, signal.SIGKILL)
                    victim, left = 0, sys.maxsize
            assert line.split() == ["dead", str(int(signal.SIGKILL))], "the run ended by itself"
            check_after_kill(folder, said, number)
        process.stdin.close()


def check_after_kill(folder: Path, said: list[list[str]], incarnation: int) -> None:
    """All that was said to be durable is there, and nothing was made twice."""
    recording = Recording(folder)
    version = max(versions(folder))
    recovered = recover(folder, version, run="run")
    state = recovered.state
    assert recovered.incarnation == incarnation
    trained = [seq for v in recording.versions for seq in recording.batch(v).seqs]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    over = {seq for v in recording.versions if v < version for seq in recording.batch(v).seqs}
    assert over.isdisjoint(state.entries)
    for name, *numbers_said in said:
        if name in (".", "pid"):
            continue
        seq, *rest = map(int, numbers_said)
        if name == "trained":
            assert recording.batch(seq).seqs == rest
            assert seq < version or seq in [batch.version for batch in state.again]
        elif seq not in over:
            entry = state.entries[seq]
            if name == "add":
                assert entry.group is not None
            if name == "tokens" and entry.group is None:
                assert len(entry.partials[rest[0]].tokens) >= rest[1] + STEP
    for seq, entry in state.entries.items():
        assert entry.prompt == f"prompt {seq}"
        if entry.group is not None:
            assert (entry.group == group_of(seq)).all()
        for episode, part in entry.partials.items():
            assert part.tokens.tolist() == [text_of(seq, episode, at) for at in range(len(part.tokens))]
    drawn = [event.seq for event in recording.events() if isinstance(event, Reserve)]
    assert drawn == list(range(len(drawn))), "a prompt was lost or drawn twice"
    made = [(event.seq, event.episode, event.offset) for event in recording.events() if isinstance(event, Tokens)]
    assert len(made) == len(set(made)), "tokens that were journalled were made again"


def test_after_three_kills_at_random_moments_all_that_was_durable_is_there_and_nothing_is_made_twice(
    tmp_path: Path,
) -> None:
    kill_at_random_moments(tmp_path / "journal", 3)


@pytest.mark.soak
def test_after_fifty_kills_at_random_moments_all_that_was_durable_is_there_and_nothing_is_made_twice(
    tmp_path: Path,
) -> None:
    kill_at_random_moments(tmp_path / "journal", 50)
