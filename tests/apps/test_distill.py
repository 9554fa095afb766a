"""On-policy distillation as a user runs it: the KL divergence to the teacher falls, without a reward."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from app_run import EXACT, ROOT, AppRun
from transformers import AutoTokenizer

from actors.trainer import ModelSpec, Trainer, TrainerConfig
from apps.distill.config import DistillConfig, plan_run, resolve_teacher
from apps.grpo.models import resolve_model
from apps.sft.batches import Batches, make_completer
from apps.sft.config import SftConfig
from apps.sft.spawn import open_rows
from forge import channel, config
from forge.errors import ConfigError
from forge.losses import LossConfig

APP = ROOT / "apps" / "distill" / "main.py"


def make_teacher(folder: Path) -> str:
    """Nano, taught the right answers by 25 supervised steps in this process."""
    nano, cfg = resolve_model("nano"), SftConfig()
    cfg.data.args = {"num_digits": 4}
    tokenizer = AutoTokenizer.from_pretrained(nano)
    completer = make_completer(tokenizer, [tokenizer.eos_token_id])
    batches = Batches(open_rows(cfg, tokenizer, ("completion",)), completer, 32, shards=1, row_tokens=4096)
    trainer = Trainer(TrainerConfig(lr=3e-3), LossConfig(name="nll"), ModelSpec(nano, "float32"))
    for _ in range(25):
        trainer.step(channel.open(asyncio.run(batches.next()).handles[0]))
    trainer.save(str(folder), nano)
    return str(folder)


@pytest.mark.soak
def test_the_divergence_from_the_teacher_falls_and_the_reward_that_nobody_trains_on_rises(tmp_path: Path) -> None:
    options = ["--model=nano", "--data.args={num_digits: 4}", EXACT, f"--teacher={make_teacher(tmp_path / 'teacher')}"]
    run = AppRun(tmp_path / "run", "--trainer.steps=10", "--trainer.lr=1e-3", app=APP, preset=options)
    try:
        assert run.finish() == 0, run.output
    finally:
        run.end()
    rows = run.rows()
    assert len(rows) == 10
    assert all(row["staleness/max"] <= row["staleness/bound"] == 1 for row in rows)
    first, last = (sum(row["loss/kl"] for row in part) / 2 for part in (rows[:2], rows[-2:]))
    assert last < 0.7 * first
    assert "reward" in run.output
    assert (run.folder / "checkpoint" / "model.safetensors").exists()


def make_config(*options: str) -> DistillConfig:
    preset = APP.with_name("tiny.yaml")
    return config.parse(DistillConfig, ["--model=nano", *options], default_config=preset, prog="", description="")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"teacher is empty; give --teacher"),
        (["--teacher=nowhere"], r"teacher: model 'nowhere' is neither"),
        (["--teacher=nano", "--loss.name=ppo_clip"], r"loss\.name is ppo_clip, which reads no teacher; use reverse_kl"),
        (["--teacher=nano", "--grpo.degenerate=drop"], r"grpo\.degenerate is drop"),
        (["--teacher=nano", "--loss.token_advantages=reinforce_pp"], r"token_advantages is reinforce_pp, which nobody"),
    ],
)
def test_what_cannot_be_distilled_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(make_config(*options), None)


def test_a_teacher_with_another_tokenizer_is_refused_by_a_token_that_differs(tmp_path: Path) -> None:
    nano = resolve_model("nano")
    assert resolve_teacher(make_config("--teacher=nano")) == nano
    tokenizer = AutoTokenizer.from_pretrained(nano)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(nano) / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=r"vocabularies of 129 and 128 tokens that differ, for one in '<new>': 128 and"
    ):
        resolve_teacher(make_config(f"--teacher={tmp_path}"))


def test_a_reward_is_not_needed() -> None:
    cfg = DistillConfig(model="nano", teacher="nano")
    cfg.data.task = "apps.grpo.tasks:reverse_digits"
    assert set(plan_run(cfg, None).roles) == {"trainer", "generator", "reference"}
