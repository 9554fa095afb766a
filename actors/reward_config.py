"""The options of rewards: functions for every sample, and named pools for the samples that name them. Pure."""

from __future__ import annotations

import inspect
import math
import pkgutil
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from forge.errors import ConfigError
from forge.registry import load


@dataclass
class RewardFunction:
    """One reward function and its weight."""

    path: str
    """module:function; takes a Sample, returns a finite number."""
    weight: float = 1.0
    """Factor of its value in the total reward."""


@dataclass
class RewardPool:
    """What scores the samples whose task has its name as `metadata["reward"]`; processes and limits of its own."""

    functions: list[RewardFunction] = field(default_factory=list)
    """Functions of a Sample, in worker processes; the value is their weighted sum."""
    judge: str = ""
    """In their place, module:Class whose `async score(sample)` gives a finite number: actors.reward_sandbox:CodeTests,
    actors.reward_judge:ChatJudge, or one of your own, which waits and does not compute."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the judge's class."""
    weight: float = 1.0
    """Factor of the pool's value in the total reward."""
    concurrency: int = 8
    """Samples that a judge has at once; of functions, worker processes."""
    timeout_s: float = 60.0
    """Seconds that one sample may take, its wait for a place excluded; of functions those of one group, see
    reward.timeout_s."""
    on_timeout: Literal["value", "fail"] = "value"
    """What becomes of a sample that takes longer: its value is timeout_reward, or the run ends."""
    timeout_reward: float = 0.0
    """That value."""
    turns: bool = False
    """Score each finished turn of an episode while later ones are generated, as a process-reward model does, in place
    of the whole episode; in apps/worlds, and read by loss.token_advantages."""

    def validate(self, section: str) -> None:
        """Raises ConfigError naming the field, its value and its limit; imports functions and judge."""
        if bool(self.functions) == bool(self.judge):
            raise ConfigError(
                f"{section} has {len(self.functions)} functions and judge {self.judge!r}; give one of both"
            )
        _check_functions(self.functions, f"{section}.functions")
        if self.judge:
            made_by = load(self.judge, f"{section}.judge")
            if not inspect.iscoroutinefunction(getattr(made_by, "score", None)):
                raise ConfigError(f"{section}.judge {self.judge} has no async method score(sample); give it one")
            try:
                inspect.signature(made_by).bind(**self.kwargs)
            except TypeError as error:
                raise ConfigError(f"{section}.kwargs does not suit {self.judge}: {error}") from error
        for name in ("weight", "timeout_reward"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{section}.{name} must be finite, got {getattr(self, name)}")
        if self.concurrency < 1:
            raise ConfigError(f"{section}.concurrency must be >= 1, got {self.concurrency}")
        if not self.timeout_s > 0:
            raise ConfigError(f"{section}.timeout_s must be > 0, got {self.timeout_s}")
        if self.on_timeout not in ("value", "fail"):
            raise ConfigError(f"{section}.on_timeout must be value or fail, got {self.on_timeout}")


@dataclass
class RewardConfig:
    """What an episode is worth."""

    functions: list[RewardFunction] = field(default_factory=list)
    """The total reward is their weighted sum, and the reward model's."""
    model: str = ""
    """A reward model, with the policy's tokenizer: a sequence classifier with one label, in a folder or on the hub.
    Its score after the last token of an episode is added to the reward. Empty: none."""
    model_weight: float = 1.0
    """Factor of that score in the total reward."""
    model_turns: bool = False
    """Score the last token of each turn instead, as a process-reward model does: the turn's tokens get that reward,
    which loss.token_advantages must read."""
    timeout_s: float = 10.0
    """Seconds that a function may take over the samples of one group. One that takes longer is asked for each
    sample alone, under the same limit."""
    timeout_reward: float = 0.0
    """Value of a function for a sample that alone takes longer than timeout_s."""
    workers: int = 1
    """Processes that score; one runs one function at a time."""
    pools: dict[str, RewardPool] = field(default_factory=dict)
    """Rewards for some tasks only, by name: those of the pool that a task's metadata names as `reward` are added to
    those of functions. A pool that stalls delays nobody else's samples."""

    needed: ClassVar[bool] = True
    """False for apps in which environments reward, turn by turn."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit; imports the functions."""
        if self.needed and not self.functions and not self.model and not self.pools:
            raise ConfigError(
                "reward.functions is empty; give at least one, such as [{path: apps.grpo.tasks:last_number}], "
                "or a reward.model"
            )
        if not math.isfinite(self.model_weight):
            raise ConfigError(f"reward.model_weight must be finite, got {self.model_weight}")
        if self.model_turns and not self.model:
            raise ConfigError("reward.model_turns is true, reward.model empty; give the model that scores turns")
        if self.workers < 1:
            raise ConfigError(f"reward.workers must be >= 1, got {self.workers}")
        if not self.timeout_s > 0:
            raise ConfigError(f"reward.timeout_s must be > 0, got {self.timeout_s}")
        _check_functions(self.functions, "reward.functions")
        for name, pool in self.pools.items():
            if not name.isidentifier():
                raise ConfigError(f"reward.pools has {name!r}; name pools with letters, digits and underscores")
            pool.validate(f"reward.pools.{name}")
            if pool.turns and self.needed:
                raise ConfigError(
                    f"reward.pools.{name}.turns is true, and episodes here have one turn; use apps/worlds"
                )

    def names(self) -> list[str]:
        """What each function is called in `Scores.parts`: its own name if unique, else its path."""
        short = [function.path.partition(":")[2] for function in self.functions]
        return [s if short.count(s) == 1 else f.path for s, f in zip(short, self.functions, strict=True)]


def _check_functions(functions: list[RewardFunction], section: str) -> None:
    paths = [function.path for function in functions]
    for function in functions:
        if not math.isfinite(function.weight):
            raise ConfigError(f"the weight of {function.path} must be finite, got {function.weight}")
        _check_function(function.path, section)
        if paths.count(function.path) > 1:
            number = paths.count(function.path)
            raise ConfigError(f"{section} names {function.path} {number} times; add up its weights")


def _check_function(path: str, section: str) -> None:
    remedy = "give module:function, a plain function of one Sample in an importable module"
    if path.count(":") != 1 or path.startswith("__main__:"):
        raise ConfigError(f"{section} has {path!r}, which a worker process cannot import; {remedy}")
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{section} has {path!r}, which cannot be imported ({error}); {remedy}") from error
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{section} has {path!r}, which is {kind}; {remedy}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{section} has {path!r}, which cannot take one Sample ({error}); {remedy}") from error
    except ValueError:
        return  # a builtin without a signature
