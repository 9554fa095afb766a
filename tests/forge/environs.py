"""What other processes have in their environment."""

from __future__ import annotations

from pathlib import Path

import psutil


def variable(process: psutil.Process, name: str) -> str:
    """An environment variable of a process; "" for none, and where the process has gone.

    psutil reads no further than to the first gap, and one that names itself, as an engine does, leaves gaps.
    """
    try:
        block = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return ""
    pairs = (pair.partition("=") for pair in block.decode(errors="replace").split("\0"))
    return next((value for key, _, value in pairs if key == name), "")
