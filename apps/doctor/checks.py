"""A check: what it found, in which state that is, and what to do. Each under a deadline, none ends the others.

What only looks runs in a thread of this process. What may hang in native code or leave processes behind (torch,
Monarch, vLLM) runs in a process group of its own, which is killed at the deadline.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["ok", "warning", "wrong", "skipped"]
_WORSE: dict[State, int] = {"skipped": 0, "ok": 1, "warning": 2, "wrong": 3}
_NOTHING: State = "skipped"
_SAID = 300
"""Characters of a failure that are told."""


@dataclass(frozen=True)
class Report:
    """What a check found; `remedy` is empty where there is nothing to do."""

    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """`look` is module:function without arguments; `alone` gives it a process group of its own."""

    name: str
    look: str
    deadline_s: float = 15.0
    alone: bool = False


@dataclass(frozen=True)
class Result(Report):
    """The report of the check `name`, and its seconds."""

    name: str = ""
    seconds: float = field(default=0.0, compare=False)


def merged(reports: Iterable[Report]) -> Report:
    """Several as one: the worst state, everything found, the remedies of those that have one. Pure."""
    each = list(reports)
    states: list[State] = [report.state for report in each]
    state = max(states, key=_WORSE.__getitem__, default=_NOTHING)
    found = "; ".join(report.found for report in each)
    return Report(state, found, "; ".join(report.remedy for report in each if report.remedy))


def run(check: Check, patience: float = 1.0) -> Result:
    """The result of `check`; a failure, a hang or a death is one, too. Its deadline is `patience` times its own."""
    begin = time.monotonic()
    report = (_in_process if check.alone else _in_thread)(check, patience * check.deadline_s)
    return Result(**asdict(report), name=check.name, seconds=time.monotonic() - begin)


def look(check: Check) -> Report:
    """Calls the check's function; what it raises is wrong."""
    try:
        module, _, function = check.look.partition(":")
        report: Report = getattr(importlib.import_module(module), function)()
        return report
    except Exception as error:
        text = " ".join(str(error).split())[:_SAID] or "no text"
        return Report("wrong", f"{type(error).__name__}: {text}", "see the error; run with --only for this check alone")


def _late(deadline_s: float) -> Report:
    return Report(
        "wrong",
        f"no answer within {deadline_s:g} s",
        "it hangs, or the machine is busy: try again with --patience 5",
    )


def _in_thread(check: Check, deadline_s: float) -> Report:
    answers: list[Report] = []
    thread = threading.Thread(target=lambda: answers.append(look(check)), name=check.name, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answers[0] if answers else _late(deadline_s)


def _in_process(check: Check, deadline_s: float) -> Report:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-m", "apps.doctor", "--inside", check.name, check.look, str(answer)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(deadline_s)
            late = process.poll() is None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if answer.exists():
            return Report(**json.loads(answer.read_text()))
        if late:
            return _late(deadline_s)
        return died(process.returncode, log.read_text(errors="replace"))


def died(code: int, log: str) -> Report:
    """Of a process that ended without an answer. Pure."""
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    said = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "nothing")
    remedy = "SIGKILL is what a kernel short of memory sends: see the check memory" if code == -9 else ""
    return Report("wrong", f"its process ended with {how}; it said last: {said[:_SAID]}", remedy)


def answer_inside(name: str, function: str, path: str) -> None:
    """In the process of a check: looks, and leaves the report at `path`, whole."""
    report = look(Check(name, function))
    new = Path(f"{path}.new")
    new.write_text(json.dumps(asdict(report)))
    new.rename(path)


def exit_code(results: Sequence[Result]) -> int:
    """1 where anything is wrong, else 0. Pure."""
    return int(any(result.state == "wrong" for result in results))
