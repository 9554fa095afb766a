"""Gymnasium environments that can be told in text: what they observe or draw, and actions by name or number.

environment path  actors.environments.adapters.gymnasium:Gymnasium
kwargs            {id: FrozenLake-v1, actions: [left, down, right, up], options: {is_slippery: false}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from actors.environments.base import Action, Observation, Step
from forge.errors import ConfigError

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    """Synchronous. `task["seed"]` begins an episode, if given; `task["say"]` is put before what is seen first.

    A text action space takes what the policy said. A discrete one takes the last of `actions` that it named, else the
    last number: an action that is none costs `invalid` and leaves the world as it was.
    """

    def __init__(
        self,
        id: str,
        actions: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        invalid: float = -0.1,
    ) -> None:
        """`options` go to `gymnasium.make`; drawing is asked for as text where the environment can do that."""
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError("gymnasium is not installed; pip install gymnasium") from error
        try:
            modes = gymnasium.spec(id).make().metadata.get("render_modes", [])
            drawn: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
            self._env: Any = gymnasium.make(id, **drawn, **(options or {}))
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"gymnasium has no environment {id!r} with {dict(options or {})}: {error}") from error
        self._actions, self._invalid, self._draws = list(actions), invalid, bool(drawn)
        space: Any = self._env.action_space
        self._text = isinstance(space, gymnasium.spaces.Text)
        if not self._text and not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"{id} takes actions of {space}; a policy can name those of a Text or a Discrete space")
        if not self._text and len(self._actions) not in (0, space.n):
            raise ConfigError(f"{id} has {space.n} actions, {len(self._actions)} names were given; name all or none")

    def reset(self, task: Mapping[str, Any]) -> Observation:
        """What is seen first, and what can be done."""
        seen, _ = self._env.reset(seed=task.get("seed"))
        number = "" if self._text else f" Answer with a number from 0 to {self._env.action_space.n - 1}."
        can = f" Answer with one of: {', '.join(self._actions)}." if self._actions else number
        return _said(f"{task.get('say', '')}{self._seen(seen)}\n{can.strip()}".strip())

    def step(self, action: Action) -> Step:
        """Takes the action, or says that it is none."""
        chosen = self._chosen(action.text)
        if chosen is None:
            return Step(_said("That is no action."), self._invalid, done=False, info={"invalid": True})
        seen, reward, terminated, truncated, _ = self._env.step(chosen)
        return Step(_said(self._seen(seen)), float(reward), bool(terminated or truncated), {"invalid": False})

    def close(self) -> None:
        """Ends the environment."""
        self._env.close()

    def _seen(self, seen: Any) -> str:
        return _ESCAPES.sub("", str(self._env.render())) if self._draws else str(seen)

    def _chosen(self, text: str) -> Any:
        if self._text:
            return text
        words = re.findall(r"[\w'-]+", text.lower())
        names = [name.lower() for name in self._actions]
        if named := [word for word in words if word in names]:
            return names.index(named[-1])
        numbers = [int(word) for word in words if word.isdecimal() and int(word) < self._env.action_space.n]
        return numbers[-1] if numbers else None


def _said(text: str) -> Observation:
    return Observation([{"role": "user", "content": text}])
