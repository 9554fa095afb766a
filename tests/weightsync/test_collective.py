"""The collective transport between real processes.

Run as a program, this file is a nursery: it imports torch once and forks the members of each scenario, a function
named as on a line that it reads, whose result it writes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import WeightSyncError
from weightsync.layout import Box, Layout, full_box, make_layout, numel, sub_view
from weightsync.offer import Offer
from weightsync.plan import Move, pair
from weightsync.transports import collective, groups, messages
from weightsync.transports.collective import CollectivePuller, CollectiveSender
from weightsync.transports.context import PullerContext, SenderContext

SMALL_BYTES = 8192
"""With messages as small, parameters of a few kilobytes take every way that large ones take."""
UNNEEDED_BYTES = 2 << 20
WAIT_S = 30.0
HOST = torch.device("cpu")


@contextlib.contextmanager
def small_messages(all_in_buckets: bool = False) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (messages, groups):
            patch.setattr(module, "BUCKET_BYTES", SMALL_BYTES)
            patch.setattr(module, "SLICE_BYTES", 2 * SMALL_BYTES)
        patch.setattr(messages, "_DIRECT_BYTES", SMALL_BYTES // 4)
        if all_in_buckets:  # as where the memory of one side is not the group's
            patch.setattr(groups, "_in_one", lambda pieces, kind: None)
        yield


# --- an example: who holds what, and who needs what


@dataclass
class Example:
    full: Layout
    sources: list[Layout]
    needed: list[dict[str, Box]]

    def image(self, version: int) -> torch.Tensor:
        """The whole model in some version, uint8; nothing between the parameters."""
        generator = torch.Generator().manual_seed(version)
        image = torch.zeros(self.full.nbytes, dtype=torch.uint8)
        for entry in self.full.entries:
            bits = torch.randint(0, 256, (entry.nbytes,), generator=generator, dtype=torch.uint8)
            image[entry.offset : entry.offset + entry.nbytes] = bits
        return image

    def buffer(self, rank: int, version: int) -> torch.Tensor:
        return copied(
            self.image(version), self.full, self.sources[rank], {e.name: e.box for e in self.sources[rank].entries}
        )

    def expected(self, worker: int, version: int) -> torch.Tensor:
        return copied(self.image(version), self.full, self.full, self.needed[worker])


def copied(image: torch.Tensor, full: Layout, target: Layout, boxes: Mapping[str, Box]) -> torch.Tensor:
    entries = {entry.name: entry for entry in full.entries}
    into = {entry.name: entry for entry in target.entries}
    buffer = torch.zeros(target.nbytes, dtype=torch.uint8)
    for name, box in boxes.items():
        sub_view(buffer, into[name], box).copy_(sub_view(image, entries[name], box))
    return buffer


def split(shape: Sequence[int], dim: int, index: int, parts: int) -> Box:
    size = -(-shape[dim] // parts)
    box = list(full_box(shape))
    box[dim] = min(index * size, shape[dim]), min((index + 1) * size, shape[dim])
    return tuple(box)


def example(ranks: int, workers: int, seed: int, unneeded_bytes: int = UNNEEDED_BYTES) -> Example:
    """Float32 and bfloat16 in any order; rows, columns or wholes on each side; one that nobody needs."""
    draw = random.Random(seed)
    parameters: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        (f"p{i}", tuple(draw.choice([1, 7, 16, 40, 96]) for _ in range(draw.choice([0, 1, 2, 2, 2, 3]))), dtype)
        for i, dtype in enumerate(draw.choices([torch.float32, torch.bfloat16], k=16))
    ]
    parameters.insert(8, ("unneeded", (unneeded_bytes // 4,), torch.float32))
    held: list[dict[str, Box | None]] = [{} for _ in range(ranks)]
    needed: list[dict[str, Box]] = [{} for _ in range(workers)]
    for name, shape, _ in parameters:
        whole, dim = full_box(shape), draw.randrange(max(len(shape), 1))
        way = draw.choice(["split", "whole"]) if shape else "whole"
        for rank in range(ranks):
            held[rank][name] = (
                split(shape, dim, rank, ranks) if way == "split" else whole if rank == seed % ranks else None
            )
        dim = draw.randrange(max(len(shape), 1))
        for worker in range(workers):
            way = draw.choice(["split", "split", "whole", "none"]) if shape else "whole"
            box = split(shape, dim, worker, workers) if way == "split" else whole
            if way != "none" and name != "unneeded" and numel(box):
                needed[worker][name] = box
    return Example(make_layout(parameters), [make_layout(parameters, boxes) for boxes in held], needed)


def one_parameter(nbytes: int, workers: int = 1) -> Example:
    full = make_layout([("p", (nbytes // 4,), torch.float32)])
    return Example(full, [full], [{"p": full_box((nbytes // 4,))} for _ in range(workers)])


def offer_of(case: Example, version: int, epoch: int = 0) -> Offer:
    return Offer(version, version % 2, "full", -1, [source.nbytes for source in case.sources], [], epoch=epoch)


def make_sender(case: Example, rank: int, deadline_s: float, payload: torch.Tensor | None = None) -> CollectiveSender:
    buffers = [torch.zeros(case.sources[rank].nbytes, dtype=torch.uint8) for _ in range(2)]
    for version in (1, 2):
        buffers[version % 2].copy_(case.buffer(rank, version))
    return CollectiveSender(
        SenderContext(
            rank=rank,
            world=len(case.sources),
            layout=case.sources[rank],
            sources=case.sources,
            buffers=buffers,
            payload=payload,
            deadline_s=deadline_s,
        )
    )


def make_puller(
    case: Example, worker: int, links: Sequence[Any], deadline_s: float, peer: str = "gen_0"
) -> CollectivePuller:
    workers = len(case.needed)
    return CollectivePuller(
        PullerContext(peer, worker, workers, case.full, case.sources, case.needed, links, HOST, deadline_s)
    )


# --- processes: what a trainer rank and a worker do when told


class Process:
    """A forked process with an object that it calls methods of; `start` and `result` are the halves of `call`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, make), daemon=True)
        self.process.start()
        other.close()

    def start(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def result(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"process {self.process.pid} does not answer")
        return self._pipe.recv()

    def call(self, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait_until_stopped(self) -> None:
        end = time.monotonic() + WAIT_S
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, "the process does not stop"
            time.sleep(0.005)

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


def serve(pipe: multiprocessing.connection.Connection, make: Callable[[], Any]) -> None:
    served = make()
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(served, method)(*args))
        except WeightSyncError as error:
            pipe.send(f"WeightSyncError: {error}")
        except Exception:
            pipe.send(traceback.format_exc())


class TrainerRank:
    def __init__(self, case: Example, rank: int, deadline_s: float, payload: torch.Tensor | None = None) -> None:
        self.case = case
        self.sender = make_sender(case, rank, deadline_s, payload)

    def link(self) -> Any:
        return self.sender.link()

    def meet(self, links: Sequence[Any], *peers: str) -> None:
        self.sender.meet(links)
        for peer in peers:
            self.sender.add_peer(peer, self.case.needed)

    def send(self, offer: Offer, peer: str = "gen_0") -> None:
        self.sender.send(peer, offer)

    def send_aside(self, offer: Offer) -> None:
        """In a thread; `failure` waits for it."""
        self.failures: list[str] = []
        self.thread = threading.Thread(target=self._send_aside, args=(offer,))
        self.thread.start()

    def _send_aside(self, offer: Offer) -> None:
        try:
            self.sender.send("gen_0", offer)
        except WeightSyncError as error:
            self.failures.append(str(error))

    def failure(self) -> str:
        self.thread.join(WAIT_S)
        return "".join(self.failures)

    def close(self) -> list[str]:
        self.sender.close()
        return threads()


class Worker:
    def __init__(
        self, case: Example, worker: int, links: Sequence[Any], deadline_s: float, peer: str = "gen_0"
    ) -> None:
        self.case, self.worker = case, worker
        self.puller = make_puller(case, worker, links, deadline_s, peer)

    def pull(self, offer: Offer) -> str:
        """What is wrong with the image."""
        image = self.puller.pull(offer)
        resident = resident_bytes(image)
        # The comparison below touches them all.
        if offer.version == 1 and image.numel() > UNNEEDED_BYTES and resident > UNNEEDED_BYTES // 2:
            return f"{resident} of {image.numel()} bytes are resident"
        return "" if torch.equal(image, self.case.expected(self.worker, offer.version)) else "other bytes came"

    def pull_and_raise(self, offer: Offer, number: int) -> str:
        """Signals itself when the first messages have been asked for."""
        rounds = groups.rounds

        def then_raise(*args: Any) -> Iterator[Any]:
            for index, messages_of_round in enumerate(rounds(*args)):
                yield messages_of_round
                if index == 2:
                    signal.raise_signal(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collective, "rounds", then_raise)
            return self.pull(offer)

    def pull_payloads(self, offer: Offer) -> list[int]:
        return [int(payload.to(torch.int64).sum()) for payload in self.puller.pull_payloads(offer)]

    def close(self) -> list[str]:
        self.puller.close()
        return threads()


def threads() -> list[str]:
    """The threads of torch and gloo in this process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if name.startswith(("pt_", "gloo")))


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the mapping in which the tensor lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(text, 16) for text in first.split("-"))
            inside = start <= tensor.data_ptr() < stop
        elif inside and first == "Rss:":
            return 1024 * int(line.split()[1])
    raise AssertionError("the tensor lies in no mapping")


@contextlib.contextmanager
def processes(
    case: Example, deadline_s: float = WAIT_S, payloads: Sequence[torch.Tensor] | None = None
) -> Iterator[tuple[list[Process], list[Process]]]:
    """Trainer ranks and workers of gen_0 that have met."""
    ranks = [
        Process(lambda rank=rank: TrainerRank(case, rank, deadline_s, payloads[rank] if payloads else None))  # type: ignore[misc]
        for rank in range(len(case.sources))
    ]
    links = [rank.call("link") for rank in ranks]
    workers = [
        Process(lambda worker=worker: Worker(case, worker, links, deadline_s))  # type: ignore[misc]
        for worker in range(len(case.needed))
    ]
    try:
        for rank in ranks:
            rank.call("meet", links, "gen_0")
        yield ranks, workers
    finally:
        for process in [*ranks, *workers]:
            process.end()


def transfer(ranks: Sequence[Process], workers: Sequence[Process], offer: Offer, pull: str = "pull") -> list[Any]:
    """What the workers say, and what a rank does not like."""
    for rank in ranks:
        rank.start("send", offer)
    for worker in workers:
        worker.start(pull, offer)
    return [worker.result() for worker in workers] + [said for rank in ranks if (said := rank.result()) is not None]


# --- scenarios, in the nursery


def images(num_ranks: int, num_workers: int, seed: int, all_in_buckets: bool) -> dict[str, Any]:
    case = example(num_ranks, num_workers, seed)
    with small_messages(all_in_buckets), processes(case) as (ranks, workers):
        said = [transfer(ranks, workers, offer_of(case, version)) for version in (1, 2)]
        left = [process.call("close") for process in [*workers, *ranks]]
    return {"said": said, "left": left}


def payloads(num_ranks: int, num_workers: int) -> dict[str, Any]:
    case = one_parameter(4096, num_workers)
    case.sources *= num_ranks
    buffers = [torch.arange(100_000, dtype=torch.int32).view(torch.uint8) // (rank + 1) for rank in range(num_ranks)]
    sizes = [[300_001, 0], [64, 1_000]]
    with small_messages(), processes(case, payloads=buffers) as (ranks, workers):
        offers = [Offer(version, 0, "delta", version - 1, nbytes, []) for version, nbytes in enumerate(sizes, 1)]
        said = [transfer(ranks, workers, offer, "pull_payloads") for offer in offers]
    sums = [[int(b[:n].to(torch.int64).sum()) for b, n in zip(buffers, nbytes, strict=True)] for nbytes in sizes]
    return {"said": said, "expected": [[total] * num_workers for total in sums]}


def killed() -> dict[str, Any]:
    case = one_parameter(1 << 20)
    with small_messages(), processes(case) as ([rank], [worker]):
        rank.start("send", offer_of(case, 1))
        worker.start("pull_and_raise", offer_of(case, 1), signal.SIGKILL)
        failed = rank.result()
        links = [rank.call("link")]
        reborn = Process(lambda: Worker(case, 0, links, WAIT_S))
        try:
            rank.call("meet", links, "gen_0")
            again = transfer([rank], [reborn], offer_of(case, 2))
        finally:
            reborn.end()
    return {"failed": failed, "again": again}


def stopped() -> dict[str, Any]:
    case = one_parameter(1 << 20)
    with small_messages(), processes(case, deadline_s=4.0) as ([rank], [worker]):
        links = [rank.call("link")]
        rank.call("meet", links, "gen_1")
        other = Process(lambda: Worker(case, 0, links, WAIT_S, "gen_1"))
        try:
            rank.call("send_aside", offer_of(case, 1))
            worker.start("pull_and_raise", offer_of(case, 1), signal.SIGSTOP)
            worker.wait_until_stopped()
            rank.start("send", offer_of(case, 1), "gen_1")
            unharmed = [other.call("pull", offer_of(case, 1)), rank.result()]
        finally:
            other.end()
        failed = rank.call("failure")
        worker.signal(signal.SIGCONT)
        resumed = worker.result()
        again = transfer([rank], [worker], offer_of(case, 2, epoch=1))
        stale = rank.call("send", offer_of(case, 2, epoch=0))
    return {"failed": failed, "resumed": resumed, "unharmed": unharmed, "again": again, "stale": stale}


def absent() -> dict[str, Any]:
    case = example(2, 2, 0)
    with processes(case, deadline_s=3.0) as (ranks, workers):
        ranks[0].start("send", offer_of(case, 1))
        workers[0].start("pull", offer_of(case, 1))
        failed = [ranks[0].result(), workers[0].result()]
        again = transfer(ranks, workers, offer_of(case, 1, epoch=1))
    return {"failed": failed, "again": again}


def board_stopped() -> dict[str, Any]:
    case = one_parameter(1 << 16)
    with processes(case, deadline_s=3.0) as ([rank], [worker]):
        rank.signal(signal.SIGSTOP)
        rank.wait_until_stopped()
        failed = worker.call("pull", offer_of(case, 1))
        rank.signal(signal.SIGCONT)
        again = transfer([rank], [worker], offer_of(case, 1, epoch=1))
        rank.end()
        gone = [worker.call("pull", offer_of(case, 2, epoch=1)), worker.call("pull", offer_of(case, 2, epoch=2))]
        left = worker.call("close")
    return {"failed": failed, "again": again, "gone": gone, "left": left}


def newer_epoch() -> dict[str, Any]:
    case = one_parameter(1 << 16)
    with processes(case) as ([rank], [worker]):
        rank.call("send_aside", offer_of(case, 1))
        again = transfer([rank], [worker], offer_of(case, 2, epoch=1))
        return {"failed": rank.call("failure"), "again": again}


def leaving() -> dict[str, Any]:
    """A process whose interpreter ends while transfers wait."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        leave_in_the_middle()
    os.close(writer)
    with open(reader) as output:
        said = output.read()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "said": said}


def leave_in_the_middle() -> NoReturn:
    """One thread waits in gloo and another for a worker that never joins."""
    case = one_parameter(4096)
    sender = make_sender(case, 0, 600.0, payload=torch.ones(64, dtype=torch.uint8))
    sender.meet([sender.link()])
    pullers = [make_puller(case, 0, [sender.link()], 600.0, peer) for peer in ("gen_0", "gen_1")]
    for peer in ("gen_0", "gen_1"):
        sender.add_peer(peer, case.needed)
    first = Offer(1, 0, "delta", 0, [64], [])
    sending = threading.Thread(target=sender.send, args=("gen_0", first))
    sending.start()
    pullers[0].pull_payloads(first)
    sending.join()

    def wait(call: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(WeightSyncError):
            call(*args)

    for call in ((pullers[0].pull_payloads, replace(first, version=2)), (sender.send, "gen_1", first)):
        threading.Thread(target=wait, args=call, daemon=True).start()
    os.write(1, " ".join(threads()).encode())
    sys.exit()


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f for f in (images, payloads, killed, stopped, absent, board_stopped, newer_epoch, leaving)
}


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, args = json.loads(line)
        try:
            said = SCENARIOS[name](*args)
        except Exception:
            said = {"raised": traceback.format_exc()}
        print(json.dumps(said), flush=True)


# --- tests


@pytest.fixture(scope="module")
def nursery() -> Iterator[Callable[..., dict[str, Any]]]:
    program = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None
    stdin, stdout = program.stdin, program.stdout

    def run(scenario: str, *args: Any) -> dict[str, Any]:
        stdin.write(json.dumps([scenario, args]) + "\n")
        stdin.flush()
        said: dict[str, Any] = json.loads(stdout.readline())
        assert "raised" not in said, said["raised"]
        return said

    yield run
    stdin.close()
    assert program.wait(WAIT_S) == 0
    stdout.close()


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "seed", "all_in_buckets"),
    [(1, 1, 1, False), (1, 2, 2, False), (2, 1, 3, False), (2, 2, 4, False), (2, 2, 5, True)],
)
def test_every_worker_gets_what_it_needs_bit_for_bit_and_no_other_page(
    nursery: Callable[..., dict[str, Any]], num_ranks: int, num_workers: int, seed: int, all_in_buckets: bool
) -> None:
    done = nursery("images", num_ranks, num_workers, seed, all_in_buckets)
    assert done["said"] == [[""] * num_workers] * 2
    assert done["left"] == [[]] * (num_ranks + num_workers), "threads are left after close"


def test_the_payloads_of_all_ranks_reach_all_workers(nursery: Callable[..., dict[str, Any]]) -> None:
    done = nursery("payloads", 2, 2)
    assert done["said"] == done["expected"]


def test_a_worker_killed_in_the_middle_is_named_at_once_and_can_come_back(
    nursery: Callable[..., dict[str, Any]],
) -> None:
    done = nursery("killed")
    assert "WeightSyncError" in done["failed"]
    assert "version 1 with gen_0 (1048576 bytes, full, epoch 0) failed: worker 0 of gen_0 broke off" in done["failed"]
    assert done["again"] == [""]


def test_a_worker_stopped_in_the_middle_fails_at_the_deadline_alone_and_the_next_epoch_works(
    nursery: Callable[..., dict[str, Any]],
) -> None:
    done = nursery("stopped")
    assert "no answer from worker 0 of gen_0 within 4 s" in done["failed"]
    assert done["unharmed"] == ["", None], "another replica was harmed"
    assert "WeightSyncError" in done["resumed"]
    assert done["again"] == [""]
    assert "epoch 0 is over" in done["stale"]


def test_members_that_never_join_are_named_and_the_next_epoch_works(nursery: Callable[..., dict[str, Any]]) -> None:
    done = nursery("absent")
    for said in done["failed"]:
        assert "WeightSyncError" in said
        assert "no answer from trainer rank 1, worker 1 of gen_0 within 3 s" in said
    assert done["again"] == ["", ""]


def test_a_trainer_that_is_stopped_or_gone_is_named(nursery: Callable[..., dict[str, Any]]) -> None:
    done = nursery("board_stopped")
    assert "no answer from trainer rank 0 within 3 s" in done["failed"]
    assert done["again"] == [""]
    for said in done["gone"]:
        assert "WeightSyncError" in said
        assert "trainer rank 0 broke off" in said
    assert done["left"] == []


def test_a_newer_epoch_ends_a_transfer_that_still_waits(nursery: Callable[..., dict[str, Any]]) -> None:
    done = nursery("newer_epoch")
    assert "called off" in done["failed"]
    assert done["again"] == [""]


def test_the_interpreter_ends_while_transfers_wait(nursery: Callable[..., dict[str, Any]]) -> None:
    done = nursery("leaving")
    assert done["code"] == 0
    assert set(done["said"].split()) == {"gloo_tcp_loop", "pt_gloo_runloop"}, "something else was said"


def test_a_transfer_to_a_peer_that_is_gone_ends_long_before_its_deadline() -> None:
    case = one_parameter(4096)
    sender = make_sender(case, 0, 600.0)
    sender.meet([sender.link()])
    sender.add_peer("gen_0", case.needed)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, "gen_0", offer_of(case, 1))
        time.sleep(0.1)
        sender.remove_peer("gen_0")
        with pytest.raises(WeightSyncError, match="it was called off"):
            sending.result(timeout=60.0)
    sender.remove_peer("never met")
    sender.close()


def test_a_peer_that_is_removed_as_its_transfer_begins_ends_that_long_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = one_parameter(4096)
    sender = make_sender(case, 0, 2.0)
    sender.meet([sender.link()])
    sender.add_peer("gen_0", case.needed)
    seat, called_off = sender._seats["gen_0"], threading.Event()
    enter, call_off = seat._enter, seat.call_off

    def call_off_and_say_so() -> None:
        call_off()
        called_off.set()

    with ThreadPoolExecutor() as pool:

        def enter_and_be_removed(epoch: int) -> str:
            problem = enter(epoch)
            called_off.clear()  # an earlier epoch was
            pool.submit(sender.remove_peer, "gen_0")
            assert called_off.wait(WAIT_S)
            return problem

        monkeypatch.setattr(seat, "call_off", call_off_and_say_so)
        monkeypatch.setattr(seat, "_enter", enter_and_be_removed)
        with pytest.raises(WeightSyncError, match="it was called off"):
            sender.send("gen_0", offer_of(case, 1))
    sender.close()


def test_a_delta_larger_than_the_payload_and_an_unknown_peer_are_refused() -> None:
    case = one_parameter(4096)
    sender = make_sender(case, 0, 1.0, payload=torch.zeros(64, dtype=torch.uint8))
    sender.meet([sender.link()])
    sender.add_peer("gen_0", case.needed)
    with pytest.raises(WeightSyncError, match=r"a delta of 65 bytes .* has 64 bytes"):
        sender.send("gen_0", Offer(1, 0, "delta", 0, [65], []))
    with pytest.raises(WeightSyncError, match="gen_1 is unknown"):
        sender.send("gen_1", offer_of(case, 1))
    sender.close()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 10_000))
def test_messages_carry_every_move_and_keep_their_size(num_ranks: int, num_workers: int, seed: int) -> None:
    case = example(num_ranks, num_workers, seed, unneeded_bytes=64)
    entries = {entry.name: entry for entry in case.full.entries}
    moves = pair(case.sources, case.needed)
    for target in range(num_workers):
        image = torch.zeros(case.full.nbytes, dtype=torch.uint8)
        for rank, source in enumerate(case.sources):
            held = {entry.name: entry for entry in source.entries}
            buffer = case.buffer(rank, seed)
            with small_messages():
                cut = messages.cut([m for m in moves if (m.source, m.target) == (rank, target)], source, case.full)
            for message in cut:
                sizes = [messages.aligned(here.nbytes) for here, _ in message]
                in_one = len(message) == 1 and not message[0][0].name and not message[0][1].name
                assert sum(sizes) <= (2 * SMALL_BYTES if in_one else SMALL_BYTES)
                for here, there in message:
                    piece = here.tensor(buffer, held).contiguous().reshape(-1).view(torch.uint8)
                    into = there.tensor(image, entries)
                    into.copy_(piece.view(into.dtype).view(into.shape))
        assert torch.equal(image, case.expected(target, seed))


def test_one_rank_and_a_worker_that_needs_everything_share_nothing_but_large_slices() -> None:
    shapes = [(f"p{i}", (257, 33), dtype) for i, dtype in enumerate([torch.float32, torch.bfloat16] * 8)]
    full = make_layout(shapes)
    moves = [Move(0, 0, entry.name, entry.box) for entry in full.entries]
    with small_messages():
        cut = messages.cut(moves, full, full)
    assert all(len(message) == 1 and not message[0][0].name and message[0][0] == message[0][1] for message in cut)
    assert [message[0][0].nbytes for message in cut[:-1]] == [2 * SMALL_BYTES] * (len(cut) - 1)


if __name__ == "__main__":
    main()
