"""A judge of one's own: an actor that scores answers, and its client that stands in for the reward functions."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from actors.reward import Sample, Scores


class Judge(Actor):
    """Lives on a mesh of its own. This one credits the part of the answer that is right from the start on;
    yours may hold a reward model, a sandbox, or a connection to somebody else's service."""

    def __init__(self, weight_of_length: float) -> None:
        self._weight_of_length = weight_of_length

    @concurrent_endpoint
    async def judge(self, samples: list[Sample]) -> list[float]:
        return [self._credit(sample.completion.strip(), str(sample.answer)) for sample in samples]

    def _credit(self, given: str, wanted: str) -> float:
        right = next((i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), len(wanted))
        return right / len(wanted) - self._weight_of_length * abs(len(given) - len(wanted)) / len(wanted)


class JudgeReward:
    """What `rollout_group` asks for a score: the judge's word and nothing else."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    async def score(self, samples: list[Sample]) -> Scores:
        values = await self._mesh.judge.call_one(samples)
        return Scores(values, {"judge": values})
