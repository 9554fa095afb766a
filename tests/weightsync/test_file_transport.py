"""Laws of the file transport: a version is there whole or not at all, and what is read is what was written."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from forge.errors import ConfigError, DeadlineExceeded, WeightSyncError
from weightsync.layout import Box, Layout, full_box, make_layout, sub_view, view
from weightsync.offer import DELTA, FULL, Offer
from weightsync.transports.context import PullerContext, SenderContext
from weightsync.transports.file import KEEP, MANIFEST, FilePuller, FileSender

PARAMETERS = [
    ("embed.weight", (13, 6), torch.bfloat16),
    ("norm.weight", (6,), torch.float32),
    ("scale", (), torch.float32),
    ("big.weight", (3000, 1200), torch.bfloat16),  # more than one block
    ("empty", (0, 4), torch.float32),
]
FULL_LAYOUT = make_layout(PARAMETERS)
WHOLE = {name: full_box(shape) for name, shape, _ in PARAMETERS}
# Two ranks: rows of one parameter, columns of another, the rest on one of them.
TWO: list[dict[str, Box]] = [
    {"embed.weight": ((0, 7), (0, 6)), "big.weight": ((0, 3000), (0, 500)), "scale": ()},
    {"embed.weight": ((7, 13), (0, 6)), "big.weight": ((0, 3000), (500, 1200)), "norm.weight": ((0, 6),)},
]
ONE_EACH = [
    {n: b for n, b in WHOLE.items() if n != "big.weight"},
    {"big.weight": WHOLE["big.weight"]},
]
WORKERS: list[dict[str, Box]] = [
    {**WHOLE, "embed.weight": ((0, 8), (0, 6)), "big.weight": ((0, 3000), (0, 600))},
    {**WHOLE, "embed.weight": ((8, 13), (0, 6)), "big.weight": ((1500, 3000), (0, 1200))},
]


def weights(seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (FULL_LAYOUT.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


class Trainer:
    """Its ranks' senders, and their snapshot buffers (one each) and payloads."""

    def __init__(self, folder: Path, ranks: Sequence[Mapping[str, Box]] = (WHOLE,), deadline_s: float = 20.0) -> None:
        self.layouts = [make_layout(PARAMETERS, None if boxes is WHOLE else boxes) for boxes in ranks]
        self.buffers = [torch.zeros(layout.nbytes + 64, dtype=torch.uint8) for layout in self.layouts]
        self.payloads = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in ranks]
        self.senders = [
            FileSender(
                SenderContext(
                    rank=rank,
                    world=len(ranks),
                    layout=self.layouts[rank],
                    sources=self.layouts,
                    buffers=[self.buffers[rank]],
                    payload=self.payloads[rank],
                    deadline_s=deadline_s,
                    folder=str(folder),
                )
            )
            for rank in range(len(ranks))
        ]
        self.links = [sender.link() for sender in self.senders]
        for sender in self.senders:
            sender.meet(self.links)

    def load(self, image: torch.Tensor) -> None:
        held = {entry.name: entry for entry in FULL_LAYOUT.entries}
        for layout, buffer in zip(self.layouts, self.buffers, strict=True):
            for entry in layout.entries:
                view(buffer, entry).copy_(sub_view(image, held[entry.name], entry.box))

    def offer(self, version: int, kind: str = FULL, nbytes: Sequence[int] = ()) -> Offer:
        return Offer(version, 0, kind, version - 1 if kind == DELTA else -1, list(nbytes), [])

    def publish(self, version: int, kind: str = FULL, nbytes: Sequence[int] = ()) -> Offer:
        """All ranks at once, as the controller does."""
        offer = self.offer(version, kind, nbytes)
        with ThreadPoolExecutor() as pool:
            shares = list(pool.map(lambda sender: sender.prepare(offer), self.senders))
        return replace(offer, where={key: value for share in shares for key, value in share.items()})

    def puller(
        self, needed: Sequence[Mapping[str, Box]] = (WHOLE,), rank: int = 0, deadline_s: float = 5.0
    ) -> FilePuller:
        cpu = torch.device("cpu")
        context = ("generator/0", rank, len(needed), FULL_LAYOUT, self.layouts, needed, self.links, cpu, deadline_s)
        return FilePuller(PullerContext(*context))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(*args: Any, **options: Any) -> Trainer:
        made.append(Trainer(tmp_path / "weights", *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir())


@pytest.mark.parametrize("ranks", [(WHOLE,), TWO, ONE_EACH])
@pytest.mark.parametrize("needed", [(WHOLE,), WORKERS])
def test_every_worker_reads_what_it_needs_bit_for_bit_and_nothing_else(
    trainer: Callable[..., Trainer], ranks: Sequence[Mapping[str, Box]], needed: Sequence[Mapping[str, Box]]
) -> None:
    one, image = trainer(ranks), weights(1)
    one.load(image)
    offer = one.publish(3)
    for rank, boxes in enumerate(needed):
        expected = torch.zeros_like(image)
        for entry in FULL_LAYOUT.entries:
            sub_view(expected, entry, boxes[entry.name]).copy_(sub_view(image, entry, boxes[entry.name]))
        puller = one.puller(needed, rank)
        for _ in range(2):
            pulled = puller.pull(offer)
            for entry in FULL_LAYOUT.entries:
                assert same_bits(view(pulled, entry), view(expected, entry)), entry.name
    assert not list(Path(offer.where["path"]).glob(".*")), "a mark was left behind"


def test_one_rank_writes_an_ordinary_safetensors_checkpoint(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    one, image = trainer(), weights(2)
    one.load(image)
    one.publish(1)
    assert folders(tmp_path / "weights") == ["v1"]
    folder = tmp_path / "weights" / "v1"
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "model.safetensors"]
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == {name for name, _, _ in PARAMETERS}
    for entry in FULL_LAYOUT.entries:
        assert same_bits(loaded[entry.name], view(image, entry)), entry.name
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["version"], manifest["kind"], manifest["base"]) == (1, "full", -1)
    (file,) = manifest["files"]
    assert file["file"] == "model.safetensors"
    (norm,) = [t for t in file["tensors"] if t["name"] == "norm.weight"]
    assert (norm["dtype"], norm["shape"], norm["box"], len(norm["sums"])) == ("float32", [6], [[0, 6]], 1)


def test_whole_tensors_of_several_ranks_have_an_index_and_parts_say_what_they_are(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    whole = trainer(ONE_EACH)
    folder = Path(whole.publish(1).where["path"])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        **dict.fromkeys(("embed.weight", "norm.weight", "scale"), "model-00001-of-00002.safetensors"),
        "big.weight": "model-00002-of-00002.safetensors",
    }
    whole.close()
    folder = Path(trainer(TWO).publish(2).where["path"])
    assert not (folder / "model.safetensors.index.json").exists()
    with safe_open(folder / "model-00002-of-00002.safetensors", "pt") as file:
        assert file.get_slice("big.weight").get_shape() == [3000, 700]
        parts = json.loads(file.metadata()["parts"])
    assert parts["big.weight"] == {"shape": [3000, 1200], "box": [[0, 3000], [500, 1200]]}
    assert "norm.weight" not in parts


def test_payloads_travel_as_files(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    one = trainer(TWO)
    for number, payload in enumerate(one.payloads):
        payload.copy_(torch.arange(len(payload)).to(torch.uint8) + number)
    offer = one.publish(4, DELTA, [1000, 7])
    assert folders(tmp_path / "weights") == ["v4.delta-from-3"]
    found = one.puller().pull_payloads(offer)
    assert all(torch.equal(f, p[:n]) for f, p, n in zip(found, one.payloads, (1000, 7), strict=True))
    with pytest.raises(WeightSyncError, match="version 4 is offered as delta, and was to be read as full"):
        one.puller().pull(offer)
    # The same version in full, for a replica that does not hold the base.
    one.load(weights(3))
    one.puller().pull(one.publish(4))
    damaged = Path(offer.where["path"]) / "delta-00001-of-00002.bin"
    flip(damaged, 500)
    with pytest.raises(WeightSyncError, match=r"v4\.delta-from-3/delta-00001-of-00002\.bin of version 4 is damaged"):
        one.puller().pull_payloads(offer)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_anywhere_in_the_data_is_found_and_its_parameter_named(trainer: Callable[..., Trainer]) -> None:
    one = trainer()
    one.load(weights(4))
    offer = one.publish(5)
    path = Path(offer.where["path"]) / "model.safetensors"
    tensors = json.loads((path.parent / MANIFEST).read_text())["files"][0]["tensors"]
    for tensor in tensors:
        for at in {tensor["begin"], tensor["begin"] + tensor["nbytes"] - 1} if tensor["nbytes"] else ():
            flip(path, at)
            with pytest.raises(
                WeightSyncError, match=rf"model\.safetensors of version 5 is damaged in {tensor['name']},"
            ):
                one.puller().pull(offer)
            flip(path, at)
    one.puller().pull(offer)


def test_a_truncated_missing_or_unreadable_file_is_named_with_version_and_remedy(
    trainer: Callable[..., Trainer],
) -> None:
    one = trainer(TWO)
    offer = one.publish(6)
    puller = one.puller()
    path = Path(offer.where["path"]) / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    with pytest.raises(
        WeightSyncError, match=r"00002\.safetensors of version 6 has \d+ bytes and should have .*publish"
    ):
        puller.pull(offer)
    path.unlink()
    with pytest.raises(WeightSyncError, match=r"00002\.safetensors of version 6 cannot be opened \(No such file"):
        puller.pull(offer)
    path.write_bytes(data)
    puller.pull(offer)
    manifest = path.with_name(MANIFEST)
    text = manifest.read_bytes()
    manifest.write_bytes(text[:-3])
    with pytest.raises(WeightSyncError, match=r"manifest\.json is not the one that version 6 was offered with"):
        puller.pull(offer)
    manifest.unlink()
    with pytest.raises(
        WeightSyncError, match=r"version 6 is not in .*v6: this host does not see it; .*weightsync\.folder"
    ):
        one.puller(deadline_s=0.1).pull(offer)
    manifest.mkdir()
    with pytest.raises(WeightSyncError, match=r"cannot read version 6 in .*\(EISDIR\)"):
        puller.pull(offer)


def test_a_read_that_takes_too_long_says_so(trainer: Callable[..., Trainer]) -> None:
    one = trainer()
    offer = one.publish(1)
    with pytest.raises(DeadlineExceeded, match=r"waited -1 s for .*model\.safetensors to be read \(version 1\)"):
        one.puller(deadline_s=-1.0).pull(offer)


def test_a_puller_waits_for_a_folder_that_is_shown_late(trainer: Callable[..., Trainer]) -> None:
    one = trainer()
    image = weights(7)
    one.load(image)
    offer = one.publish(1)
    folder = Path(offer.where["path"])
    hidden = folder.with_name("elsewhere")
    folder.rename(hidden)
    with ThreadPoolExecutor() as pool:
        pulled = pool.submit(one.puller().pull, offer)
        hidden.rename(folder)
        assert same_bits(view(pulled.result(10), FULL_LAYOUT.entries[0]), view(image, FULL_LAYOUT.entries[0]))


def test_the_folder_appears_only_when_every_rank_has_written(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    one = trainer(TWO)
    with ThreadPoolExecutor() as pool:
        finished = pool.submit(one.senders[0].prepare, one.offer(1))
        while not (tmp_path / "weights" / "v1.tmp" / "rank-0.json").exists():
            assert not finished.done()
        assert folders(tmp_path / "weights") == ["v1.tmp"]
        one.senders[1].prepare(one.offer(1))
        finished.result(10)
    assert folders(tmp_path / "weights") == ["v1"]


def test_a_rank_that_does_not_write_is_named_at_the_deadline(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    one = trainer(TWO, deadline_s=0.5)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.5 s for trainer rank 1 to write its shard of version 1"):
        one.senders[0].prepare(one.offer(1))
    assert folders(tmp_path / "weights") == []


def test_what_an_earlier_run_left_is_neither_taken_for_a_shard_nor_read(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    before = trainer(TWO)
    before.load(weights(8))
    before.publish(1)
    before.senders[1].prepare(before.offer(2))  # and its rank 0 died
    stale = before.publish(1)
    leftover = tmp_path / "weights" / "v2.tmp"
    assert leftover.exists()
    os.close(before.senders[0]._lock or -1)  # the lock of a process goes with it
    before.senders[0]._lock = None
    impatient = trainer(TWO, deadline_s=0.5)
    assert not leftover.exists()
    impatient.senders[1].prepare(impatient.offer(1))
    impatient.senders[0].meet([impatient.links[0], before.links[1]])  # what is there is not this rank's
    with pytest.raises(DeadlineExceeded, match="trainer rank 1"):
        impatient.senders[0].prepare(impatient.offer(1))
    impatient.close()
    after = trainer(TWO)
    image = weights(9)
    after.load(image)
    offer = after.publish(1)
    assert same_bits(view(after.puller().pull(offer), FULL_LAYOUT.entries[0]), view(image, FULL_LAYOUT.entries[0]))
    with pytest.raises(WeightSyncError, match="another run publishes into the same folder"):
        after.puller().pull(stale)


def test_two_runs_do_not_share_a_folder(trainer: Callable[..., Trainer]) -> None:
    trainer()
    with pytest.raises(ConfigError, match=r"another run publishes into weightsync\.folder .*a folder of its own"):
        trainer()


def test_a_folder_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(ConfigError, match=r"weightsync\.folder .*weights cannot be used: File exists"):
        Trainer(tmp_path / "weights")
    with pytest.raises(ConfigError, match=r"transport file needs weightsync\.folder"):
        FileSender(SenderContext(0, 1, Layout((), 0), [], [], None, 1.0))


def test_old_versions_are_removed_but_not_one_that_is_being_read(
    trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    one = trainer()
    (tmp_path / "weights" / "v0.notes").mkdir()  # not ours
    offers = [one.publish(version) for version in (1, 2)]
    mark = Path(offers[0].where["path"]) / ".reading-other-0"
    mark.touch()
    one.publish(3)
    assert folders(tmp_path / "weights") == ["v0.notes", "v1", "v2", "v3"]
    one.publish(4)
    assert KEEP == 2
    assert folders(tmp_path / "weights") == ["v0.notes", "v1", "v3", "v4"]
    os.utime(mark, (0, 0))  # whoever read it has been dead for more than a deadline
    one.publish(5)
    assert folders(tmp_path / "weights") == ["v0.notes", "v4", "v5"]
    with pytest.raises(WeightSyncError, match=r"version 1 is not in .*it has been removed, newer ones are there"):
        one.puller().pull(offers[0])


def test_a_version_has_its_mark_while_it_is_read(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer()
    offer = one.publish(1)
    seen: list[str] = []
    read = os.preadv

    def watched(*args: Any) -> int:
        seen.extend(p.name for p in Path(offer.where["path"]).glob(".reading-*"))
        return read(*args)

    monkeypatch.setattr(os, "preadv", watched)
    one.puller().pull(offer)
    assert set(seen) == {".reading-generator%2F0-0"}


def test_a_folder_that_may_only_be_read_is_read(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer()
    offer = one.publish(1)

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    one.puller().pull(offer)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_leaves_nothing_and_says_what_to_do_on_every_rank(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    one = trainer(TWO)
    write, lock = os.write, threading.Lock()
    written: list[int] = []

    def limited(fd: int, data: Any) -> int:
        mine = f"0000{rank + 1}-of" in os.readlink(f"/proc/self/fd/{fd}")
        with lock:
            if mine and sum(written) + len(data) > 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(len(data) if mine else 0)
        return write(fd, data)

    monkeypatch.setattr(os, "write", limited)
    told = r"cannot write version 1 in .*v1\.tmp: No space left on device \(ENOSPC\); [\d,]+ bytes are free .*folder"
    if rank == 1:
        with pytest.raises(WeightSyncError, match=told):
            one.senders[1].prepare(one.offer(1))
        assert [p.name for p in (tmp_path / "weights" / "v1.tmp").iterdir()] == ["rank-1.json"]
    with pytest.raises(WeightSyncError, match=("trainer rank 1: " if rank == 1 else "") + told):
        one.senders[0].prepare(one.offer(1))
    assert folders(tmp_path / "weights") == []
    monkeypatch.undo()
    one.puller().pull(one.publish(1))  # the same version again, once there is room


def test_a_disk_without_room_is_known_before_anything_is_written(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer()

    class Usage:
        free = 4096

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(
        WeightSyncError, match=r"No space left on device, 7,\d+,\d+ bytes are needed \(ENOSPC\); 4,096 "
    ):
        one.publish(1)
    assert folders(tmp_path / "weights") == []


def test_a_version_that_is_offered_again_is_not_written_again(trainer: Callable[..., Trainer]) -> None:
    one = trainer(TWO)
    offer = one.publish(1)
    before = {p.name: p.stat().st_mtime_ns for p in Path(offer.where["path"]).iterdir()}
    assert one.publish(1).where == offer.where
    assert {p.name: p.stat().st_mtime_ns for p in Path(offer.where["path"]).iterdir()} == before
