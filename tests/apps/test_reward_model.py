"""Reward-model training as a user runs it: pairs are told apart, and other programs load what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from app_run import EXACT, ROOT, AppRun

from apps.dpo.tasks import reverse_digits

NANO = ["--model=nano", "--data.args={num_digits: 4}", EXACT]


@pytest.mark.soak
def test_pairs_that_were_not_trained_are_told_apart_by_what_transformers_loads(tmp_path: Path) -> None:
    options = ["--trainer.steps=50", "--trainer.lr=2e-3", "--trainer.packing", "--run.checkpoint_every=25"]
    run = AppRun(tmp_path / "run", *options, app=ROOT / "apps" / "reward_model" / "main.py", preset=NANO)
    try:
        assert run.finish() == 0, run.output
    finally:
        run.end()
    rows = run.rows()
    assert len(rows) == 50
    assert abs(rows[0]["loss/policy"] - 0.6931) < 1e-3  # a head of zeros
    last = rows[-5:]
    assert sum(row["loss/policy"] for row in last) / 5 < 0.5
    assert sum(row["extra/pair_accuracy"] for row in last) / 5 > 0.75
    assert (run.folder / "checkpoints" / "000050" / "trainer").is_dir()
    assert accuracy(run.folder / "checkpoint") > 0.75


def accuracy(folder: Path) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = reverse_digits(4, 128, seed=99)
    texts = [[row["prompt"] + row[key] + "<eos>" for row in rows] for key in ("chosen", "rejected")]
    with torch.no_grad():
        chosen, rejected = (model(**tokenizer(of, return_tensors="pt")).logits[:, 0] for of in texts)
    return float((chosen > rejected).float().mean())
