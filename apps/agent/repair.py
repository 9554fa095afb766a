"""An offline repair task: a small repository whose test fails, for agents that are programs, such as mini-swe-agent.

The agent gets a folder with a module and its test, and is to make the test pass; `passed` looks whether it does.
`rows` are the tasks for data.task, `passed` is for agent.check. Nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CHECK_S = 20.0
_MODULE, _TEST = "figures.py", "test_figures.py"
_BUGS = {
    "total": (
        "def total(values):\n    out = 0\n    for value in values[1:]:\n        out += value\n    return out\n",
        "assert total([1, 2, 3]) == 6\nassert total([]) == 0\n",
    ),
    "largest": (
        "def largest(values):\n    out = 0\n    for value in values:\n        out = max(out, value)\n    return out\n",
        "assert largest([1, 3, 2]) == 3\nassert largest([-2, -1]) == -1\n",
    ),
}
"""What is wrong, and what has to hold."""
_ASK = f"`python {_TEST}` fails. Repair {_MODULE}, so that it passes; leave {_TEST} as it is."


def rows() -> list[dict[str, Any]]:
    """One task a bug; its `prompt` is for {prompt} in agent.command."""
    return [
        {
            "prompt": _ASK,
            "metadata": {
                "id": name,
                "prompt": _ASK,
                "files": {_MODULE: code, _TEST: f"from figures import {name}\n\n{holds}"},
            },
        }
        for name, (code, holds) in _BUGS.items()
    ]


def passed(task: Mapping[str, Any], folder: Path) -> float:
    """1 where the test passes, as it was given; else 0."""
    (folder / _TEST).write_text(task["files"][_TEST])
    try:
        done = subprocess.run([sys.executable, "-B", _TEST], cwd=folder, capture_output=True, timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)
