"""Which tasks are not tried any more: a task that always fails would otherwise cost its time-outs for ever."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REMEMBERED_TASKS = 10_000
_REMEMBERED_CHARACTERS = 2_000


@dataclass(frozen=True)
class Failures:
    """Of one task."""

    count: int
    """Tries that failed since its last good episode."""
    last_error: str
    """Text of the last one's error, its end where it is long."""


def task_key(task: Mapping[str, Any]) -> str:
    """What a task is called: its `id`, else a hash of its content."""
    if task.get("id") is not None:
        return str(task["id"])
    text = json.dumps(task, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Quarantine:
    """Counts failures by task. Remembers the last ten thousand tasks that failed; pure."""

    def __init__(self, after: int) -> None:
        """`after` so many failures a task is quarantined, for good."""
        self._after = after
        self._failures: OrderedDict[str, Failures] = OrderedDict()

    def failed(self, key: str, error: str) -> bool:
        """Counts a failed try; whether this one put the task into quarantine."""
        before = self._failures.pop(key, None)
        count = before.count + 1 if before else 1
        self._failures[key] = Failures(count, error[-_REMEMBERED_CHARACTERS:])
        if len(self._failures) > _REMEMBERED_TASKS:
            self._failures.popitem(last=False)
        return count == self._after

    def succeeded(self, key: str) -> None:
        """A good episode: the count of a task that is not in quarantine starts anew."""
        if key not in self:
            self._failures.pop(key, None)

    def __contains__(self, key: str) -> bool:
        failures = self._failures.get(key)
        return failures is not None and failures.count >= self._after

    def __getitem__(self, key: str) -> Failures:
        """Failures of a task; KeyError without any."""
        return self._failures[key]

    def tasks(self) -> dict[str, Failures]:
        """Those in quarantine."""
        return {key: failures for key, failures in self._failures.items() if key in self}
