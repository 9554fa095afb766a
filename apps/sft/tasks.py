"""Rows with completions. Your own: `--data.task=my.module:rows`, or a file by `--data.task=apps.sft.tasks:jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from apps.grpo.tasks import reversal
from forge.errors import ConfigError


def reverse_digits(num_digits: int = 6, num_rows: int = 2048, seed: int = 7) -> list[dict[str, Any]]:
    """Prompts such as `rev:123456=`, each with the right answer, `654321`; what `tiny` (6) and `nano` (4) half know."""
    rng = Random(seed)
    pairs = [reversal(rng, num_digits) for _ in range(num_rows)]
    return [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]


def jsonl(path: str) -> list[dict[str, Any]]:
    """One row a line, of any app: `prompt` or `messages`, and `completion`, or `chosen` and `rejected`."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"data.path {path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
    return rows
