"""Laws of forge/pairing.py: which loss goes with which bound."""

from __future__ import annotations

from typing import Any

import pytest

from forge.corrections import CORRECTIONS
from forge.errors import ConfigError
from forge.losses import LOSSES, LossConfig
from forge.pairing import LOSS_STALENESS, check_pairing


def test_every_loss_and_every_correction_is_in_the_table() -> None:
    assert set(LOSS_STALENESS) == set(LOSSES) | set(CORRECTIONS)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_ignores_who_sampled_is_refused_above_a_bound_of_zero(name: str) -> None:
    loss = LossConfig(name=name)
    check_pairing(loss, 0)
    if LOSS_STALENESS[name].uses_behavior or LOSS_STALENESS[name].anyone:
        check_pairing(loss, 4)
        return
    text = rf"replay\.max_staleness is 1, loss\.name {name}, which ignores .*use ppo_clip, .*allow_off_policy"
    with pytest.raises(ConfigError, match=text):
        check_pairing(loss, 1)


@pytest.mark.parametrize("changes", [{"allow_off_policy": True}, *({"correction": name} for name in CORRECTIONS)])
def test_a_switch_or_a_correction_lets_it_through(changes: dict[str, Any]) -> None:
    check_pairing(LossConfig(name="reinforce", **changes), 4)


def test_a_loss_of_ones_own_is_not_judged() -> None:
    check_pairing(LossConfig(name="my_algorithm:loss"), 4)
