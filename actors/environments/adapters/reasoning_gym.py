"""reasoning-gym's procedural tasks: one question, one answer, a verifier. `pip install reasoning-gym`.

environment path  actors.environments.adapters.reasoning_gym:ReasoningGym
kwargs            {dataset: leg_counting}
--data.task       actors.environments.adapters.reasoning_gym:tasks
--data.args       {dataset: leg_counting, size: 1000}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actors.environments.base import Action, Observation, Step
from forge.errors import ConfigError

ASK = "\nThink if you need to, then give the answer alone between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """Synchronous. `task["entry"]` is one entry of the data set, as `tasks` gives it.

    The reward is the data set's own score, from 0 to 1, of what stands between the last <answer> and </answer>.
    """

    def __init__(self, dataset: str, **config: Any) -> None:
        """`config` is the data set's."""
        self._dataset = _create(dataset, **config)

    def reset(self, task: Mapping[str, Any]) -> Observation:
        """Asks the question."""
        self._entry = task["entry"]
        return Observation([{"role": "user", "content": self._entry["question"] + ASK}])

    def step(self, action: Action) -> Step:
        """Scores the answer; the only turn."""
        found = _ANSWER.findall(action.text)
        answer = found[-1].strip() if found else None
        score = float(self._dataset.score_answer(answer, self._entry))
        return Step(Observation([]), score, done=True, info={"answered": bool(found)})

    def close(self) -> None:
        """Nothing is held."""


def tasks(dataset: str, size: int = 1000, seed: int = 0, **config: Any) -> list[dict[str, Any]]:
    """Rows of that data set, for data.task: their metadata are the environment's tasks."""
    entries = _create(dataset, size=size, seed=seed, **config)
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "metadata": {"id": f"{dataset}/{n}", "entry": entry}}
        for n, entry in enumerate(entries)
    ]


def _create(dataset: str, **config: Any) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("reasoning-gym is not installed; pip install reasoning-gym") from error
    try:
        return reasoning_gym.create_dataset(dataset, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym has no data set {dataset!r} with {config}: {error}") from error
