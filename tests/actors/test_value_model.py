"""Laws of value models: where they come from and go to, and what a reward model makes of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from tensordict import TensorDict
from transformers import AutoModelForSequenceClassification

from actors.reward import RewardConfig, RewardScorer, Sample, Scores
from actors.reward_model import RewardModel, RewardModelClient
from actors.trainer import ModelSpec, TrainerConfig
from actors.value_model import ValueModel, check_vocabulary, load_value_model, save_value_model
from apps.grpo.models import resolve_model
from forge import channel
from forge.batch import collate, make_group
from forge.errors import ConfigError


@pytest.fixture(scope="module")
def nano() -> str:
    return str(resolve_model("nano"))


@pytest.fixture(scope="module")
def scorer(nano: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model: nano with a head that is not zero."""
    folder = tmp_path_factory.mktemp("scorer") / "model"
    save_value_model(with_head(nano), folder, nano, torch.float32)
    return str(folder)


def with_head(path: str) -> ValueModel:
    model = load_value_model(path, torch.float32, option="critic.model")
    torch.manual_seed(0)
    torch.nn.init.normal_(model.hf.score.weight)
    return model


def episodes() -> TensorDict:
    """Three of unequal length; the second has two turns."""
    completions = [[20, 21, 22], [20, 21, 9, 9, 23, 24, 25], [30]]
    rows = [[[0.0] * len(c) for c in completions], [[0] * len(c) for c in completions]]
    group = make_group([7, 8], completions, *rows, group_id=0)  # type: ignore[arg-type]
    group["loss_mask"][1, 4:6] = False
    group["token_versions"][1, 4:6] = -1
    return collate([group])


def test_a_fresh_head_values_everything_at_nothing_and_learns_at_once(nano: str) -> None:
    model = load_value_model(nano, torch.float32, option="critic.model")
    batch = episodes()
    positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
    values = model(batch["tokens"], positions, batch["loss_mask"])
    assert values.shape == (int(batch["loss_mask"].sum()),)
    assert values.dtype == torch.float32
    assert not values.any()
    (values - 1).square().sum().backward()
    assert model.hf.score.weight.grad.abs().max() > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_transformers_gives_the_same_scores_after_saving(family: str, tmp_path: Path) -> None:
    source = small_models.family(family, tmp_path / "source")
    model = with_head(source)
    save_value_model(model, tmp_path / "model", source, torch.float32)
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert theirs.config.num_labels == 1
    tokens = torch.randint(7, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    last = torch.zeros(3, 9, dtype=torch.bool)
    last[:, -1] = True
    with torch.no_grad():
        ours = model(tokens, torch.arange(9).expand(3, 9), last, after=True)
        assert float(ours.std()) > 0.1
        torch.testing.assert_close(theirs(tokens).logits[:, 0], ours)
    again = load_value_model(tmp_path / "model", torch.float32, option="critic.model", fresh_head=False)
    for name, value in model.hf.state_dict().items():
        assert torch.equal(again.hf.state_dict()[name], value), name


def test_the_value_before_a_token_knows_nothing_of_it(nano: str) -> None:
    model = with_head(nano)
    batch = episodes()
    other = batch["tokens"].clone()
    other[:, 4:] = 33  # the last tokens of all that are valued below
    mask = torch.zeros_like(batch["loss_mask"])
    mask[:, :5] = batch["loss_mask"][:, :5]
    positions = torch.arange(other.shape[1]).expand_as(other)
    with torch.no_grad():
        before = [model(tokens, positions, mask) for tokens in (batch["tokens"], other)]
        after = [model(tokens, positions, mask, after=True) for tokens in (batch["tokens"], other)]
    torch.testing.assert_close(*before)
    assert not torch.allclose(*after)


def test_what_cannot_score_or_read_the_policys_tokens_is_refused_by_name(nano: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.model .*nano.* has no score\.weight"):
        load_value_model(nano, torch.float32, option="reward.model", fresh_head=False)
    with pytest.raises(ConfigError, match=r"critic\.model .*nothing"):
        load_value_model(tmp_path / "nothing", torch.float32, option="critic.model")
    config = json.loads((Path(nano) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 101}))
    with pytest.raises(ConfigError, match=r"reward\.model .* a vocabulary of 101 tokens, the policy .* one of 128"):
        check_vocabulary(str(tmp_path), nano, option="reward.model")
    check_vocabulary(nano, nano, option="reward.model")


# The reward model


def judge(scorer: str, *, turns: bool, tokens: int = 4096) -> RewardModel:
    return RewardModel(ModelSpec(scorer, "float32"), microbatch_tokens=tokens, turns=turns)


def score_of(scorer: str, tokens: list[int]) -> float:
    hf: Any = AutoModelForSequenceClassification.from_pretrained(scorer)
    with torch.no_grad():
        return float(hf(torch.tensor([tokens])).logits)


@pytest.mark.parametrize("tokens", [4096, 12])
def test_an_episode_is_scored_behind_its_last_token_whatever_lies_beside_it(scorer: str, tokens: int) -> None:
    batch = episodes()
    scores = judge(scorer, turns=False, tokens=tokens).score(batch)
    assert scores.shape == (3, 1)
    for row, length in enumerate(batch["lengths"].tolist()):
        alone = score_of(scorer, batch["tokens"][row, :length].tolist())
        assert float(scores[row, 0]) == pytest.approx(alone, abs=1e-4)


def test_a_reward_model_may_be_all_the_reward_there_is(scorer: str) -> None:
    samples = [Sample("prompt", "completion")] * 3
    alone = RewardScorer(RewardConfig(model=scorer), inline=True)
    assert asyncio.run(alone.score(samples)) == Scores([0.0, 0.0, 0.0], {})
    with pytest.raises(ConfigError, match=r"reward\.functions is empty; .*or a reward\.model"):
        RewardConfig().validate()
    with pytest.raises(ConfigError, match=r"reward\.model_weight must be finite, got nan"):
        RewardConfig(model=scorer, model_weight=float("nan")).validate()


class Mesh:
    """A mesh of one actor, as far as the client knows."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self.score = self

    async def call_one(self, handle: Any) -> torch.Tensor:
        return self._model.score(channel.take(handle))


def test_a_process_reward_stands_at_the_end_of_its_turn_and_in_the_total(scorer: str) -> None:
    batch = episodes()
    config = RewardConfig(model=scorer, model_weight=0.5, model_turns=True)
    client = RewardModelClient(Mesh(judge(scorer, turns=True)), config, TrainerConfig())
    scores = asyncio.run(client.add_to(Scores([1.0, 2.0, 3.0], {"own": [1.0, 2.0, 3.0]}), batch))
    ends = {0: [5], 1: [4, 9], 2: [3]}  # tokens up to the end of each turn
    for row, lengths in ends.items():
        parts = [score_of(scorer, batch["tokens"][row, :length].tolist()) for length in lengths]
        assert scores.parts["reward_model"][row] == pytest.approx(sum(parts), abs=1e-4)
        assert scores.total[row] == pytest.approx(row + 1 + 0.5 * sum(parts), abs=1e-4)
        places = [length - 1 for length in lengths]
        assert batch["token_rewards"][row].nonzero().flatten().tolist() == places
        assert batch["token_rewards"][row, places].tolist() == pytest.approx([0.5 * part for part in parts], abs=1e-4)
