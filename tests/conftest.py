"""Environment of every test, one Monarch client, and the law that tests leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from environs import variable
from hypothesis import settings

if TYPE_CHECKING:
    from forge.launch import Hosts

# Two OpenMP threads in each of several processes on few cores are several times slower than one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# Inherited by every process that a test starts, and by theirs: finds orphans, whose parent is gone.
SESSION_VARIABLE = "MESHFORGE_TEST_SESSION"
SESSION = uuid.uuid4().hex
os.environ[SESSION_VARIABLE] = SESSION
SHM = Path("/dev/shm")
GRACE_S = 15.0

settings.register_profile("meshforge", deadline=None, derandomize=True)
settings.load_profile("meshforge")


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays_behind() -> Iterator[None]:
    """A trainer of one rank makes a process group of its own where FSDP2 wants one; the next module begins without."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """At the end of the session: Monarch shut down, no process of ours alive, none of our segments left."""
    segments = shm_segments()
    yield
    shut_monarch_down()
    processes = wait_for_processes(GRACE_S)
    described = [f"{p.pid}: {command_line(p)}" for p in processes]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
    end_resource_tracker(GRACE_S)
    leaked = shm_segments() - segments
    leaked -= held_segments() if leaked else set()
    if foreign_resource_tracker():
        # Semaphores are not mapped for as long as they exist: these may be another program's, which still runs.
        leaked = {name for name in leaked if not name.startswith("sem.mp-")}
    left = [*described, *sorted(leaked)]
    assert not left, f"tests left these processes and {SHM} segments behind: {left}"


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """One Monarch client for the whole session: a process cannot start a second one."""
    from forge.launch import bring_up

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hosts = bring_up()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    yield hosts
    hosts.tear_down()


def end_resource_tracker(grace_s: float) -> None:
    """What processes that were killed had named is unlinked by this session's resource tracker, when it ends."""
    tracker: Any = resource_tracker._resource_tracker
    # In a thread: it waits for the last process that holds the tracker's pipe.
    ending = threading.Thread(target=tracker._stop, daemon=True)
    ending.start()
    ending.join(grace_s)


def foreign_resource_tracker() -> bool:
    """Whether a program that is none of this session's uses multiprocessing now."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = variable(process, SESSION_VARIABLE) == SESSION or process.ppid() == os.getpid()
            if not ours and "multiprocessing.resource_tracker" in command_line(process):
                return True
    return False


def shut_monarch_down() -> None:
    """For the tests that use Monarch without `hosts`; does nothing when it is down already."""
    if "monarch.actor" in sys.modules:
        from monarch.actor import shutdown_context

        shutdown_context(10).get(timeout=30)


def wait_for_processes(grace_s: float) -> list[psutil.Process]:
    """The processes of this session that are still alive after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    while (alive := session_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def session_processes() -> list[psutil.Process]:
    """Every process but this one that carries this session's variable in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if variable(process, SESSION_VARIABLE) == SESSION and not ends_with_us(process):
                found.append(process)
    return found


def ends_with_us(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker reads a pipe from this process and ends when we do."""
    return process.ppid() == os.getpid() and "multiprocessing.resource_tracker" in command_line(process)


def command_line(process: psutil.Process) -> str:
    """As `ps` shows it."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return "gone"


def shm_segments() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()


def held_segments() -> set[str]:
    """Segments that a live process has mapped or open: other programs use /dev/shm too."""
    held: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths = [m.path for m in process.memory_maps()] + [f.path for f in process.open_files()]
            held.update(path.removeprefix(f"{SHM}/") for path in paths if path.startswith(f"{SHM}/"))
    return held
