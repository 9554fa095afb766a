"""Laws of apps/bench/trainer.py: every way trains on the same tokens, and what the figures become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.bench import trainer
from apps.bench.harness.trainer_run import Settings, bare, episodes_of, lengths, ours, ragged_batch, timed
from apps.bench.peers import trl_step
from apps.grpo.models import resolve_model


def small(**options: Any) -> Settings:
    model = resolve_model("nano")
    return Settings(model, "", episodes=8, longest=48, microbatch_tokens=96, **{"way": "ours", **options})


def test_half_of_the_episodes_are_shorter_than_a_third_of_the_longest() -> None:
    sizes = lengths(64, 512)
    assert max(sizes) == 512
    assert sorted(sizes)[31] == pytest.approx(512 / 3, rel=0.02)
    assert sorted(ragged_batch(64, 512, 50)["lengths"].tolist()) == sorted(sizes)


@pytest.mark.parametrize("way", ["bare", "bare_masked", "bare_longest", "ours"])
@pytest.mark.parametrize("packing", [True, False])
def test_every_way_runs_a_step(way: str, packing: bool) -> None:
    settings = small(way=way, packing=packing)
    [seconds] = timed(ours(settings) if way == "ours" else bare(settings), 1)
    assert seconds > 0


def test_the_peer_gets_the_same_episodes_padded_to_the_longest(tmp_path: Path) -> None:
    settings = trainer.trl_settings(small(), tmp_path)
    episodes = json.loads(Path(settings.data).read_text())
    batch = ragged_batch(8, 48, 64)
    assert [len(one["prompt"]) + len(one["completion"]) for one in episodes] == batch["lengths"].tolist()
    assert [one["prompt"] + one["completion"] for one in episodes] == [tokens for tokens, _, _ in _own_tokens()]
    passes = trl_step.passes(episodes, settings.episodes_per_pass)
    assert settings.episodes_per_pass == 2
    assert [one["advantages"].shape[0] for one in passes] == [2] * 4
    assert {one["completion_ids"].shape[1] for one in passes} == {max(len(one["completion"]) for one in episodes)}
    trained = sum(int(one["completion_mask"].sum()) for one in passes)
    assert trained == int(passes[0]["num_items_in_batch"]) == int(batch["loss_mask"].sum())


def _own_tokens() -> list[tuple[list[int], int, float]]:
    return episodes_of(small())


def test_goals_are_ratios_inside_the_rounds() -> None:
    runs = trainer.Runs()
    for bare_s, packed_s, longest_s in ((1.0, 1.05, 3.0), (2.0, 2.4, 5.0), (1.0, 1.0, 2.0)):
        for name, seconds in ((trainer.BARE, bare_s), (trainer.PACKED, packed_s), (trainer.LONGEST, longest_s)):
            runs.add(name, {"step_s": seconds, "tokens": 100, "peak_rss_bytes": 2**20})
    values = [goal.value for goal in trainer.goals(runs, 1.4)]
    assert values == pytest.approx([5.0 / 2.4, 1.05, 1.4])
    assert [goal.met for goal in trainer.goals(runs, 1.4)] == [True, True, False]
    assert runs.ratio(trainer.PACKED, trainer.TRL) is None
    row = next(row for row in runs.rows() if row["name"] == trainer.PACKED)
    assert row == {
        "name": trainer.PACKED,
        "step_ms": pytest.approx(1050),
        "tokens_per_s": pytest.approx(100 / 1.05),
        "over_bare": pytest.approx(1 / 1.05),
        "peak_mib": 1.0,
    }


def test_padding_to_the_longest_computes_every_place_of_the_rectangle() -> None:
    assert trainer.ways("m")[trainer.LONGEST].way == "bare_longest"
    batch = ragged_batch(8, 48, 64)
    assert batch["tokens"].shape == torch.Size([8, 48])
