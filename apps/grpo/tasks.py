"""The app's tasks (functions that return rows, see `forge/data.py`) and its rewards (functions of a Sample).

Your own go into a module of yours: `--data.task=my.module:rows`,
`--reward.functions='[{path: my.module:reward}]'`. Reward functions run in worker processes that import this
module, so it imports nothing heavy at its top.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError

if TYPE_CHECKING:
    from actors.reward_worker import Sample

Row = dict[str, Any]

# ---- tasks ------------------------------------------------------------------------------------------


def add_digits() -> list[Row]:
    """The 100 sums of two digits, as a user's question. Reward: `last_number`."""
    return [_question(f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]


def reverse_digits(num_digits: int = 6, num_rows: int = 2048, seed: int = 7) -> list[Row]:
    """Plain prompts such as `rev:123456=`, to be continued by `654321`. Reward: `reversed_digits`.

    The models `tiny` (6 digits) and `nano` (4 digits) of `apps/grpo/models.py` half know how.
    """
    rng = Random(seed)
    pairs = [reversal(rng, num_digits) for _ in range(num_rows)]
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def reversal(rng: Random, num_digits: int) -> tuple[str, str]:
    """A random prompt of `reverse_digits` and its answer."""
    digits = "".join(rng.choices("0123456789", k=num_digits))
    return f"rev:{digits}=", digits[::-1]


def gsm8k(path: str = "openai/gsm8k", split: str = "train", instruction: str = "") -> list[Row]:
    """Grade-school word problems, the final number in a box. Reward: `math_verify_reward`.

    `path` is a .jsonl file with `question` and `answer` (which ends in `#### number`), or a data set of that
    form that the `datasets` package finds on the hub. `instruction` replaces the sentence after the question.
    """
    ask = instruction or "Reason step by step, and put the final answer within \\boxed{}."
    return [
        _question(f"{question}\n{ask}", _final_answer(answer, path, number))
        for number, (question, answer) in enumerate(_gsm8k_pairs(path, split))
    ]


def _question(text: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": text}], "answer": answer}


def _gsm8k_pairs(path: str, split: str) -> Iterator[tuple[str, str]]:
    records = _read_jsonl(path) if path.endswith(".jsonl") else _read_hub(path, split)
    for number, record in enumerate(records):
        if not {"question", "answer"} <= record.keys():
            raise ConfigError(
                f"{path}, record {number} has the keys {sorted(record)}; it needs `question` and `answer`"
            )
        yield record["question"], record["answer"]


def _read_jsonl(path: str) -> Iterator[dict[str, str]]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"data.path {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error


def _read_hub(path: str, split: str) -> Iterable[dict[str, str]]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"data.path {path} is a data set of the hub, which needs the package `datasets`; "
            "pip install datasets, or set data.path to a .jsonl file"
        ) from error
    return load_dataset(path, "main", split=split)


def _final_answer(answer: str, path: str, number: int) -> str:
    _, mark, final = answer.rpartition("####")
    if not mark:
        raise ConfigError(f"{path}, record {number}: the answer has no `####` before its final number: {answer[:80]!r}")
    return final.strip().replace(",", "")


# ---- rewards ----------------------------------------------------------------------------------------

# A minus sign right behind a digit subtracts; it is no sign of the number.
_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(sample: Sample) -> float:
    """1 if the last number in the completion equals the answer, else 0."""
    numbers = _NUMBER.findall(sample.completion)
    return float(bool(numbers) and Decimal(numbers[-1].replace(",", "")) == Decimal(sample.answer))


def reversed_digits(sample: Sample) -> float:
    """Fraction of digits in the right place, less 0.1 if the length is wrong; -0.1 to 1."""
    return digits_reward(sample.completion, sample.answer)


def digits_reward(text: str, answer: str) -> float:
    """`reversed_digits` of bare strings."""
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / len(answer) - 0.1 * (len(text) != len(answer))


def math_verify_reward(sample: Sample) -> float:
    """1 if the completion's final expression equals the answer mathematically, else 0; by math-verify.

    Its own time limits need the main thread and signals; the reward actor's limit serves instead.
    """
    from math_verify import parse, verify

    # It warns of every call without its own time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"\\boxed{{{sample.answer}}}", parsing_timeout=None)
    given = parse(sample.completion, parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))
