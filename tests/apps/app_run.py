"""Starts the real app in a process of its own and looks at what it does, says and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from environs import variable

from replay.recording import Recording
from replay.recovery import recover

ROOT = Path(__file__).parents[2]
APP = ROOT / "apps" / "grpo" / "main.py"
RERUN = APP.with_name("rerun.py")
EXACT = "--dtype=float32"
"""For what trainer and engine have to agree on to many digits: a CPU with bf16 units computes in bfloat16 else."""
NANO = ["--config", str(ROOT / "apps/grpo/tiny.yaml"), "--model=nano", "--data.args={num_digits: 4}", EXACT]
MARK = "MESHFORGE_APP_RUN"


class AppRun:
    """One run of an app under a terminal-like process group; `folder` is its run folder.

    It takes the options `preset` first. With `resumed` it goes on with that run, in its folder.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        launcher: tuple[str, ...] = (),
        app: Path = APP,
        prefix: tuple[str, ...] = (),
        preset: Sequence[str] = NANO,
        resumed: AppRun | None = None,
    ) -> None:
        self.folder: Path = resumed.folder if resumed else folder
        self._mark = uuid.uuid4().hex
        self._log = folder.parent / f"{folder.name}.log"
        which = [f"--resume={self.folder}"] if resumed else [*preset, f"--run.dir={folder}"]
        command = [*prefix, *(launcher or (sys.executable,)), str(app), *which, *options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
                cwd=folder.parent,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds by now."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 150.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, f"the app ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.output}"
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        """SIGINT to the whole foreground group, as a terminal sends it."""
        os.killpg(self._process.pid, signal.SIGINT)

    def kill_controller(self) -> None:
        """SIGKILL of the process that was started; its actors have to notice."""
        self._process.kill()

    def kill_actor(self, name: str) -> None:
        """SIGKILL of the actor's own process."""
        process = self.process_of(name)
        assert process is not None, f"no process of actor {name} runs"
        process.kill()

    def process_of(self, name: str) -> psutil.Process | None:
        """The actor's own process, in whichever of its lives."""
        for process in self.processes():
            mark = variable(process, "MESHFORGE_RUN_ID")
            if mark.rpartition("/")[2].partition("_life")[0] == name and "forge.child" in process.cmdline():
                return process
        return None

    def signal_actor(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to every process of an actor, its engine included."""
        for process in self.processes():
            if variable(process, "MESHFORGE_RUN_ID").endswith(f"/{name}"):
                process.send_signal(number)

    def signal_engine(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the processes that an actor has started, its engine's."""
        engine = [
            process
            for process in self.processes()
            if variable(process, "MESHFORGE_RUN_ID").endswith(f"/{name}") and "forge.child" not in process.cmdline()
        ]
        assert engine, f"no process of the engine of {name} runs"
        for process in engine:
            process.send_signal(number)

    def finish(self, timeout_s: float = 150.0) -> int:
        """The exit code; by then no process of the run may be alive."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            running = [" ".join(p.cmdline()) for p in self.processes()]
            self.end()
            raise AssertionError(f"still running after {timeout_s} s: {running}\n{self.output}") from None
        deadline = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = [" ".join(p.cmdline()) for p in left]
        self.end()
        assert not names, f"left behind: {names}\n{self.output}"
        return code

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if variable(process, MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        """Ends what is left of the run, whatever the test found."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        self._process.wait()


def check_nothing_was_lost(run: AppRun) -> None:
    """Whatever was done to a run at bound 1: each step once, no token too old, no episode dropped, one clean end."""
    numbers = run.rows()
    assert [row["step"] for row in numbers] == list(range(1, len(numbers) + 1))
    assert max(row["staleness/max"] for row in numbers) <= 1
    assert sum(row["episodes/dropped"] for row in numbers) == 0
    assert "Traceback" not in run.output


def check_recording(run: AppRun, again: AppRun) -> None:
    """The recorded run trained no prompt twice and lost none; `again`, a rerun of it, gives its steps bit for bit."""
    steps, journal = len(run.rows()), run.folder / "journal"
    batches = Recording(journal)
    trained = [seq for version in batches.versions for seq in batches.batch(version).seqs]
    waiting = list(recover(journal, steps).state.entries)
    assert sorted(trained + waiting) == list(range(max(trained + waiting) + 1)), "a prompt was lost, or used twice"
    try:
        assert again.finish(400) == 0, again.output
    finally:
        again.end()
    assert f"{steps} of {steps} steps gave the recorded numbers, bit for bit" in again.output
