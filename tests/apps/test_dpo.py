"""DPO as a user runs it: on pairs that are there, and on pairs of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from app_run import EXACT, ROOT, AppRun
from tensordict import TensorDict

from actors.reward import Sample, Scores
from actors.rollout import Rollout
from apps.dpo import online
from apps.dpo.config import plan_online
from apps.dpo.tasks import reverse_digits
from apps.grpo.config import AppConfig, plan_whole_groups
from forge import config
from forge.batch import make_group
from forge.errors import ConfigError
from forge.metrics import Meter

DPO = ROOT / "apps" / "dpo"
NANO = ["--model=nano", "--data.args={num_digits: 4}", EXACT]


@pytest.fixture
def runs() -> Iterator[list[AppRun]]:
    started: list[AppRun] = []
    yield started
    for run in started:
        run.end()


@pytest.mark.soak
def test_pairs_that_are_there_are_told_apart_by_a_margin_that_grows(tmp_path: Path, runs: list[AppRun]) -> None:
    options = ["--trainer.steps=12", "--trainer.lr=1e-3", "--batch.size=16", "--trainer.microbatch_tokens=200"]
    runs.append(run := AppRun(tmp_path / "run", *options, app=DPO / "main.py", preset=NANO))
    assert run.finish() == 0, run.output
    rows = run.rows()
    assert len(rows) == 12
    assert rows[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are one
    assert rows[0]["extra/pair_margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[-1]["loss/policy"] < 0.5
    assert rows[-1]["extra/pair_accuracy"] > 0.9
    assert rows[-1]["extra/pair_margin"] > 0.3
    assert rows[-1]["episodes/trained"] == 32
    assert (run.folder / "checkpoint" / "model.safetensors").exists()


@pytest.mark.soak
def test_rollouts_make_pairs_and_the_policy_learns_from_them(tmp_path: Path, runs: list[AppRun]) -> None:
    options = [
        "--trainer.steps=6",
        "--trainer.lr=1e-3",
        "--grpo.group_size=4",
        "--grpo.batch_size=64",
        "--mesh.slots=2",
    ]
    options += ["--mesh.trainer.procs=2"]  # a pair is never torn apart between ranks
    runs.append(run := AppRun(tmp_path / "run", *options, app=DPO / "online.py", preset=NANO))
    assert run.finish() == 0, run.output
    rows = run.rows()
    assert [row["episodes/trained"] for row in rows] == [32] * 6
    assert all(row["staleness/max"] <= row["staleness/bound"] for row in rows)
    assert rows[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3)
    assert rows[-1]["extra/pair_margin"] > 0
    assert all(row["reward/std"] > 0 for row in rows)  # of the best and the worst
    assert sum(row.get("extra/sampled_episodes", 0) for row in rows) >= 6 * 64
    assert sum(row["tokens/generated"] for row in rows) > 1.5 * sum(row["tokens/trained"] for row in rows)


# The best and the worst


def rollout(rewards: list[float]) -> Rollout:
    completions = [[100 + i] * (i + 1) for i in range(len(rewards))]
    logprobs, versions = [[-1.0] * len(c) for c in completions], [[i] * len(c) for i, c in enumerate(completions)]
    group = make_group([1, 2], completions, logprobs, versions, group_id=0)
    group["rewards"] = torch.tensor(rewards)
    samples = [Sample("p", str(i), None, num_tokens=i + 1) for i in range(len(rewards))]
    return Rollout(group, samples, Scores(rewards, {"part": [10 * r for r in rewards]}), num_tokens_cut=3)


def test_a_pair_is_the_best_then_the_worst_and_what_the_others_sampled_counts_as_cut() -> None:
    pair = online.best_and_worst(rollout([0.5, 0.1, 0.9, 0.1, 0.9]))
    assert pair.group["rewards"].tolist() == pytest.approx([0.9, 0.1])
    assert pair.group["tokens"][:, 2].tolist() == [102, 101]
    assert [s.completion for s in pair.samples] == ["2", "1"]
    assert (pair.scores.total, pair.scores.parts) == ([0.9, 0.1], {"part": [9.0, 1.0]})
    assert pair.num_tokens == 3 + 2
    assert pair.num_tokens_cut == 3 + 1 + 4 + 5
    assert [record.versions for record in pair.records()] == [[2], [1]]


def test_only_a_pair_is_shown_to_the_reference_while_all_rewards_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reference:
        async def logprobs(self, group: TensorDict) -> torch.Tensor:
            assert len(group) == 2
            return torch.full(group["tokens"].shape, -2.0)

    async def whole(*args: Any, **options: Any) -> Rollout:
        assert options == {"group_size": 3}
        return rollout([0.0, 1.0, 0.5])

    monkeypatch.setattr(online, "rollout_group", whole)
    meter = Meter()
    made = asyncio.run(online.rollout_pair("prompt", meter=meter, reference=Reference(), group_size=3))
    assert made.group["ref_logprobs"].unique().tolist() == [-2.0]
    lap = meter.lap()
    assert (lap["extra/sampled_reward"], lap["extra/sampled_episodes"]) == (1.5, 3)


def test_a_pair_of_the_task_never_says_the_same_twice() -> None:
    rows = reverse_digits(num_digits=1 + 1, num_rows=300)
    assert len(rows) == 300
    assert all(row["chosen"] == row["rejected"][::-1] != row["rejected"] for row in rows)
    assert all(row["prompt"] == f"rev:{row['rejected']}=" for row in rows)


# Configurations


def online_config(*options: str) -> AppConfig:
    return config.parse(AppConfig, list(options), default_config=DPO / "online.yaml", prog="", description="")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--grpo.degenerate=keep", "grpo.degenerate is keep: a group of equal rewards has neither"),
        ("--loss.name=ppo_clip", "loss.name is ppo_clip, which is no loss of pairs; use dpo"),
        ("--grpo.batch_size=8", "as many pairs a step, and the trainer's ranks divide them into 2"),
    ],
)
def test_what_makes_no_pairs_is_refused(option: str, message: str) -> None:
    assert set(plan_online(online_config(), None).roles) == {"trainer", "generator", "reference"}
    with pytest.raises(ConfigError, match=message):
        plan_online(online_config(option, "--mesh.slots=2", "--mesh.trainer.procs=2"), None)


def test_the_loops_of_grpo_refuse_a_loss_of_pairs() -> None:
    with pytest.raises(ConfigError, match=r"loss\.name is dpo, which compares 2 episodes .* use apps/dpo/online\.py"):
        plan_whole_groups(online_config(), None)
