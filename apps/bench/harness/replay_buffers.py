"""What `apps.bench.replay` times in one process: our buffer, memcpy, and TorchRL's in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from apps.bench.peers import torchrl_replay
from apps.bench.peers.torchrl_replay import ADD, ADD_MANY, LOAD, SAMPLE, SAVE
from forge.batch import Arrays, make_group
from forge.memory import peak_rss_bytes
from forge.packing import first_fit, pack, pad
from replay.buffer import Choice, ReplayBuffer
from replay.persistence import JournalPlace, Persistence
from replay.shards import make_shards, plan_shards
from replay.staleness import Admission
from replay.storage import store

OURS = "ours"
PACKED = "sample_packed"
ROW_TOKENS = 4096

Times = dict[tuple[str, str], list[float]]
"""(work, system) -> seconds, one a round."""


@dataclass(frozen=True)
class Work:
    """Sizes that all systems share."""

    items: int = 10_000
    """Episodes that a buffer holds."""
    tokens: int = 512
    """Of each episode."""
    group_size: int = 8
    batch: int = 64
    """Episodes that are sampled at a time."""
    many: int = 64
    """Groups that are added at a time where many are."""


class System(Protocol):
    """Something that can do some of the work."""

    def times(self, work: str, repeats: int) -> list[float] | None:
        """Seconds of each repeat; None where it cannot do that work."""


def make_groups(work: Work, count: int, *, ragged: bool = False) -> list[TensorDict]:
    """Groups `[G]` of episodes of `work.tokens`, or of 1/8 of that and more."""
    rng = torch.Generator().manual_seed(0)

    def numbers(length: int) -> list[int]:
        return torch.randint(0, 32_000, (length,), generator=rng).tolist()

    groups = []
    for number in range(count):
        prompt = numbers(work.tokens // 16)
        longest = work.tokens - len(prompt)
        drawn = torch.randint(longest // 8, longest + 1, (work.group_size,), generator=rng).tolist()
        lengths = drawn if ragged else [longest] * work.group_size
        logprobs = [torch.randn(n, generator=rng).tolist() for n in lengths]
        group = make_group(prompt, list(map(numbers, lengths)), logprobs, [[0] * n for n in lengths], group_id=number)
        group["rewards"] = torch.rand(work.group_size, generator=rng)
        group["advantages"] = torch.randn(work.group_size, generator=rng)
        groups.append(group)
    return groups


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Ours:
    """`ReplayBuffer`, full of groups; what samples take is added again off the clock."""

    def __init__(self, work: Work, *, ragged: bool = False) -> None:
        self._work = work
        self._groups = make_groups(work, 32, ragged=ragged)
        self._per_batch = work.batch // work.group_size
        self._buffer = self._empty()
        self._version = 0
        self._added = 0
        for _ in range(work.items // work.group_size):
            self._add()

    def times(self, work: str, repeats: int) -> list[float] | None:
        """See `System`."""
        if work in (SAVE, LOAD):
            return [self._disk(work) for _ in range(repeats)]
        timed_work: dict[str, Callable[[], object]] = {
            ADD: self._add,
            ADD_MANY: self._add_many,
            SAMPLE: lambda: pad(self._take()),
            PACKED: self._take_packed,
        }
        seconds: list[float] = []
        while len(seconds) < repeats:
            # One right after the other, as in TorchRL's program; what is too much or lacks comes behind them.
            run = min(repeats - len(seconds), self._buffer.num_queued // self._per_batch)
            seconds += [timed(timed_work[work]) for _ in range(run)]
            self._level()
        return seconds

    def _level(self) -> None:
        full = self._work.items // self._work.group_size
        while self._buffer.num_queued >= full + self._per_batch:
            self._take()
        self._buffer.release(self._version)
        while self._buffer.num_queued < full:
            self._add()

    def _empty(self) -> ReplayBuffer:
        return ReplayBuffer(Admission(1_000_000, self._per_batch))

    def _add(self) -> None:
        ticket = self._buffer.reserve()
        assert ticket is not None
        self._buffer.add(ticket, store(self._groups[self._added % 32], ticket.seq))
        self._added += 1

    def _add_many(self) -> None:
        for _ in range(self._work.many):
            self._add()

    def _take(self) -> list[Arrays]:
        return [record.arrays for record in self._choice().records]

    def _take_packed(self) -> TensorDict:
        records = self._choice().records
        plan = plan_shards([n for record in records for n in record.lengths], 1, ROW_TOKENS)
        (shard,) = make_shards([record.arrays for record in records], plan)
        return shard

    def _choice(self) -> Choice:
        choice = self._buffer.sample(self._version)
        assert choice is not None
        self._version += 1
        return choice

    def _disk(self, work: str) -> float:
        """The replay's own way to the disk, synced; and back into an empty buffer."""
        with tempfile.TemporaryDirectory(prefix="meshforge-bench-") as folder:
            kept = Persistence(JournalPlace(folder, "bench"), None, 1.0)
            kept.start(self._empty(), 0)
            assert kept.marked is not None
            kept.marked.result(60)

            def save() -> None:
                kept.mark(self._buffer, self._version)
                assert kept.marked is not None
                kept.marked.result(60)

            def load() -> None:
                nonlocal kept
                kept = Persistence(JournalPlace(folder, "bench", self._version), None, 1.0)
                kept.start(loaded, self._version)

            saved = timed(save)
            kept.close()
            if work == SAVE:
                return saved
            loaded = self._empty()
            seconds = timed(load)
            kept.close()  # the snapshot that the resumed run begins with is written behind it
            assert loaded.num_queued == self._buffer.num_queued
            return seconds


class Memcpy:
    """A copy of the same bytes: what the memory of the machine allows. To the disk: one file, synced; and back."""

    def __init__(self, work: Work) -> None:
        (group,) = make_groups(work, 1)
        batch, sampled = work.batch // work.group_size, group.bytes()
        packed = pack([store(group, 0).arrays], first_fit(group["lengths"].tolist(), ROW_TOKENS)).bytes()
        sizes = {ADD: sampled, ADD_MANY: sampled * work.many, SAMPLE: sampled * batch, PACKED: packed * batch}
        self._stored = b"1" * (packed * work.items // work.group_size)
        self._pairs = {name: [torch.ones(size, dtype=torch.uint8) for _ in range(2)] for name, size in sizes.items()}

    def times(self, work: str, repeats: int) -> list[float] | None:
        """See `System`."""
        if work in (SAVE, LOAD):
            return [self._disk(work) for _ in range(repeats)]
        source, target = self._pairs[work]
        return [timed(lambda: target.copy_(source)) for _ in range(repeats)]

    def _disk(self, work: str) -> float:
        with tempfile.NamedTemporaryFile(prefix="meshforge-bench-", buffering=0) as file:

            def save() -> None:
                file.write(self._stored)
                os.fsync(file.fileno())

            saved = timed(save)
            return saved if work == SAVE else timed(Path(file.name).read_bytes)


class TorchRL:
    """One storage of the peer's program."""

    def __init__(self, process: TorchRLProcess, storage: str) -> None:
        self._process, self._storage = process, storage

    def times(self, work: str, repeats: int) -> list[float] | None:
        """See `System`."""
        no_disk = self._storage == "ListStorage" and work in (SAVE, LOAD)
        if work not in torchrl_replay.WORKS or no_disk:
            return None
        return list(self._process.ask(json.dumps([self._storage, work, repeats])))


class TorchRLProcess:
    """The peer's program in the Python of another venv, driven over pipes so that they can take turns."""

    def __init__(self, python: str, work: Work) -> None:
        settings = {
            "items": work.items,
            "tokens": work.tokens,
            "group_size": work.group_size,
            "batch": work.batch,
            "many": work.many,
        }
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [python, torchrl_replay.__file__, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.versions: dict[str, str] = self._answer()

    def ask(self, line: str) -> Any:
        """The answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def peak_bytes(self) -> int:
        """Memory, at most, of the program with all its storages."""
        return peak_rss_bytes(self._process.pid)

    def close(self) -> None:
        """Ends the program."""
        self._process.communicate(timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"TorchRL's program ended with code {self._process.wait()}; see its output above")
        return json.loads(line)


def find_python(root: Path, peer: str, asked_for: str | None, setup: str) -> str | None:
    """The Python that was asked for, else that of .venv-`peer` where there is one; not resolved, as in `find_trl`."""
    python = Path(asked_for) if asked_for else root / f".venv-{peer}" / "bin" / "python"
    if not python.exists():
        if asked_for:
            raise SystemExit(f"--{peer}-python {asked_for} does not exist; make it with: {setup}")
        return None
    return str(python.absolute())
