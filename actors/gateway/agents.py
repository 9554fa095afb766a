"""How an agent is run: as an environment of a single step, which is the agent's whole run.

So an agent has what environments have: a worker process of its own, killed with what it started when it is over its
time; a bounded number at once, on a mesh of their own; quarantine of tasks that always fail; latency in the reports. An
agent is a function or a program. It finds its session in OPENAI_BASE_URL and OPENAI_API_KEY, as a plain `OpenAI()`
does, and knows nothing else of a training run.

An agent is trusted with the rights of its user, and so is whatever its policy makes it do. `agent.command` may begin
with what shuts it in: a container, bubblewrap.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actors.environments.base import Action, Observation, Step
from actors.environments.config import EnvironmentConfig
from actors.environments.sandbox_watch import kill_all
from actors.worker_process import START_DEADLINE_S
from forge.errors import ConfigError
from forge.registry import load

_MARGIN_S = 30.0
"""For what an agent does not take: judging a program's work, ending what it left."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHOWN = 4000
"""Characters of a program's output that an error shows."""
_FUNCTION = "give module:function of an agent, which takes a task and returns its reward or None"
_CHECK = "give module:function, which takes a task and the folder as the program left it, and returns a reward"


@dataclass
class AgentConfig:
    """The agent that is trained, and how many of it run at once."""

    path: str = ""
    """module:function of the agent: a plain function that takes the task and returns its reward; None leaves the reward
    to whoever posts one to the gateway."""
    command: list[str] = field(default_factory=list)
    """Instead of `path`, a program and its arguments, run in a folder of its own, into which the task's `files` (names
    and texts) are written first. {name} stands for the task's `name`."""
    check: str = ""
    """module:function of (task, folder), for `command`: what the program's work is worth."""
    concurrency: int = 16
    """Agents at once, each in a process."""
    timeout_s: float = 600.0
    """Seconds that one run may take; its processes are killed then, and it has failed."""
    place_timeout_s: float = 3600.0
    """Seconds that a run may wait for one of the places."""
    quarantine_after: int = 3
    """Failed runs of a task, with no good one between them, after which it is refused."""
    partial: Literal["drop", "keep"] = "drop"
    """What becomes of a session whose agent failed: its episode has failed too; or it is trained as far as it came,
    worth `partial_reward`. Without those that are over their time a policy is not taught to be in time."""
    partial_reward: float = 0.0
    """See `partial`."""

    def validate(self, section: str = "agent") -> None:
        """Raises ConfigError naming the field, its value and its limit; imports the agent's module."""
        if bool(self.path) == bool(self.command):
            raise ConfigError(
                f"{section}.path is {self.path!r}, {section}.command {self.command}; give one of them, and one only"
            )
        if self.path:
            load(self.path, f"{section}.path", _FUNCTION)
        else:
            load(self.check, f"{section}.check", _CHECK)
        if self.partial not in ("drop", "keep"):
            raise ConfigError(f"{section}.partial must be drop or keep, got {self.partial}")
        for name in ("timeout_s", "place_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{section}.{name} must be > 0, got {getattr(self, name)}")
        for name in ("concurrency", "quarantine_after"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{section}.{name} must be >= 1, got {getattr(self, name)}")

    def environment(self, folder: str = "") -> EnvironmentConfig:
        """The pool that runs agents. `folder`: where programs get theirs; "" is the system's."""
        own: dict[str, Any] = {"path": self.path}
        if self.command:
            own = {"command": self.command, "check": self.check, "timeout_s": self.timeout_s, "folder": folder}
        return EnvironmentConfig(
            path=f"{__name__}:{'CommandAgent' if self.command else 'FunctionAgent'}",
            kwargs=own,
            concurrency=self.concurrency,
            place_timeout_s=self.place_timeout_s,
            reset_timeout_s=START_DEADLINE_S,
            turn_timeout_s=self.timeout_s + (_MARGIN_S if self.command else 0.0),
            episode_timeout_s=self.longest_s,
            quarantine_after=self.quarantine_after,
        )

    @property
    def longest_s(self) -> float:
        """What a run takes at most, its wait for a place included, seconds."""
        return self.place_timeout_s + 4 * START_DEADLINE_S + self.timeout_s + 2 * _MARGIN_S


def agent_task(key: str, task: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """What an agent's environment is reset with: the task called `key`, and the agent's environment variables."""
    return {"id": key, "task": dict(task), "variables": dict(variables)}


class FunctionAgent:
    """Runs a function of the user's."""

    def __init__(self, path: str) -> None:
        """Imports it. ConfigError where that is not possible."""
        self._agent: Callable[[Any], float | None] = load(path, "agent.path", _FUNCTION)

    def reset(self, task: Mapping[str, Any]) -> Observation:
        """One run at a time: the variables are this process's."""
        self._task = task["task"]
        os.environ.update(task["variables"])
        return Observation([])

    def step(self, action: Action) -> Step:
        """The whole run."""
        return _ended(self._agent(self._task))

    def close(self) -> None:
        """Nothing is held."""


class CommandAgent:
    """Runs a program in a folder of its own and judges what it left there."""

    def __init__(self, command: Sequence[str], check: str, timeout_s: float, folder: str = "") -> None:
        """`folder`: where the program's folder is made."""
        self._command, self._timeout_s, self._above = list(command), timeout_s, folder or None
        self._check: Callable[[Any, Path], float | None] = load(check, "agent.check", _CHECK)
        self._folder: Path | None = None

    def reset(self, task: Mapping[str, Any]) -> Observation:
        """Writes the task's files."""
        self._task, self._variables = task["task"], task["variables"]
        self._folder = Path(tempfile.mkdtemp(prefix="agent-", dir=self._above))
        for name, text in self._task.get("files", {}).items():
            path = self._folder / name
            if not path.resolve().is_relative_to(self._folder.resolve()):
                raise ConfigError(f"the task has a file {name!r}; give a name inside of the agent's folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Observation([])

    def step(self, action: Action) -> Step:
        """The whole run. Raises TimeoutError when it is over its time; whatever it has started is killed then."""
        assert self._folder is not None
        with tempfile.TemporaryFile(dir=self._above) as output:
            code = self._run(output.fileno())
            output.seek(max(0, os.fstat(output.fileno()).st_size - _SHOWN))
            said = output.read().decode(errors="replace")
        if code is None:
            raise TimeoutError(
                f"{self._command[0]} ran for more than {self._timeout_s:g} s; raise agent.timeout_s, or have it do "
                f"less. Its last output:\n{said}"
            )
        step = _ended(self._check(self._task, self._folder))
        step.info.update(exit_code=code, output=said)
        return step

    def close(self) -> None:
        """Removes the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, output: int) -> int | None:
        """The exit code; None when it is over its time. Nothing that it has started is left."""
        # Orphans of the program become this process's children: none gets away.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        process = subprocess.Popen(
            filled(self._command, self._task),
            cwd=self._folder,
            env={**os.environ, **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_end_with_parent,
        )
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_all(namespaces=False, user=None)
            process.wait(_MARGIN_S)


def filled(command: Sequence[str], task: Mapping[str, Any]) -> list[str]:
    """The command with {name} replaced by the task's texts and numbers; other braces stay. Pure."""
    out = []
    for part in command:
        for name, value in task.items():
            if isinstance(value, str | int | float):
                part = part.replace("{" + name + "}", str(value))
        out.append(part)
    return out


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ended(reward: float | None) -> Step:
    return Step(Observation([]), 0.0 if reward is None else reward, True, {"scored": reward is not None})
