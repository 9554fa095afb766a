"""Laws of training a reward model: what is scored, and one gradient however pairs are cut and divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.functional import logsigmoid

from actors.reward_trainer import RewardTrainer, check_options, ends_only
from actors.trainer import ModelSpec, TrainerConfig
from actors.updates import RankGroup, mini_batches
from apps.grpo.models import resolve_model
from forge.batch import collate, make_group
from forge.errors import ConfigError
from forge.packing import first_fit, flatten, pack

PAIRS = [([5, 6], [7]), ([8], [9, 10, 11, 12]), ([13, 14, 15], [16, 17]), ([20] * 6, [21] * 5)]


def pairs() -> TensorDict:
    """Ragged."""
    groups = []
    for number, two in enumerate(PAIRS):
        zeros: list[list[int]] = [[0] * len(c) for c in two]
        groups.append(make_group([1, 2, 3][: 1 + number % 3], two, zeros, zeros, group_id=number))
    return collate(groups)


def trainer(**options: Any) -> RewardTrainer:
    made = RewardTrainer(TrainerConfig(**options), ModelSpec(resolve_model("nano"), "float32"))
    with torch.no_grad():  # a head of zeros has no gradient to give to what lies below
        made.model.hf.score.weight.copy_(torch.linspace(-1, 1, made.model.hf.score.weight.numel())[None])
    return made


def gradient(batch: TensorDict, **options: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    made = trainer(**options)
    flat = ends_only(batch)
    [cuts] = mini_batches(flat, TrainerConfig(**options), RankGroup(), "cpu", together=2)
    totals = made._backward(cuts).tolist()
    return {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}, totals


def test_the_score_of_an_episode_is_the_one_of_its_last_token() -> None:
    batch, made = pairs(), trainer()
    with torch.no_grad():
        scores = [
            float(made.model.hf(input_ids=row[None, :length]).logits[0, 0])
            for row, length in zip(batch["tokens"], batch["lengths"].tolist(), strict=True)
        ]
    margins = torch.tensor(scores)[0::2] - torch.tensor(scores)[1::2]
    metrics = made.step(batch).metrics
    assert metrics["loss/policy"] == pytest.approx(float(-logsigmoid(margins).mean()), rel=1e-4)
    assert metrics["extra/pair_margin"] == pytest.approx(float(margins.mean()), rel=1e-3, abs=1e-5)
    assert metrics["extra/pair_accuracy"] == float((margins > 0).float().mean())
    assert made.version == 1


@pytest.mark.parametrize(
    "options", [{"microbatch_tokens": 18}, {"packing": True}, {"packing": True, "microbatch_tokens": 20}]
)
def test_the_gradient_does_not_see_how_pairs_are_cut(options: dict[str, Any]) -> None:
    flat = flatten(pairs())
    whole, totals = gradient(pairs())
    packed = pack([flat], first_fit(flat["lengths"].tolist(), 25, together=2))
    for batch in (pairs(), packed):
        cut, cut_totals = gradient(batch, **options)
        assert cut_totals == pytest.approx(totals, rel=1e-5)
        assert cut.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def _rank_step(rank: int, world: int, folder: str, nano: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    batch = pairs()[[slice(0, 6), slice(6, 8)][rank]]  # uneven: one rank runs out of passes first
    made = RewardTrainer(
        TrainerConfig(lr=1e-2, microbatch_tokens=18), ModelSpec(nano, "float32"), rank=rank, world=world
    )
    first, second = made.step(batch).metrics, made.step(batch).metrics
    made.save(f"{folder}/checkpoint", nano)
    made.state.stage(Path(folder) / "state", made.version)
    made.state.wait(60)
    if rank == 0:
        torch.save([first, second], f"{folder}/out.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_train_like_one_which_goes_on_from_their_state(tmp_path: Path) -> None:
    nano = resolve_model("nano")
    torch.multiprocessing.spawn(_rank_step, args=(2, str(tmp_path), nano), nprocs=2)
    one = RewardTrainer(TrainerConfig(lr=1e-2), ModelSpec(nano, "float32"))
    for theirs in torch.load(tmp_path / "out.pt"):
        ours = one.step(pairs()).metrics
        for key in ("loss/policy", "extra/pair_accuracy", "extra/pair_margin", "grad_norm"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-5), key
    again = RewardTrainer(TrainerConfig(lr=1e-2), ModelSpec(str(tmp_path / "checkpoint"), "float32"))
    resumed = RewardTrainer(TrainerConfig(lr=1e-2), ModelSpec(nano, "float32"))
    assert resumed.load_state(str(tmp_path / "state")) == 2
    for name, value in resumed.model.hf.state_dict().items():
        torch.testing.assert_close(again.model.hf.state_dict()[name], value)
        torch.testing.assert_close(one.model.hf.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("option", [{"tensor_parallel": 2}, {"compile": True}])
def test_options_that_it_has_not_are_refused(option: dict[str, Any]) -> None:
    check_options(TrainerConfig())
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(option))} is set, which a reward model does not take"):
        check_options(TrainerConfig(**option))
