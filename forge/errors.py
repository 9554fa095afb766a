"""Every error that the project raises on purpose, under one root.

    ForgeError
    |- ConfigError(ValueError)         a value the user gave cannot work; raised before any process starts, exit code 2
    |- SchemaError(ValueError)         a TensorDict does not follow the schema of forge/batch.py
    |- LaunchError                     the hosts or processes of a run could not be brought up
    |  '- NodeLost                     a node of the run is gone, and nothing can be started there
    |- ActorFailed                     an actor's process died, or an actor raised where nobody can answer for it
    |- DeadlineExceeded(TimeoutError)  a wait reached its deadline; names what was waited for
    |- ChannelError                    the data plane: a segment is gone, a handle is stale, a budget is reached
    |- WeightSyncError                 publish, pull or apply failed; the old weights stay in force
    |- MemoryBudgetError               the replay would hold more bytes of groups than it may
    |- StalenessError                  the staleness bound would be broken, or can never be met
    |- RewardError                     a reward function raised
    |  '- RewardTimeout                a reward took too long, and its pool's policy is to fail
    |- EnvironmentFailed               an environment did not do what was asked; names its kind, task and turn
    |  |- EnvironmentTimeout(TimeoutError)  it was not done in time
    |  |- EnvironmentRaised            its code raised, or returned what it must not
    |  |- EnvironmentDied              its worker process ended
    |  |- EpisodeEnded                 it has been closed: by its client, by the limit of its lease, or with its pool
    |  |- QuarantinedError             its task has failed so often that it is not tried again
    |- TranscriptError                 a conversation cannot become tokens, or not those of its chat template
    |- GatewayError                    a call to the gateway is refused; has the HTTP status that says so
    |- SandboxError                    the machine cannot keep a program in, or a sandbox broke
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


class NodeLost(LaunchError):
    """A node of the run is gone."""


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


class RewardTimeout(RewardError, TimeoutError):
    """A reward took longer than its pool allows, whose policy is to fail then."""


class EnvironmentFailed(ForgeError):
    """An environment did not do what was asked of it."""

    def __init__(self, text: str, *, kind: str = "", task: str = "", turn: int = 0) -> None:
        """kind: name of its pool. task: key of the task. turn: 0 is the reset, then steps count from 1."""
        super().__init__(text)
        self.kind = kind
        self.task = task
        self.turn = turn


class EnvironmentTimeout(EnvironmentFailed, TimeoutError):
    """An environment was not done in time, or no place for it became free in time."""


class EnvironmentRaised(EnvironmentFailed):
    """An environment's code raised, or returned what it must not; the text has its traceback."""


class EnvironmentDied(EnvironmentFailed):
    """An environment's worker process ended, or could not be started."""


class EpisodeEnded(EnvironmentFailed):
    """An episode is over already: closed by its client, by the limit of its lease, or with its pool."""


class QuarantinedError(EnvironmentFailed):
    """A task has failed so often that it is not tried again."""


class TranscriptError(ForgeError):
    """A conversation cannot be put into tokens, or its tokens are not those of its chat template."""


class GatewayError(ForgeError):
    """The gateway refuses a call."""

    def __init__(self, status: int, text: str, *, code: str = "", param: str = "", retry: bool = False) -> None:
        """status: of HTTP. code, param: as in OpenAI's errors. retry: whether the same call may work a little later."""
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param
        self.retry = retry


class SandboxError(ForgeError):
    """A program could not be run under its limits."""


class RunFolderError(ForgeError):
    """The run folder cannot be written."""
