"""What becomes of processes that code under test has started."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def gone(pid: int, patience_s: float = 20.0) -> bool:
    """Whether the process ends within `patience_s`; a zombie has ended."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def read_pid(path: Path, patience_s: float = 60.0) -> int:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"no process wrote its id to {path}")
