"""How fast weights would go here: a publisher and a receiver in one process, a model of 64 MiB, a second each."""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from apps.doctor.checks import Report, merged
from weightsync.config import WeightSyncConfig
from weightsync.layout import full_box
from weightsync.publisher import Publisher, combine
from weightsync.transports import why_not
from weightsync.worker.inbox import Inbox

_NBYTES = 64 << 20
_SPAN_S = 1.0
_DEADLINE_S = 30.0
_NEEDS_ACTORS = ("ipc", "rdma")
"""Between devices, or between Monarch's actors: not measured here."""


def transports() -> Report:
    """Which transports two processes of this host could use, and what each carries."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return merged(_one(name, reason) for name, reason in why_not(True, device).items())


def _one(name: str, reason: str) -> Report:
    if name in _NEEDS_ACTORS:
        return Report("skipped", f"{name}: {reason or 'available, not measured'}")
    if reason:
        return Report("skipped", f"{name}: {reason}")
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-weights-") as folder:
            speed = measure(name, folder)
    except Exception as error:
        return Report("wrong", f"{name}: {type(error).__name__}: {error}", f"leave out weightsync.transport={name}")
    mapped = " to read, nothing travels" if name == "memory" else ""
    return Report("ok", f"{name} {speed / 1e9:.2f} GB/s{mapped}")


def measure(name: str, folder: str, nbytes: int = _NBYTES, span_s: float = _SPAN_S) -> float:
    """Bytes a second of whole versions from a publisher to an inbox that reads all of it: the median of a second's.

    Each version is checked bit for bit. Raises what goes wrong.
    """
    parameter = torch.nn.Parameter(torch.arange(nbytes // 4, dtype=torch.float32))
    config = WeightSyncConfig(deadline_s=_DEADLINE_S, checksums=False)
    publisher = Publisher([("w", parameter)], torch.float32, config, transport=name, folder=folder)
    needed = [{entry.name: full_box(entry.shape) for entry in publisher.endpoint.layout.entries}]
    publisher.add_peer("doctor", needed)
    inbox = Inbox(publisher.endpoint, "doctor", needed, 0, torch.device("cpu"))
    speeds: list[float] = []
    try:
        with ThreadPoolExecutor(1) as threads:
            end = time.monotonic() + span_s
            while not speeds or time.monotonic() < end:
                with torch.no_grad():
                    parameter.add_(1)
                speeds.append(_version(publisher, inbox, threads, len(speeds) + 1, parameter))
    finally:
        inbox.close()
        publisher.close()
    return statistics.median(speeds)


def _version(publisher: Publisher, inbox: Inbox, threads: ThreadPoolExecutor, version: int, sent: Any) -> float:
    buffer = version % 2
    publisher.snapshot(version, buffer)
    offer = combine([publisher.offer(version, buffer, -1)], publisher.endpoint, version, buffer, -1)
    begin = time.perf_counter()
    offer = replace(offer, where=publisher.prepare(offer))
    sending = threads.submit(publisher.send, "doctor", offer)
    inbox.receive(offer)
    sending.result(_DEADLINE_S)
    ((_, arrived),) = inbox.weights()
    same = torch.equal(arrived, sent)
    seconds = time.perf_counter() - begin
    if not same:
        raise RuntimeError("what arrived differs from what was sent")
    return sent.numel() * sent.element_size() / seconds
