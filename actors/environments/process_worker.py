"""What runs in the worker process of a synchronous environment: one episode after the other, one request at a time.

    request    pickle  ("import", path) | ("reset", path, kwargs, task) | ("step", action) | ("close",)
    answer     pickle  ("value", what the method returned) | ("error", text with the user's traceback)

Imports nothing heavy: torch comes only with an environment that imports it.
"""

from __future__ import annotations

import pickle
import pkgutil
from typing import Any, Literal, cast

from actors import worker_loop
from actors.environments.base import SyncEnvironment, load_environment

Request = tuple[Any, ...]
Answer = tuple[Literal["value", "error"], Any]


class _Episode:
    """Holds the environment between requests."""

    def __init__(self) -> None:
        self._environment: SyncEnvironment | None = None

    def answer(self, request: bytes) -> bytes:
        verb = "request"
        try:
            verb, *arguments = cast(Request, pickle.loads(request))
            value = self._do(verb, *arguments)
        except (Exception, SystemExit) as error:
            return _pickled(("error", _described(error)))
        try:
            return _pickled(("value", value))
        except Exception as error:
            return _pickled(("error", f"{verb} returned what cannot go to another process ({error})"))

    def _do(self, verb: str, *arguments: Any) -> Any:
        if verb == "import":
            return self._import(*arguments)
        if verb == "reset":
            path, kwargs, task = arguments
            self._environment, _ = cast(tuple[SyncEnvironment, str], load_environment(path, kwargs))
            return self._environment.reset(task)
        environment = self._environment
        if verb == "close":
            self._environment = None
            return environment.close() if environment is not None else None
        assert environment is not None, "step before reset"
        return environment.step(*arguments)

    def _import(self, path: str) -> None:
        pkgutil.resolve_name(path)


def serve(fd: int, parent: int) -> None:
    """Answers requests on the socket `fd`, see `actors.worker_loop.serve`."""
    worker_loop.serve(fd, parent, _Episode().answer)


def _pickled(answer: Answer) -> bytes:
    return pickle.dumps(answer)


def _described(error: BaseException) -> str:
    """First what was raised, then the traceback from the user's code inwards."""
    return f"{type(error).__name__}: {error}\n{worker_loop.users_traceback(error, own_frames=2)}"
