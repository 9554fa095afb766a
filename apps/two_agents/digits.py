"""An episode for the models `tiny` and `nano`: any string of digits is a task, and its answer the digits reversed.

How hard it is lies in the digits: `7777` is its own reverse, `4382` takes four digits in the right places.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.reward_worker import Sample

ILLEGAL = -0.5


def to_task(text: str, longest: int = 8) -> dict[str, Any] | None:
    """The solver's row for a proposal of 1 to `longest` digits; None for anything else."""
    if not re.fullmatch(f"[0-9]{{1,{longest}}}", text):
        return None
    return {"prompt": f"rev:{text}=", "answer": text[::-1]}


def at_the_edge(sample: Sample) -> float:
    """1 - |2p - 1| of a proposal that the share p of its answers solves (a reward of 1); `ILLEGAL` for no task.

    1 where every second answer is right; 0 where all are, or none.
    """
    if sample.answer is None:
        return ILLEGAL
    return 1 - abs(2 * fmean(reward >= 1 for reward in sample.answer) - 1)
