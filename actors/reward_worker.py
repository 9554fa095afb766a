"""What runs in a reward's worker process: it takes samples from a socket and answers with numbers.

A reward is a user's function. It may hang, crash, leak, or hold the interpreter for minutes; here it hurts
nobody else. Workers start often (anew after every time-out), so this file imports nothing heavy: torch comes
only with a reward that imports it.

    request    pickle  (path of the function, samples); no samples: import the function
    answer     JSON    {"values": [float, ...]} or {"error": text}; each message after its length, 8 bytes
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import pkgutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from forge.errors import RewardError

LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Sample:
    """One episode, as a reward function sees it."""

    prompt: str
    """What the policy was asked, special tokens included."""
    completion: str
    """What it answered, special tokens left out."""
    answer: Any = None
    """The `answer` of the task's row."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The `metadata` of the task's row."""
    num_tokens: int = 0
    """Tokens of the completion, its end-of-text token included."""
    finished: bool = True
    """Whether the policy ended the completion itself; False where a limit cut it."""


Reward = Callable[[Sample], float]


def evaluate(path: str, function: Reward, samples: Sequence[Sample]) -> list[float]:
    """`function` of every sample; RewardError when it raises (then the cause) or gives no finite number."""
    values = []
    for sample in samples:
        try:
            value: Any = function(sample)
        except (Exception, SystemExit) as error:
            raise RewardError(f"{path} raised {type(error).__name__}: {error}\n{_describe(sample)}") from error
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise RewardError(f"{path} returned {value!r}; a reward is one finite number\n{_describe(sample)}")
        values.append(number)
    return values


def _describe(sample: Sample) -> str:
    prompt, completion = sample.prompt[:_SHOWN_CHARACTERS], sample.completion[:_SHOWN_CHARACTERS]
    return f"  prompt {prompt!r}\n  completion {completion!r}\n  answer {sample.answer!r}"


def serve(fd: int, parent: int) -> None:
    """Answers requests on the socket `fd` until its other end is closed or the process `parent` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A program that a reward starts must not keep the socket open.
    os.set_inheritable(fd, False)
    _end_with(parent)
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as stream:
        while (request := read_message(cast(BinaryIO, stream))) is not None:
            answer = json.dumps(_answer(request)).encode()
            stream.write(LENGTH.pack(len(answer)) + answer)
            stream.flush()


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def _end_with(parent: int) -> None:
    """Has the kernel kill this process once `parent` is dead, even while a reward holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer(request: bytes) -> dict[str, Any]:
    try:
        path, samples = pickle.loads(request)
        function = pkgutil.resolve_name(path)
        return {"values": evaluate(path, function, samples)}
    except RewardError as error:
        return {"error": f"{error}{_users_traceback(error.__cause__)}"}
    except (Exception, SystemExit):
        return {"error": f"the worker of the rewards failed\n{traceback.format_exc().rstrip()}"}


def _users_traceback(cause: BaseException | None) -> str:
    """From the reward function inwards; the frames of this file are left out."""
    if cause is None:
        return ""
    inner = cause.__traceback__.tb_next if cause.__traceback__ else None
    return "\n" + "".join(traceback.format_exception(type(cause), cause, inner)).rstrip()
