"""Every error that the project raises on purpose, under one root.

    ForgeError
    |- ConfigError(ValueError)         a value the user gave cannot work; raised before any process starts, exit code 2
    |- SchemaError(ValueError)         a TensorDict does not follow the schema of forge/batch.py
    |- LaunchError                     the hosts or processes of a run could not be brought up
    |- ActorFailed                     an actor's process died, or an actor raised where nobody can answer for it
    |- DeadlineExceeded(TimeoutError)  a wait reached its deadline; names what was waited for
    |- ChannelError                    the data plane: a segment is gone, a handle is stale, a budget is reached
    |- WeightSyncError                 publish, pull or apply failed; the old weights stay in force
    |- MemoryBudgetError               the replay would hold more bytes of groups than it may
    |- StalenessError                  the staleness bound would be broken, or can never be met
    |- RewardError                     a reward function raised
    |- RunFolderError                  the run folder cannot be written (full disk, permissions)

The text of each says what was wrong, the value, the limit and the remedy.
"""

from __future__ import annotations


class ForgeError(Exception):
    """Root of the project's own errors."""


class ConfigError(ForgeError, ValueError):
    """A value in the configuration cannot work."""


class SchemaError(ForgeError, ValueError):
    """A TensorDict breaks the schema of `forge.batch`."""


class LaunchError(ForgeError):
    """The run could not be brought up."""


class ActorFailed(ForgeError):
    """An actor died or cannot answer any more."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"actor {name} failed: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[ActorFailed], tuple[str, str]]:
        return type(self), (self.name, self.reason)


class DeadlineExceeded(ForgeError, TimeoutError):
    """A wait reached its deadline."""


class ChannelError(ForgeError):
    """A TensorDict could not be handed over."""


class WeightSyncError(ForgeError):
    """A weight update did not happen; the previous weights stay in force."""


class MemoryBudgetError(ForgeError):
    """The replay would hold more bytes of groups than it may."""


class StalenessError(ForgeError):
    """The staleness bound would be broken."""


class RewardError(ForgeError):
    """A reward function raised."""


class RunFolderError(ForgeError):
    """The run folder cannot be written."""
