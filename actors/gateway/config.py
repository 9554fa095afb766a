"""The options of the gateway, and the limits of one session."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from forge.errors import ConfigError


@dataclass
class SessionLimits:
    """What one session may do."""

    max_turns: int = 256
    """Answers in all its conversations together."""
    max_tokens: int = 0
    """Tokens of one conversation, answers included; 0: as many as `gateway.max_tokens`."""
    max_calls: int = 16
    """Chat calls at once."""
    deadline_s: float = 3600.0
    """Seconds from its opening on, after which it answers no call."""

    def validate(self, section: str = "gateway.limits") -> None:
        """Raises ConfigError naming the field, its value and its limit. section: key of this object, for the text."""
        for name, least in (("max_turns", 1), ("max_tokens", 0), ("max_calls", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{section}.{name} must be an integer >= {least}, got {value!r}")
        if not _positive(self.deadline_s):
            raise ConfigError(f"{section}.deadline_s must be a finite number > 0, got {self.deadline_s!r}")

    def changed(self, **changes: Any) -> SessionLimits:
        """The same with `changes`; ConfigError for what is no limit, or no possible one."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        if unknown := sorted(changes.keys() - own.keys()):
            raise ConfigError(f"a session has no limit {', '.join(unknown)}; it has {', '.join(own)}")
        limits = SessionLimits(**{**own, **changes})
        limits.validate("limits")
        return limits


@dataclass
class GatewayConfig:
    """The gateway in front of the generators."""

    max_tokens: int = 512
    """Tokens of a conversation, answers included: at most generator.max_model_len."""
    host: str = "127.0.0.1"
    """Address it listens at. Tokens travel unencrypted: leave the loopback only for a network of your own."""
    port: int = 0
    """0: a free one."""
    model: str = "policy"
    """What it calls the model. The name that an agent asks for does not matter."""
    temperature: float = 1.0
    """As generator.temperature: what the tokens are sampled and trained with."""
    top_p: float = 1.0
    """As generator.top_p."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """What becomes of options that would change how tokens are sampled, or that no generator has."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    """Of sessions that do not say otherwise."""
    max_sessions: int = 4096
    """Sessions that are open at once."""
    keep_s: float = 3600.0
    """Seconds behind its deadline after which a session that nobody closed may be forgotten to make room."""
    request_timeout_s: float = 600.0
    """Seconds that one chat call may take."""
    max_request_bytes: int = 16 * 2**20
    """Of one request's body."""
    journal: str = ""
    """Folder in which sessions are kept as they grow, to survive the server, their keys included; "" keeps none."""

    def validate(self, section: str = "gateway") -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        least = {"max_tokens": 2, "port": 0, "max_sessions": 1, "max_request_bytes": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"{section}.{name} must be >= {limit}, got {getattr(self, name)}")
        for name in ("temperature", "top_p", "keep_s", "request_timeout_s"):
            if not _positive(getattr(self, name)):
                raise ConfigError(f"{section}.{name} must be a finite number > 0, got {getattr(self, name)}")
        if self.port > 65535:
            raise ConfigError(f"{section}.port must be <= 65535, got {self.port}; 0 takes a free one")
        if self.unsupported not in ("refuse", "ignore"):
            raise ConfigError(f"{section}.unsupported must be refuse or ignore, got {self.unsupported}")
        if not self.host or not self.model:
            raise ConfigError(f"{section}.host and {section}.model must not be empty; leave them out for the defaults")
        self.limits.validate(f"{section}.limits")
        if self.limits.max_tokens > self.max_tokens:
            raise ConfigError(
                f"{section}.limits.max_tokens is {self.limits.max_tokens}, {section}.max_tokens {self.max_tokens}; "
                "a conversation cannot have more than the generators take"
            )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
