"""The critic of PPO: values of the states that tokens were sampled in, learned by regression on their returns.

    passes --with_values--> values --actors.credit: GAE--> advantages (the policy's), returns --train--> a better critic

It is cut like the policy: the same mini-batches, epochs, passes and ranks, and the same optimizer section with a
learning rate of its own. Values, and so advantages and returns, are those of the start of a step. One rank, without
Monarch: inside the trainer's processes (`with_values`, `train`), or on its own (`values`, `step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh

from actors.credit import with_returns
from actors.packing import MicroBatch
from actors.sharding import shard
from actors.tensor_parallel import check_tensor_parallel
from actors.trainer_state import TrainerState
from actors.updates import RankGroup, Updates, mini_batches
from actors.value_model import load_value_model, save_value_model
from forge.batch import is_packed
from forge.errors import ConfigError
from forge.losses import LossConfig, aggregate
from forge.packing import flatten
from forge.policy_losses import clipped_value_loss
from forge.token_advantages import merge_moments, moments

if TYPE_CHECKING:
    from actors.trainer import ModelSpec, TrainerConfig

FOLDER = "critic"
"""What its folder is called, beside the policy's, among states as among models."""
_TOKEN_MEAN = LossConfig(aggregation="token_mean")


@dataclass
class CriticConfig:
    """The critic of PPO; it exists where loss.token_advantages is gae, and shares all else with section trainer."""

    model: str = ""
    """What it starts from, with the policy's tokenizer: a causal LM or a sequence classifier with one label, as a name
    that --model takes; empty: the policy's own weights."""
    lr: float = 1e-5
    """Learning rate; its warm-up and schedule are those of section trainer."""
    value_clip: float = 0.2
    """A value moves by at most this much in one step, in units of the reward; > 0."""
    alone_steps: int = 0
    """Steps at the start that train the critic only, while the policy stays as it is."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        if not self.lr > 0:
            raise ConfigError(f"critic.lr must be > 0, got {self.lr}; 1e-5 is usual")
        if not self.value_clip > 0:
            raise ConfigError(f"critic.value_clip must be > 0, got {self.value_clip}; 1e9 never clips")
        if self.alone_steps < 0:
            raise ConfigError(f"critic.alone_steps must be >= 0, got {self.alone_steps}; 0 trains both from the start")


class Critic:
    """One rank, without Monarch. `spec` is the policy's; `mesh` shards the critic, None leaves it whole."""

    def __init__(
        self,
        config: CriticConfig,
        trainer: TrainerConfig,
        loss: LossConfig,
        spec: ModelSpec,
        *,
        ranks: RankGroup,
        mesh: DeviceMesh | None = None,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self._config, self._trainer, self._loss, self._spec = config, replace(trainer, lr=config.lr), loss, spec
        self._ranks, self._rank = ranks, rank
        self._world = mesh.size() if mesh is not None else 1
        self._source = config.model or spec.path
        check_tensor_parallel(self._source, trainer.tensor_parallel)
        self.model = load_value_model(self._source, torch.float32, spec.device, option="critic.model")
        self.model.train()
        if trainer.gradient_checkpointing:
            self.model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        if mesh is not None:
            shard(self.model, mesh, getattr(torch, spec.dtype))
        self._updates = Updates(list(self.model.parameters()), self._trainer, section="critic")
        self._state: TrainerState | None = None
        self.version = 0

    @torch.no_grad()
    def with_values(self, minis: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """The passes with the critic's values of now; all ranks call it at the same time."""
        return [[replace(cut, values=cut.unpack(self._values(cut))) for cut in cuts] for cuts in minis]

    def train(self, minis: list[list[MicroBatch]]) -> dict[str, float | None]:
        """Learns the `returns` of all updates of a step; one new version, and what metrics.jsonl says of it.

        Raises FloatingPointError after `trainer.max_skipped` updates in a row whose gradient is not finite.
        """
        rate = self._updates.set_learning_rate(self.version + 1)
        metrics: dict[str, float | None] = {"extra/value_explained_variance": self._explained(minis)}
        costs, norms, skipped = [], [], 0
        for cuts in minis * self._trainer.epochs:
            costs.append(self._backward(cuts))
            norms.append(self._updates.clipped_norm())
            skipped += not self._updates.apply(norms[-1], self.version + 1)
        self.version += 1
        cost, count = self._ranks.sum(torch.stack(costs).sum(dim=0)).tolist()
        return metrics | {
            "extra/value_loss": cost / count if count else None,
            "extra/critic_grad_norm": sum(norms) / len(norms),
            "extra/critic_lr": rate,
            "extra/critic_skipped_updates": skipped,
        }

    def values(self, batch: TensorDict) -> torch.Tensor:
        """`[N]` float32 of this rank's share of a batch, along its flat tokens; 0 where nothing is trained."""
        flat = batch if is_packed(batch) else flatten(batch)
        out = torch.zeros(flat["tokens"].shape)
        for cuts in self.with_values(self._cut(flat)):
            for cut in cuts:
                assert cut.values is not None
                out[_places(flat["lengths"], cut)] = cut.values[cut.loss_mask].cpu()
        return out

    def step(self, batch: TensorDict) -> dict[str, float | None]:
        """Trains on this rank's share of a batch that has `values`, those of the start of the step; see `train`."""
        minis = self._cut(batch if is_packed(batch) else flatten(batch))
        return self.train([[with_returns(cut, self._loss) for cut in cuts] for cuts in minis])

    def _cut(self, flat: TensorDict) -> list[list[MicroBatch]]:
        return mini_batches(flat, self._trainer, self._ranks, self._spec.device)

    def _values(self, cut: MicroBatch) -> torch.Tensor:
        values: torch.Tensor = self.model(cut.tokens, cut.position_ids, cut.mask)
        return values

    def _backward(self, cuts: list[MicroBatch]) -> torch.Tensor:
        """The passes of one update; the summed loss of this rank's tokens and their number, float64 `[2]`."""
        own = torch.stack([cut.loss_mask.sum() for cut in cuts]).sum()
        count = self._ranks.sum(own).clamp(min=1)  # the mean is over the tokens of all passes and ranks
        total = torch.zeros((), dtype=torch.float64)
        for cut in cuts:
            assert cut.values is not None, "the critic learns behind with_values"
            assert cut.returns is not None, "the critic learns behind GAE"
            values = cut.unpack(self._values(cut))
            each = clipped_value_loss(values, cut.values, cut.returns, self._config.value_clip)
            cost = aggregate(each, cut.loss_mask, _TOKEN_MEAN)
            (cost / count).backward()
            total += cost.detach().double().cpu()
        return torch.stack([total, own.double().cpu()])

    def _explained(self, minis: Sequence[Sequence[MicroBatch]]) -> float | None:
        """`1 - Var(returns - values) / Var(returns)` over the tokens of all ranks; None where returns do not differ."""
        variances = []
        for of_cut in (_returns, _errors):
            parts = [moments(of_cut(cut), cut.loss_mask).cpu() for cuts in minis for cut in cuts]
            variances.append(float(merge_moments(self._ranks.gather_tensors(merge_moments(parts)))[2]))
        return 1.0 - variances[1] / variances[0] if variances[0] > 0 else None

    @property
    def state(self) -> TrainerState:
        """What saves and loads all that it goes on from; all ranks ask for it at the same time at first."""
        if self._state is None:
            self._state = TrainerState(self.model.hf, self._updates.optimizer, self._world)
        return self._state

    def load_state(self, folder: str) -> int:
        """Goes on from the state in `folder`; returns its version. Raises what `TrainerState.load` raises."""
        self.version = self.state.load(Path(folder))
        return self.version

    def save(self, folder: str) -> None:
        """Writes a sequence classifier with one label, see `save_value_model`."""
        dtype = getattr(torch, self._spec.dtype)
        save_value_model(self.model, Path(folder), self._source, dtype, rank=self._rank)


def beside(folder: str | Path) -> Path:
    """Where the critic of the policy in `folder` is kept."""
    return Path(folder).with_name(FOLDER)


def _returns(cut: MicroBatch) -> torch.Tensor:
    assert cut.returns is not None
    return cut.returns


def _errors(cut: MicroBatch) -> torch.Tensor:
    assert cut.values is not None
    return _returns(cut) - cut.values


def _places(lengths: torch.Tensor, cut: MicroBatch) -> torch.Tensor:
    """Where in a flat batch of these `lengths` the trained tokens of a pass lie, in their order."""
    starts = (lengths.cumsum(0) - lengths)[list(cut.rows)]
    index = starts[:, None] + torch.arange(cut.loss_mask.shape[1])
    return index[cut.loss_mask.cpu()]
