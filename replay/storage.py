"""Complete groups as the replay keeps them: without padding, in memory of its own, within a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from forge.batch import Arrays, array, checked_arrays, is_packed
from forge.errors import MemoryBudgetError, SchemaError
from forge.memory import memory_limit_bytes
from forge.packing import as_tensors, flat_arrays, flatten


@dataclass(slots=True)
class Record:
    """A complete group and what the bookkeeping needs of it, read once when it is added."""

    arrays: Arrays
    """Flat episodes (`forge/batch.py`): token keys `[N]`, episode keys `[G]`."""
    oldest: list[int]
    """Of each episode: the oldest version that sampled one of its tokens; -1 when it trains no token."""
    newest: int
    """The newest version in the group; -1 when it trains no token."""
    num_tokens: int
    """Tokens that the policy produced (`loss_mask`)."""
    rewards: list[float]
    degenerate: bool
    """All rewards equal, so that no advantage says anything."""
    lengths: list[int]
    """Of each episode, prompt included, tokens."""
    magnitude: float
    """Mean absolute advantage of the episodes."""
    nbytes: int
    """Memory that the group takes."""

    @property
    def group(self) -> TensorDict:
        """`arrays` as tensors, the same memory; made anew each time, which takes as long as the copy of a group."""
        return as_tensors(self.arrays)

    def oldest_version(self, default: int) -> int:
        """The oldest version that sampled a token of the group; `default` where it trains none."""
        return min((version for version in self.oldest if version >= 0), default=default)

    def is_stale(self, policy_version: int, max_staleness: int) -> bool:
        """Whether an episode holds a token older than the bound allows at `policy_version`."""
        return any(0 <= version < policy_version - max_staleness for version in self.oldest)


def store(group: TensorDict, group_id: int) -> Record:
    """A Group `[G]` as the replay keeps it: checked, in a copy without padding that shares no memory with it.

    Raises SchemaError when it breaks the schema or has no episode.
    """
    arrays = checked_arrays(group)
    if group.batch_size[0] == 0:
        raise SchemaError("the group has 0 episodes; fail its ticket instead of adding it")
    flat = flat_arrays(arrays)
    flat["group_id"].fill(group_id)
    return _record(flat, flat["token_versions"])


def summarize(group: TensorDict) -> Record:
    """The Record of a valid group, flat as it was stored or padded as it was made.

    Raises SchemaError when a reward is not finite.
    """
    flat = group if is_packed(group) else flatten(group)
    arrays = {key: array(cast(torch.Tensor, value)) for key, value in flat.items()}
    rewards = arrays["rewards"].tolist()
    if not all(map(math.isfinite, rewards)):
        raise SchemaError(f"rewards must be finite, got {rewards}; a reward of nan would reach every weight")
    return _record(arrays, np.where(arrays["loss_mask"], arrays["token_versions"], -1))


def _record(flat: Arrays, versions: NDArray[Any]) -> Record:
    """`versions` are -1 where nothing is trained."""
    rewards, lengths = flat["rewards"].tolist(), flat["lengths"].tolist()
    # Read as unsigned, -1 is larger than any version.
    oldest = np.minimum.reduceat(versions.view(np.uint64), list(accumulate(lengths[:-1], initial=0))).view(np.int64)
    return Record(
        arrays=flat,
        oldest=oldest.tolist(),
        newest=int(versions.max()),
        num_tokens=int(np.count_nonzero(flat["loss_mask"])),
        rewards=rewards,
        degenerate=max(rewards) == min(rewards),
        lengths=lengths,
        magnitude=math.fsum(map(abs, flat["advantages"].tolist())) / len(lengths),
        nbytes=sum([value.nbytes for value in flat.values()]),
    )


class MemoryBudget:
    """Bytes of groups that are held, and whether one more may be begun. Pure.

    Backpressure comes first: a group that is not begun costs nothing, one that does not fit when it is complete
    ends the run. What a running group will take is estimated by the largest so far.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        """`limit_bytes`: of all groups; 0 stands for a quarter of what this process may use."""
        self.limit_bytes = limit_bytes or memory_limit_bytes() // 4
        self.held_bytes = 0
        self.largest_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be held."""
        return self.held_bytes + nbytes <= self.limit_bytes

    def estimate(self, num_groups: int) -> int:
        """Bytes that so many groups will take at most, if none is larger than the largest so far."""
        return num_groups * self.largest_bytes

    def hold(self, nbytes: int) -> None:
        """A group of `nbytes` is kept from now on. Raises MemoryBudgetError when it does not fit."""
        if not self.fits(nbytes):
            raise MemoryBudgetError(
                f"a group of {nbytes} bytes does not fit: the replay holds {self.held_bytes} bytes of groups, "
                f"replay.memory_bytes allows {self.limit_bytes}; raise it, or lower replay.max_staleness, "
                "grpo.batch_size or generator.max_new_tokens, so that fewer or shorter groups wait"
            )
        self.held_bytes += nbytes
        self.largest_bytes = max(self.largest_bytes, nbytes)

    def free(self, nbytes: int) -> None:
        """A group of `nbytes` is no longer kept."""
        assert nbytes <= self.held_bytes, "more memory was freed than was held"
        self.held_bytes -= nbytes
