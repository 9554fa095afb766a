"""Training in an environment as a user starts it: a world, its tasks, and the loops of GRPO."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch
from app_run import EXACT, ROOT, AppRun

from apps.worlds.config import WorldsConfig, plan_run
from apps.worlds.language import make_language
from apps.worlds.reversals import tasks
from forge import config
from forge.errors import ConfigError
from forge.trace import read_spans
from replay.recording import Recording

APP = ROOT / "apps/worlds/main.py"
PRESET = ROOT / "apps/worlds/tiny.yaml"


def parse(*options: str) -> WorldsConfig:
    return config.parse(WorldsConfig, list(options), default_config=PRESET, prog="", description="")


def test_every_turn_is_trained_as_it_was_sampled_and_older_than_the_bound_is_none(tmp_path: Path) -> None:
    options = ["--trainer.steps=3", "--replay.record", EXACT]
    run = AppRun(tmp_path / "run", *options, app=APP, preset=["--config", str(PRESET)])
    try:
        assert run.finish(200) == 0, run.output
    finally:
        run.end()
    rows = run.rows()
    assert len(rows) == 3
    assert all(row["staleness/max"] <= 1 for row in rows)
    assert rows[0]["extra/engine_mismatch"] < 1e-4, "the trainer sees what the generator saw"
    template, _ = make_language(parse())
    batches = Recording(run.folder / "journal")
    for group in (group for version in batches.versions for group in batches.batch(version).groups):
        first, mask = int(group["lengths"][0]), group["loss_mask"]
        said = template.decode(group["tokens"][:first].tolist())
        assert said.count("rev:") == 3
        turns = torch.diff(mask[:first].int(), prepend=torch.zeros(1, dtype=torch.int32)) == 1
        assert int(turns.sum()) == 3, said


@pytest.mark.soak
def test_kinds_have_their_quotas_and_a_run_tells_of_each(tmp_path: Path) -> None:
    world = "path: 'apps.worlds.reversals:Reversals'"
    run = AppRun(
        tmp_path / "run",
        "--trainer.steps=3",
        "--run.trace",
        "--environment.path=",
        f"--environments={{quick: {{{world}}}, slow: {{{world}}}}}",
        "--quotas={slow: 0.25}",
        "--data.args={kinds: [quick, quick, quick, slow], slow: {'3': 2.0, '7': 2.0}}",
        "--episodes.round_tokens=6",
        app=APP,
        preset=["--config", str(PRESET)],
    )
    try:
        assert run.finish(600) == 0, run.output
    finally:
        run.end()
    groups = {kind: sum(row[f"extra/env/{kind}/groups"] for row in run.rows()) for kind in ("quick", "slow")}
    assert groups["slow"] / sum(groups.values()) == pytest.approx(0.25, abs=0.1)
    assert "slow" in run.output
    assert "in seconds" in run.output
    kinds = json.loads((run.folder / "environments.json").read_text())
    assert kinds["slow"]["counts"]["steps"] > 0
    lanes = {span.lane for span in read_spans(run.folder / "trace.json")}
    assert {"generate", "quick", "slow", "train loop"} <= lanes
    actors = {"generator_0: requests", "generator_0: weights", "trainer_0: step", "trainer_0: weights"}
    assert actors <= lanes, "what actors measured of themselves"


@pytest.mark.soak
def test_tiny_learns_three_answers_in_a_row(tmp_path: Path) -> None:
    run = AppRun(tmp_path / "run", "--trainer.steps=60", app=APP, preset=["--config", str(PRESET)])
    try:
        assert run.finish(600) == 0, run.output
    finally:
        run.end()
    rewards = [row["reward/mean"] for row in run.rows()]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2, rewards


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--environment.path=", "environment.path is empty"),
        ("--environment.path=apps.worlds.reversals:Nothing", "Nothing"),
        ("--environments={quick: {path: 'apps.worlds.reversals:Reversals'}}", "environments names quick; use one"),
        ("--quotas={slow: 0.5}", "quotas has 'slow', which is none of the environments environment"),
        ("--episodes.round_tokens=-1", "episodes.round_tokens must be >= 0, got -1"),
        ("--reward.pools={a: {judge: 'nowhere:Judge'}}", "nowhere"),
        ("--episodes.max_turns=0", "episodes.max_turns must be >= 1, got 0"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(parse(option), None)


def test_tasks_are_as_many_questions_as_turns() -> None:
    row = tasks(turns=2, num_digits=4, num_rows=3)[1]
    task = row["metadata"]
    assert len(task["questions"]) == len(task["answers"]) == 2
    assert all(
        question[4:] == answer[::-1] for question, answer in zip(task["questions"], task["answers"], strict=True)
    )
