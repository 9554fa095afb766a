"""What runs in a reward's worker process: it takes samples from a socket and answers with numbers.

A reward is a user's function. It may hang, crash, leak, or hold the interpreter for minutes; here it hurts
nobody else. Workers start often (anew after every time-out), so this file imports nothing heavy: torch comes
only with a reward that imports it.

    request    pickle  (path of the function, samples); no samples: import the function
    answer     JSON    {"values": [float, ...]} or {"error": text}
"""

from __future__ import annotations

import json
import math
import pickle
import pkgutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors import worker_loop
from forge.errors import RewardError

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
            values.append(finite(value, path))
        except RewardError as error:
            raise RewardError(f"{error}\n{_describe(sample)}") from None
    return values


def finite(value: Any, whose: str) -> float:
    """What `whose` returned as a number; RewardError where it is none, or not finite."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{whose} returned {value!r}; a reward is one finite number")
    return number


def _describe(sample: Sample) -> str:
    prompt, completion = sample.prompt[:_SHOWN_CHARACTERS], sample.completion[:_SHOWN_CHARACTERS]
    return f"  prompt {prompt!r}\n  completion {completion!r}\n  answer {sample.answer!r}"


def serve(fd: int, parent: int) -> None:
    """Answers requests on the socket `fd`, see `actors.worker_loop.serve`."""
    worker_loop.serve(fd, parent, lambda request: json.dumps(_answer(request)).encode())


def _answer(request: bytes) -> dict[str, Any]:
    try:
        path, samples = pickle.loads(request)
        function = pkgutil.resolve_name(path)
        return {"values": evaluate(path, function, samples)}
    except RewardError as error:
        cause = worker_loop.users_traceback(error.__cause__)
        return {"error": f"{error}\n{cause}" if cause else str(error)}
    except (Exception, SystemExit):
        return {"error": f"the worker of the rewards failed\n{traceback.format_exc().rstrip()}"}
