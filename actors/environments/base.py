"""What an environment is: one episode's world, which says something, takes an action, and says what came of it.

    reset(task) -> Observation      once, first
    step(action) -> Step            once a turn, until `done`
    close()                         once, last, whatever happened before

Two kinds, told apart by their methods. An *asynchronous* one waits (for a server, a container, a judge); any number of
them share one event loop, so it never computes for long there, in its constructor neither. A *synchronous* one is plain
Python that may compute or block as it likes; each runs in a worker process of its own. A new instance serves each
episode. What goes in and out is picklable.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from forge.errors import ConfigError
from forge.registry import load

EnvironmentKind = Literal["async", "sync"]
_METHODS = {"reset": ("a task",), "step": ("an action",), "close": ()}
_REMEDY = (
    "give module:name of a class with the methods reset(task), step(action) and close(), all async or all plain, or of "
    "a function that returns such an instance, in an importable module"
)


@dataclass(frozen=True)
class Observation:
    """What an environment says."""

    messages: list[dict[str, Any]]
    """Chat messages in OpenAI's form, only the new ones: {"role": "user" | "tool" | "system", "content": ...}."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the functions that may be called from now on; read after `reset` only."""


@dataclass(frozen=True)
class Step:
    """What came of an action."""

    observation: Observation
    """What the environment says next; of a last step it is not shown to the policy."""
    reward: float
    """Of this turn alone; finite."""
    done: bool
    """Whether the episode is over."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything else worth keeping, for metrics and for people."""


@dataclass(frozen=True)
class Action:
    """What the policy said."""

    text: str
    """Decoded, without special tokens."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Parsed, in OpenAI's form: {"id", "type": "function", "function": {"name", "arguments": "<json text>"}}."""
    finish: str = "stop"
    """Why it ended: "stop", or "length" where a token limit cut it."""
    error: str = ""
    """Why something that begins like a tool call is none; "" where all is well."""


class Environment(Protocol):
    """One episode's world, asynchronous."""

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Makes the world of `task`; called once, first."""
        ...

    async def step(self, action: Action) -> Step:
        """Takes one turn. Cancelled when the turn is over its time; `close` follows."""
        ...

    async def close(self) -> None:
        """Frees whatever it holds; called once, last, even after a failed or cancelled `reset`."""
        ...


class SyncEnvironment(Protocol):
    """One episode's world, synchronous; runs in a worker process."""

    def reset(self, task: Mapping[str, Any]) -> Observation:
        """Makes the world of `task`; called once, first."""
        ...

    def step(self, action: Action) -> Step:
        """Takes one turn. The process is killed when the turn is over its time."""
        ...

    def close(self) -> None:
        """Frees whatever it holds; called last, unless the process was killed."""
        ...


class Worlds(Protocol):
    """Episodes of environments: an `EnvironmentPool`, or a client of one or of several kinds."""

    async def start(self, task: Mapping[str, Any]) -> tuple[str, Observation]:
        """A new episode of `task`: its id, and what its environment says first."""
        ...

    async def step(self, episode: str, action: Action) -> Step:
        """One turn."""
        ...

    async def close(self, episode: str) -> None:
        """Ends the episode."""
        ...


def environment_kind(path: str, kwargs: Mapping[str, Any] | None = None) -> EnvironmentKind:
    """Whether the environment at `module:name` is asynchronous, without making one.

    Of a class its methods tell, of a function its return annotation (`-> Environment` and `-> SyncEnvironment` do).
    Raises ConfigError, with path and remedy, for what cannot be imported, called with `kwargs`, or be an environment.
    """
    if path.startswith("__main__:"):
        raise ConfigError(f"environment path is {path!r}, which another process cannot import; {_REMEDY}")
    made_by = load(path, "environment path", _REMEDY)
    try:
        inspect.signature(made_by).bind(**(kwargs or {}))
    except TypeError as error:
        raise ConfigError(
            f"environment {path!r} cannot be made with kwargs {dict(kwargs or {})!r} ({error}); correct them"
        ) from error
    except ValueError:
        pass  # a builtin without a signature
    return _kind_of(_class_of(made_by, path), path)


def load_environment(
    path: str, kwargs: Mapping[str, Any] | None = None
) -> tuple[Environment | SyncEnvironment, EnvironmentKind]:
    """A new instance of the class, or from the function, at `module:name`, and whether it is asynchronous.

    Raises ConfigError as `environment_kind` does, and whatever making it raises.
    """
    made_by = load(path, "environment path", _REMEDY)
    instance = made_by(**(kwargs or {}))
    return instance, _kind_of(type(instance), path)


def check_observation(value: Any) -> Observation:
    """`value`, if it is what `reset` has to return; TypeError saying what it is instead."""
    if not isinstance(value, Observation):
        raise TypeError(f"reset returned {_shown(value)}; it returns an Observation")
    _check_content(value)
    return value


def check_step(value: Any) -> Step:
    """`value`, if it is what `step` has to return; TypeError saying what it is instead."""
    if not isinstance(value, Step):
        raise TypeError(f"step returned {_shown(value)}; it returns a Step")
    if not isinstance(value.observation, Observation):
        raise TypeError(f"step returned the observation {_shown(value.observation)}; it is an Observation")
    _check_content(value.observation)
    try:
        finite = math.isfinite(value.reward)
    except TypeError:
        finite = False
    if not finite:
        raise TypeError(f"step returned the reward {_shown(value.reward)}; it is one finite number")
    return value


def _check_content(observation: Observation) -> None:
    for message in observation.messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(f"an observation has the message {_shown(message)}; it is a mapping with role and content")
    for tool in observation.tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"an observation has the tool {_shown(tool)}; it is a mapping, a JSON schema")


def _class_of(made_by: Any, path: str) -> type:
    """The class of what `made_by` makes."""
    while isinstance(made_by, partial):
        made_by = made_by.func
    if isinstance(made_by, type):
        return made_by
    try:
        made = typing.get_type_hints(made_by).get("return")
    except (NameError, TypeError):
        made = None
    if not isinstance(made, type):
        raise ConfigError(
            f"environment {path!r} is a function that does not say what it returns; annotate it with the class, or "
            "with -> Environment (async) or -> SyncEnvironment (plain) of actors.environments.base"
        )
    return made


def _kind_of(cls: type, path: str) -> EnvironmentKind:
    kinds: dict[str, EnvironmentKind] = {}
    for name, arguments in _METHODS.items():
        method = getattr(cls, name, None)
        if not callable(method):
            raise ConfigError(f"environment {path!r} ({cls.__name__}) has no method {name}; {_REMEDY}")
        try:
            inspect.signature(method).bind("self", *arguments)
        except TypeError as error:
            raise ConfigError(
                f"{name} of environment {path!r} ({cls.__name__}) cannot take {' '.join(arguments) or 'no argument'} "
                f"({error}); {_REMEDY}"
            ) from error
        kinds[name] = "async" if inspect.iscoroutinefunction(method) else "sync"
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise ConfigError(f"environment {path!r} ({cls.__name__}) is of two kinds: {listed}; {_REMEDY}")
    return kinds["reset"]


def _shown(value: Any) -> str:
    return f"{repr(value)[:200]} ({type(value).__name__})"
