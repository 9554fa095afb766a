"""A failed call of an environment, in words: which kind, task and turn, what was waited for, limit, remedy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from actors.environments.world import ImportTimeout, ProcessEnded, RaisedInside
from forge.errors import EnvironmentDied, EnvironmentFailed, EnvironmentRaised, EnvironmentTimeout

CALL_ERRORS = (RaisedInside, ProcessEnded, ImportTimeout, TimeoutError)
"""What a call of a World fails with."""


@dataclass(frozen=True)
class Call:
    """What was asked, and of whom."""

    kind: str
    """Name of the pool."""
    task: str
    """Key of the task."""
    turn: int
    """0 is the reset."""
    limit_s: float
    """Of this call."""

    @property
    def where(self) -> str:
        """As errors name it."""
        return f"environment {self.kind}, task {self.task!r}, {f'turn {self.turn}' if self.turn else 'reset'}"


def failure(call: Call, error: Exception) -> EnvironmentFailed:
    """The error that a client sees; `error` is one of CALL_ERRORS."""
    kind: type[EnvironmentFailed]
    if isinstance(error, TimeoutError):
        option = "turn_timeout_s" if call.turn else "reset_timeout_s"
        kind, text = EnvironmentTimeout, f"took more than {call.limit_s:g} s; raise {option}, or do less in one call"
    elif isinstance(error, ImportTimeout):
        kind, text = EnvironmentTimeout, f"{error}; import less at the top of that module"
    elif isinstance(error, ProcessEnded):
        kind, text = EnvironmentDied, f"its worker process ended ({error})"
    else:
        kind, text = EnvironmentRaised, str(error)
    return kind(f"{call.where}: {text}", kind=call.kind, task=call.task, turn=call.turn)
