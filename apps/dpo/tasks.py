"""Rows with a better and a worse completion; files are read by `apps.sft.tasks:jsonl`."""

from __future__ import annotations

from random import Random
from typing import Any

from apps.grpo.tasks import reversal


def reverse_digits(num_digits: int = 6, num_rows: int = 2048, seed: int = 7) -> list[dict[str, Any]]:
    """Prompts such as `rev:123456=`: 654321 is better than 123456, and those are what `tiny` and `nano` waver between.

    Numbers that read the same both ways are left out.
    """
    rng = Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < num_rows:
        prompt, answer = reversal(rng, num_digits)
        if answer != answer[::-1]:
            rows.append({"prompt": prompt, "chosen": answer, "rejected": answer[::-1]})
    return rows
