"""What keeps processes from outliving the actors that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s until {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def start(program: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A process running `program` in a session of its own, and the words of its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


SLEEPER = "import time; time.sleep(600)"
FORKED = f"""
import os, subprocess, sys, time
from forge.child import guard_process_group, scratch_folder
guard_process_group()
forked = os.fork()
if forked == 0:
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)
started = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
print(forked, started.pid, scratch_folder(), flush=True)
time.sleep(600)
"""


def test_a_guarded_process_takes_its_group_and_its_scratch_folder_along() -> None:
    process, (forked, started, folder) = start(FORKED)
    Path(folder, "socket").touch()
    assert Path(folder).name.startswith("meshforge-")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    wait_until(lambda: gone(int(forked)), "a process forked without exec is gone")
    wait_until(lambda: gone(int(started)), "a subprocess is gone")
    wait_until(lambda: not Path(folder).exists(), "the scratch folder is gone")


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "from forge.child import die_with_parent; {call}; {rest}"],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_die_with_parent_ends_a_process_whose_parent_was_killed() -> None:
    rest = "import time; print(1, flush=True); time.sleep(600)"
    process, (child,) = start(PARENT.format(call="die_with_parent()", rest=rest))
    assert not gone(int(child))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    wait_until(lambda: gone(int(child)), "the child has followed its parent")


def test_die_with_parent_notices_a_parent_that_has_died_already() -> None:
    program = f"from forge.child import die_with_parent; die_with_parent({os.getpid() + 1}); print('alive')"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == ""
