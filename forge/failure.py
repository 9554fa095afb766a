"""What a failed run tells its user: one cause, printed once, and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from forge.errors import (
    ActorFailed,
    ConfigError,
    DeadlineExceeded,
    EnvironmentFailed,
    LaunchError,
    RewardError,
    RunFolderError,
)

# Their text says all; a traceback through our own code would only hide it.
_SELF_EXPLAINING = (
    ActorFailed,
    ConfigError,
    DeadlineExceeded,
    EnvironmentFailed,
    LaunchError,
    RewardError,
    RunFolderError,
)

# The end of a traceback, which a logger may have put the place in front of.
_EXCEPTION = re.compile(r"(?:.*\bERROR\b.*?\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")


def print_failure(error: BaseException) -> int:
    """Print the root cause of `error` on stderr, once; the exit code: 2 for a ConfigError, else 1."""
    root = root_cause(error)
    print(describe(root), file=sys.stderr, flush=True)
    for other in _leaves(error):
        if isinstance(other, ActorFailed) and other is not root:
            print(f"at the same time: {first_line(str(other))}", file=sys.stderr, flush=True)
    return 2 if isinstance(root, ConfigError) else 1


def root_cause(error: BaseException) -> BaseException:
    """The one exception behind `error`, which may be a TaskGroup's.

    An exception of user code comes before an ActorFailed, which names the dead actor, and that before the
    SupervisionErrors with which calls to that actor fail as a consequence.
    """
    return min(_leaves(error), key=_rank)


def describe(error: BaseException) -> str:
    """What a user needs to see: a typed error's text, an actor's traceback, or else the one here."""
    remote = remote_exception(error)
    if isinstance(remote, _SELF_EXPLAINING):
        return f"{type(remote).__name__}: {remote}\n({first_line(str(error)).rstrip('.')})"
    if remote is not None:
        return str(error).rstrip()
    if isinstance(error, _SELF_EXPLAINING):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def explain(report: str) -> str:
    """Monarch's report of a failure, in a user's words: which rank, and what ended it."""
    index, count = 0, 1
    for coordinate, size in re.findall(r"'\w+': (\d+)/(\d+)", report.partition("\n")[0]):
        index, count = index * int(size) + int(coordinate), count * int(size)
    rank = f"rank {index} of {count}: " if count > 1 else ""
    if killed := re.search(r"Killed(?:\(sig=| \{ signal: )(\d+)", report):
        return rank + describe_exit(int(killed[1]), killed=True)
    if exited := re.search(r"(?:exited with non-zero code|Stopped \{ exit_code:) (-?\d+)", report):
        return rank + describe_exit(int(exited[1]), killed=False)
    if "timeout waiting for message from proc mesh agent" in report:
        return f"{rank}its process does not answer: it is stopped, or hangs in code that lets no other thread run"
    _, aborted, text = report.partition("actor explicitly aborted due to: ")
    if aborted:
        return f"{rank}it raised where no caller waits for the answer\n{text.rstrip()}"
    return rank + report.strip()


def describe_exit(status: int, *, killed: bool) -> str:
    """How a process ended: `status` is the signal that killed it, or its exit code."""
    if not killed:
        return f"its process exited with code {status}"
    name = signal.Signals(status).name if status in set(signal.Signals) else f"signal {status}"
    hint = "; the kernel does that when memory runs out, see dmesg" if status == signal.SIGKILL else ""
    return f"its process was killed by {name}{hint}"


def logged_error(log: Path, begin: int = 0) -> str:
    """The last line of the first traceback that the file `log` has from byte `begin` on; "" for none."""
    with contextlib.suppress(OSError):
        for line in log.read_bytes()[begin:].decode(errors="replace").splitlines():
            if found := _EXCEPTION.match(line):
                return found[1]
    return ""


def is_supervision_error(error: BaseException) -> bool:
    """Whether a call failed because its actor is dead: Monarch's SupervisionError, not exported."""
    return type(error).__name__ == "SupervisionError"


def _rank(error: BaseException) -> int:
    if isinstance(error, asyncio.CancelledError):
        return 3
    if is_supervision_error(error):
        return 2
    return 1 if isinstance(error, ActorFailed) else 0


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group in order, depth first; the exception itself where it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def remote_exception(error: BaseException) -> BaseException | None:
    """The exception that an actor raised, where `error` is Monarch's ActorError around it."""
    if type(error).__name__ != "ActorError":
        return None
    inner = getattr(error, "exception", None)
    if not isinstance(inner, BaseException):
        return None
    return remote_exception(inner) or inner


def first_line(text: str) -> str:
    """What a text of several lines begins with; "" of none."""
    return (text.splitlines() or [""])[0]
