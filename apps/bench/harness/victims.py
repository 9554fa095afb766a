"""A run of the app to be hurt: its processes by role, signals to them, and whether it has got over it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apps.bench.grpo import ENV, PRESET, ROOT
from apps.bench.harness.processes import end
from forge.metrics import Row, read_rows
from forge.processes import RUN_ID_ENV

_MARK_ENV = "MESHFORGE_BENCH_RUN"
_POLL_S = 0.1
_BACK = re.compile(r"(\w+) (?:serves again, |failed while the run started: )")
_APP = ROOT / "apps" / "grpo" / "main.py"
CONTROLLER = "controller"
GONE_S = 30.0
"""Within which nothing of a run may be left once its controller is dead, seconds."""


@dataclass(frozen=True)
class Fault:
    """What was done to whom, and how long it took until the role served again and a step behind it was done."""

    role: str
    what: str
    recovery_s: float
    overlapping: bool
    """Whether the run had not got over the one before."""

    @property
    def kind(self) -> tuple[str, str]:
        """The role, and what was done to it under which circumstances."""
        return self.role, self.what + (", overlapping" if self.overlapping else "")


class Victim:
    """One run in `folder`, through all its controllers. A context manager that leaves no process behind."""

    def __init__(self, folder: Path, options: Sequence[str], deadline_s: float) -> None:
        """`deadline_s`: within which it has to get over any fault."""
        self.folder, self._options, self._deadline_s = folder, list(options), deadline_s
        self._mark = uuid.uuid4().hex
        self._log = folder.with_suffix(".log")
        self.ended = 0
        """Times that the run ended by itself, with an error, once it trained."""
        self.ended_early = 0
        """Times that it did so while its actors started, where nothing is lost."""
        self.resumes = 0
        self.left = 0
        """Processes that outlived their controller by `GONE_S`."""
        self._start([*("--config", str(PRESET)), f"--run.dir={folder}"])

    def _start(self, which: Sequence[str]) -> None:
        command = [sys.executable, str(_APP), *which, *self._options]
        env = {**os.environ, **ENV, _MARK_ENV: self._mark, "OMP_NUM_THREADS": "1"}
        self._said = len(self.output) if self._log.exists() else 0
        with self._log.open("a") as log:
            self._app = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._app)
        for pid, _role in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._log.read_text(errors="replace")

    def rows(self) -> list[Row]:
        """Its steps so far; the line that is being written is left out."""
        path = self.folder / "metrics.jsonl"
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return read_rows(path)
        return []

    def strike(self, role: str, what: str, rng: random.Random) -> bool:
        """SIGKILL ("kill"), SIGSTOP ("stop"), or both ends of a pause ("pause") to one process of `role`.

        Whether the role restarts for it: not after a pause, nor for a process that its actor replaces itself.
        """
        deadline = time.monotonic() + self._deadline_s
        while not (pids := [pid for pid, found in self.processes() if found.partition("_")[0] == role]):
            self._check(deadline, f"a process of {role}")
            time.sleep(_POLL_S)
        pid = rng.choice(pids)
        with contextlib.suppress(OSError):  # it may have ended by now
            replaced = role == "reward" and b"forge.child" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            if what == "pause":
                time.sleep(rng.uniform(1.0, 8.0))
                os.kill(pid, signal.SIGCONT)
            return what != "pause" and not replaced
        return False

    def served_again(self, role: str) -> int:
        """How often a replica of `role` has come back, or was started once more where the run had not begun."""
        if role == CONTROLLER:
            return self.resumes
        return sum(name.partition("_")[0] == role for name in _BACK.findall(self.output))

    def recover(self, role: str, before: int, *, waits: bool, resumes: int | None = None) -> None:
        """Until `role` has come back more often than `before` (where it is to) and another step is done.

        All roles have come back once there were more than `resumes`.
        """
        deadline = time.monotonic() + self._deadline_s
        while waits and self.served_again(role) <= before and (resumes is None or self.resumes <= resumes):
            self._check(deadline, f"{role} to come back")
            time.sleep(_POLL_S)
        steps = len(self.rows())
        while len(self.rows()) <= steps:
            self._check(deadline, f"a step after {role} had come back")
            time.sleep(_POLL_S)

    def wait_for_step(self, step: int) -> None:
        """Until so many steps are done."""
        deadline = time.monotonic() + self._deadline_s
        while len(self.rows()) < step:
            self._check(deadline, f"step {step}")
            time.sleep(_POLL_S)

    def _check(self, deadline: float, what: str) -> None:
        code = self._app.poll()
        if code is not None:
            if code != -signal.SIGKILL:
                early = "\nstep " not in self.output[self._said :]
                self.ended, self.ended_early = self.ended + (not early), self.ended_early + early
                tail = "\n".join(self.output.splitlines()[-8:])
                print(f"the run ended by itself, with exit code {code}:\n{tail}", file=sys.stderr, flush=True)
            self._bury()
            self.resumes += 1
            self._start([f"--resume={self.folder}"])
        if time.monotonic() > deadline:
            tail = "\n".join(self.output.splitlines()[-30:])
            raise TimeoutError(f"waited {self._deadline_s:g} s for {what}, in vain:\n{tail}")

    def _bury(self) -> None:
        """The controller is dead; its actors have to notice."""
        patient = time.monotonic() + GONE_S
        while (left := len(self.processes())) and time.monotonic() < patient:
            time.sleep(_POLL_S)
        self.left += left

    def stop(self) -> None:
        """Ctrl-C, and its end."""
        self._app.send_signal(signal.SIGINT)
        try:
            self._app.wait(self._deadline_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run did not end within {self._deadline_s:g} s of Ctrl-C") from None
        self._bury()

    def processes(self) -> list[tuple[int, str]]:
        """Its processes with their meshes; the controller's is `CONTROLLER`."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not entry.isdigit():
                    continue
                environ = dict(
                    line.partition("=")[::2]
                    for line in Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace").split("\0")
                )
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                if environ.get(_MARK_ENV) != self._mark or state == "Z":
                    continue
                role = environ.get(RUN_ID_ENV, "").partition("/")[2]
                if role or int(entry) == self._app.pid:
                    found.append((int(entry), role or CONTROLLER))
        return found
