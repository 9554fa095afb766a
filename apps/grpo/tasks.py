"""Tasks (rows of prompts) and rewards (plain functions) of the GRPO app."""
from __future__ import annotations
from random import Random

def reversal(rng: Random, num_digits: int) -> tuple[str, str]:
    digits = "".join(rng.choices("0123456789", k=num_digits))
    return f"rev:{digits}=", digits[::-1]

def digits_reward(text: str, answer: str) -> float:
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / len(answer) - 0.1 * (len(text) != len(answer))
