"""The app's tasks have the right answers, and its rewards know them when they see them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.reward import RewardConfig, RewardFunction, RewardScorer, Sample
from apps.grpo.tasks import (
    add_digits,
    digits_reward,
    gsm8k,
    last_number,
    math_verify_reward,
    reverse_digits,
    reversed_digits,
)
from forge.data import DataConfig, load_task
from forge.errors import ConfigError

ROOT = Path(__file__).parents[2]
GSM8K = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"


def sample(completion: str, answer: str) -> Sample:
    return Sample(prompt="", completion=completion, answer=answer)


def test_add_digits_asks_each_of_the_hundred_sums_once_without_a_system_turn() -> None:
    rows = add_digits()
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 100
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in rows)
    assert {row["messages"][0]["content"]: row["answer"] for row in rows}["What is 7 + 8?"] == "15"


def test_reverse_digits_is_the_same_for_the_same_seed() -> None:
    rows = reverse_digits(num_digits=4, num_rows=50)
    assert rows == reverse_digits(num_digits=4, num_rows=50)
    assert rows != reverse_digits(num_digits=4, num_rows=50, seed=8)
    for row in rows:
        digits = row["prompt"].removeprefix("rev:").removesuffix("=")
        assert len(digits) == 4
        assert row["answer"] == digits[::-1]


def test_gsm8k_reads_a_file_of_its_own_format() -> None:
    rows = gsm8k(str(GSM8K))
    assert [row["answer"] for row in rows] == ["25", "10000", "15", "-5", "45", "9", "64", "75"]
    question = rows[0]["messages"][0]["content"]
    assert question.startswith("A baker puts 12 rolls")
    assert "\\boxed{}" in question
    assert "####" not in question


def test_gsm8k_is_reached_through_the_configuration_with_a_system_prompt() -> None:
    rows = load_task(DataConfig("apps.grpo.tasks:gsm8k", path=str(GSM8K), size=3, system_prompt="You count."))
    assert len(rows) == 3
    assert [m["role"] for m in rows[2]["messages"]] == ["system", "user"]


def test_gsm8k_says_which_file_or_record_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl cannot be read"):
        gsm8k(str(tmp_path / "missing.jsonl"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        json.dumps({"question": "?", "answer": "#### 1"}) + "\n\n" + json.dumps({"question": "?", "answer": "2"})
    )
    with pytest.raises(ConfigError, match="record 1: the answer has no `####`"):
        gsm8k(str(bad))
    bad.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match="record 0"):
        gsm8k(str(bad))
    bad.write_text("not json\n")
    with pytest.raises(ConfigError, match="line 1"):
        gsm8k(str(bad))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package is installed")
def test_gsm8k_of_the_hub_says_which_package_it_needs() -> None:
    with pytest.raises(ConfigError, match="pip install datasets"):
        gsm8k()


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("7", "7", 1),
        ("3 + 4 = 7.", "7", 1),
        ("3 + 4 = 7. Or is it 8?", "7", 0),
        ("7 apples", "7", 1),
        ("It is 17", "7", 0),
        ("", "7", 0),
        ("seven", "7", 0),
        ("1,234", "1234", 1),
        ("$7.00", "7", 1),
        ("5-2", "2", 1),
        ("x = -5", "-5", 1),
        ("x = 5", "-5", 0),
    ],
)
def test_the_last_number_decides(completion: str, answer: str, reward: float) -> None:
    assert last_number(sample(completion, answer)) == reward


@pytest.mark.parametrize(
    "text, reward",
    [
        ("654321", 1.0),
        ("123456", 0.0),
        ("654", 0.5 - 0.1),
        ("6543210", 1.0 - 0.1),
        ("", -0.1),
        ("654x21", 5 / 6),
    ],
)
def test_digits_in_the_right_place_are_paid_and_a_wrong_length_costs(text: str, reward: float) -> None:
    assert digits_reward(text, "654321") == pytest.approx(reward)
    assert reversed_digits(sample(text, "654321")) == pytest.approx(reward)


MATH = [
    ("The answer is \\boxed{10000}.", "10000", 1.0),
    ("The answer is \\boxed{10,000}.", "10000", 1.0),
    ("So \\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("She has 3 left, so \\boxed{4}.", "3", 0.0),
    ("The answer is 25", "25", 1.0),
    ("\\boxed{-5}", "-5", 1.0),
    ("I do not know", "25", 0.0),
    ("", "25", 0.0),
]


@pytest.mark.parametrize("completion, answer, reward", MATH)
def test_equal_mathematics_is_right_whatever_its_form(completion: str, answer: str, reward: float) -> None:
    assert math_verify_reward(sample(completion, answer)) == reward


def test_math_verify_works_in_a_worker_and_off_the_main_thread(capfd: pytest.CaptureFixture[str]) -> None:
    cfg = RewardConfig([RewardFunction("apps.grpo.tasks:math_verify_reward")], timeout_s=60)

    async def main() -> list[float]:
        async with RewardScorer(cfg) as scorer:
            return (await scorer.score([sample(text, answer) for text, answer, _ in MATH])).total

    async def off_the_main_thread() -> list[float]:
        return await asyncio.to_thread(lambda: [math_verify_reward(sample(t, a)) for t, a, _ in MATH])

    assert asyncio.run(main()) == asyncio.run(off_the_main_thread()) == [reward for _, _, reward in MATH]
    assert capfd.readouterr().err == ""


def test_the_worked_solutions_of_the_sample_file_earn_the_full_reward() -> None:
    rows = gsm8k(str(GSM8K))
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    for row, solution in zip(rows, solutions, strict=True):
        reasoning, _, final = solution.rpartition("####")
        assert math_verify_reward(sample(f"{reasoning}\\boxed{{{final.strip()}}}", row["answer"])) == 1.0
        assert math_verify_reward(sample(f"{reasoning}\\boxed{{{final.strip()}1}}", row["answer"])) == 0.0


def test_importing_the_rewards_imports_nothing_heavy() -> None:
    code = "import sys, apps.grpo.tasks; print([n for n in ('torch', 'monarch', 'sympy') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
