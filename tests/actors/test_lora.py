"""Laws of training adapters: only they are trained, published and kept, and the merged export is what was trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import torch.distributed as dist
from peft import PeftModel
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from actors.lora import ADAPTER_FOLDER, LoraConfig, targets_of_model
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.segment import Segment, SegmentRef
from weightsync.config import WeightSyncConfig
from weightsync.layout import is_adapter, view

ALL_LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]


@pytest.fixture(scope="module")
def nano() -> str:
    return str(resolve_model("nano"))


def batch(seed: int = 0, num_groups: int = 4) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for number in range(num_groups):
        lengths = [1 + (3 * number + 5 * g) % 11 for g in range(4)]
        completions = [torch.randint(7, 40, (length,), generator=generator).tolist() for length in lengths]
        logprobs = [[-2.0] * len(c) for c in completions]
        group = make_group([5, 6, 7], completions, logprobs, [[0] * len(c) for c in completions], group_id=number)
        group["advantages"] = torch.randn(4, generator=generator)
        groups.append(group)
    return collate(groups)


def trainer(model: str, rank: int = 0, world: int = 1, dtype: str = "float32", **config: Any) -> Trainer:
    lora = LoraConfig(**{"rank": 4, **config.pop("lora", {})})
    settings = TrainerConfig(**{"lr": 1e-2, "clip_norm": 1e3, "lora": lora, **config})
    settings.validate()
    return Trainer(settings, LossConfig(), ModelSpec(model, dtype), rank=rank, world=world)


def adapter(one: Trainer) -> dict[str, torch.Tensor]:
    """The adapter's matrices, whole."""
    named = ((name, p.detach()) for name, p in one.policy.hf.named_parameters() if is_adapter(name))
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in named}


def gradient(one: Trainer, rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    """What the optimizer sees of the adapters, once both matrices have one: B begins as zero, and A has none then."""
    seen: dict[str, torch.Tensor] = {}

    def look(*_: Any) -> None:
        for name, parameter in one.policy.hf.named_parameters():
            if (grad := parameter.grad) is not None:
                seen[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    _set_b(one)
    one._optimizer.register_step_pre_hook(look)
    share = batch()
    one.step(share if rows is None else share[torch.tensor(rows)])
    return seen


@torch.no_grad()
def _set_b(one: Trainer) -> None:
    """Some value for every B, the same ones for any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in one.policy.hf.named_parameters():
        if "lora_B" in name:
            value = 0.1 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                value = dist.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
                parameter.to_local().copy_(value)
            else:
                parameter.copy_(value)


def logits(hf: Any) -> torch.Tensor:
    with torch.no_grad():
        return hf.eval()(input_ids=torch.tensor([PROMPT]), use_cache=False).logits


def test_it_begins_as_the_base_model_and_a_step_changes_the_adapters_alone(nano: str) -> None:
    one, base = trainer(nano), AutoModelForCausalLM.from_pretrained(nano)
    assert torch.equal(logits(one.policy.hf), logits(base))
    before = {name: p.detach().clone() for name, p in one.policy.hf.named_parameters()}
    one.step(batch())
    one.step(batch(1))
    for name, parameter in one.policy.hf.named_parameters():
        assert torch.equal(parameter, before[name]) != is_adapter(name), name
    adapted = {name.split(".")[-4] for name in before if is_adapter(name)}
    assert sorted(adapted) == ALL_LINEAR == targets_of_model(nano, LoraConfig(rank=4))


def test_where_some_layers_are_frozen_the_others_are_adapted(nano: str, tmp_path: Path) -> None:
    one = trainer(nano, trainable=[r"model\.layers\.1\.", r"model\.norm\."], lora={"targets": ["q_proj", "up_proj"]})
    modules = {name.partition(".lora_")[0] for name in adapter(one)}
    assert modules == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    assert all(p.requires_grad == is_adapter(name) for name, p in one.policy.hf.named_parameters())
    _set_b(one)
    one.save(str(tmp_path / "checkpoint"), nano)
    check_export(one, tmp_path / "checkpoint", nano)
    with pytest.raises(ConfigError, match=r"trainer\.trainable leaves none of the layers down_proj, gate_proj"):
        trainer(nano, trainable=[r"model\.norm\."])


def test_gradient_checkpointing_and_the_cuts_of_a_batch_change_nothing(nano: str) -> None:
    wanted = gradient(trainer(nano))
    assert len(wanted) == 2 * 2 * len(ALL_LINEAR)
    assert min(float(g.abs().max()) for g in wanted.values()) > 1e-5
    other = gradient(trainer(nano, gradient_checkpointing=True, microbatch_tokens=24, packing=True))
    for name, value in wanted.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6, msg=name)


def _of_two_ranks(rank: int, folder: str, nano: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    one = trainer(nano, rank, 2, lora={"rank": 3}, gradient_checkpointing=True)
    assert all(isinstance(p, DTensor) for p in one.policy.hf.parameters())
    found = {"gradient": gradient(one, [list(range(11)), list(range(11, 16))][rank])}
    found["adapter"] = adapter(one)
    endpoint = one.connect("float32", WeightSyncConfig(), "memory")
    one.publisher.snapshot(1, 1)
    one.state.stage(Path(folder) / "state", one.policy_version)
    one.state.wait(60)
    one.save(f"{folder}/checkpoint", nano)
    if rank == 0:
        (ref,) = {SegmentRef(**link["buffers"][1]) for link in endpoint.links}
        snapshot = Segment.attach(ref)
        found["published"] = {e.name: view(snapshot.buffer, e).clone() for e in endpoint.layout.entries}
        torch.save(found, f"{folder}/out.pt")
    dist.barrier()
    one.close()
    # As in test_trainer: a gloo thread that meets a finalizing interpreter aborts the process.
    os._exit(0)


def test_two_sharded_ranks_train_publish_and_save_what_one_does(nano: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_of_two_ranks, args=(str(tmp_path), nano), nprocs=2)
    two = torch.load(tmp_path / "out.pt")
    one = trainer(nano, lora={"rank": 3})
    wanted = gradient(one)
    assert wanted.keys() == two["gradient"].keys()
    for name, value in wanted.items():
        torch.testing.assert_close(two["gradient"][name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert {name.replace(".lora_", ".").replace(".default.weight", "") for name in wanted} == two["published"].keys()
    for name, value in two["adapter"].items():
        published = two["published"][name.replace(".lora_", ".").replace(".default.weight", "")]
        assert torch.equal(published, value), name

    assert one.load_state(str(tmp_path / "state")) == 1
    for name, value in adapter(one).items():
        assert torch.equal(two["adapter"][name], value), name
    check_export(one, tmp_path / "checkpoint", nano)


def check_export(one: Trainer, folder: Path, base: str) -> None:
    """Both forms of the export compute what the trainer does, and the first is a plain model."""
    trained = logits(one.policy.hf)
    assert float((trained - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max()) > 0.01
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert merged.state_dict().keys() == AutoModelForCausalLM.from_pretrained(base).state_dict().keys()
    torch.testing.assert_close(logits(merged), trained, atol=1e-4, rtol=0)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder / ADAPTER_FOLDER))
    torch.testing.assert_close(logits(peft), trained, atol=1e-5, rtol=0)
    assert json.loads((folder / ADAPTER_FOLDER / "adapter_config.json").read_text())["base_model_name_or_path"] == base


@pytest.mark.parametrize("model", ["nano", "biased", "experts"])
def test_the_merged_export_and_the_adapter_load_with_the_logits_of_the_trainer(model: str, tmp_path: Path) -> None:
    base = small_models.make(model, tmp_path / "base")
    if base != str(resolve_model("nano")):
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(resolve_model("nano")).save_pretrained(base)
    one = trainer(base, lora={"rslora": True, "rank": 9, "alpha": 7.5})
    _set_b(one)
    one.save(str(tmp_path / "checkpoint"), base)
    check_export(one, tmp_path / "checkpoint", base)
