"""A world for the model `tiny`: it asks for the digits of several numbers, one a turn, in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from actors.environments.base import Action, Observation, Step
from apps.grpo.tasks import digits_reward, reversal


class Reversals:
    """`task["questions"]` are prompts of `reverse_digits` without their end, `task["answers"]` what they want.

    A turn takes no time, but the one of `task["slow_turn"]`, where there is one: that takes `task["slow_s"]` seconds.
    """

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """The first question."""
        self._task, self._questions, self._answers, self._turn = task, task["questions"], task["answers"], 0
        return self._ask()

    async def step(self, action: Action) -> Step:
        """The share of digits in the right place, divided by the turns; and the next question."""
        reward = digits_reward(action.text, self._answers[self._turn]) / len(self._answers)
        self._turn += 1
        if self._turn == self._task.get("slow_turn"):
            await asyncio.sleep(self._task["slow_s"])
        done = self._turn == len(self._questions)
        return Step(Observation([]) if done else self._ask(), reward, done)

    async def close(self) -> None:
        """Nothing is held."""

    def _ask(self) -> Observation:
        return Observation([{"role": "user", "content": self._questions[self._turn]}])


def tasks(
    turns: int = 3,
    num_digits: int = 6,
    num_rows: int = 2048,
    seed: int = 7,
    kinds: Sequence[str] = (),
    slow: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Rows for data.task: for each environment of `kinds` in turn, if any are named; `slow` has the seconds that the
    second turn of a row takes, by number of the row."""
    rng = Random(seed)
    rows = []
    for number in range(num_rows):
        pairs = [reversal(rng, num_digits) for _ in range(turns)]
        questions, answers = [prompt.rstrip("=") for prompt, _ in pairs], [answer for _, answer in pairs]
        task: dict[str, Any] = {"id": str(number), "questions": questions, "answers": answers}
        task |= {"environment": kinds[number % len(kinds)]} if kinds else {}
        if seconds := (slow or {}).get(str(number)):
            task |= {"slow_turn": 2, "slow_s": seconds}
        rows.append({"prompt": pairs[0][0], "metadata": task})
    return rows
