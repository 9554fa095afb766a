"""Laws of the optimizer step on a real (0.1 M) Hugging Face model: invariants a and b, clipping, checkpoints."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from actors.model import freeze_except, load_hf
from actors.reference import Reference
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.grpo.models import resolve_model
from forge.batch import collate, is_packed, make_group
from forge.errors import ConfigError, SchemaError
from forge.losses import Aggregation, LossConfig
from forge.packing import first_fit, flatten, pack
from forge.segment import Segment, SegmentRef
from weightsync.config import WeightSyncConfig
from weightsync.layout import view
from weightsync.offer import Endpoint
from weightsync.publisher import Publisher


@pytest.fixture(scope="module")
def nano() -> str:
    return str(resolve_model("nano"))


def ragged_batch(num_groups: int = 4, group_size: int = 4) -> TensorDict:
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int) -> list[int]:
        return torch.randint(7, 40, (count,), generator=generator).tolist()

    groups = []
    for number in range(num_groups):
        completions = [numbers(1 + (3 * number + 5 * g) % 11) for g in range(group_size)]
        logprobs = [[-2.0 - 0.1 * (t % 3) for t in c] for c in completions]
        versions = [[0] * len(c) for c in completions]
        group = make_group(numbers(2 + number), completions, logprobs, versions, group_id=number)
        group["advantages"] = torch.randn(group_size, generator=generator)
        groups.append(group)
    return collate(groups)


def trainer(nano: str, loss: LossConfig | None = None, **config: Any) -> Trainer:
    spec = {k: config.pop(k) for k in ("temperature", "top_p", "top_k") if k in config}
    return Trainer(TrainerConfig(**config), loss or LossConfig(), ModelSpec(nano, "float32", **spec))


def accumulate(one: Trainer, batch: TensorDict) -> dict[str, float]:
    """A step without its updates; the metrics."""
    minis = one._prepare(batch if is_packed(batch) else flatten(batch))
    return one._means([part for cuts in minis for part in one._backward(cuts, first=True)])


def gradient(nano: str, batch: TensorDict, **config: Any) -> dict[str, torch.Tensor]:
    one = trainer(nano, **config)
    accumulate(one, batch)
    return {name: p.grad.clone() for name, p in one.policy.hf.named_parameters()}


def assert_same(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert max(float(g.abs().max()) for g in reference.values()) > 1e-3
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize(
    "cut", [{"microbatch_tokens": 24}, {"packing": True}, {"packing": True, "microbatch_tokens": 30}]
)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(
    nano: str, aggregation: Aggregation, cut: dict[str, Any]
) -> None:
    loss = LossConfig(aggregation=aggregation)
    batch = ragged_batch()
    assert_same(gradient(nano, batch, loss=loss, **cut), gradient(nano, batch, loss=loss))


@pytest.mark.parametrize("packing", [False, True])
def test_a_packed_batch_gives_the_gradient_of_the_padded_one(nano: str, packing: bool) -> None:
    flat = flatten(ragged_batch())
    packed = pack([flat], first_fit(flat["lengths"].tolist(), 30))
    packed["behavior_logprobs"][~packed["loss_mask"]] = float("nan")
    ours = gradient(nano, packed, packing=packing, microbatch_tokens=30)
    assert_same(ours, gradient(nano, ragged_batch()))


def test_nan_and_garbage_in_padding_change_nothing(nano: str) -> None:
    clean, poisoned = ragged_batch(), ragged_batch()
    width = poisoned["tokens"].shape[1]
    padding = torch.arange(width) >= poisoned["lengths"][:, None]
    poisoned["behavior_logprobs"][~poisoned["loss_mask"]] = float("nan")
    poisoned["tokens"][padding] = 99
    assert_same(gradient(nano, poisoned), gradient(nano, clean))


def test_gradient_checkpointing_changes_nothing(nano: str) -> None:
    batch = ragged_batch()
    assert_same(gradient(nano, batch, gradient_checkpointing=True), gradient(nano, batch))


def attach(endpoint: Endpoint, buffer: int) -> Segment:
    """The segment in which all ranks' shares of a snapshot lie, each in its place."""
    (ref,) = {SegmentRef(**link["buffers"][buffer]) for link in endpoint.links}
    return Segment.attach(ref)


def _rank_gradient(rank: int, world: int, folder: str, nano: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows = [list(range(11)), list(range(11, 16))][rank]  # uneven: one rank runs out of passes first
    spec, batch = ModelSpec(nano, "float32"), rich_batch()[torch.tensor(rows)]
    ways = {}
    for way, options in WAYS.items():
        config = TrainerConfig(microbatch_tokens=30, packing=way == "ppo")
        one = Trainer(config, LossConfig(**options), spec, rank=rank, world=world)
        accumulate(one, batch)
        ways[way] = {name: p.grad.full_tensor() for name, p in one.policy.hf.named_parameters()}
    one = Trainer(TrainerConfig(updates=3, lr=1e-2), LossConfig(correction="tis"), spec, rank=rank, world=world)
    one.step(batch)
    moved = {name: p.detach().full_tensor() for name, p in one.policy.hf.named_parameters()}
    one = Trainer(TrainerConfig(microbatch_tokens=30), LossConfig(), spec, rank=rank, world=world)
    metrics = accumulate(one, ragged_batch()[torch.tensor(rows)])
    full = {name: p.grad.full_tensor() for name, p in one.policy.hf.named_parameters()}
    before = {n: p.detach().full_tensor().clone() for n, p in one.policy.hf.named_parameters()}
    endpoint = one.connect("float32", WeightSyncConfig(), "memory")
    one.publisher.snapshot(1, 1)
    dist.barrier()
    if rank == 0:
        torch.save({"gradient": full, "metrics": metrics, "ways": ways, "moved": moved}, f"{folder}/out.pt")
        published = attach(endpoint, 1)
        for entry in endpoint.layout.entries:
            assert torch.equal(view(published.buffer, entry), before[entry.name]), entry.name
    dist.barrier()
    one.save(f"{folder}/checkpoint", nano)
    one.close()
    # FSDP keeps the gloo group alive past destroy_process_group, and a gloo thread that meets a finalizing
    # interpreter aborts the process.
    os._exit(0)


def test_two_sharded_ranks_give_the_gradient_and_the_weights_of_one(nano: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank_gradient, args=(2, str(tmp_path), nano), nprocs=2)
    two = torch.load(tmp_path / "out.pt")
    one = trainer(nano)
    metrics = accumulate(one, ragged_batch())
    assert_same(two["gradient"], {n: p.grad for n, p in one.policy.hf.named_parameters()})
    for key, value in metrics.items():
        assert two["metrics"][key] == pytest.approx(value, abs=1e-5), key
    for way, options in WAYS.items():
        assert_same(two["ways"][way], gradient(nano, rich_batch(), loss=LossConfig(**options)))
    updated = trainer(nano, LossConfig(correction="tis"), updates=3, lr=1e-2)
    updated.step(rich_batch())
    assert_same(two["moved"], {n: p.detach() for n, p in updated.policy.hf.named_parameters()})
    reloaded = load_hf(tmp_path / "checkpoint", torch.float32)
    for name, parameter in one.policy.hf.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], parameter), name


def test_clipping_bounds_the_gradient_that_the_optimizer_sees(nano: str) -> None:
    one = trainer(nano, clip_norm=0.01)
    result = one.step(ragged_batch())
    assert (result.metrics["grad_norm"] or 0) > 0.1
    moments = [one._optimizer.state[p]["exp_avg"] for p in one._parameters]
    seen = torch.stack([m.norm() for m in moments]).norm() / (1 - 0.9)
    assert float(seen) == pytest.approx(0.01, rel=1e-3)


def test_a_step_makes_a_version_and_changes_the_weights(nano: str) -> None:
    one = trainer(nano, lr=1e-3)
    before = {n: p.detach().clone() for n, p in one.policy.hf.named_parameters()}
    assert one.policy_version == 0
    assert one.step(ragged_batch()).policy_version == one.policy_version == 1
    assert any(not torch.equal(before[n], p) for n, p in one.policy.hf.named_parameters())


def test_a_non_finite_gradient_is_skipped_and_counted_until_there_are_too_many_in_a_row(nano: str) -> None:
    one = trainer(nano, max_skipped=2)
    good, bad = ragged_batch(), ragged_batch()
    bad["advantages"][0] = float("inf")
    before = {n: p.detach().clone() for n, p in one.policy.hf.named_parameters()}

    def skipped(batch: TensorDict) -> float | None:
        return one.step(batch).metrics["extra/skipped_updates"]

    assert [skipped(bad), skipped(bad)] == [1, 1]
    assert all(torch.equal(before[n], p) for n, p in one.policy.hf.named_parameters())
    assert [skipped(good), skipped(bad), skipped(bad)] == [0, 1, 1]
    with pytest.raises(FloatingPointError, match=r"the gradient norm of step 6 is .*after 2 updates .*max_skipped"):
        one.step(bad)
    assert one.policy_version == 5
    assert all(bool(p.isfinite().all()) for p in one._parameters)


def rich_batch() -> TensorDict:
    """With versions, a reference, and rewards of tokens."""
    batch, draw = ragged_batch(), torch.Generator().manual_seed(1)
    shape, mask = batch["tokens"].shape, batch["loss_mask"]
    batch["ref_logprobs"] = torch.where(mask, batch["behavior_logprobs"] + 0.1, 0.0)
    batch["token_rewards"] = torch.where(mask, 0.1 * torch.randn(shape, generator=draw), 0.0)
    batch["values"] = torch.where(mask, torch.randn(shape, generator=draw), 0.0)
    batch["token_versions"] = torch.where(mask, torch.arange(shape[0])[:, None] % 3 - 2, -1).clamp(min=-1)
    batch["token_versions"][mask] = batch["token_versions"][mask].clamp(min=0)
    return batch


WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "seq_mean_token_mean"},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm", "norm_length": 12},
    "gspo": {"name": "gspo", "aggregation": "seq_mean_token_mean"},
    "cispo": {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"aggregation": "seq_mean_token_sum"},
    "reinforce_pp": {"token_advantages": "reinforce_pp", "kl_weight": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "ppo": {"token_advantages": "gae", "gamma": 0.9, "lam": 0.8},
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "tis": {"correction": "tis"},
}
"""Of every algorithm what the trainer sees of it."""
CUTS: list[dict[str, Any]] = [{"microbatch_tokens": 24}, {"packing": True}, {"packing": True, "microbatch_tokens": 30}]


@pytest.mark.parametrize("way", WAYS)
def test_no_algorithm_sees_how_the_batch_is_cut(nano: str, way: str) -> None:
    loss, batch = LossConfig(**WAYS[way]), rich_batch()
    whole = gradient(nano, batch, loss=loss)
    for cut in CUTS:
        assert_same(gradient(nano, batch, loss=loss, **cut), whole)


def test_advantages_of_tokens_are_white_over_the_whole_batch(nano: str) -> None:
    batch = rich_batch()
    del batch["token_rewards"]
    one = trainer(nano, LossConfig(token_advantages="reinforce_pp"), microbatch_tokens=24)
    [cuts] = one._prepare(flatten(batch))
    assert len(cuts) > 3
    values = torch.cat([cut.advantages[cut.loss_mask] for cut in cuts])
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(values.std()) == pytest.approx(1.0, abs=1e-5)
    own = [(row, number) for cut in cuts for row, number in zip(cut.rows, cut.advantages, strict=True)]
    raw = batch["advantages"]
    every = torch.cat([raw[row].expand(int(batch["loss_mask"][row].sum())) for row, _ in own])
    torch.testing.assert_close(values, (every - every.mean()) / every.std(), rtol=1e-4, atol=1e-5)


def test_what_a_token_advantage_needs_and_lacks_is_an_error(nano: str) -> None:
    with pytest.raises(SchemaError, match=r"values is missing; loss\.token_advantages gae needs a critic"):
        trainer(nano, LossConfig(token_advantages="gae")).step(ragged_batch())
    loss = LossConfig(token_advantages="reinforce_pp", kl_weight=0.1, kl_in="reward")
    with pytest.raises(SchemaError, match=r"ref_logprobs is missing; loss\.kl_in reward needs it"):
        trainer(nano, loss).step(ragged_batch())


# Several updates of one batch


def test_two_updates_of_a_batch_are_two_steps_on_its_halves(nano: str) -> None:
    batch = ragged_batch()
    both, halves = trainer(nano, lr=1e-2, updates=2), trainer(nano, lr=1e-2)
    result = both.step(batch)
    first, second = halves.step(batch[:8]), halves.step(batch[8:])
    for ours, theirs in zip(both._parameters, halves._parameters, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (result.policy_version, second.policy_version) == (1, 2)
    norms = [float(r.metrics["grad_norm"] or 0) for r in (first, second)]
    assert result.metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_from_the_second_update_on_the_anchor_is_where_the_step_began(nano: str, packing: bool) -> None:
    loss = LossConfig(name="decoupled_ppo", clip_low=0.01, clip_high=0.01, weight_high=1e9)
    one = trainer(nano, loss, lr=1e-2, updates=2, epochs=2, packing=packing, microbatch_tokens=40)
    flat = flatten(ragged_batch())
    [mini, other] = one._prepare(flat)
    with torch.no_grad():
        now = [cut.unpack(one.policy(cut.tokens, cut.position_ids, cut.mask)[0]) for cut in mini]
    for cut, logprobs in zip(mini, now, strict=True):
        assert cut.proximal_logprobs is not None
        torch.testing.assert_close(cut.proximal_logprobs, logprobs)
    groups = [{int(flat["group_id"][row]) for cut in cuts for row in cut.rows} for cuts in (mini, other)]
    assert groups == [{0, 1}, {2, 3}]
    assert (one.step(flat).metrics["ratio/clip_fraction"] or 0) > 0.05  # without a second update nothing has moved
    single = trainer(nano, loss, lr=1e-2).step(flat).metrics
    assert single["ratio/clip_fraction"] == 0.0


def test_more_updates_than_groups_are_an_error(nano: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.updates is 5, the batch has 4 groups"):
        trainer(nano, updates=5).step(ragged_batch())


def test_the_gap_between_engines_is_told_apart_from_old_weights(nano: str) -> None:
    batch = rich_batch()
    one = trainer(nano)
    one.policy_version = 1
    mask, versions = batch["loss_mask"], batch["token_versions"]
    versions[:] = torch.where(mask, (torch.arange(16) % 2)[:, None], -1)
    with torch.no_grad():
        positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        logprobs, _ = one.policy(batch["tokens"], positions, mask)
    now = torch.zeros_like(batch["behavior_logprobs"]).masked_scatter(mask, logprobs)
    batch["behavior_logprobs"] = torch.where(versions == 1, now + 0.01, now - 0.5)
    metrics = one.step(batch).metrics
    assert metrics["extra/engine_mismatch"] == pytest.approx(0.01, rel=1e-2)
    assert metrics["extra/staleness_ratio"] == pytest.approx(math.exp(0.5), rel=1e-3)


@pytest.mark.parametrize("sampler", [{}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5}])
def test_the_ratio_is_one_when_the_policy_itself_was_the_sampler(nano: str, sampler: dict[str, Any]) -> None:
    one = trainer(nano, **sampler)
    batch = ragged_batch()
    with torch.no_grad():
        positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        logprobs, _ = one.policy(batch["tokens"], positions, batch["loss_mask"])
    batch["behavior_logprobs"] = torch.zeros_like(batch["behavior_logprobs"]).masked_scatter(
        batch["loss_mask"], logprobs
    )
    metrics = one.step(batch).metrics
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio/clip_fraction"] == 0.0


def supports_of(batch: TensorDict) -> torch.Tensor:
    """`[B, T, 4]`: each trained token and its two neighbours, and of every fifth token none."""
    tokens = batch["tokens"]
    kept = torch.stack([tokens, tokens + 1, tokens - 1, torch.full_like(tokens, -1)], dim=-1)
    return torch.where((batch["loss_mask"] & (tokens % 5 > 0))[..., None], kept, -1).int()


@pytest.mark.parametrize("cut", [{"microbatch_tokens": 24}, {"packing": True, "microbatch_tokens": 30}])
def test_recorded_supports_are_what_trainer_and_reference_take_log_probs_over(nano: str, cut: dict[str, Any]) -> None:
    sampler: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9}
    batch = ragged_batch()
    batch["kept_tokens"] = supports_of(batch)
    mask = batch["loss_mask"]
    one = trainer(nano, **sampler, **cut)
    with torch.no_grad():
        positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
        logprobs, _ = one.policy(batch["tokens"], positions, mask, batch["kept_tokens"][mask])
        anew, _ = one.policy(batch["tokens"], positions, mask)
    recorded = batch["tokens"][mask] % 5 > 0
    assert (logprobs[recorded] - anew[recorded]).abs().mean() > 0.1
    batch["behavior_logprobs"] = torch.zeros_like(batch["behavior_logprobs"]).masked_scatter(mask, logprobs)
    reference = Reference(ModelSpec(nano, "float32", **sampler), microbatch_tokens=24).logprobs(batch)
    torch.testing.assert_close(reference, batch["behavior_logprobs"], atol=1e-5, rtol=0)
    batch["ref_logprobs"] = reference
    metrics = one.step(batch).metrics
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio/clip_fraction"] == 0.0


def test_old_behavior_engages_the_clip(nano: str) -> None:
    clip_fraction = trainer(nano).step(ragged_batch()).metrics["ratio/clip_fraction"]
    assert clip_fraction is not None
    assert 0.1 < clip_fraction < 0.9


def test_a_snapshot_is_the_weights_bit_for_bit_also_in_bfloat16(nano: str) -> None:
    hf = load_hf(nano, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        publisher = Publisher(hf.named_parameters(), dtype)
        publisher.snapshot(1, 0)
        segment = attach(publisher.endpoint, 0)
        parameters = dict(hf.named_parameters())
        for entry in publisher.endpoint.layout.entries:
            assert torch.equal(view(segment.buffer, entry), parameters[entry.name].to(dtype)), entry.name
        segment.close()
        publisher.close()


def test_trainable_patterns_freeze_the_rest_and_a_pattern_without_a_match_is_an_error(nano: str) -> None:
    hf = load_hf(nano, torch.float32)
    freeze_except(hf, [r"model\.norm\."])
    assert [n for n, p in hf.named_parameters() if p.requires_grad] == ["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"trainer\.trainable: 'nothing' matches none"):
        freeze_except(hf, ["nothing"])
