"""Programs that a bench starts: run to their end, with the peak memory of every role among their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.processes import RUN_ID_ENV

_SAMPLE_EVERY_S = 0.5
_LAST_LINES = 40


@dataclass(frozen=True)
class Finished:
    """A program that ended with 0: what it printed, and peak memory in bytes by role."""

    output: str
    peaks: dict[str, int]


def peaks_by_role(pid: int, root_role: str, named: Mapping[int, str] | None = None) -> dict[str, int]:
    """Peak resident bytes of `pid` and its living descendants, summed by role.

    A process has the role that `named` gives its pid, else the mesh that its environment names, else its parent's.
    """
    peaks: dict[str, int] = {}
    todo = [(pid, root_role)]
    while todo:
        current, inherited = todo.pop()
        role = (named or {}).get(current) or _mesh_of(current) or inherited
        try:
            with open(f"/proc/{current}/status") as status:
                peak = next((int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:")), 0)
            todo += [(child, role) for child in _children(current)]
        except OSError:
            continue
        peaks[role] = peaks.get(role, 0) + peak
    return peaks


def _children(pid: int) -> Iterator[int]:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as children:
            yield from map(int, children.read().split())


def _mesh_of(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    mark = f"{RUN_ID_ENV}=".encode()
    names = (entry.partition(b"/")[2].decode() for entry in entries if entry.startswith(mark))
    return next(names, None)


def raise_peaks(peaks: dict[str, int], sampled: Mapping[str, int]) -> None:
    """Keeps the larger of the two for every role."""
    for role, peak in sampled.items():
        peaks[role] = max(peak, peaks.get(role, 0))


def run(
    command: Sequence[str], *, role: str, cwd: Path, env: Mapping[str, str], deadline_s: float, log: Path
) -> Finished:
    """Runs `command` to its end; its output goes to the file `log`.

    Raises RuntimeError with the last lines when it fails, and TimeoutError when the deadline is over. Either way,
    and on Ctrl-C, it has ended afterwards.
    """
    peaks: dict[str, int] = {}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT)
        done = threading.Event()
        sampler = threading.Thread(target=_sample, args=(process.pid, role, peaks, done), daemon=True)
        sampler.start()
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{' '.join(command)} did not end within {deadline_s:g} s:\n{_tail(log)}") from None
        finally:
            done.set()
            sampler.join()
            end(process)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}:\n{_tail(log)}")
    return Finished(log.read_text(), peaks)


def _sample(pid: int, role: str, peaks: dict[str, int], done: threading.Event) -> None:
    while True:
        raise_peaks(peaks, peaks_by_role(pid, role))
        if done.wait(_SAMPLE_EVERY_S):
            return


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes], patience_s: float = 20.0) -> None:
    """Interrupts a program that still runs, as Ctrl-C would; kills it when that does not help."""
    start = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(max(1.0, patience_s - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
