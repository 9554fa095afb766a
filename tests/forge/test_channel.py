"""The laws of the data plane, held between real processes: memory is never used again too early, never
lost, and a handle gives the right bytes or an error."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack

import forge.channel as channel
from forge.blocks import TABLE
from forge.channel import Handle, Pool
from forge.errors import ChannelError
from forge.layout import flatten
from forge.segment import Segment, start_time

ROOT = Path(channel.__file__).resolve().parents[1]
KB = 1024
BLOCK = 104 * KB  # what `small()` takes

# A process that has imported everything and forks a peer for each connection. It never waits for them:
# a killed peer stays a zombie, which is the harder case.
_NURSERY = """
import gc, os, pickle, select, socket, sys, threading, time
from multiprocessing.connection import Connection
import torch
from tensordict import TensorDict
from forge import channel
from forge.channel import Pool
from forge.blocks import TABLE
from forge.errors import ChannelError
from forge.segment import Segment

def serve(conn):
    scope = dict(globals())
    while True:
        try:
            code, values = pickle.loads(conn.recv_bytes())
        except EOFError:
            os._exit(0)
        scope.update(values)
        try:
            exec(code, scope)
            conn.send_bytes(pickle.dumps(scope.pop("result", None)))
        except Exception as error:
            conn.send_bytes(pickle.dumps(error))
            del error

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while True:
    if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
        os._exit(0)
    accepted = listener.accept()[0]
    if os.fork() == 0:
        listener.close()
        serve(Connection(accepted.detach()))
    accepted.close()
"""


class Peer:
    """Another process. `peer("code", name=value)` runs code there and returns what it calls `result`."""

    def __init__(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)
            self._conn = Connection(sock.detach())
        self.pid: int = self("result = os.getpid()")

    def __call__(self, code: str, **values: Any) -> Any:
        self._conn.send_bytes(pickle.dumps((textwrap.dedent(code), values)))
        answer = pickle.loads(self._conn.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: start_time(self.pid) is None)

    def close(self) -> None:
        self._conn.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = str(tmp_path_factory.mktemp("peers") / "socket")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _NURSERY, address], env=env, **pipes) as process:  # type: ignore[call-overload]
        assert select.select([process.stdout], [], [], 120)[0], "the peers did not start within 120 s"
        yield address


@pytest.fixture
def spawn(nursery: str) -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(nursery))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(spawn: Callable[[], Peer]) -> Peer:
    return spawn()


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(wait_s=5)
    yield made
    made.shutdown()


def tight(blocks: int = 1, **options: Any) -> Pool:
    """A pool that holds so many `small` TensorDicts and hardly waits."""
    return Pool(blocks * (BLOCK + TABLE), **{"wait_s": 0.05, **options})


def small(value: float = 0.0) -> TensorDict:
    """About 100 kB."""
    return TensorDict(
        {"a": torch.full((8, 3200), float(value)), "n": {"b": torch.full((8,), float(value))}}, batch_size=[8]
    )


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def assert_same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    assert got.batch_size == want.batch_size
    if isinstance(want, LazyStackedTensorDict):
        for left, right in zip(got.tensordicts, want.tensordicts, strict=True):
            assert_same(left, right)
    elif isinstance(want, NonTensorData):
        assert got.data == want.data
    elif isinstance(want, TensorDict):
        assert set(got.keys()) == set(want.keys())
        assert got.names == want.names
        for key in want.keys():  # noqa: SIM118
            left, right = got.get(key), want.get(key)
            if isinstance(right, torch.Tensor):
                assert left.dtype == right.dtype, key
                assert left.shape == right.shape, key
                assert raw(left) == raw(right), key
            else:
                assert_same(left, right)


def raw(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(dense.view(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- what arrives

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
]


def awkward(rows: int) -> TensorDict:
    """Every dtype, shape and kind of value that a batch may hold."""
    bits = torch.randint(0, 2, (rows, 5, 16), dtype=torch.uint8)
    values: dict[str, Any] = {str(dtype): bits.view(dtype) for dtype in DTYPES}
    big = torch.randn(rows, 64, 40)
    values |= {
        "transposed": big.transpose(1, 2),
        "strided": big[:, ::3, 1::2],
        "expanded": torch.randn(rows, 1).expand(rows, 7),
        "empty": torch.empty(rows, 0, 3, dtype=torch.int16),
        "grad": torch.randn(rows, 2, requires_grad=True),
        "conjugate": torch.randn(rows, 3, dtype=torch.complex64).conj(),
        "text": NonTensorData("same for all", batch_size=[rows]),
        "texts": NonTensorStack(*[f"row {i}" for i in range(rows)]),
        "nested": TensorDict({"deep": TensorDict({"x": torch.randn(rows, 3, 2)}, batch_size=[rows, 3])}, [rows]),
        "ragged": lazy_stack([TensorDict({"t": torch.arange(i + 1)}) for i in range(rows)]),
    }
    td = TensorDict(values, batch_size=[rows])
    td["scalars"] = TensorDict({"zero_dim": torch.tensor(3.5), "flag": torch.tensor(True)}, batch_size=[]).expand(rows)
    return td


@pytest.mark.parametrize("rows", [4, 700], ids=["inside the handle", "in a segment"])
def test_every_kind_of_value_survives_a_round_trip_between_two_processes(peer: Peer, pool: Pool, rows: int) -> None:
    td = awkward(rows)
    handle = pool.put(td)
    assert (handle.segment is None) == (rows == 4)
    back: Handle = peer("td = channel.open(handle); result = channel.put(td)", handle=handle)
    assert_same(pool.open(back), td)
    again: Handle = peer("result = channel.put(channel.take(handle))", handle=pool.put(td))
    assert_same(pool.take(again), td)


def test_zero_dim_empty_and_named_tensordicts_travel(pool: Pool) -> None:
    for td in (
        TensorDict({"loss": torch.tensor(2.0), "step": torch.tensor(7)}, batch_size=[]),
        TensorDict({}, batch_size=[3, 0]),
        TensorDict({"a": torch.zeros(2, 3, 1)}, batch_size=[2, 3], names=["group", "time"]),
    ):
        assert_same(pool.open(pool.put(td)), td)
        own = Pool(inline_bytes=0)
        assert_same(own.open(own.put(td)), td)


def test_a_small_tensordict_in_a_handle_is_a_snapshot_that_may_be_written(pool: Pool) -> None:
    td = TensorDict({"a": torch.zeros(4)}, batch_size=[4])
    handle = pool.put(td)
    td["a"] += 1
    got = pool.open(handle)
    got["a"] += 5
    assert got["a"].tolist() == [5.0] * 4
    assert pool.open(handle)["a"].tolist() == [0.0] * 4


def test_without_a_limit_everything_travels_in_handles_whatever_it_was_allocated_for() -> None:
    far = Pool(inline_bytes=None)
    td = far.alloc(small())
    td.update_(small(3.0))
    handle = far.put(td)
    assert handle.segment is None
    td.zero_()
    assert_same(far.open(pickle.loads(pickle.dumps(handle))), small(3.0))


def test_a_handle_of_twenty_leaves_is_smaller_than_4_kb(pool: Pool) -> None:
    td = TensorDict({f"a_rather_long_key_{i:02}": torch.zeros(64, 512) for i in range(20)}, batch_size=[64])
    handle = pool.put(td)
    assert handle.segment is not None
    assert handle.batch_size == (64,)
    assert len(pickle.dumps(handle)) < 4000


def test_a_view_carries_only_its_own_bytes(peer: Peer, pool: Pool) -> None:
    group = TensorDict({"a": torch.randn(64, 4096), "b": torch.randn(64, 4096)}, batch_size=[64])
    rows = group[8:16]
    handle = pool.put(rows)
    assert handle.nbytes == 2 * 8 * 4096 * 4
    assert pool.stats().busy_bytes < 2 * handle.nbytes
    got = pool.open(handle)
    assert got["a"].untyped_storage().nbytes() == 8 * 4096 * 4, "pickling a leaf would carry the whole block"
    assert_same(got, rows)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (torch.eye(3).to_sparse(), r"x is a of layout torch.sparse_coo tensor.*to_dense"),
        (
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            r"x is a nested tensor.*pad it",
        ),
        (torch.zeros(3, 3, device="meta"), r"meta device.*alloc"),
    ],
    ids=["sparse", "nested", "meta"],
)
def test_a_leaf_without_flat_bytes_is_refused_by_name(pool: Pool, leaf: torch.Tensor, words: str) -> None:
    with pytest.raises(ChannelError, match=words):
        pool.put(TensorDict({"x": leaf}, batch_size=[]))
    assert pool.stats().busy_bytes == 0


def test_wrong_arguments_name_value_limit_and_remedy(pool: Pool) -> None:
    for readers in (0, 65):
        with pytest.raises(ChannelError, match=rf"readers must lie in \[1, 64\], got {readers}; "):
            pool.put(small(), readers=readers)
    with pytest.raises(ChannelError, match=r"max_bytes must be >= 1, got 0; "):
        Pool(0)
    with pytest.raises(ChannelError, match=r"non-tensor data cannot be pickled"):
        pool.put(TensorDict({"f": NonTensorData(lambda: None)}))
    with pytest.raises(ChannelError, match=r"is a dict, expected a TensorDict"):
        pool.put({"a": torch.zeros(1)})  # type: ignore[arg-type]


# ---- no copy


def test_an_allocated_tensordict_is_put_without_a_copy_and_seen_by_readers_as_it_is(peer: Peer, pool: Pool) -> None:
    td = pool.alloc(small().to("meta"))
    td.zero_()
    owned = pool.stats()
    handles = [pool.put(td) for _ in range(3)]
    assert pool.stats() == owned, "no memory was taken for the three puts"
    peer("views = [channel.open(handle) for handle in handles]", handles=handles)
    td["a"].fill_(7)
    assert peer("result = [view['a'].unique().tolist() for view in views]") == [[7.0]] * 3


def test_rows_and_keys_of_an_allocated_tensordict_stay_without_a_copy(peer: Peer, pool: Pool) -> None:
    td = pool.alloc(small())
    td.zero_()
    part = td[2:5].select("a")
    handle = pool.put(part)
    td["a"][3].fill_(9)
    got: TensorDict = peer("result = channel.take(handle)", handle=handle)
    assert_same(got, part)
    assert got["a"][1].unique().tolist() == [9.0]


def test_an_allocated_tensordict_with_a_foreign_or_strided_leaf_is_copied(peer: Peer, pool: Pool) -> None:
    td = pool.alloc(small())
    td.zero_()
    foreign = td.copy()
    foreign["c"] = torch.ones(8, 3200)
    handles = [pool.put(foreign), pool.put(TensorDict({"a": td["a"][:, ::2]}, batch_size=[8]))]
    td["a"].fill_(9)
    for handle in handles:
        assert peer("result = channel.take(handle)['a'].unique().tolist()", handle=handle) == [0.0]


def test_an_allocated_block_is_offered_to_1024_readers_at_a_time_and_no_more(pool: Pool) -> None:
    td = pool.alloc(small())
    handles = [pool.put(td, readers=64) for _ in range(16)]
    with pytest.raises(ChannelError, match=r"already offered to 1024 readers and 1 more exceed the limit of 1024"):
        pool.put(td)
    for _ in range(64):
        pool.take(handles[0])
    pool.take(pool.put(td))


# ---- never used again too early

HOLDS = {
    "the TensorDict": "keep = td",
    "one leaf": "keep = td['n', 'b']",
    "a slice of a slice": "keep = td['a'][2:][1:, 5:]",
    "a numpy array": "keep = td['a'].numpy()[1:]",
    "a tensor saved for backward": "w = torch.ones(3200, requires_grad=True); keep = (td['a'] @ w).sum()",
    "a TensorDict made of it": "keep = TensorDict({'x': td['a'].view(-1)}, batch_size=[])",
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_memory_is_not_used_again_while_anything_in_the_reader_views_it(peer: Peer, hold: str) -> None:
    pool = tight()
    peer(f"td = channel.open(handle); {hold}; del td", handle=pool.put(small(3)))
    with pytest.raises(ChannelError, match=r"no \d+ bytes came free"):
        pool.put(small(4))
    peer("keep = w = None; gc.collect()")
    assert pool.take(pool.put(small(5)))["a"].unique().tolist() == [5.0]


def test_memory_is_not_used_again_while_the_senders_own_tensors_view_it(peer: Peer) -> None:
    pool = tight()
    mine = pool.alloc(small())
    mine.zero_()
    peer("channel.take(handle)", handle=pool.put(mine))
    row = mine["a"][3]
    del mine
    with pytest.raises(ChannelError, match=r"no \d+ bytes came free"):
        pool.put(small(4))
    assert row.unique().tolist() == [0.0]
    del row
    pool.put(small(5))


def test_no_reader_ever_sees_bytes_that_were_not_sent_to_it(spawn: Callable[[], Peer]) -> None:
    rng, peers, pool = random.Random(0), [spawn(), spawn()], tight(6, wait_s=10)
    for each in peers:
        each("held, pool = {}, Pool()")
    held: list[tuple[Peer, float]] = []
    waiting: list[tuple[Handle, float]] = []
    check = "td = held.pop(value); assert td['a'].eq(value).all() and td['n', 'b'].eq(value).all(); del td"
    for step in range(400):
        value = float(step)
        action = rng.random()
        if len(held) + len(waiting) < 5 and action < 0.7:
            if rng.random() < 0.3:
                td = pool.alloc(small())
                td.update_(small(value))
                waiting.append((pool.put(td), value))
                del td
            else:
                waiting.append((pool.put(small(value)), value))
        elif waiting and action < 0.85:
            handle, value = waiting.pop(rng.randrange(len(waiting)))
            reader = rng.choice(peers)
            if rng.random() < 0.2:
                reader("pool.close(handle)", handle=handle)
            else:
                reader("held[value] = pool.open(handle)", handle=handle, value=value)
                held.append((reader, value))
        elif held:
            reader, value = held.pop(rng.randrange(len(held)))
            reader(check, value=value)
    for reader, value in held:
        reader(check, value=value)
    for handle, _ in waiting:
        pool.close(handle)
    pool.reclaim()
    assert pool.stats().busy_bytes == 0
    assert pool.stats().owned_bytes <= pool.max_bytes


def test_a_forked_child_neither_releases_what_its_parent_reads_nor_shares_its_pool(peer: Peer) -> None:
    pool = tight()
    peer(
        "held = channel.open(handle); mine = channel.put(TensorDict({'a': torch.ones(30000)}))",
        handle=pool.put(small(3)),
    )
    peer("""
        child = os.fork()
        if child == 0:
            stats = channel.default_pool().stats()
            del held
            gc.collect()
            os._exit(0 if stats.num_segments == stats.num_attached == stats.owned_bytes == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert channel.take(mine)['a'].eq(1).all()
    """)
    assert pool.reclaim() == 0
    with pytest.raises(ChannelError, match=r"no \d+ bytes came free"):
        pool.put(small(4))
    assert peer("result = held['a'].unique().tolist()") == [3.0]


# ---- readers, counted


def test_a_handle_opens_as_often_as_it_has_readers_and_then_says_who_opened_it(peer: Peer, pool: Pool) -> None:
    handle = pool.put(small(1), readers=2)
    mine = pool.open(handle)
    peer("td = channel.open(handle)", handle=handle)
    with pytest.raises(ChannelError, match=r"its 2 reader\(s\) have opened or closed it, processes") as caught:
        pool.open(handle)
    assert str(peer.pid) in str(caught.value)
    with pytest.raises(ChannelError, match=r"processes .* put more readers"):
        peer("channel.take(handle)", handle=handle)
    peer("del td")
    assert pool.reclaim() == 0, "one reader still has it open"
    del mine
    assert pool.reclaim() == BLOCK
    with pytest.raises(ChannelError, match=r"its 2 reader\(s\) are done"):
        pool.open(handle)


def test_readers_that_race_for_handles_win_each_exactly_as_often_as_it_has_readers(pool: Pool) -> None:
    interval = sys.getswitchinterval()
    handles = [pool.put(small(value), readers=2) for value in range(100)]
    won: list[float] = []
    gate = threading.Barrier(4)

    def race(reader: Pool) -> None:
        for handle in handles:
            gate.wait()
            with contextlib.suppress(ChannelError):
                won.append(reader.open(handle)["a"][0, 0].item())

    threads = [threading.Thread(target=race, args=(Pool(),)) for _ in range(4)]
    sys.setswitchinterval(1e-6)  # a switch between any two steps of a claim
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(won) == [float(value) for value in range(100) for _ in range(2)]


def test_nobody_claims_a_handle_while_another_process_is_at_the_cells(peer: Peer, pool: Pool) -> None:
    handle = pool.put(small(4))
    peer("other = Segment.attach(ref); lock = other.locked(); lock.__enter__()", ref=handle.segment)
    got: list[TensorDict] = []
    thread = threading.Thread(target=lambda: got.append(pool.open(handle)))
    thread.start()
    thread.join(0.2)
    assert got == []
    peer("lock.__exit__(None, None, None)")
    thread.join()
    assert got[0]["a"].eq(4).all()


def test_a_used_up_handle_never_opens_the_next_tensordict_in_its_memory(pool: Pool) -> None:
    pool = tight()
    old = pool.put(small(1))
    pool.take(old)
    new = pool.put(small(2))
    assert (new.segment, new.offset) == (old.segment, old.offset)
    with pytest.raises(ChannelError, match=r"handle 1 of process \d+ cannot be opened: .* put it again"):
        pool.open(old)
    pool.close(old)
    assert pool.take(new)["a"].unique().tolist() == [2.0]


def test_close_gives_an_unopened_share_back_once_and_leaves_an_opened_one_to_its_tensors(peer: Peer) -> None:
    pool = tight()
    handle = pool.put(small(1), readers=2)
    peer("channel.close(handle); channel.close(handle)", handle=handle)
    assert pool.reclaim() == 0, "the second close of one process must not cost the other reader its share"
    mine = pool.open(handle)
    pool.close(handle)
    assert pool.reclaim() == 0, "tensors still view it"
    assert mine["a"].unique().tolist() == [1.0]
    del mine
    assert pool.reclaim() == BLOCK


def test_withdraw_gives_all_unopened_shares_back_and_leaves_opened_ones_to_their_tensors(peer: Peer) -> None:
    pool = tight()
    handle = pool.put(small(1), readers=3)
    peer("td = channel.open(handle)", handle=handle)
    pool.withdraw(handle)
    pool.withdraw(handle)
    with pytest.raises(ChannelError, match="have opened or closed it"):
        pool.open(handle)
    assert pool.reclaim() == 0, "the peer views it"
    peer("del td")
    assert pool.reclaim() == BLOCK


# ---- death, at any moment


def test_a_killed_reader_gives_its_memory_back(spawn: Callable[[], Peer]) -> None:
    pool, reader, other = tight(), spawn(), spawn()
    handle = pool.put(small(1), readers=2)
    reader("td = channel.open(handle)", handle=handle)
    other("td = channel.open(handle)", handle=handle)
    reader.kill()
    assert pool.reclaim() == 0, "the other reader lives"
    other("del td")
    assert pool.take(pool.put(small(2)))["a"].unique().tolist() == [2.0]


def test_a_reader_that_is_only_stopped_keeps_its_memory(peer: Peer) -> None:
    pool = tight()
    peer("td = channel.open(handle)", handle=pool.put(small(1)))
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        assert pool.reclaim() == 0
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    assert peer("result = td['a'].unique().tolist()") == [1.0]


def test_a_killed_sender_takes_nothing_from_those_who_opened_and_tells_those_who_come_late(
    peer: Peer, pool: Pool
) -> None:
    make = "result = [channel.put(TensorDict({'a': torch.full((100000,), 6.0)})) for _ in range(2)]"
    first, second = peer(make)
    td = pool.open(first)
    peer.kill()
    assert td["a"].eq(6).all()
    with pytest.raises(ChannelError, match=rf"gone with its owner, process {peer.pid}, which has ended"):
        pool.open(second)
    pool.close(second)
    pool.reclaim()
    assert pool.stats().num_attached == 0, "the mapping would keep a dead sender's memory"
    assert td["a"].eq(6).all()


def test_a_handle_of_a_pool_that_was_shut_down_says_so(peer: Peer, pool: Pool) -> None:
    handles = peer("other = Pool(); td = TensorDict({'a': torch.ones(30000)}); result = [other.put(td), other.put(td)]")
    td = pool.open(handles[0])
    peer("other.shutdown()")
    with pytest.raises(ChannelError, match=rf"was closed by its owner, process {peer.pid}"):
        pool.open(handles[1])
    assert td["a"].eq(1).all()


def test_memory_of_a_handle_that_nobody_opens_comes_back_after_its_deadline() -> None:
    pool = tight(unopened_s=0.05)
    handle = pool.put(small(1))
    assert pool.reclaim() == 0
    until(lambda: pool.reclaim() == BLOCK)
    with pytest.raises(ChannelError, match=r"none came for unopened_s; put it again"):
        pool.open(handle)


def test_an_opened_handle_never_expires() -> None:
    pool = tight(unopened_s=0.0)
    td = pool.open(pool.put(small(1)))
    assert pool.reclaim() == 0
    assert td["a"].unique().tolist() == [1.0]


# ---- the budget


def test_a_tensordict_beyond_the_budget_is_refused_at_once() -> None:
    words = rf"of 4194304 bytes needs {(4 << 20) + TABLE} of shared memory, max_bytes is {BLOCK}; raise max_bytes"
    with pytest.raises(ChannelError, match=words):
        Pool(BLOCK, wait_s=3600).put(TensorDict({"a": torch.zeros(1 << 20)}))


def test_a_full_pool_waits_and_goes_on_when_a_reader_lets_go() -> None:
    pool = tight(wait_s=20)
    held = [pool.open(pool.put(small(1)))]
    timer = threading.Timer(0.2, held.clear)
    timer.start()
    assert pool.take(pool.put(small(2)))["a"].unique().tolist() == [2.0]
    timer.join()


def test_a_full_pool_fails_at_its_deadline_with_value_limit_and_remedy() -> None:
    pool = tight(2)
    keep = [pool.put(small(i)) for i in range(2)]
    with pytest.raises(
        ChannelError, match=rf"within 0.05 s: {2 * BLOCK} bytes are .*max_bytes is {pool.max_bytes}; raise"
    ):
        pool.put(small())
    assert pool.take(keep[0])["a"].unique().tolist() == [0.0]


def test_idle_memory_of_one_size_makes_room_for_another() -> None:
    pool = Pool(1024 * KB, wait_s=0.05)
    for kilobytes in (70, 900, 200, 500, 70, 700):
        td = TensorDict({"a": torch.full((kilobytes * 256,), float(kilobytes))})
        assert pool.take(pool.put(td))["a"].eq(kilobytes).all()
        assert pool.stats().owned_bytes <= 1024 * KB


def test_many_small_tensordicts_share_few_descriptors() -> None:
    pool, before = Pool(), num_fds()
    handles = [pool.put(small(i)) for i in range(160)]
    assert num_fds() - before <= 20
    assert [pool.take(handle)["a"][0, 0].item() for handle in handles] == list(range(160))
    pool.shutdown()


def test_a_failed_put_leaves_no_memory_taken() -> None:
    pool = tight()
    td = small()
    td["a"] = torch.zeros(8, 3200, device="meta")
    with pytest.raises(ChannelError):
        pool.put(td)
    pool.put(small())


# ---- no leak


def test_two_hundred_hand_overs_leave_memory_and_descriptors_as_they_were(peer: Peer, pool: Pool) -> None:
    read = "total = channel.open(handle)['a'].sum().item(); result = (total, len(os.listdir('/proc/self/fd')))"
    counts = set()
    gc.collect()
    for step in range(200):
        total, theirs = peer(read, handle=pool.put(small(step)))
        assert total == step * 8 * 3200
        if step >= 2:
            counts.add((num_fds(), theirs, pool.stats().owned_bytes, pool.stats().num_segments))
    assert len(counts) == 1


def test_pools_and_attachments_that_are_gone_give_their_descriptors_back(peer: Peer) -> None:
    make = "other = Pool(); result = other.put(TensorDict({'a': torch.ones(30000)}))"
    reader = Pool()
    reader.take(peer(make))
    before = num_fds()
    for _ in range(10):
        reader.take(peer(make))
        mine = Pool()
        mine.take(mine.put(small()))
        del mine
    assert num_fds() <= before
    assert reader.stats().num_attached <= 2


def test_threads_share_a_pool(pool: Pool) -> None:
    pool = Pool(4 << 20, wait_s=30)
    failures: list[object] = []

    def work(seed: int) -> None:
        rng, held = random.Random(seed), []
        try:
            for step in range(40):
                value = float(1000 * seed + step)
                td = TensorDict({"a": torch.full((rng.randrange(20_000, 60_000),), value)})
                handle = pool.put(td)
                held.append((pool.open(handle) if rng.random() < 0.5 else pool.take(handle), value))
                if len(held) > 3:
                    got, want = held.pop(rng.randrange(4))
                    assert got["a"].eq(want).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.reclaim()
    assert pool.stats().busy_bytes == 0


def test_the_functions_of_the_module_use_one_pool_a_process() -> None:
    mine = Pool()
    before = channel.default_pool()
    channel.set_default_pool(mine)
    try:
        td = channel.alloc(small())
        td.update_(small(4))
        assert_same(channel.open(channel.put(td)), td)
        assert_same(channel.take(channel.put(td)), td)
        channel.close(channel.put(td))
        channel.reclaim()
        assert channel.default_pool() is mine
        assert mine.stats().num_segments == 1
    finally:
        channel.set_default_pool(before)


# ---- segments by themselves, as weight sync uses them


def test_both_sides_of_a_segment_see_the_same_bytes(peer: Peer) -> None:
    segment = Segment.create(100_001)
    assert segment.buffer.dtype == torch.uint8
    assert segment.buffer.shape == (100_001,)
    assert not segment.buffer.any()
    peer("other = Segment.attach(ref); other.buffer[100_000] = 200", ref=segment.ref)
    assert segment.buffer[100_000] == 200
    segment.buffer[:4000].view(torch.float32).fill_(2.5)
    assert peer("result = other.buffer[:4000].view(torch.float32).sum().item()") == 2500


def test_a_closed_segment_stays_mapped_for_those_who_view_it_and_takes_nobody_new(peer: Peer) -> None:
    segment = Segment.create(8192)
    peer("other = Segment.attach(ref)", ref=segment.ref)
    view, ref = segment.buffer[4096:], segment.ref
    segment.close()
    segment.close()
    del segment
    gc.collect()
    view.fill_(5)
    assert peer("result = other.buffer[-1].item()") == 5
    with pytest.raises(ChannelError, match=r"was closed by its owner"):
        peer("Segment.attach(ref)", ref=ref)


def test_a_recycled_descriptor_is_never_taken_for_the_old_segment(peer: Peer) -> None:
    old = Segment.create(4096)
    old.close()
    new = Segment.create(4096)
    assert new.ref.fd == old.ref.fd
    with pytest.raises(ChannelError, match=r"was closed by its owner"):
        peer("Segment.attach(ref)", ref=old.ref)
    peer("Segment.attach(ref)", ref=new.ref)


def test_a_segment_cannot_be_shrunk_under_those_who_map_it() -> None:
    segment = Segment.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.ref.fd, 0)


def test_the_lock_of_a_segment_holds_processes_apart_and_outlives_no_holder(peer: Peer) -> None:
    segment = Segment.create(4096)
    peer("other = Segment.attach(ref); lock = other.locked(); lock.__enter__()", ref=segment.ref)
    with (
        pytest.raises(ChannelError, match=r"held by another process for 0.05 s"),
        segment.locked(timeout_s=0.05),
    ):
        pass
    peer.kill()
    with segment.locked(timeout_s=5):
        pass
    segment.close()
    with pytest.raises(ChannelError, match=r"was closed here"), segment.locked():
        pass


def test_a_segment_that_cannot_be_made_says_why() -> None:
    with pytest.raises(ChannelError, match=r"nbytes must be >= 1, got 0"):
        Segment.create(0)
    with pytest.raises(ChannelError, match=r"cannot make a segment of|cannot map"):
        Segment.create(1 << 62)


def test_too_few_descriptors_is_an_error_that_names_the_limit(peer: Peer) -> None:
    with pytest.raises(ChannelError, match=r"two of the \d+ descriptors of a process; raise `ulimit -n`"):
        peer("""
            import resource
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 3, limit[1]))
            try:
                keep = [Segment.create(4096) for _ in range(4)]
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        """)


# ---- actors


@pytest.mark.soak
def test_the_bench_moves_tensordicts_between_two_monarch_actors_and_ends_in_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apps.bench.channel", "--mb", "1", "--rounds", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "channel"
    assert {goal["name"] for goal in result["goals"]} == {"mapped_over_memcpy", "resident_ms"}
    assert all(set(goal) == {"name", "value", "target", "met"} for goal in result["goals"])
    assert len(result["rows"]) == 6
    assert all(row["median_ms"] > 0 for row in result["rows"])
    assert set(result["peak_rss_bytes"]) == {"sender", "receiver", "controller"}


def test_layout_offsets_are_aligned_and_do_not_overlap() -> None:
    layout, leaves = flatten(awkward(5))
    ends = [offset + leaf.nbytes for offset, leaf in zip(layout.offsets, leaves, strict=True)]
    assert all(offset % 64 == 0 for offset in layout.offsets)
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert layout.nbytes == max(ends)
