"""Checks for the doctor's tests that fail in every way; importable by name in processes, and light."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

from apps.doctor.checks import Report


def fine() -> Report:
    return Report("ok", "all is well")


def raising() -> NoReturn:
    raise RuntimeError("the disk [sda] said no")


def hanging() -> NoReturn:
    while True:
        time.sleep(1)


def dying() -> NoReturn:
    print("out of luck", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
