"""A recording gives back what was trained: every batch, byte for byte, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from forge import channel
from forge.batch import check_batch, make_group
from forge.errors import StalenessError
from replay import shards
from replay.events import Add, Entry, Event, Gone, ReplayState, Reserve, Trained
from replay.journal import Journal
from replay.recording import RecordedReplay, Recording
from replay.recovery import recover
from replay.segments import JournalError, log_path
from replay.storage import store

STEPS, BATCH, ROW = 6, 3, 16


def group(seq: int) -> TensorDict:
    """Ragged, and different in every number."""
    rng = torch.Generator().manual_seed(seq)
    rows = [torch.randint(1, 99, (n,), generator=rng).tolist() for n in (2 + seq % 4, 5, 1)]
    logprobs = [torch.randn(len(row), generator=rng).tolist() for row in rows]
    td = make_group([7] * (1 + seq % 3), rows, logprobs, [[seq // BATCH] * len(row) for row in rows], group_id=seq)
    td["rewards"] = torch.randn(3, generator=rng)
    td["advantages"] = torch.randn(3, generator=rng)
    return td


def record(folder: Path, events: Sequence[Event], state: ReplayState | None = None, incarnation: int = 0) -> None:
    state = state or ReplayState(0)
    journal = Journal(folder, run="run", incarnation=incarnation)
    journal.rotate(state.version, state).result(30)
    for event in events:
        journal.append(event)
    journal.close()


def bytes_of(td: TensorDict) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    keys = sorted(map(str, td.keys()))
    return {key: (td[key].dtype, tuple(td[key].shape), td[key].numpy().tobytes()) for key in keys}


def hand_over(groups: list[TensorDict], num_shards: int) -> list[channel.Handle]:
    return shards.hand_over(groups, num_shards, ROW, channel)


def added(*seqs: int) -> list[Event]:
    return [event for seq in seqs for event in (Reserve(seq, 0), Add(seq, group(seq)))]


def test_a_replayed_run_gives_byte_equal_shards_to_a_trainer_without_generators(tmp_path: Path) -> None:
    records = [store(group(seq), seq).group for seq in range(STEPS * BATCH)]
    orders = [[BATCH * step + at for at in (2, 0, 1)] for step in range(STEPS)]
    trained = [Trained(step, seqs, {"reward/mean": step / 7}) for step, seqs in enumerate(orders)]
    record(tmp_path, [*(Reserve(s, 0) for s in range(len(records))), *map(Add, range(len(records)), records), *trained])

    async def main() -> None:
        replayed = RecordedReplay(Recording(tmp_path), hand_over)
        assert await replayed.reserve() is None
        for version, seqs in enumerate(orders):
            groups = [records[seq] for seq in seqs]
            plan = shards.plan_shards([n for td in groups for n in td["lengths"].tolist()], 2, ROW)
            wanted = shards.make_shards(groups, plan)
            batch = await replayed.sample(version, 2)
            assert batch is not None
            got = [channel.take(handle) for handle in batch.handles]
            assert [bytes_of(shard) for shard in got] == [bytes_of(shard) for shard in wanted]
            assert (batch.policy_version, batch.stats["reward/mean"]) == (version, version / 7)
        assert await replayed.sample(STEPS) is None

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_batch_comes_back_in_the_order_it_was_trained_in_however_it_was_added(tmp_path: Path) -> None:
    record(tmp_path, [*added(2, 0, 3, 1), Gone(4, "failed"), Trained(0, [3, 0]), Trained(1, [1, 2])])
    recording = Recording(tmp_path)
    assert recording.versions == [0, 1]
    assert recording.batch(0).seqs == [3, 0]
    for got, seq in zip(recording.batch(1).groups, [1, 2], strict=True):
        assert bytes_of(got) == bytes_of(group(seq))
        check_batch(got)
    assert [type(event).__name__ for event in recording.events()][:3] == ["Reserve", "Add", "Reserve"]


def test_what_crashes_made_the_run_train_twice_is_there_once(tmp_path: Path) -> None:
    record(tmp_path, [*added(0, 1, 2), Trained(0, [0]), Trained(1, [2])])
    with log_path(tmp_path, 0).open("ab") as file:
        file.write(b"\x93MJ1 torn")
    resumed = recover(tmp_path, 0).state
    record(tmp_path, [Trained(0, [0]), Trained(1, [2]), Trained(2, [1])], resumed, incarnation=1)
    recording = Recording(tmp_path)
    assert [(v, recording.batch(v).seqs) for v in recording.versions] == [(0, [0]), (1, [2]), (2, [1])]
    assert bytes_of(recording.batch(2).groups[0]) == bytes_of(group(1))
    assert len(recording.notes) == 1
    assert "the last 9 bytes are a torn record" in recording.notes[0]


def test_groups_that_were_there_before_the_first_segment_come_from_its_snapshot(tmp_path: Path) -> None:
    state = ReplayState(5, 2, {seq: Entry(seq, 5, group=group(seq)) for seq in range(2)})
    record(tmp_path, [*added(2), Trained(5, [1, 2])], state)
    batch = Recording(tmp_path).batch(5)
    assert [bytes_of(td) for td in batch.groups] == [bytes_of(group(1)), bytes_of(group(2))]


def test_stats_that_were_not_recorded_are_read_off_the_groups(tmp_path: Path) -> None:
    record(tmp_path, [*added(0, 4), Trained(3, [0, 4], {"reward/mean": 9.0})])

    async def main() -> None:
        batch = await RecordedReplay(Recording(tmp_path), hand_over).sample(3)
        assert batch is not None
        channel.take(batch.handles[0])
        assert batch.stats["reward/mean"] == 9.0
        assert batch.stats["tokens/trained"] == 16
        assert batch.stats["staleness/max"] == 3

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_a_recording_does_not_hold_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal; give the journal of a run that was recorded"):
        Recording(tmp_path)
    record(tmp_path, [*added(0), Trained(0, [0]), Trained(4, [0, 7])])
    recording = Recording(tmp_path)
    with pytest.raises(JournalError, match="no batch of version 2; it has those of 0 to 4, 2 in all"):
        recording.batch(2)
    with pytest.raises(JournalError, match="group 7 of the batch of version 4 is not in"):
        recording.batch(4)

    async def main() -> None:
        replayed = RecordedReplay(recording, hand_over)
        with pytest.raises(
            StalenessError, match="no batch was recorded at policy_version 2, the next one is that of 4"
        ):
            await replayed.sample(2)
        await replayed.release(1)
        await replayed.close()
        assert await replayed.sample(0) is None
        assert await replayed.stats() == {"recording/batches": 2, "recording/served": 0}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_two_stories_in_one_folder_and_damage_are_errors(tmp_path: Path) -> None:
    record(tmp_path / "two", [*added(0, 1), Trained(0, [0])])
    record(tmp_path / "two", [Trained(0, [1])], recover(tmp_path / "two", 0).state, incarnation=1)
    with pytest.raises(JournalError, match=r"version 0 was trained from groups \[0\] and, after a resume, from \[1\]"):
        Recording(tmp_path / "two")
    record(tmp_path / "bad", [*added(0), Trained(0, [0])])
    path = log_path(tmp_path / "bad", 0)
    data: Any = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"byte \d+: damaged, and more was written behind it"):
        Recording(tmp_path / "bad")
