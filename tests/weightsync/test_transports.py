"""Laws of every transport, between publishers and inboxes: bytes arrive bit for bit, damage is found and named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.errors import ConfigError, WeightSyncError
from weightsync import transports
from weightsync.config import WeightSyncConfig
from weightsync.layout import Box, full_box, sub_view
from weightsync.offer import Endpoint, Offer
from weightsync.publisher import Publisher, combine
from weightsync.worker.inbox import Inbox

TRANSPORTS = ["memory", "collective", "file"]
CPU = torch.device("cpu")
DEADLINE_S = 20.0


class Ranks:
    """Trainer ranks as threads of this process; what they hold alike each of them publishes a part of."""

    def __init__(self, transport: str, world: int, folder: Path, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "embed.weight": (301, 16),
            "norm.weight": (16,),
            "q.weight": (64, 16),
            "head.bias": (),
            "o.weight": (16, 64),
        }
        self.parameters = {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}
        self.config = WeightSyncConfig(deadline_s=DEADLINE_S, **options)
        self._threads = ThreadPoolExecutor(world)
        self._barrier = threading.Barrier(world)
        self._values: list[Any] = [None] * world
        self.publishers = self.each(
            lambda rank: Publisher(
                self.parameters.items(),
                torch.float32,
                self.config,
                transport=transport,
                rank=rank,
                gather=lambda value: self._gather(rank, value),
                folder=str(folder),
            ),
            range(world),
        )
        self.endpoint: Endpoint = self.publishers[0].endpoint
        self.base = -1

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(DEADLINE_S)
        values = list(self._values)
        self._barrier.wait(DEADLINE_S)
        return values

    def each(self, work: Callable[[Any], Any], over: Sequence[Any] | None = None) -> list[Any]:
        """`work` for every rank at the same time."""
        return list(self._threads.map(work, self.publishers if over is None else over))

    def change(self, seed: int, share: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters.values():
                chosen = torch.rand(parameter.shape, generator=generator) < share
                parameter.add_(chosen * torch.randn(parameter.shape, generator=generator))

    def offer(self, version: int) -> Offer:
        buffer = version % 2
        self.each(lambda p: p.snapshot(version, buffer))
        shares = self.each(lambda p: p.offer(version, buffer, self.base))
        offer = combine(shares, self.endpoint, version, buffer, self.base)
        if self.endpoint.transport == "file":
            offer = replace(offer, where=self.each(lambda p: p.prepare(offer))[0])
        self.base = version if self.config.delta else -1
        return offer

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self._threads.shutdown()


class Replica:
    """The inboxes of one replica's workers."""

    def __init__(self, ranks: Ranks, peer: str, tp: int) -> None:
        self.ranks, self.peer = ranks, peer
        self.needed = [boxes_of(ranks.endpoint, worker, tp) for worker in range(tp)]
        for publisher in ranks.publishers:
            publisher.add_peer(peer, self.needed)
        self.inboxes = [Inbox(ranks.endpoint, peer, self.needed, worker, CPU) for worker in range(tp)]

    def receive(self, offer: Offer) -> None:
        with ThreadPoolExecutor(8) as threads:
            sends = [threads.submit(p.send, self.peer, offer) for p in self.ranks.publishers]
            calls = [threads.submit(inbox.receive, offer) for inbox in self.inboxes]
            for call in [*calls, *sends]:
                call.result(2 * DEADLINE_S)

    def check(self, parameters: dict[str, torch.Tensor]) -> None:
        for boxes, inbox in zip(self.needed, self.inboxes, strict=True):
            weights = dict(inbox.weights())
            for name, box in boxes.items():
                index = tuple(slice(a, b) for a, b in box)
                assert torch.equal(weights[name][index], parameters[name][index]), name

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.close()


def boxes_of(endpoint: Endpoint, worker: int, tp: int) -> dict[str, Box]:
    """Rows of q, columns of o, a padded share of the embedding; everything else whole."""
    boxes = {entry.name: full_box(entry.shape) for entry in endpoint.layout.entries}
    if tp > 1:
        per = -(-320 // tp)
        boxes["embed.weight"] = ((min(worker * per, 301), min((worker + 1) * per, 301)), (0, 16))
        boxes["q.weight"] = ((worker * 64 // tp, (worker + 1) * 64 // tp), (0, 16))
        boxes["o.weight"] = ((0, 16), (worker * 64 // tp, (worker + 1) * 64 // tp))
    return boxes


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[Ranks, Replica]]]:
    opened: list[Any] = []

    def start(transport: str, world: int = 1, tp: int = 1, **options: Any) -> tuple[Ranks, Replica]:
        ranks = Ranks(transport, world, tmp_path / "weights", **options)
        opened.append(ranks)
        opened.append(Replica(ranks, "generator_0", tp))
        return opened[-2], opened[-1]

    yield start
    for one in reversed(opened):
        one.close()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_worker_needs_arrives_bit_for_bit_version_after_version(
    make: Any, transport: str, world: int, tp: int
) -> None:
    ranks, replica = make(transport, world, tp)
    for version in range(1, 5):
        ranks.change(version)
        replica.receive(ranks.offer(version))
        replica.check(ranks.parameters)


@pytest.mark.parametrize("tp", [1, 2])
def test_mapped_pieces_of_several_ranks_are_put_together(make: Any, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.publisher._in_place", lambda full, boxes: None)  # as with slices of columns
    ranks, replica = make("memory", 3, tp)
    for version in (1, 2, 3):
        ranks.change(version)
        offer = ranks.offer(version)
        replica.receive(offer)
        replica.check(ranks.parameters)
        for inbox in replica.inboxes:
            inbox.confirm(offer)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("transport", ["collective", "file"])
def test_a_delta_makes_the_same_image_as_the_whole(make: Any, transport: str, world: int) -> None:
    ranks, replica = make(transport, world, tp=2, delta=True)
    kinds = []
    for version, share in enumerate((1.0, 0.01, 0.0, 1.0, 0.02), 1):
        ranks.change(version, share)
        offer = ranks.offer(version)
        kinds.append(offer.kind)
        replica.receive(offer)
        replica.check(ranks.parameters)
    assert kinds == ["full", "delta", "delta", "full", "delta"]


@pytest.mark.parametrize("transport", ["collective", "file"])
def test_a_delta_without_its_base_is_refused_and_a_full_version_mends_it(make: Any, transport: str) -> None:
    ranks, replica = make(transport, delta=True)
    ranks.offer(1)
    ranks.change(2, 0.01)
    offer = ranks.offer(2)
    assert offer.kind == "delta"
    with pytest.raises(WeightSyncError, match=r"a delta against version 1 came to a worker that holds version -1"):
        replica.inboxes[0].receive(offer)
    ranks.base = -1
    replica.receive(replace(ranks.offer(3), epoch=1))
    replica.check(ranks.parameters)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_found_and_the_parameter_named(make: Any, transport: str, tp: int) -> None:
    ranks, replica = make(transport, tp=tp)
    offer = ranks.offer(1)
    damage(ranks, offer, "o.weight")
    with pytest.raises(WeightSyncError, match=r"o\.weight"):
        replica.receive(offer)
    replica.receive(replace(ranks.offer(2), epoch=1))
    replica.check(ranks.parameters)


def damage(ranks: Ranks, offer: Offer, name: str) -> None:
    """Flips a bit of what travels, after its checksum was taken."""
    if ranks.endpoint.transport == "file":
        (path,) = Path(next(iter(offer.where.values()))).rglob("*.safetensors")
        raw = bytearray(path.read_bytes())
        value = ranks.parameters[name].detach().numpy().tobytes()
        raw[raw.index(value) + len(value) // 2] ^= 1
        path.write_bytes(raw)
        return
    publisher = ranks.publishers[0]
    entry = next(e for e in publisher._layout.entries if e.name == name)
    sub_view(publisher._snapshots.data(offer.buffer), entry, entry.box).view(torch.int32)[0, 3] ^= 1


def test_mapped_memory_that_was_overwritten_while_it_was_read_is_an_error(make: Any) -> None:
    ranks, replica = make("memory")
    offer = ranks.offer(1)
    replica.receive(offer)
    ranks.publishers[0].snapshot(3, offer.buffer)
    with pytest.raises(WeightSyncError, match=r"was to hold version 1 until it is applied, and holds \[3\]"):
        replica.inboxes[0].confirm(offer)
    with pytest.raises(WeightSyncError, match="overtook a receiver"):
        replica.receive(offer)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_replica_that_comes_late_gets_the_version_that_the_first_one_has(make: Any, transport: str) -> None:
    ranks, replica = make(transport, world=2)
    replica.receive(ranks.offer(1))
    late = Replica(ranks, "generator_1", 2)
    ranks.change(2)
    offer = ranks.offer(2)
    for one in (late, replica):
        one.receive(offer)
        one.check(ranks.parameters)
    late.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cast_happens_in_the_snapshot(make: Any, transport: str, tmp_path: Path) -> None:
    source = torch.nn.Parameter(torch.randn(33, 7))
    publisher = Publisher([("w", source)], torch.bfloat16, transport=transport, folder=str(tmp_path))
    needed: list[dict[str, Box]] = [{"w": full_box((33, 7))}]
    publisher.add_peer("generator_0", needed)
    inbox = Inbox(publisher.endpoint, "generator_0", needed, 0, CPU)
    publisher.snapshot(1, 1)
    offer = combine([publisher.offer(1, 1, -1)], publisher.endpoint, 1, 1, -1)
    offer = replace(offer, where=publisher.prepare(offer))
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(publisher.send, "generator_0", offer)
        inbox.receive(offer)
        sending.result()
    assert torch.equal(dict(inbox.weights())["w"], source.detach().bfloat16())
    inbox.close()
    publisher.close()


def test_new_memory_under_a_parameter_is_noticed(make: Any) -> None:
    ranks, replica = make("memory")
    ranks.offer(1)
    ranks.parameters["q.weight"].data = torch.randn(64, 16)
    replica.receive(ranks.offer(2))
    replica.check(ranks.parameters)


@pytest.mark.parametrize(
    ("wanted", "same_host", "device", "taken"),
    [
        ("auto", True, "cpu", "memory"),
        ("auto", False, "cpu", "collective"),
        ("file", True, "cpu", "file"),
        ("rdma", False, "cpu", "rdma"),
    ],
)
def test_the_first_transport_that_can_work_is_taken_and_named(
    wanted: str, same_host: bool, device: str, taken: str
) -> None:
    lines: list[str] = []
    assert transports.choose(wanted, same_host=same_host, device=device, note=lines.append) == taken
    assert f"weights travel by {taken}" in lines[0]


@pytest.mark.parametrize(
    ("wanted", "same_host", "why"), [("memory", False, "different hosts"), ("ipc", True, "device memory")]
)
def test_a_transport_that_cannot_work_is_refused_with_those_that_can(wanted: str, same_host: bool, why: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"weightsync\.transport is {wanted}.*{why}.*use auto or one of .*collective"
    ):
        transports.choose(wanted, same_host=same_host, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_snapshots_are_mapped_by_another_process(tmp_path: Path) -> None:
    import torch.multiprocessing as mp

    source = torch.nn.Parameter(torch.randn(1024, 257, device="cuda"))
    publisher = Publisher([("w", source)], torch.bfloat16, transport="ipc")
    publisher.snapshot(1, 1)
    publisher.before_update()
    offer = combine([publisher.offer(1, 1, -1)], publisher.endpoint, 1, 1, -1)
    context = mp.get_context("spawn")
    queue: Any = context.Queue()
    child = context.Process(target=_receive_ipc, args=(publisher.endpoint.plain(), offer.plain(), queue))
    child.start()
    arrived = queue.get(timeout=120)
    child.join(60)
    assert torch.equal(arrived, source.detach().bfloat16().cpu())
    publisher.close()


def _receive_ipc(endpoint: dict[str, Any], offer: dict[str, Any], queue: Any) -> None:
    device = torch.device("cuda")
    inbox = Inbox(Endpoint.from_plain(endpoint), "generator_0", [{"w": full_box((1024, 257))}], 0, device)
    inbox.receive(Offer(**offer))
    queue.put(dict(inbox.weights())["w"].cpu())
