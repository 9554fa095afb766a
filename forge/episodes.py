"""Episodes of several turns, token by token, and the Group that they make. Pure.

    given    prompts, observations, whatever a chat template puts between turns: read, never trained
    sampled  what the policy said: the ids that a generator sampled, never text that was tokenised again

A turn's reward stands at the turn's last sampled token, so that no span of given tokens is between a reward and the
tokens that earned it. `forge/batch.py` has the schema, and `make_group` for one turn from one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from tensordict import TensorDict

from forge.batch import OUTSIDE_MASK, TOKEN_KEYS
from forge.errors import SchemaError
from forge.routes import continued, padded_routes
from forge.supports import joined


@dataclass
class EpisodeTokens:
    """One episode as it grows: `given` and `sampled` append, `reward` says what the last sampled tokens earned."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """Along `tokens`: whether the policy sampled it."""
    logprobs: list[float] = field(default_factory=list)
    """Along the sampled tokens, as are `versions` and `earned`."""
    versions: list[int] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)
    """What turns earned, at the last sampled token of each; zeros elsewhere."""
    total: float = 0.0
    """All rewards."""
    rewarded: bool = False
    """Whether `reward` was called."""
    kept: torch.Tensor | None = field(default=None, compare=False)
    """`[n, K]` along the sampled tokens where supports were recorded (`forge/supports.py`)."""
    routes: torch.Tensor | None = field(default=None, compare=False)
    """`[m, layers, k]` from the first token on, as far as they were recorded (`forge/routes.py`)."""

    @property
    def num_sampled(self) -> int:
        """Tokens that can be trained."""
        return len(self.logprobs)

    def given(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not choose."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)

    def sampled(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        *,
        kept: torch.Tensor | None = None,
        routes: torch.Tensor | None = None,
    ) -> None:
        """Appends what the policy chose, as it was sampled, with log-probs and versions along it.

        `kept` `[n, K]` runs along `tokens`; `routes` `[m, layers, k]` run from the episode's first token on, as
        `Completion.routes` of a generator do. Raises SchemaError when lengths differ, and before any given token.
        """
        if not self.tokens:
            raise SchemaError("the episode begins with a sampled token; a policy needs at least one token before it")
        counts = {"logprobs": len(logprobs), "versions": len(versions)}
        if kept is not None:
            counts["kept"] = len(kept)
        if wrong := {name: count for name, count in counts.items() if count != len(tokens)}:
            raise SchemaError(f"{len(tokens)} sampled tokens came with {wrong}; each token needs exactly one of each")
        length = len(self.tokens) + len(tokens)
        if routes is not None and len(routes) > length:
            raise SchemaError(f"routes of {len(routes)} tokens, the episode has {length}; at most one row a token")
        self.kept = joined([(self.kept, self.num_sampled), (kept, len(tokens))])
        self.routes = continued(self.routes, routes)
        self.tokens += tokens
        self.mask += [True] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.earned += [0.0] * len(tokens)

    def reward(self, value: float, at: int = -1) -> None:
        """What the turn that ends here earned, or at sampled token `at`; adds up where it is called again.

        Before the first sampled token nothing can have earned it: it counts for the episode alone. Raises SchemaError
        for what is no finite number.
        """
        if not math.isfinite(value):
            raise SchemaError(f"the reward of a turn is {value}; a reward must be a finite number")
        self.total += value
        self.rewarded = True
        if self.earned:
            self.earned[at] += value


def make_episodes_group(
    episodes: Sequence[EpisodeTokens], *, group_id: int, pad_id: int = 0, turn_rewards: bool | None = None
) -> TensorDict:
    """Episodes of one task as a Group `[G]`: `rewards` are their totals, advantages zero.

    `token_rewards` is there with `turn_rewards`; None means where an episode has any, but all groups of a batch must
    agree. An episode whose policy never spoke has a reward for its neighbours to be compared with, and trains
    nothing. Raises SchemaError for no episode, for one without a token, and where nothing at all was sampled.
    """
    if not episodes:
        raise SchemaError("the group has 0 episodes; a group holds at least one")
    lengths = [len(episode.tokens) for episode in episodes]
    if 0 in lengths:
        raise SchemaError(f"episode {lengths.index(0)} of {len(lengths)} has 0 tokens; it has to observe something")
    if not any(episode.num_sampled for episode in episodes):
        raise SchemaError(f"no episode of {len(lengths)} has a sampled token; such a group trains nothing, drop it")
    width = max(lengths)
    mask = torch.zeros((len(episodes), width), dtype=torch.bool)
    tokens = torch.full(mask.shape, pad_id, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        tokens[row, : lengths[row]] = torch.tensor(episode.tokens, dtype=torch.int64)
        mask[row, : lengths[row]] = torch.tensor(episode.mask, dtype=torch.bool)
    group = {
        "tokens": tokens,
        "loss_mask": mask,
        "behavior_logprobs": _at(mask, "behavior_logprobs", (e.logprobs for e in episodes)),
        "token_versions": _at(mask, "token_versions", (e.versions for e in episodes)),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "rewards": torch.tensor([episode.total for episode in episodes], dtype=torch.float32),
        "advantages": torch.zeros(len(episodes), dtype=torch.float32),
        "group_id": torch.full((len(episodes),), group_id, dtype=torch.int64),
    }
    if turn_rewards or (turn_rewards is None and any(episode.rewarded for episode in episodes)):
        group["token_rewards"] = _at(mask, "token_rewards", (e.earned for e in episodes))
    # A mask picks tokens row by row: in the order of the episodes laid end to end.
    if (kept := joined([(episode.kept, episode.num_sampled) for episode in episodes])) is not None:
        group["kept_tokens"] = torch.full((*mask.shape, kept.shape[1]), int(OUTSIDE_MASK["kept_tokens"])).int()
        group["kept_tokens"][mask] = kept
    if (routes := padded_routes([episode.routes for episode in episodes], lengths, width)) is not None:
        group["routed_experts"] = routes
    return TensorDict(group, batch_size=[len(episodes)])


def _at(mask: torch.Tensor, key: str, rows: Iterable[Sequence[float]]) -> torch.Tensor:
    """Numbers of the sampled tokens of each episode where `mask` has them, `[G, T]`."""
    dtype = TOKEN_KEYS.get(key, torch.float32)
    out = torch.full(mask.shape, OUTSIDE_MASK[key], dtype=dtype)
    out[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return out
