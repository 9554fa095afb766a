"""Laws of tensor parallelism: however a model is cut, it learns, publishes and saves what it would on one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from tensordict import TensorDict

from actors.lora import LoraConfig
from actors.model import load_hf
from actors.packing import micro_batches
from actors.sharding import count_shards
from actors.tensor_parallel import check_tensor_parallel
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_run
from forge.batch import collate, make_group
from forge.config import parse
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.segment import Segment, SegmentRef
from weightsync.config import WeightSyncConfig
from weightsync.layout import Layout, view
from weightsync.offer import Endpoint

WORKING = sorted(set(small_models.FAMILIES) - {"bloom", "qwen3_moe"})
SETTINGS: dict[str, Any] = {
    # With a large eps AdamW's update is smooth in the gradient, so rounding stays rounding.
    "lr": 5.0,
    "eps": 1.0,
    "clip_norm": 0.02,
    "microbatch_tokens": 40,
}


def batch(seed: int) -> TensorDict:
    """Eight ragged episodes."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for number in range(2):
        completions = [
            torch.randint(7, 60, (1 + (5 * g + number) % 11,), generator=generator).tolist() for g in range(4)
        ]
        logprobs = [[-2.0 - 0.1 * (t % 3) for t in c] for c in completions]
        group = make_group([5, 6, 7], completions, logprobs, [[0] * len(c) for c in completions], group_id=number)
        group["advantages"] = torch.randn(4, generator=generator)
        groups.append(group)
    return collate(groups)


def trainer(model: str, rank: int = 0, world: int = 1, dtype: str = "float32", **config: Any) -> Trainer:
    settings = TrainerConfig(**{**SETTINGS, **config})
    return Trainer(settings, LossConfig(), ModelSpec(model, dtype), rank=rank, world=world)


def share(one: Trainer, seed: int) -> TensorDict:
    """Uneven: the first data-parallel rank has most of the batch."""
    rows = [list(range(8)), [], []] if one.dp_size == 1 else [list(range(6)), [6, 7]]
    return batch(seed)[torch.tensor(rows[one.dp_rank])]


def weights(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one._full_state_dict().items()}


def read_published(endpoint: Endpoint, buffer: int) -> dict[str, torch.Tensor]:
    """Every tensor of a snapshot, put together from what each rank wrote."""
    whole = {e.name: torch.full(e.shape, torch.nan, dtype=e.torch_dtype) for e in endpoint.layout.entries}
    for link, layout in zip(endpoint.links, endpoint.sources, strict=True):
        segment = Segment.attach(SegmentRef(**link["buffers"][buffer]))
        read_layout(segment.buffer, layout, whole)
        segment.close()
    return whole


def read_layout(memory: torch.Tensor, layout: Layout, whole: dict[str, torch.Tensor]) -> None:
    for entry in layout.entries:
        whole[entry.name][tuple(slice(start, stop) for start, stop in entry.box)] = view(memory, entry)


def _rank(rank: int, world: int, folder: str, models: dict[str, str], settings: dict[str, dict[str, Any]]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for name, model in models.items():
        one = trainer(model, rank, world, **settings[name])
        out: dict[str, Any] = {"metrics": [one.step(share(one, seed)).metrics for seed in range(2)]}
        out["weights"] = weights(one)
        one.state.stage(Path(folder) / f"{name}-state", one.policy_version)
        endpoint = one.connect("float32", WeightSyncConfig(), "memory")
        one.publisher.snapshot(1, 1)
        dist.barrier()
        if rank == 0:
            out["published"] = read_published(endpoint, 1)
        one.state.wait(60)
        one.save(f"{folder}/{name}-checkpoint", model)
        out["metrics"].append(one.step(share(one, 2)).metrics)
        out["after"] = weights(one)
        if rank == 0:
            torch.save(out, f"{folder}/{name}.pt")
        dist.barrier()
        one.close()
    os._exit(0)  # see test_trainer.py


def assert_close(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=5e-6, msg=name)


def check_against_one_rank(folder: Path, families: dict[str, dict[str, Any]], world: int) -> None:
    """Trains each family on `world` ranks with its settings, and on one rank without sharding; compares all there is.

    What follows a family's name in a key of `families` tells its cases apart.
    """
    models = {name: small_models.family(name.split()[0], folder / name) for name in families}
    torch.multiprocessing.spawn(_rank, args=(world, str(folder), models, families), nprocs=world)
    for name, model in models.items():
        sharded = torch.load(folder / f"{name}.pt")
        lora = {"lora": families[name].get("lora", LoraConfig())}
        one = trainer(model, **lora)
        before = weights(one)
        metrics = [one.step(share(one, seed)).metrics for seed in range(2)]
        trained = weights(one)
        learns = {key for key, parameter in one.policy.hf.named_parameters() if parameter.requires_grad}
        moved = {key: float((value - before[key]).abs().max()) for key, value in trained.items()}
        assert max(moved.values()) > 1e-3, name
        assert all((moved[key] > 0) == (key in learns) for key in moved if key != "lm_head.weight"), name
        assert_close(sharded["weights"], trained)
        metrics.append(one.step(share(one, 2)).metrics)
        for ours, reference in zip(sharded["metrics"], metrics, strict=True):
            assert reference["grad_norm"] > SETTINGS["clip_norm"]
            assert ours.keys() == reference.keys()
            for key, value in reference.items():
                assert ours[key] == (value if value is None else pytest.approx(value, rel=1e-3, abs=1e-5)), (name, key)
        assert_close(sharded["after"], weights(one))

        resumed = trainer(model, **lora)
        assert resumed.load_state(str(folder / f"{name}-state")) == 2
        assert_equal(weights(resumed), sharded["weights"])
        resumed.step(share(resumed, 2))
        assert_close(weights(resumed), sharded["after"])

        if lora["lora"].rank:
            continue
        assert_equal(load_hf(folder / f"{name}-checkpoint", torch.float32).state_dict(), sharded["weights"])
        published = sharded["published"]
        assert set(published) >= {key for key, _ in one.policy.hf.named_parameters()}
        assert_equal(published, {key: sharded["weights"][key] for key in published})


def assert_equal(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    for name, value in reference.items():
        assert torch.equal(ours[name], value), name


def test_two_tensor_parallel_ranks_are_one(tmp_path: Path) -> None:
    cut: dict[str, Any] = {"tensor_parallel": 2}
    families = {"qwen3": cut, "gpt2": {**cut, "packing": True}, "gemma2": {**cut, "gradient_checkpointing": True}}
    families["qwen2 with adapters"] = {**cut, "lora": LoraConfig(rank=2, alpha=8.0)}
    check_against_one_rank(tmp_path, families, world=2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_by_two_ranks_are_one_for_every_family(tmp_path: Path) -> None:
    families: dict[str, dict[str, Any]] = {name: {"tensor_parallel": 2} for name in WORKING}
    families["gpt2"]["packing"] = families["llama"]["packing"] = True
    families["qwen2"]["gradient_checkpointing"] = True
    families["llama with adapters"] = {"tensor_parallel": 2, "lora": LoraConfig(rank=2, alpha=8.0)}
    check_against_one_rank(tmp_path, families, world=4)


@pytest.mark.parametrize("name", WORKING)
def test_the_families_that_work_are_told_from_their_config_alone(name: str, tmp_path: Path) -> None:
    model = small_models.family(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    check_tensor_parallel(model, 2)
    with pytest.raises(
        ConfigError, match=rf"tensor_parallel is 3, .* num_attention_heads of {model}, 4; it can be 1, 2"
    ):
        check_tensor_parallel(model, 3)


def test_a_family_without_a_plan_is_refused_by_name_and_one_rank_takes_any(tmp_path: Path) -> None:
    for name, why in (("bloom", "has no plan"), ("qwen3_moe", "cut experts")):
        model = small_models.family(name, tmp_path / name)
        with pytest.raises(ConfigError, match=rf"works for Llama, .*GPT-2, .*{name}: .*{why}.*tensor_parallel=1"):
            check_tensor_parallel(model, 2)
        check_tensor_parallel(model, 1)


def test_what_no_number_of_ranks_divides_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    model = small_models.family("llama", tmp_path, num_key_value_heads=1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, .* num_key_value_heads .* 1; it can be 1$"):
        trainer(model, tensor_parallel=2)


def test_processes_come_in_groups_that_share_the_layers() -> None:
    assert [count_shards(8, tensor_parallel) for tensor_parallel in (1, 2, 8)] == [8, 4, 1]
    with pytest.raises(ConfigError, match=r"mesh\.trainer\.procs is 3, trainer\.tensor_parallel 2: .* use 4 processes"):
        count_shards(3, 2)
    with pytest.raises(ConfigError, match=r"mesh\.trainer\.procs is 1, trainer\.tensor_parallel 4: .* use 4 processes"):
        count_shards(1, 4)


def test_a_run_whose_processes_do_not_come_in_groups_is_refused_before_it_starts() -> None:
    def plan(*words: str) -> None:
        options = ["--mesh.device=cpu", "--mesh.slots=4", *words]
        plan_run(parse(AppConfig, options, default_config=DEFAULT_PRESET, prog="test", description=""), None)

    plan("--mesh.trainer.procs=4", "--trainer.tensor_parallel=2", "--grpo.group_size=2", "--grpo.batch_size=2")
    with pytest.raises(ConfigError, match=r"mesh\.trainer\.procs is 3, trainer\.tensor_parallel 2"):
        plan("--mesh.trainer.procs=3", "--trainer.tensor_parallel=2")
    with pytest.raises(ConfigError, match=r"grpo\.batch_size is 2, the trainer's ranks divide it into 4"):
        plan("--mesh.trainer.procs=4", "--grpo.group_size=2", "--grpo.batch_size=2")
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel must be > 0, got 0"):
        plan("--trainer.tensor_parallel=0")


def test_bf16_computes_in_bf16_and_keeps_the_rest_in_float32(tmp_path: Path) -> None:
    one = trainer(small_models.family("gemma2", tmp_path), dtype="bfloat16")
    seen: dict[str, torch.dtype] = {}
    layer, head = one.policy.hf.model.layers[0], one.policy
    layer.register_forward_hook(lambda _, args, output: seen.update(layer=output.dtype, input=args[0].dtype))
    head.register_forward_hook(lambda _, args, output: seen.update(logprobs=output[0].dtype, entropy=output[1].dtype))
    result = one.step(batch(0))
    assert seen == {
        "layer": torch.bfloat16,
        "input": torch.bfloat16,
        "logprobs": torch.float32,
        "entropy": torch.float32,
    }
    state = [value for moments in one._optimizer.state.values() for value in moments.values()]
    assert {tensor.dtype for tensor in [*one._parameters, *state]} == {torch.float32}
    norm = trainer(str(tmp_path)).step(batch(0)).metrics["grad_norm"]
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=0.05)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at its own tensors
@pytest.mark.parametrize("packing", [False, True])
def test_compiled_layers_give_the_same_gradient_at_every_length_from_a_few_graphs(
    tmp_path: Path, packing: bool
) -> None:
    torch._dynamo.reset()
    model = small_models.family("qwen3", tmp_path)
    options: dict[str, Any] = {"microbatch_tokens": 200, "gradient_checkpointing": True, "packing": packing}
    one, compiled = trainer(model), trainer(model, compile=True, **options)
    made = []
    for seed in range(6):
        td = batch(seed)[: 8 - seed]
        (cut,) = micro_batches(td, 200, packing=packing)
        assert len(cut.rows) == 8 - seed
        plain, ours = one.step(td).metrics, compiled.step(td).metrics
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert_close(weights(compiled), weights(one))
    assert made[0] > 0
    assert made[1] == made[-1], f"graphs by step {made}: rows of other numbers of episodes are compiled anew"


def test_compiling_needs_a_compiler_and_layers_that_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.compile is true and trainer\.tensor_parallel 2: "):
        TrainerConfig(compile=True, tensor_parallel=2).validate()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler no-such-compiler; install one, .* CXX, or use"):
        TrainerConfig(compile=True).validate()
