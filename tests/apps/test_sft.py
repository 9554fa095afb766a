"""Supervised fine-tuning as a user runs it, and the parts that other apps on rows share with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from app_run import EXACT, ROOT, AppRun
from tensordict import TensorDict

from apps.dpo.config import DpoConfig
from apps.grpo.models import resolve_model
from apps.reward_model.config import RewardModelConfig
from apps.sft.batches import Batch, Batches, make_completer, texts_of
from apps.sft.config import OfflineConfig, SftConfig, plan_run
from apps.sft.cursor import Cursor
from apps.sft.spawn import open_rows
from apps.sft.tasks import jsonl, reverse_digits
from forge import channel, config
from forge.data import DataConfig
from forge.errors import ConfigError, RunFolderError

SFT = ROOT / "apps" / "sft" / "main.py"
NANO = ["--model=nano", "--data.args={num_digits: 4}", EXACT]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
Launch = Callable[..., AppRun]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    runs: list[AppRun] = []

    def start(*options: str, **settings: Any) -> AppRun:
        runs.append(AppRun(tmp_path / f"run{len(runs)}", *options, **{"app": SFT, "preset": NANO, **settings}))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.mark.soak
def test_a_model_learns_the_right_answers_is_stopped_and_goes_on_with_other_ranks(launch: Launch) -> None:
    options = ["--trainer.steps=1000", "--trainer.lr=3e-3", "--run.checkpoint_every=4", "--batch.size=32"]
    run = launch(*options)
    run.wait_until(lambda: len(run.rows()) >= 10, "ten steps")
    run.press_ctrl_c()
    assert run.finish(40) == 130, run.output
    steps = len(run.rows()) + 3
    resumed = launch(f"--trainer.steps={steps}", resumed=run, launcher=TORCHRUN)
    assert resumed.finish() == 0, resumed.output
    rows = resumed.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["episodes/trained"] for row in rows] == [32] * steps
    assert rows[-1]["loss/policy"] < 0.6 * rows[0]["loss/policy"]
    assert rows[-1]["ratio/mean"] is rows[-1]["staleness/max"] is rows[-1]["tokens/generated"] is None
    assert not any(key.startswith(("extra/kl_behavior", "extra/engine")) for key in rows[0])
    assert "loss 0." in resumed.output
    assert "Traceback" not in run.output + resumed.output
    right, repeated = answers(str(resumed.folder / "checkpoint"))
    assert right < answers(resolve_model("nano"))[0]
    assert right < repeated


def answers(model: str) -> tuple[float, float]:
    """Mean cross entropy of right answers to prompts that were not trained, and of digits repeated, nats a token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows = reverse_digits(4, 64, seed=99)
    losses = []
    for texts in ([r["completion"] for r in rows], [r["completion"][::-1] for r in rows]):
        ids = tokenizer(
            [r["prompt"] + text for r, text in zip(rows, texts, strict=True)], return_tensors="pt"
        ).input_ids
        labels = torch.where(torch.arange(ids.shape[1]) < ids.shape[1] - 4, -100, ids)
        with torch.no_grad():
            losses.append(float(hf(input_ids=ids, labels=labels).loss))
    return losses[0], losses[1]


# Rows to batches


class CharTokenizer:
    """A token a character."""

    chat_template = None

    class Ids:
        def __init__(self, text: str) -> None:
            self.input_ids = [ord(c) for c in text]

    def __call__(self, text: str, add_special_tokens: bool = True) -> Ids:
        return self.Ids(text)


class Constant:
    """A reference that says the same of every token."""

    async def logprobs(self, group: TensorDict) -> torch.Tensor:
        return torch.where(group["loss_mask"], -2.0, 0.0)


def make_batches(size: int = 3, *, keys: tuple[str, ...] = ("completion",), **options: Any) -> Batches:
    cfg = OfflineConfig(data=DataConfig(task="apps.sft.tasks:reverse_digits", args={"num_digits": 2, "num_rows": 5}))
    if len(keys) > 1:
        cfg.data.task = "apps.dpo.tasks:reverse_digits"
    stream = open_rows(cfg, CharTokenizer(), keys)
    settings: dict[str, Any] = {"shards": 1, "row_tokens": 64, "together": len(keys), **options}
    return Batches(stream, make_completer(CharTokenizer(), [7, 8]), size, **settings)


def tokens_of(batch: Batch) -> list[TensorDict]:
    return [channel.open(handle) for handle in batch.handles]


def test_a_completion_is_trained_with_the_token_that_ends_it_and_its_prompt_is_not() -> None:
    (td,) = tokens_of(asyncio.run(make_batches().next()))
    text = "".join(map(chr, td["tokens"].tolist()))
    trained = "".join(map(chr, td["tokens"][td["loss_mask"]].tolist()))
    prompts = [piece[:6] for piece in text.split("rev:")[1:]]
    assert sorted(trained.split("\7")[:-1]) == sorted(p[3:5] for p in prompts)
    assert all(p[:2] == p[3:5][::-1] for p in prompts)
    assert bool((td["behavior_logprobs"] == 0).all())
    assert td["group_id"].unique().tolist() == [0, 1, 2]


def test_both_completions_of_a_row_go_to_one_rank_beside_each_other_with_the_references_log_probs() -> None:
    batches = make_batches(keys=("chosen", "rejected"), shards=2, reference=Constant())
    batch = asyncio.run(batches.next())
    assert batch.stats["episodes/trained"] == 6
    groups = []
    for td in tokens_of(batch):
        assert td["ref_logprobs"][td["loss_mask"]].unique().tolist() == [-2.0]
        ids = td["group_id"].tolist()
        assert ids[0::2] == ids[1::2]
        groups += ids[0::2]
        texts = "".join(map(chr, td["tokens"].tolist())).split("rev:")[1:]
        assert all(text[:2] == text[3:5][::-1] for text in texts[0::2])  # chosen: reversed
        assert all(text[:2] == text[3:5] for text in texts[1::2])
    assert sorted(groups) == [0, 1, 2]


def test_a_stream_goes_on_behind_the_last_batch_that_was_trained_not_behind_the_ones_made_ahead(tmp_path: Path) -> None:
    async def resumed() -> tuple[list[int], list[int]]:
        first, cursor = make_batches(), Cursor(tmp_path / "data.json")
        made = [await first.next() for _ in range(4)]
        cursor.now = made[1].cursor  # two are made ahead of the trainer
        await cursor.mark(2)
        assert await cursor.marked() == 2
        second = make_batches()
        second.stream.load_state_dict(Cursor(tmp_path / "data.json").at(2))
        again = await second.next()
        return tokens_of(made[2])[0]["tokens"].tolist(), tokens_of(again)[0]["tokens"].tolist()

    expected, got = asyncio.run(resumed())
    assert got == expected


def test_a_cursor_forgets_what_no_checkpoint_needs_and_says_what_it_lacks(tmp_path: Path) -> None:
    async def use() -> None:
        cursor = Cursor(tmp_path / "data.json")
        for version in (2, 4, 6):
            cursor.now = {"version": version}
            await cursor.mark(version)
            await cursor.prune(version - 2)
        await cursor.marked()

    asyncio.run(use())
    again = Cursor(tmp_path / "data.json")
    assert again.at(4) == {"version": 4}
    with pytest.raises(ConfigError, match=r"data\.json does not know where the data stood at step 2"):
        again.at(2)
    (tmp_path / "data.json").write_text("[")
    with pytest.raises(RunFolderError, match=r"data\.json does not say where the data stood"):
        Cursor(tmp_path / "data.json")


def test_a_row_that_cannot_be_trained_is_named() -> None:
    with pytest.raises(ConfigError, match=r"row \d needs 10 tokens, trainer\.microbatch_tokens is 9; raise it"):
        asyncio.run(make_batches(row_tokens=9).next())
    with pytest.raises(ConfigError, match=r"row \d needs 20 tokens"):
        asyncio.run(make_batches(keys=("chosen", "rejected"), row_tokens=19).next())
    with pytest.raises(ConfigError, match=r"has the keys \['answer', 'prompt'\]; it needs text under 'completion'"):
        texts_of("completion")({"prompt": "a", "answer": "b"})
    with pytest.raises(ConfigError, match="names no token that ends a text"):
        make_completer(CharTokenizer(), [])


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "c", "completion": "d"}\n')
    assert [row["completion"] for row in jsonl(str(path))] == ["b", "d"]
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1 is no JSON"):
        jsonl(str(path))
    with pytest.raises(ConfigError, match=r"data\.path .* cannot be read"):
        jsonl(str(tmp_path / "none"))


# Configurations


@pytest.mark.parametrize(
    ("config_cls", "app", "option", "message"),
    [
        (SftConfig, "sft", "--loss.name=ppo_clip", "loss.name is ppo_clip, which is no loss for this data; use nll"),
        (SftConfig, "sft", "--loss.correction=tis", "loss.correction is tis"),
        (SftConfig, "sft", "--batch.size=0", "batch.size must be >= 1"),
        (SftConfig, "sft", "--mesh.trainer.on_failure=respawn", "this app ends with the trainer, and --resume goes on"),
        (
            SftConfig,
            "sft",
            "--mesh.slots=3 --mesh.trainer.procs=3 --batch.size=2",
            "the trainer's ranks divide it into 3",
        ),
        (DpoConfig, "dpo", "--loss.name=nll", "use dpo, or one of your own"),
        (DpoConfig, "dpo", "--loss.aggregation=token_mean", "only seq_mean_token_sum adds it up again"),
        (DpoConfig, "dpo", "--loss.params={'beta': -1}", "beta must be > 0, got -1"),
        (
            RewardModelConfig,
            "reward_model",
            "--loss.name=nll",
            "section loss is set, which a reward model does not read",
        ),
        (RewardModelConfig, "reward_model", "--trainer.lora.rank=4", "trainer.lora.rank is set"),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], config_cls: type[OfflineConfig], app: str, option: str, message: str
) -> None:
    preset = ROOT / "apps" / app / "tiny.yaml"
    with pytest.raises(SystemExit) as end:
        config.parse(
            config_cls,
            ["--model=nano", *option.split(" --")[0:1], *(f"--{o}" for o in option.split(" --")[1:])],
            default_config=preset,
            prog=f"apps/{app}/main.py",
            description="",
            validate=lambda cfg: plan_run(cfg, None),
        )
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert message in said, said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("config_cls", "app", "roles"),
    [
        (SftConfig, "sft", {"trainer"}),
        (DpoConfig, "dpo", {"trainer", "reference"}),
        (RewardModelConfig, "reward_model", {"trainer"}),
    ],
)
def test_presets_need_no_more_actors_than_their_loss(
    config_cls: type[OfflineConfig], app: str, roles: set[str]
) -> None:
    preset = ROOT / "apps" / app / "tiny.yaml"
    cfg = config.parse(config_cls, [], default_config=preset, prog="", description="")
    assert set(plan_run(cfg, None).roles) == roles
