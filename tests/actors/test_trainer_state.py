"""A trainer that was saved and loaded goes on as the one that was not, whatever trains while it is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.errors import ConfigError, RunFolderError
from forge.losses import LossConfig


@pytest.fixture(scope="module")
def nano() -> str:
    return str(resolve_model("nano"))


def batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    completions = [torch.randint(7, 40, (3 + g,), generator=generator).tolist() for g in range(4)]
    logprobs = [[-2.0] * len(c) for c in completions]
    group = make_group([5, 6], completions, logprobs, [[0] * len(c) for c in completions], group_id=seed)
    group["advantages"] = torch.randn(4, generator=generator)
    return collate([group])


def trainer(nano: str, rank: int = 0, world: int = 1, **config: object) -> Trainer:
    settings = TrainerConfig(warmup_steps=5, lr=1e-3, **config)  # type: ignore[arg-type]
    return Trainer(settings, LossConfig(), ModelSpec(nano, "float32"), rank=rank, world=world)


def weights(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one._full_state_dict().items()}


def train(one: Trainer, seeds: range) -> dict[str, torch.Tensor]:
    for seed in seeds:
        one.step(batch(seed))
    return weights(one)


def test_a_loaded_trainer_makes_the_very_same_weights(nano: str, tmp_path: Path) -> None:
    one = trainer(nano)
    train(one, range(3))
    one.state.stage(tmp_path / "state", one.policy_version)
    undisturbed = train(one, range(3, 6))  # while the state is written
    one.state.wait(60)
    other = trainer(nano)
    train(other, range(50, 51))
    assert other.load_state(str(tmp_path / "state")) == other.policy_version == 3
    resumed = train(other, range(3, 6))
    assert resumed.keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        assert torch.equal(resumed[name], value), name


def _save_with_two_ranks(rank: int, folder: str, nano: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    one = trainer(nano, rank, 2)
    for seed in range(3):
        one.step(batch(seed))
    one.state.stage(Path(folder) / "state", one.policy_version)
    for seed in range(3, 6):
        one.step(batch(seed))
    one.state.wait(60)
    after = weights(one)
    if rank == 0:
        torch.save(after, f"{folder}/after.pt")
    dist.destroy_process_group()


def test_another_number_of_ranks_goes_on_from_the_same_state(nano: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_save_with_two_ranks, args=(str(tmp_path), nano), nprocs=2)
    one = trainer(nano)
    assert one.load_state(str(tmp_path / "state")) == 3
    resumed, undisturbed = train(one, range(3, 6)), torch.load(tmp_path / "after.pt")
    for name, value in undisturbed.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_state_that_does_not_fit_or_is_not_there_is_an_error_with_its_folder(nano: str, tmp_path: Path) -> None:
    one = trainer(nano)
    with pytest.raises(ConfigError, match=r"nothing holds no state of a trainer"):
        one.load_state(str(tmp_path / "nothing"))
    one.state.stage(tmp_path / "state", 1)
    one.state.wait(60)
    other = trainer(str(resolve_model("tiny")))
    with pytest.raises(ConfigError, match=r"cannot read the trainer's state in .*state: .*resume with the model"):
        other.load_state(str(tmp_path / "state"))


def test_a_disk_that_refuses_is_an_error_with_the_folder(nano: str, tmp_path: Path) -> None:
    one = trainer(nano)
    (tmp_path / "file").touch()
    one.state.stage(tmp_path / "file" / "state", 1)
    with pytest.raises(RunFolderError, match=r"cannot write .*file/state"):
        one.state.wait(60)


def test_a_disk_without_room_is_said_before_anything_is_written(
    nano: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(nano)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(RunFolderError, match=r"state: No space left on device, the trainer's state needs \d{7} bytes"):
        one.state.stage(tmp_path / "state", 1)
    assert not (tmp_path / "state").exists()
