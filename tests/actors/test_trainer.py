"""Laws of the optimizer step on a real (0.1 M) Hugging Face model: invariants a and b, clipping, checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from actors.model import freeze_except, load_hf
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.errors import ConfigError
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


def gradient(nano: str, batch: TensorDict, **config: Any) -> dict[str, torch.Tensor]:
    one = trainer(nano, **config)
    one._accumulate(batch)
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
    one = Trainer(TrainerConfig(microbatch_tokens=30), LossConfig(), ModelSpec(nano, "float32"), rank=rank, world=world)
    metrics = one._accumulate(ragged_batch()[torch.tensor(rows)])
    full = {name: p.grad.full_tensor() for name, p in one.policy.hf.named_parameters()}
    before = {n: p.detach().full_tensor().clone() for n, p in one.policy.hf.named_parameters()}
    endpoint = one.connect("float32", WeightSyncConfig(), "memory")
    one.publisher.snapshot(1, 1)
    dist.barrier()
    if rank == 0:
        torch.save({"gradient": full, "metrics": metrics}, f"{folder}/out.pt")
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
    metrics = one._accumulate(ragged_batch())
    assert_same(two["gradient"], {n: p.grad for n, p in one.policy.hf.named_parameters()})
    for key, value in metrics.items():
        assert two["metrics"][key] == pytest.approx(value, abs=1e-5), key
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


def test_a_non_finite_gradient_is_an_error_and_leaves_the_weights_alone(nano: str) -> None:
    one = trainer(nano)
    before = {n: p.detach().clone() for n, p in one.policy.hf.named_parameters()}
    batch = ragged_batch()
    batch["advantages"][0] = float("inf")
    with pytest.raises(FloatingPointError, match="the gradient norm of step 1 is"):
        one.step(batch)
    assert all(torch.equal(before[n], p) for n, p in one.policy.hf.named_parameters())
    assert one.policy_version == 0


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
