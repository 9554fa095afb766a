"""A user names a function in the configuration: either a registered name or a `module:function` path.

One rule for losses and advantages, so that a user's own needs no change to the framework.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from forge.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def lookup(name: str, registry: Mapping[str, F], option: str) -> F:
    """The function called `name`: an entry of `registry`, else the object at `module:function`.

    `option` is the configuration key that held the name. Raises ConfigError, with the registered
    names, when there is no such function or the object cannot be called.
    """
    if name in registry:
        return registry[name]
    remedy = f"use one of {', '.join(sorted(registry))}, or module:function for your own"
    if ":" not in name:
        raise ConfigError(f"{option} is {name!r}, which is not registered; {remedy}")
    return cast(F, load(name, option, remedy))


def load(path: str, option: str, remedy: str = "give module:function, importable from where the run starts") -> Any:
    """The callable at `module:function`; `option` is the configuration key that held the path.

    Raises ConfigError, with `remedy`, when there is none.
    """
    if path.count(":") != 1:
        raise ConfigError(f"{option} is {path!r}, which is no path of an object; {remedy}")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} is {path!r}, which cannot be imported ({error}); {remedy}") from error
    if not callable(found):
        raise ConfigError(f"{option} is {path!r}, which is a {type(found).__name__}, not a function; {remedy}")
    return found
