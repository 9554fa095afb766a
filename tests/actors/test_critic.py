"""Laws of the critic: values and gradients whatever the cut and the ranks, returns, learning, PPO in the trainer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from actors.credit import token_advantages, with_returns
from actors.critic import Critic, CriticConfig, beside
from actors.packing import MicroBatch, micro_batches
from actors.sharding import make_mesh
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from actors.updates import RankGroup
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.packing import first_fit, flatten, pack

GAE = LossConfig(token_advantages="gae", gamma=0.9, lam=0.8)


@pytest.fixture(scope="module")
def nano() -> str:
    return str(resolve_model("nano"))


def ragged_batch(num_groups: int = 4, group_size: int = 4, seed: int = 0) -> TensorDict:
    """Episodes of unequal length."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(count: int) -> list[int]:
        return torch.randint(7, 40, (count,), generator=draw).tolist()

    groups = []
    for number in range(num_groups):
        completions = [numbers(1 + (3 * number + 5 * g) % 7) for g in range(group_size)]
        logprobs = [[-2.0] * len(c) for c in completions]
        versions = [[0] * len(c) for c in completions]
        group = make_group(numbers(2 + number), completions, logprobs, versions, group_id=number)
        group["advantages"] = torch.randn(group_size, generator=draw)
        groups.append(group)
    return collate(groups)


def critic(
    nano: str,
    *,
    rank: int = 0,
    world: int = 1,
    mesh: DeviceMesh | None = None,
    lr: float = 1e-3,
    clip: float = 0.2,
    **config: Any,
) -> Critic:
    """With a head that is not zero, the same on every rank."""
    mesh = mesh or (make_mesh("cpu", world) if world > 1 else None)
    settings = TrainerConfig(**config)
    one = Critic(
        CriticConfig(lr=lr, value_clip=clip),
        settings,
        GAE,
        ModelSpec(nano, "float32"),
        ranks=RankGroup(world),
        mesh=mesh,
        rank=rank,
    )
    head = one.model.hf.score.weight
    whole = torch.randn(head.shape, generator=torch.Generator().manual_seed(1)) / 10
    with torch.no_grad():
        head.copy_(whole if mesh is None else distribute_tensor(whole, head.device_mesh, head.placements))
    return one


def valued(one: Critic, batch: TensorDict) -> TensorDict:
    flat = flatten(batch)
    flat["values"] = one.values(flat)
    return flat


# Values and returns


@pytest.mark.parametrize(
    "cut", [{"microbatch_tokens": 24}, {"packing": True}, {"packing": True, "microbatch_tokens": 30}, {"updates": 3}]
)
def test_values_do_not_depend_on_how_the_batch_is_cut(nano: str, cut: dict[str, Any]) -> None:
    whole = critic(nano).values(ragged_batch())
    flat = flatten(ragged_batch())
    assert float(whole[flat["loss_mask"]].std()) > 0.01
    assert not whole[~flat["loss_mask"]].any()
    torch.testing.assert_close(critic(nano, **cut).values(ragged_batch()), whole, rtol=1e-4, atol=1e-5)


def test_values_see_neither_padding_nor_the_order_in_which_episodes_are_packed(nano: str) -> None:
    one, batch = critic(nano, packing=True), ragged_batch()
    whole = one.values(batch)
    batch["tokens"][torch.arange(batch["tokens"].shape[1]) >= batch["lengths"][:, None]] = 99
    torch.testing.assert_close(one.values(batch), whole, rtol=1e-4, atol=1e-5)
    flat = flatten(batch)
    rows = first_fit(flat["lengths"].tolist(), 30)
    spans = list(whole.split(flat["lengths"].tolist()))
    expected = torch.cat([spans[episode] for row in rows for episode in row])
    torch.testing.assert_close(one.values(pack([flat], rows)), expected, rtol=1e-4, atol=1e-5)


def one_cut(**changes: Any) -> MicroBatch:
    """One episode of two tokens of prompt and three of the policy, reward 1."""
    group = make_group([5, 6], [[7, 8, 9]], [[-1.0, -1.0, -1.0]], [[0, 0, 0]], group_id=0)
    group["advantages"] = torch.tensor([1.0])
    [cut] = micro_batches(collate([group]), 100, packing=False)
    return replace(cut, values=torch.tensor([[0.0, 0.0, 0.2, 0.4, 0.6]]), **changes)


def test_returns_are_generalised_advantages_and_the_values_they_came_from() -> None:
    returns = with_returns(one_cut(), GAE).returns
    third = 1 - 0.6
    second = (0.9 * 0.6 - 0.4) + 0.72 * third
    first = (0.9 * 0.4 - 0.2) + 0.72 * second
    assert returns is not None
    assert returns[0].tolist() == pytest.approx([0, 0, first + 0.2, second + 0.4, third + 0.6])
    [cut] = token_advantages([one_cut()], GAE, lambda tensor: [tensor])
    torch.testing.assert_close(cut.returns, returns)  # not whitened, as the advantages are


def test_a_penalty_for_leaving_the_reference_counts_in_the_returns() -> None:
    loss = LossConfig(token_advantages="gae", kl_weight=0.5, kl_in="reward", kl_estimator="k1")
    reference = torch.tensor([[0.0, 0.0, -1.0, -1.4, -1.0]])  # the second token is 0.4 likelier under the policy
    returns = with_returns(one_cut(ref_logprobs=reference), loss).returns
    assert returns is not None
    assert returns[0].tolist() == pytest.approx([0, 0, 0.8, 0.8, 1.0])


# Learning


def test_one_update_does_not_depend_on_how_the_batch_is_cut(nano: str) -> None:
    batch = valued(critic(nano), ragged_batch())
    whole, cut = critic(nano), critic(nano, packing=True, microbatch_tokens=30)
    ours, theirs = cut.step(batch), whole.step(batch)
    assert ours == pytest.approx(theirs, rel=1e-3)
    for a, b in zip(cut._updates.parameters, whole._updates.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_loss_is_the_mean_over_tokens_and_the_explained_share_that_of_their_variance(nano: str) -> None:
    batch = valued(critic(nano), ragged_batch())
    mask, values = batch["loss_mask"], batch["values"]
    cuts = micro_batches(batch, 4096, packing=False)
    rows = [with_returns(cut, GAE) for cut in cuts]
    returns = torch.cat([cut.returns[cut.loss_mask] for cut in rows if cut.returns is not None])
    old = torch.cat([cut.values[cut.loss_mask] for cut in rows if cut.values is not None])
    assert len(returns) == int(mask.sum())
    assert float(values[mask].std()) > 0
    metrics = critic(nano, clip=1e9).step(batch)
    assert metrics["extra/value_loss"] == pytest.approx(float((returns - old).square().mean() / 2), rel=1e-4)
    explained = 1 - float((returns - old).var() / returns.var())
    assert metrics["extra/value_explained_variance"] == pytest.approx(explained, rel=1e-4)


def first_decides(seed: int) -> TensorDict:
    """Episodes of four tokens out of ten; the reward is 1 where the first is one of five of them."""
    draw, groups = torch.Generator().manual_seed(seed), []
    for number in range(8):
        completions = [torch.randint(7, 17, (4,), generator=draw).tolist() for _ in range(4)]
        group = make_group([20, 21], completions, [[-2.0] * 4] * 4, [[0] * 4] * 4, group_id=number)
        group["advantages"] = torch.tensor([float(c[0] < 12) for c in completions])
        groups.append(group)
    return collate(groups)


def test_a_critic_learns_what_the_first_token_says_about_the_reward(nano: str) -> None:
    loss, spec = LossConfig(token_advantages="gae"), ModelSpec(nano, "float32")
    one = Critic(CriticConfig(lr=3e-3), TrainerConfig(updates=2), loss, spec, ranks=RankGroup())
    steps = [one.step(valued(one, first_decides(seed))) for seed in range(30)]
    explained = [metrics["extra/value_explained_variance"] or 0.0 for metrics in steps]
    assert abs(explained[0]) < 1e-6  # a fresh head knows nothing
    assert sum(explained[-5:]) / 5 > 0.6  # of 0.75: before the first token all is chance


def test_a_gradient_that_is_not_finite_leaves_the_critic_as_it_is_until_there_are_too_many(nano: str) -> None:
    one = critic(nano, max_skipped=1)
    batch = valued(one, ragged_batch())
    batch["values"][batch["loss_mask"]] = float("nan")
    before = [p.detach().clone() for p in one._updates.parameters]
    assert one.step(batch)["extra/critic_skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, one._updates.parameters, strict=True))
    with pytest.raises(FloatingPointError, match=r"critic: the gradient norm of step 2 is nan, .*Lower critic\.lr"):
        one.step(batch)


# Several ranks, and a resume


def _rank(rank: int, world: int, folder: str, nano: str, divisible: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows = [list(range(11)), list(range(11, 16))][rank]  # uneven: one rank runs out of passes first
    one = critic(nano, rank=rank, world=world, microbatch_tokens=30, updates=2)
    batch = valued(one, ragged_batch()[torch.tensor(rows)])
    metrics = one.step(batch)
    one.state.stage(Path(folder) / "state", one.version)
    one.state.wait(60)
    values = [None, None]
    dist.all_gather_object(values, (batch["values"], one.values(batch)))
    if rank == 0:
        torch.save({"values": values, "metrics": metrics}, f"{folder}/out.pt")
    one.save(f"{folder}/model")
    sharing = critic(divisible, mesh=make_mesh("cpu", 2, 2), tensor_parallel=2)
    torch.testing.assert_close(sharing.values(ragged_batch()), critic(divisible).values(ragged_batch()))
    dist.barrier()
    os._exit(0)  # a gloo thread that meets a finalizing interpreter aborts the process


def test_two_sharded_ranks_learn_what_one_does_and_one_goes_on_from_their_state(nano: str, tmp_path: Path) -> None:
    divisible = small_models.family("qwen3", tmp_path / "qwen3")
    torch.multiprocessing.spawn(_rank, args=(2, str(tmp_path), nano, divisible), nprocs=2)
    two = torch.load(tmp_path / "out.pt")
    one = critic(nano, updates=2)
    batch = valued(one, ragged_batch())
    metrics = one.step(batch)
    for number, own in enumerate((batch["values"], one.values(batch))):
        theirs = torch.cat([values[number] for values in two["values"]])
        torch.testing.assert_close(theirs, own, rtol=1e-3, atol=1e-4)
    assert two["metrics"] == pytest.approx(metrics, rel=1e-3)
    resumed = critic(nano, updates=2)
    assert resumed.load_state(str(tmp_path / "state")) == resumed.version == 1
    torch.testing.assert_close(resumed.values(batch), one.values(batch), rtol=1e-3, atol=1e-4)
    exported = Critic(
        CriticConfig(model=str(tmp_path / "model")), TrainerConfig(), GAE, ModelSpec(nano, "float32"), ranks=RankGroup()
    )
    torch.testing.assert_close(exported.values(batch), resumed.values(batch))


# In the trainer


def ppo(nano: str, config: CriticConfig | None = None, *, inside: bool = True, **settings: Any) -> Trainer:
    critic = config or CriticConfig(lr=1e-3)
    chosen = TrainerConfig(lr=1e-3, **settings)
    return Trainer(chosen, GAE, ModelSpec(nano, "float32"), critic=critic, critic_inside=inside)


def weights(one: Trainer | Critic) -> list[torch.Tensor]:
    return [p.detach().clone() for p in one._updates.parameters]


def test_a_critic_inside_the_trainer_does_what_one_elsewhere_does(nano: str) -> None:
    together, alone = ppo(nano, updates=2, epochs=2), ppo(nano, inside=False, updates=2, epochs=2)
    settings, spec = TrainerConfig(updates=2, epochs=2), ModelSpec(nano, "float32")
    elsewhere = Critic(CriticConfig(lr=1e-3), settings, GAE, spec, ranks=RankGroup())
    for seed in range(2):
        batch = valued(elsewhere, ragged_batch(seed=seed))
        ours = together.step(ragged_batch(seed=seed)).metrics
        theirs = alone.step(batch).metrics | elsewhere.step(batch)
        assert ours.pop("loss/kl") is theirs.pop("loss/kl") is None
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert together._critic is not None
    for one, other in ((together, alone), (together._critic, elsewhere)):
        assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def test_the_policy_waits_for_a_critic_that_trains_alone_first(nano: str) -> None:
    one = ppo(nano, CriticConfig(lr=1e-3, alone_steps=1))
    assert one._critic is not None
    before = weights(one), weights(one._critic)
    assert one.step(ragged_batch()).policy_version == 1
    assert all(torch.equal(a, b) for a, b in zip(before[0], weights(one), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[1], weights(one._critic), strict=True))
    one.step(ragged_batch())
    assert not all(torch.equal(a, b) for a, b in zip(before[0], weights(one), strict=True))


def test_a_loaded_trainer_goes_on_with_the_critic_that_was_saved(nano: str, tmp_path: Path) -> None:
    one, other = ppo(nano), ppo(nano)
    one.step(ragged_batch())
    one.stage_state(str(tmp_path / "trainer"))
    one.wait_state(60)
    assert {path.name for path in tmp_path.iterdir()} == {"trainer", "critic"}
    other.step(ragged_batch(seed=9))
    assert other.load_state(str(tmp_path / "trainer")) == 1
    assert other.step(ragged_batch(seed=1)).metrics == one.step(ragged_batch(seed=1)).metrics
    without = tmp_path / "alone" / "trainer"
    without.parent.mkdir()
    (tmp_path / "trainer").rename(without)
    with pytest.raises(ConfigError, match="alone/critic holds no state"):
        other.load_state(str(without))
    assert beside(without) == tmp_path / "alone" / "critic"
