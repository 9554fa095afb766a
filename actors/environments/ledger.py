"""What a pool remembers of its episodes: counts, times, and which tasks fail."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from actors.environments.failures import CALL_ERRORS, Call, failure
from actors.environments.latency import LatencyRecorder
from actors.environments.quarantine import Failures, Quarantine
from forge.errors import EnvironmentTimeout, QuarantinedError

COUNTS = ("episodes", "steps", "retries", "failures", "timeouts", "expired", "quarantined", "refused", "close_failures")
"""Episodes that began; turns done; tries of a reset beyond the first; calls that failed, and those of them that were
over their time; leases ended at `episode_timeout_s`; tasks put into quarantine; episodes refused because their task is;
environments that did not close as they should."""

_log = logging.getLogger(__name__)


@dataclass
class PoolReport:
    """What a pool says of itself."""

    name: str
    """Of its kind."""
    counts: dict[str, int]
    """Since the report before; the names of `COUNTS`."""
    running: int
    """Episodes that have a place."""
    waiting: int
    """Episodes that wait for one."""
    latency: LatencyRecorder
    """Queue and service times since the report before."""
    quarantine: dict[str, Failures]
    """Every task that is in quarantine, and its last error."""

    def row(self, prefix: str = "extra/env/") -> dict[str, float | int]:
        """Metrics: those of this kind under its name, and `LatencyRecorder.row`."""
        values = {**self.counts, "running": self.running, "waiting": self.waiting, "quarantine": len(self.quarantine)}
        return {f"{prefix}{self.name}/{key}": value for key, value in values.items()} | self.latency.row(prefix)


class Ledger:
    """Of one pool."""

    def __init__(self, name: str, quarantine_after: int) -> None:
        self._name = name
        self._quarantine_after = quarantine_after
        self._quarantine = Quarantine(quarantine_after)
        self._latency = LatencyRecorder()
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """One more of those in `COUNTS`."""
        self._counts[name] += 1

    @contextmanager
    def keeping(self, call: Call, names: Sequence[str] = (), queue_s: float = 0.0, *, blame: bool) -> Iterator[None]:
        """The body is `call`: records how long it took under each of `names`, and turns its failure into a client's.

        queue_s: how long it had waited before. blame: whether a failure counts against the task.
        A call that is cancelled leaves no trace.
        """
        begun = time.monotonic()
        try:
            yield
        except CALL_ERRORS as error:
            self._record(call, names, queue_s, begun)
            failed = failure(call, error)
            self._counts["failures"] += 1
            self._counts["timeouts"] += isinstance(failed, EnvironmentTimeout)
            if blame and self._quarantine.failed(call.task, str(failed)):
                self._counts["quarantined"] += 1
                _log.warning("task %r is in quarantine, its last failure: %s", call.task, failed)
            raise failed from error
        self._record(call, names, queue_s, begun)

    def succeeded(self, task: str) -> None:
        """An episode of `task` has gone well."""
        self._quarantine.succeeded(task)

    def quarantined(self, task: str) -> bool:
        """Whether `task` is not to be tried any more."""
        return task in self._quarantine

    def refuse_quarantined(self, task: str) -> None:
        """Raises QuarantinedError where `task` is not to be tried any more."""
        if not self.quarantined(task):
            return
        self._counts["refused"] += 1
        failures = self._quarantine[task]
        raise QuarantinedError(
            f"environment {self._name}, task {task!r} is in quarantine after {failures.count} failed tries "
            f"(quarantine_after {self._quarantine_after}); mend the task or leave it out. The last one:\n"
            f"{failures.last_error}",
            kind=self._name,
            task=task,
        )

    def report(self, running: int, waiting: int) -> PoolReport:
        """Counts and times since the last report."""
        counts, self._counts = {name: self._counts[name] for name in COUNTS}, Counter()
        latency, self._latency = self._latency, LatencyRecorder()
        return PoolReport(self._name, counts, running, waiting, latency, self._quarantine.tasks())

    def _record(self, call: Call, names: Sequence[str], queue_s: float, begun: float) -> None:
        for name in names:
            self._latency.record(name, turn=call.turn, queue_s=queue_s, service_s=time.monotonic() - begun)
