"""From one prompt to one Group: generate, score, turn rewards into advantages.

Plain functions; a user's own rollout is another function with the same result.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import torch
from tensordict import TensorDict

from actors.reward import Sample, Scores
from actors.vllm_engine import Completion
from forge.advantages import advantages
from forge.batch import make_group
from forge.data import Prompt
from forge.episodes import EpisodeTokens
from forge.run_folder import EpisodeRecord


class Generates(Protocol):
    """Anything that continues prompts: `actors.generators.Generators`, one replica, or a user's own."""

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        *,
        begun: Mapping[int, Completion] | None = None,
        wanted: int = 0,
        affinity: str = "",
    ) -> list[Completion]: ...


class Rewards(Protocol):
    """Anything that scores samples: `actors.reward_pools.RewardPools`, or a user's own judge."""

    async def score(self, samples: list[Sample]) -> Scores: ...


class TimedRewards:
    """`Rewards` that tells `add` the seconds of each call under `key`."""

    def __init__(self, rewards: Rewards, add: Callable[[str, float], object], key: str) -> None:
        self._rewards, self._add, self._key = rewards, add, key

    async def score(self, samples: list[Sample]) -> Scores:
        begin = time.monotonic()
        try:
            return await self._rewards.score(samples)
        finally:
            self._add(self._key, time.monotonic() - begin)


class References(Protocol):
    """The frozen reference: log-probs `[G, T]` of a group's tokens."""

    async def logprobs(self, group: TensorDict) -> torch.Tensor: ...


class RewardModels(Protocol):
    """A reward model: adds its scores of a group to those of the functions, see `actors.reward_model`."""

    async def add_to(self, scores: Scores, group: TensorDict) -> Scores: ...


class Begun(Protocol):
    """An episode as far as it had come: tensors `[n]` and `[n, K]`, and why it ended, or "" where it did not."""

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def logprobs(self) -> torch.Tensor: ...
    @property
    def versions(self) -> torch.Tensor: ...
    @property
    def finish(self) -> str: ...
    @property
    def kept(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Rollout:
    """A Group `[G]` with rewards and advantages, and what it came from: texts and reward parts, one per episode."""

    group: TensorDict
    samples: list[Sample]
    scores: Scores
    num_tokens_cut: int = 0
    """Sampled tokens of the episodes beyond `group_size` that were cut."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all episodes."""
        return sum(sample.num_tokens for sample in self.samples)

    def records(
        self, decode: Callable[[Sequence[int]], str] | None = None, most: int | None = None
    ) -> list[EpisodeRecord]:
        """The first `most` episodes in text, as `episodes.jsonl` holds them; with `decode` also who sampled what."""
        return [self._record(place, decode) for place in range(len(self.samples))[:most]]

    def _record(self, place: int, decode: Callable[[Sequence[int]], str] | None) -> EpisodeRecord:
        sample, versions = self.samples[place], self.group["token_versions"][place]
        pieces = self._pieces(place, decode) if decode else ()
        own = sorted(set(versions[versions >= 0].tolist()))
        return EpisodeRecord(sample.prompt, sample.completion, self.scores.total[place], own, pieces)

    def _pieces(self, place: int, decode: Callable[[Sequence[int]], str]) -> tuple[tuple[str, int], ...]:
        """One episode cut where its version changes. A character that a cut divides shows as two of U+FFFD."""
        length = int(self.group["lengths"][place])
        tokens, versions = (self.group[key][place, :length].tolist() for key in ("tokens", "token_versions"))
        runs = groupby(zip(tokens, versions, strict=True), key=itemgetter(1))
        return tuple((decode([token for token, _ in run]), version) for version, run in runs)


async def rollout_group(
    prompt: Prompt,
    generators: Generates,
    reward: Rewards,
    *,
    group_id: int,
    group_size: int,
    advantage: str,
    decode: Callable[[Sequence[int]], str],
    seed: int,
    reference: References | None = None,
    reward_model: RewardModels | None = None,
    oversample: int = 0,
    begun: Mapping[int, Begun] | None = None,
) -> Rollout:
    """Samples `group_size` episodes of `prompt`, scores them and computes their advantages.

    Seeds derive from `seed`, `group_id` and the episode's place, so that a request gives the same tokens in any
    batch under equal weights. `reference` and `reward_model` are asked only when given. With `oversample`, as many
    episodes more are begun and the first `group_size` to end make the group: no straggler holds it up, and long
    episodes are rarer in it than in the policy's own distribution. `begun` has the tokens that unfinished episodes had
    before a crash, by place.
    """
    places = range(group_size + oversample)
    completions = await generators.generate(
        [prompt.token_ids] * len(places),
        [episode_seed(seed, group_id, place) for place in places],
        request_id=str(group_id),
        begun={place: _completion(part) for place, part in (begun or {}).items()},
        wanted=group_size,
    )
    cut = sum(len(c.token_ids) for c in completions if c.finish_reason == "cut")
    completions = [c for c in completions if c.finish_reason != "cut"]
    samples = [_sample(prompt, c, decode) for c in completions]
    scores = await reward.score(samples)
    group = make_group(
        prompt.token_ids,
        [c.token_ids for c in completions],
        [c.logprobs for c in completions],
        [c.versions for c in completions],
        group_id=group_id,
        kept=[c.kept for c in completions],
        routes=[c.routes for c in completions],
    )
    return await scored(
        Rollout(group, samples, scores, cut), advantage, group_size, reference=reference, reward_model=reward_model
    )


async def scored(
    rollout: Rollout,
    advantage: str,
    group_size: int,
    *,
    reference: References | None = None,
    reward_model: RewardModels | None = None,
) -> Rollout:
    """The rollout with what its scores make of the group: rewards, advantages, and the reference's log-probs."""
    group, scores = rollout.group, rollout.scores
    if reward_model is not None:
        scores = await reward_model.add_to(scores, group)
    group["rewards"] = torch.tensor(scores.total, dtype=torch.float32)
    group["advantages"] = advantages(group["rewards"], advantage, group_size)
    if reference is not None:
        group["ref_logprobs"] = await reference.logprobs(group)
    return replace(rollout, scores=scores)


def episode_seed(seed: int, group_id: int, episode: int) -> int:
    """A 31-bit seed, equal on every machine."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{episode}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _completion(begun: Begun) -> Completion:
    columns = (begun.tokens.tolist(), begun.logprobs.tolist(), begun.versions.tolist())
    return Completion(*columns, begun.finish or "abort", begun.kept)


def _sample(prompt: Prompt, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Sample:
    return Sample(
        prompt=prompt.text,
        completion=decode(completion.token_ids),
        answer=prompt.answer,
        metadata=prompt.metadata,
        num_tokens=len(completion.token_ids),
        finished=completion.finish_reason == "stop",
    )


def episode_sample(
    tokens: EpisodeTokens, prompt: Prompt, decode: Callable[[Sequence[int]], str], *, finished: bool
) -> Sample:
    """An episode of several turns as reward functions see one: all behind its first sampled token is its completion."""
    begin = tokens.mask.index(True)
    return Sample(
        prompt=decode(tokens.tokens[:begin]),
        completion=decode(tokens.tokens[begin:]),
        answer=prompt.answer,
        metadata=prompt.metadata,
        num_tokens=tokens.num_sampled,
        finished=finished,
    )
