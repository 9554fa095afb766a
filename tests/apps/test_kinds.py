"""Laws of apps/worlds/kinds.py: what a quota promises."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.worlds.kinds import Interleaved, divided, in_turn, shares_of
from forge.data import DataConfig, PromptStream, load_task
from forge.errors import ConfigError


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7))
def test_of_the_first_n_groups_each_kind_has_its_share_give_or_take_less_than_one(weights: list[int]) -> None:
    shares = {f"kind{i}": Fraction(weight, sum(weights)) for i, weight in enumerate(weights)}
    taken: Counter[str] = Counter()
    for number, name in enumerate(islice(in_turn(shares), 120), start=1):
        taken[name] += 1
        for kind, share in shares.items():
            assert abs(taken[kind] - share * number) < 1, (kind, number)


def test_kinds_without_a_quota_divide_the_rest() -> None:
    assert shares_of(["a", "b", "c"], {"a": 0.5}) == {"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(1, 4)}
    assert sum(shares_of(list("abcd"), {"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.7}).values()) == 1


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ({"c": 0.5}, r"'c', which is none of the environments a, b"),
        ({"a": 0.0}, r"quotas\.a must lie in \(0, 1\], got 0\.0"),
        ({"a": 1.0}, r"add up to 1, and 1 kinds have none \(b\)"),
        ({"a": 0.5, "b": 0.2}, r"add up to 0\.7, and 0 kinds have none"),
        ({"a": 0.9, "b": 0.9}, r"add up to 1\.8"),
    ],
)
def test_wrong_quotas_are_named(quotas: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shares_of(["a", "b"], quotas)


def rows() -> DataConfig:
    arguments = {"turns": 1, "num_rows": 12, "kinds": ["quick", "quick", "quick", "slow"]}
    return DataConfig("apps.worlds.reversals:tasks", arguments)


def stream(seed: int = 3) -> PromptStream:
    shares = shares_of(["quick", "slow"], {"slow": 0.5})
    return PromptStream(load_task(divided(rows(), shares, seed)), lambda row: (row["prompt"], [1]), seed)


def test_every_kind_comes_in_an_order_of_its_own_epoch_after_epoch() -> None:
    drawn = [stream_.draw().metadata for stream_ in [stream()] for _ in range(36)]
    assert [task["environment"] for task in drawn[:4]].count("slow") == 2
    quick, slow = ([t["id"] for t in drawn if t["environment"] == kind] for kind in ("quick", "slow"))
    assert sorted(quick[:9]) == sorted(quick[9:18])
    assert len({*quick[:9]}) == 9
    assert len({*slow[:3]}) == 3
    assert sorted(slow[:3]) == sorted(slow[3:6])
    assert quick[:9] != quick[9:18], "another order each epoch"


def test_a_resumed_run_goes_on_with_the_very_next_task() -> None:
    first, second = stream(), stream()
    for _ in range(17):
        first.draw()
    second.load_state_dict(first.state_dict())
    for _ in range(20):
        assert second.draw() == first.draw()


def test_a_kind_without_tasks_and_a_task_without_a_kind_are_named() -> None:
    task = {"prompt": "a", "metadata": {"environment": "a"}}
    shares = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    with pytest.raises(ConfigError, match=r"no row of data\.task is for environment b"):
        Interleaved([task], shares, 0, True)
    with pytest.raises(ConfigError, match=r"row 1 of data\.task has environment None in its metadata"):
        Interleaved([task, {"prompt": "a"}], shares, 0, True)
    with pytest.raises(ConfigError, match="quotas need rows with len"):
        Interleaved(iter([task]), shares, 0, True)
