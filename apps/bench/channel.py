"""What it costs to hand a TensorDict from one actor to another on the same host.

    python -m apps.bench.channel [--mb 64] [--rounds 30] [--ray-python VENV/bin/python]

Two Monarch actors in two processes, one way: from the sender's first line to the moment when the
receiver has the TensorDict, on the clock that they share. Every round runs every way once, in turns,
beside one memcpy of the same bytes; times are medians over the rounds, ratios are medians of the ratios
inside a round. Ray's rows need a venv with `pip install ray numpy`; there the same bytes lie in one
numpy array in Ray's object store and only its reference travels.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, endpoint, shutdown_context, this_host
from tensordict import TensorDict

from apps.bench.harness import rates
from apps.bench.harness.result import Column, Goal, Result, machine, rows_table, show
from forge.channel import Handle, Pool
from forge.layout import flatten, rebuild, write
from forge.memory import peak_rss_bytes

MEMCPY = "one memcpy of the same bytes"
MAPPED = "put, open mapped"
RESIDENT = "already in a segment, open mapped"
TAKE = "put, take (private copy)"
EMPTY = "empty Monarch message"
MESSAGE = "the TensorDict as a Monarch message"
RAY_REF = "Ray, numpy array by reference"
RAY_PUT = "Ray, put and numpy array by reference"
COLUMNS = (
    Column("", "name"),
    Column("median ms", "median_ms", ".2f"),
    Column("min ms", "min_ms", ".2f"),
    Column("x memcpy", "over_memcpy", ".2f"),
)


def make_batch(nbytes: int) -> TensorDict:
    """A batch `[B, T]` with the schema's keys, about `nbytes` in all."""
    B = 512
    T = max(1, nbytes // (B * 25))
    return TensorDict(
        {
            "tokens": torch.randint(0, 50_000, (B, T)),
            "loss_mask": torch.ones(B, T, dtype=torch.bool),
            "behavior_logprobs": torch.randn(B, T),
            "token_versions": torch.ones(B, T, dtype=torch.int64),
            "ref_logprobs": torch.randn(B, T),
            "lengths": torch.full((B,), T),
            "rewards": torch.randn(B),
            "advantages": torch.randn(B),
            "group_id": torch.arange(B) // 8,
        },
        batch_size=[B],
    )


class Receiver(Actor):
    """Notes the time (ns, shared by all processes of a host) when it has what was sent."""

    def __init__(self) -> None:
        self._pool = Pool()

    @endpoint
    async def mapped(self, handle: Handle) -> int:
        td = self._pool.open(handle)
        now = time.monotonic_ns()
        del td  # from here on the sender may use the memory again
        return now

    @endpoint
    async def copied(self, handle: Handle) -> int:
        td = self._pool.take(handle)
        now = time.monotonic_ns()
        del td
        return now

    @endpoint
    async def message(self, td: TensorDict | None) -> int:
        return time.monotonic_ns()

    @endpoint
    async def differs(self, handle: Handle, sums: dict[str, float]) -> list[str]:
        """Keys whose sum is not the one that the sender computed."""
        td = self._pool.open(handle)
        return [key for key, total in sums.items() if td.get(key).double().sum().item() != total]

    @endpoint
    async def peak_bytes(self) -> int:
        return peak_rss_bytes()


class Sender(Actor):
    """Sends one batch in every way; each endpoint returns one time in ms."""

    def __init__(self, nbytes: int, receiver: Any) -> None:
        self._receiver = receiver
        self._pool = Pool()
        layout, leaves = flatten(make_batch(nbytes))
        self._flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        memory = self._flat.numpy().data
        write(layout, leaves, memory)
        self._batch = rebuild(layout, memory)  # the leaves lie in `_flat`: a memcpy reads what a put reads
        self._resident = self._pool.alloc(self._batch)
        self._resident.update_(self._batch)
        # How fast memory is depends on where its pages happen to lie: take turns.
        self._copies = itertools.cycle([torch.zeros_like(self._flat) for _ in range(3)])

    @endpoint
    async def nbytes(self) -> int:
        return self._flat.nbytes

    @endpoint
    async def round(self, name: str) -> float:
        start = time.monotonic_ns()
        if name == MEMCPY:
            copy = next(self._copies).data_ptr()
            start = time.monotonic_ns()
            ctypes.memmove(copy, self._flat.data_ptr(), self._flat.nbytes)
            end = time.monotonic_ns()
        elif name == MAPPED:
            end = await self._receiver.mapped.call_one(self._pool.put(self._batch))
        elif name == RESIDENT:
            end = await self._receiver.mapped.call_one(self._pool.put(self._resident))
        elif name == TAKE:
            end = await self._receiver.copied.call_one(self._pool.put(self._batch))
        else:
            end = await self._receiver.message.call_one(self._batch if name == MESSAGE else None)
        return (end - start) / 1e6

    @endpoint
    async def verify(self) -> list[str]:
        """Keys that arrive wrong: none."""
        sums = {key: self._batch.get(key).double().sum().item() for key in sorted(self._batch.keys())}
        wrong: list[str] = []
        for td in (self._batch, self._resident):
            wrong += await self._receiver.differs.call_one(self._pool.put(td), sums)
        return wrong

    @endpoint
    async def peak_bytes(self) -> int:
        return peak_rss_bytes()


_RAY = """
import json, os, sys, time
os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
import numpy as np, ray
nbytes = int(sys.argv[1])
store = max(8 * nbytes, 1 << 29)
ray.init(num_cpus=2, object_store_memory=store, include_dashboard=False, log_to_driver=False)
@ray.remote(num_cpus=0)
class Receiver:
    def receive(self, array): return time.monotonic_ns()
@ray.remote(num_cpus=0)
class Sender:
    def __init__(self, receiver):
        self.receiver, self.array = receiver, np.ones(nbytes, dtype=np.uint8)
        self.ref = ray.put(self.array)
    def by_reference(self):
        start = time.monotonic_ns()
        return (ray.get(self.receiver.receive.remote(self.ref)) - start) / 1e6
    def put(self):
        start = time.monotonic_ns()
        return (ray.get(self.receiver.receive.remote(ray.put(self.array))) - start) / 1e6
sender = Sender.remote(Receiver.remote())
for _ in range(5): ray.get([sender.by_reference.remote(), sender.put.remote()])
print(json.dumps({"version": ray.__version__}), flush=True)
for line in sys.stdin:
    print(json.dumps(ray.get(getattr(sender, line.strip()).remote())), flush=True)
ray.shutdown()
"""


class Ray:
    """Two Ray actors in the Python of another venv, driven over pipes so that they can take turns."""

    def __init__(self, python: str, nbytes: int) -> None:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [python, "-c", _RAY, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.version = self._ask("")["version"]

    def round(self, name: str) -> float:
        return float(self._ask("by_reference\n" if name == RAY_REF else "put\n"))

    def peak_bytes(self) -> int:
        """Of the driver and all that it started; the object store counts once for each that maps it."""
        return peak_rss_bytes(self._process.pid)

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the Ray process ended with code {self._process.wait()}; see its output above")
        return json.loads(answer)


@contextlib.contextmanager
def ray_peer(python: str | None, nbytes: int) -> Iterator[Ray | None]:
    """The Ray pair when a Python with Ray is given, else None."""
    if python is None:
        yield None
        return
    with contextlib.closing(Ray(python, nbytes)) as peer:
        yield peer


async def measure(mb: int, rounds: int, ray_python: str | None) -> Result:
    """All rounds."""
    receiver = this_host().spawn_procs(name="receiver").spawn("receiver", Receiver)
    sender = this_host().spawn_procs(name="sender").spawn("sender", Sender, mb << 20, receiver)
    wrong = await sender.verify.call_one()
    if wrong:
        raise RuntimeError(f"{wrong} arrived with other values than were sent; do not trust the times")
    nbytes = await sender.nbytes.call_one()
    with ray_peer(ray_python, nbytes) as ray:
        times: dict[str, list[float]] = {n: [] for n in (MEMCPY, MAPPED, RESIDENT, TAKE, EMPTY, MESSAGE)}
        for _ in range(3):
            for name in times:
                await sender.round.call_one(name)
        times |= {} if ray is None else {RAY_REF: [], RAY_PUT: []}
        for _ in range(rounds):
            for name, values in times.items():
                # The buffers of a large message are freed when the next one arrives (7 ms): not on our time.
                await sender.round.call_one(EMPTY)
                await asyncio.sleep(0.01)
                if name in (RAY_REF, RAY_PUT):
                    assert ray is not None
                    values.append(ray.round(name))
                else:
                    values.append(await sender.round.call_one(name))
        peaks = {
            "sender": await sender.peak_bytes.call_one(),
            "receiver": await receiver.peak_bytes.call_one(),
        }
        if ray is not None:
            peaks["ray, all processes"] = ray.peak_bytes()
    peaks["controller"] = peak_rss_bytes() - sum(peaks[role] for role in ("sender", "receiver"))
    return make_result(times, nbytes, peaks, None if ray is None else ray.version)


def make_result(times: dict[str, list[float]], nbytes: int, peaks: dict[str, int], ray_version: str | None) -> Result:
    """`times` holds ms by way, one a round."""
    rows = [
        {
            "name": name,
            "median_ms": round(statistics.median(values), 3),
            "min_ms": round(min(values), 3),
            "over_memcpy": round(rates.ratio(values, times[MEMCPY]), 3),
            "rounds": len(values),
        }
        for name, values in times.items()
    ]
    by_name: dict[str, dict[str, Any]] = {str(row["name"]): row for row in rows}
    goals = [
        Goal("mapped_over_memcpy", by_name[MAPPED]["over_memcpy"], 1.5, "most"),
        Goal("resident_ms", by_name[RESIDENT]["median_ms"], 3.0, "most"),
    ]
    return Result("channel", rows, goals, peaks, machine(ray=ray_version), {"nbytes": nbytes})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.channel", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mb", type=int, default=64, help="size of the TensorDict in MiB")
    parser.add_argument("--rounds", type=int, default=30, help="rounds; each runs every way once")
    parser.add_argument("--ray-python", help="Python of a venv that has ray and numpy")
    args = parser.parse_args()
    result = asyncio.run(measure(args.mb, args.rounds, args.ray_python))
    title = f"one way between two actors, {result.extra['nbytes'] / 2**20:.1f} MiB"
    show(result, rows_table(title, result.rows, COLUMNS))
    shutdown_context().get()
    sys.stdout.flush()
    os._exit(0)  # Monarch's own exit handlers have been seen to print a fatal error after a clean run


if __name__ == "__main__":
    # Actors of `__main__` are pickled by value; those of a module that the processes can import are not.
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    from apps.bench import channel

    channel.main()
