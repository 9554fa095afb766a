"""The options of one kind of environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.environments.base import environment_kind
from forge.errors import ConfigError


@dataclass
class EnvironmentConfig:
    """One kind of environments and its pool."""

    path: str = ""
    """module:name of the environment's class, or of a function that returns one."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class or function."""
    concurrency: int = 64
    """Episodes at once; of a synchronous environment, worker processes."""
    place_timeout_s: float = 3600.0
    """Seconds that an episode may wait for one of those places."""
    reset_timeout_s: float = 60.0
    """Seconds that one try of a reset may take, the making of the environment included."""
    turn_timeout_s: float = 120.0
    """Seconds that one step may take; a synchronous environment is killed then."""
    close_timeout_s: float = 10.0
    """Seconds that closing an environment may take before it is given up, or its process killed."""
    episode_timeout_s: float = 3600.0
    """Seconds from reset after which an episode that nobody has closed is ended, and its place is free again."""
    retries: int = 2
    """Further tries of a reset that failed, each with a fresh environment. A step has effects and is tried once."""
    quarantine_after: int = 3
    """Failed tries of a task, resets and steps, with no good episode between them, after which it is refused."""

    def validate(self, section: str = "environment") -> None:
        """Raises ConfigError naming the field, its value and its limit; imports the environment's module.

        section: configuration key of this object, for those texts.
        """
        if not self.path:
            raise ConfigError(f"{section}.path is empty; give module:name of an environment")
        environment_kind(self.path, self.kwargs)
        for name, least in (("concurrency", 1), ("retries", 0), ("quarantine_after", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{section}.{name} must be >= {least}, got {getattr(self, name)}")
        for name in ("place", "reset", "turn", "close", "episode"):
            if not getattr(self, f"{name}_timeout_s") > 0:
                raise ConfigError(f"{section}.{name}_timeout_s must be > 0, got {getattr(self, f'{name}_timeout_s')}")
