"""LoRA as a user starts it: one option, and every side follows."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from app_run import AppRun
from peft import PeftModel
from transformers import AutoModelForCausalLM

from actors.generator import Generator, GeneratorConfig
from actors.vllm_engine import Completion
from apps.grpo.config import DEFAULT_PRESET, AppConfig, plan_run
from apps.grpo.models import resolve_model
from apps.grpo.spawn import generator_config
from forge import config
from forge.errors import ConfigError

LORA = "--trainer.lora.rank=8"
PROMPT = [33, 50, 27, 7, 8, 9, 10, 20]


def parse(*options: str) -> AppConfig:
    return config.parse(AppConfig, list(options), default_config=DEFAULT_PRESET, prog="test", description="")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--trainer.lora.rank=513"], "trainer.lora.rank must lie in 0..512, what the engine serves, got 513"),
        (["--trainer.lora.rank=-1"], "trainer.lora.rank must lie in 0..512"),
        ([LORA, "--trainer.lora.alpha=0"], "trainer.lora.alpha must be > 0, got 0"),
        ([LORA, "--trainer.lora.dropout=0.1"], "trainer.lora.dropout must be 0, got 0.1"),
        ([LORA, "--weightsync.kv=drain"], "weightsync.kv is drain with trainer.lora.rank 8"),
        ([LORA, "--generator.lora_rank=4", "--generator.lora_targets=[q_proj]"], "the adapters do not fit"),
        (["--generator.lora_rank=4", "--generator.lora_targets=[q_proj]"], "set trainer.lora.rank, the generators"),
    ],
)
def test_a_combination_that_cannot_work_is_one_line_before_any_process(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(parse(*options), None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_generators_follow_what_the_trainer_adapts() -> None:
    nano = str(resolve_model("nano"))
    cfg = parse(LORA)
    plan_run(cfg, None)
    served = generator_config(cfg, nano)
    assert served.lora is not None
    assert (served.lora.max_rank, len(served.lora.targets)) == (8, 7)
    some = generator_config(parse(LORA, "--trainer.lora.targets=[v_proj, q_proj]", "--generator.lora_adapters=6"), nano)
    assert some.lora is not None
    assert (some.lora.targets, some.lora.adapters) == (("q_proj", "v_proj"), 6)
    assert generator_config(parse(), nano).lora is None
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets has lm_head, norm; the linear layers of Qwen3For"):
        generator_config(parse(LORA, "--trainer.lora.targets=[q_proj, norm, lm_head]"), nano)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Sixteen steps of two ranks, strictly on policy."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    options = [LORA, "--trainer.lr=3e-3", "--trainer.steps=16", "--replay.max_staleness=0"]
    run = AppRun(tmp_path_factory.mktemp("lora") / "run", *options, launcher=torchrun)
    try:
        assert run.finish(250) == 0, run.output
        yield run
    finally:
        run.end()


@pytest.mark.soak
def test_a_run_learns_with_a_ratio_of_one_while_its_adapters_alone_travel(run: AppRun) -> None:
    rows = run.rows()
    assert len(rows) == 16
    for row in rows:
        assert row["staleness/max"] == 0
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert not row["generator/pause_s"]
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.1


@pytest.mark.soak
def test_the_checkpoint_of_a_run_is_a_plain_model_and_its_adapter(run: AppRun) -> None:
    base = AutoModelForCausalLM.from_pretrained(resolve_model("nano"))
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoint")
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        start, trained = base(tokens).logits, merged(tokens).logits
        peft = PeftModel.from_pretrained(base, str(run.folder / "checkpoint" / "adapter"))
        torch.testing.assert_close(peft(tokens).logits, trained, atol=1e-4, rtol=0)
    assert float((trained - start).abs().max()) > 0.1


@pytest.mark.soak
def test_vllm_serves_the_merged_model_with_the_log_probs_of_base_and_adapter(run: AppRun) -> None:
    answers = asyncio.run(served_by_vllm(run.folder / "checkpoint"))
    base = AutoModelForCausalLM.from_pretrained(resolve_model("nano"))
    peft = PeftModel.from_pretrained(base, str(run.folder / "checkpoint" / "adapter"))
    for answer in answers:
        with torch.no_grad():
            logits = peft(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


async def served_by_vllm(folder: Path) -> list[Completion]:
    settings = GeneratorConfig(max_model_len=64, max_new_tokens=12, kv_cache_bytes=64 << 20)
    generator = Generator(settings, str(folder), "float32", seed=0, stop_ids=[])
    try:
        await generator.setup()
        async with asyncio.timeout(120):
            return await generator.generate([PROMPT] * 8, list(range(8)))
    finally:
        generator.shutdown()
