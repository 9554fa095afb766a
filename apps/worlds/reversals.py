"""A world for the model `tiny`: it asks for the digits of several numbers, one a turn, in reverse."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from actors.environments.base import Action, Observation, Step
from apps.grpo.tasks import digits_reward, reversal


class Reversals:
    """`task["questions"]` are prompts of `reverse_digits` without their end, `task["answers"]` what they want."""

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """The first question."""
        self._questions, self._answers, self._turn = task["questions"], task["answers"], 0
        return self._ask()

    async def step(self, action: Action) -> Step:
        """The share of digits in the right place, divided by the turns; and the next question."""
        reward = digits_reward(action.text, self._answers[self._turn]) / len(self._answers)
        self._turn += 1
        done = self._turn == len(self._questions)
        return Step(Observation([]) if done else self._ask(), reward, done)

    async def close(self) -> None:
        """Nothing is held."""

    def _ask(self) -> Observation:
        return Observation([{"role": "user", "content": self._questions[self._turn]}])


def tasks(turns: int = 3, num_digits: int = 6, num_rows: int = 2048, seed: int = 7) -> list[dict[str, Any]]:
    """Rows for data.task."""
    rng = Random(seed)
    rows = []
    for number in range(num_rows):
        pairs = [reversal(rng, num_digits) for _ in range(turns)]
        questions, answers = [prompt.rstrip("=") for prompt, _ in pairs], [answer for _, answer in pairs]
        task = {"id": str(number), "questions": questions, "answers": answers}
        rows.append({"prompt": pairs[0][0], "metadata": task})
    return rows
