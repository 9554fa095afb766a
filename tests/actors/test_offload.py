"""Laws of tensors that leave a device and come back; on a CPU it is host memory that is emptied and filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from actors.critic import CriticConfig
from actors.lora import LoraConfig
from actors.offload import Offload
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.losses import LossConfig
from forge.segment import Segment, SegmentRef
from weightsync.config import WeightSyncConfig

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """What lies behind them; nothing may read the others, not even to print them."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.untyped_storage().nbytes() for tensor in local)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_away_is_what_it_was_views_and_ties_included(device: str) -> None:
    whole = torch.randn(64, 32, device=device)
    tensors = [whole, whole[3:9, 5:], whole.t(), torch.arange(7, device=device)]
    before = [tensor.clone().cpu() for tensor in tensors]
    offload = Offload(lambda: tensors, device)
    for _ in range(2):
        offload.away()
        left = nbytes(tensors)
        assert left == 0
        for tensor, value in zip(tensors, before, strict=True):
            assert torch.equal(offload.at_home(tensor), value)
        offload.bring()
        for tensor, value in zip(tensors, before, strict=True):
            assert torch.equal(tensor.cpu(), value)
            assert offload.at_home(tensor) is tensor
    whole.add_(1)  # what changes while it is here is what is away afterwards
    with pytest.raises(ValueError, match="no loss"), offload.here():
        raise ValueError("no loss")
    assert torch.equal(offload.at_home(tensors[2]), before[2] + 1)


def test_where_there_is_no_room_all_stays_away_and_can_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(5), torch.randn(6)]
    before = [tensor.clone() for tensor in tensors]
    offload = Offload(lambda: tensors, "cpu")
    offload.away()
    copies: list[torch.Tensor] = []

    def full(*args: Any, **kwargs: Any) -> Any:
        copies.append(args[0])
        if len(copies) == 2:
            raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", full)
        with pytest.raises(torch.OutOfMemoryError):
            offload.bring()
    left = nbytes(tensors)
    assert left == 0
    offload.bring()
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))


def small_batch() -> TensorDict:
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int) -> list[int]:
        return torch.randint(7, 40, (count,), generator=generator).tolist()

    groups = []
    for number in range(2):
        completions = [numbers(3 + (number + 5 * g) % 7) for g in range(4)]
        logprobs, versions = [[-2.0] * len(c) for c in completions], [[0] * len(c) for c in completions]
        group = make_group(numbers(4), completions, logprobs, versions, group_id=number)
        groups.append(group.update({"advantages": torch.randn(4, generator=generator)}))
    return collate(groups)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """Bfloat16 goes through FSDP2, which makes a process group of this process alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trainer(device: str, offload: bool, **options: Any) -> Trainer:
    config = TrainerConfig(lr=1e-3, lora=options.pop("lora", LoraConfig()), trainable=options.pop("trainable", []))
    spec = ModelSpec(str(resolve_model("nano")), options.pop("dtype", "float32"), device)
    return Trainer(config, options.pop("loss", LossConfig()), spec, offload=offload, **options)


def held(one: Trainer) -> list[torch.Tensor]:
    """All that a trainer keeps from step to step."""
    updates = [one._updates, *([one._critic._updates] if one._critic else [])]
    states = [state for each in updates for state in each.optimizer.state.values()]
    assert len(states) == sum(len(each.parameters) for each in updates)
    moments = [value for state in states for value in state.values()]
    critic = list(one._critic.model.parameters()) if one._critic else []
    return [*one.policy.parameters(), *critic, *moments]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"lora": LoraConfig(rank=4)},
        {"loss": LossConfig(token_advantages="gae"), "critic": CriticConfig(lr=1e-3)},
    ],
    ids=["all weights", "FSDP2", "adapters", "a critic"],
)
def test_a_trainer_that_leaves_between_its_steps_trains_the_same(device: str, options: dict[str, Any]) -> None:
    stays, leaves = trainer(device, offload=False, **options), trainer(device, offload=True, **options)
    batch = small_batch()
    if "critic" in options:
        batch["rewards"] = torch.linspace(-1, 1, batch.shape[0])
    for _ in range(3):
        with leaves.here():
            theirs = leaves.step(batch).metrics
        assert theirs == stays.step(batch).metrics
        left = nbytes(held(leaves))
        assert left == 0
    with leaves.here():
        for ours, other in zip(held(leaves), held(stays), strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_of_a_trainer_that_is_away_holds_its_weights(device: str) -> None:
    one = trainer(device, offload=True)
    endpoint = one.connect("float32", WeightSyncConfig(), "memory")
    with one.here():
        one.step(small_batch())
        weights = {name: p.detach().clone().cpu() for name, p in one.policy.hf.named_parameters()}
    one.publisher.snapshot(1, 0)
    (ref,) = {SegmentRef(**link["buffers"][0]) for link in endpoint.links}
    segment = Segment.attach(ref)
    for entry in endpoint.layout.entries:
        if entry.name in weights:
            published = segment.buffer[entry.offset : entry.offset + entry.nbytes].view(torch.float32)
            assert torch.equal(published, weights[entry.name].flatten()), entry.name
    segment.close()
    one.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # bfloat16 goes through FSDP2
def test_a_trainer_that_is_away_leaves_the_device_empty(dtype: str) -> None:
    before = torch.cuda.memory_reserved()
    one = trainer("cuda", offload=True, dtype=dtype)
    with one.here():
        one.step(small_batch())
        full = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() < 0.1 * full
    assert torch.cuda.memory_reserved() - before <= 64 << 20  # what kernels keep for themselves
