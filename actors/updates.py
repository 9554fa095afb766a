"""What the optimizer steps of policy and critic are made of.

    batch --mini_batches--> passes of each update --backward--> Updates: clipped, then applied, or skipped and counted

`RankGroup` makes sums of them over all ranks, so that nothing depends on how a batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from actors.optimizer import Parameters, make_optimizer, rate_share
from actors.packing import MicroBatch, empty_micro_batch, micro_batches
from forge.errors import ConfigError

if TYPE_CHECKING:
    from actors.trainer import TrainerConfig


@dataclass(frozen=True)
class RankGroup:
    """The ranks among which a batch is divided. Every method is called by all of them at the same time."""

    world: int = 1
    """How many they are; with more than 1 a process group must be initialised."""
    group: dist.ProcessGroup | None = None
    """Theirs; None: that of all ranks."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value, op=dist.ReduceOp.SUM, group=self.group)
        return value

    def max(self, values: list[int]) -> list[int]:
        """Of each number the largest of all ranks."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        maxima: list[int] = tensor.tolist()
        return maxima

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, any that pickle takes."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The same for tensors of one shape."""
        if self.world == 1:
            return [value]
        values = [torch.empty_like(value) for _ in range(self.world)]
        dist.all_gather(values, value, group=self.group)
        return values


def mini_batches(
    flat: TensorDict, cfg: TrainerConfig, ranks: RankGroup, device: str, together: int = 1
) -> list[list[MicroBatch]]:
    """The passes of each of `cfg.updates` updates of a flat batch, as many on every rank.

    Runs of `together` episodes, which are of one group, stay in one pass.
    Raises ConfigError when the batch has fewer groups than updates, or an episode does not fit into a pass.
    """
    choices = _choices(flat["group_id"], cfg.updates, ranks)
    limit, packing = cfg.microbatch_tokens, cfg.packing
    minis = [micro_batches(flat, limit, packing=packing, episodes=rows, together=together) for rows in choices]
    # Every rank runs as many passes as the busiest one: FSDP2's collectives must pair up.
    spare = empty_micro_batch(flat, together)
    counts = ranks.max([len(cuts) for cuts in minis])
    minis = [cuts + [spare] * (count - len(cuts)) for cuts, count in zip(minis, counts, strict=True)]
    return [[cut.to(device) for cut in cuts] for cuts in minis]


def _choices(group_ids: torch.Tensor, updates: int, ranks: RankGroup) -> list[list[int] | None]:
    """This rank's episodes of each update; who is in which does not depend on the number of ranks."""
    if updates == 1:
        return [None]
    own = group_ids.tolist()
    groups = sorted(set().union(*ranks.gather(set(own))))
    if len(groups) < updates:
        raise ConfigError(f"trainer.updates is {updates}, the batch has {len(groups)} groups; lower the former")
    update = {group: place * updates // len(groups) for place, group in enumerate(groups)}
    return [[row for row, group in enumerate(own) if update[group] == number] for number in range(updates)]


class Updates:
    """The optimizer of one model. After each backward pass: `clipped_norm`, then `apply` or `drop`."""

    def __init__(self, parameters: Parameters, cfg: TrainerConfig, *, section: str = "trainer") -> None:
        """`section` is what the configuration calls it, for errors."""
        self.parameters = list(parameters)
        self.optimizer = make_optimizer(self.parameters, cfg)
        self._cfg, self._section = cfg, section
        self._skipped_in_a_row = 0

    def set_learning_rate(self, step: int) -> float:
        """The rate of `step`, counted from 1; it holds until the next call."""
        rate = self._cfg.lr * rate_share(step, self._cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def clipped_norm(self) -> float:
        """Clips the gradient; its norm before that, over all ranks."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._cfg.clip_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def apply(self, norm: float, step: int, before: Callable[[], None] | None = None) -> bool:
        """Moves the weights along the gradient; False when it is not finite and they stay.

        `before` is called ahead of a move. Raises FloatingPointError after `max_skipped` skipped ones in a row.
        """
        finite = math.isfinite(norm)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row > self._cfg.max_skipped:
            raise FloatingPointError(
                f"{self._section}: the gradient norm of step {step} is {norm}, after {self._cfg.max_skipped} updates "
                "skipped for the same reason (trainer.max_skipped); the weights are unchanged. "
                f"Lower {self._section}.lr or look at the batch's rewards and log-probs"
            )
        if finite:
            if before is not None:
                before()
            self.optimizer.step()
        self.drop()
        return finite

    def drop(self) -> None:
        """Forgets the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
