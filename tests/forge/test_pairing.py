"""Laws of forge/pairing.py: which loss goes with which bound, and what a loss needs."""

from __future__ import annotations

from typing import Any

import pytest

from forge.corrections import CORRECTIONS
from forge.errors import ConfigError
from forge.losses import LOSSES, LossConfig
from forge.pairing import LOSS_STALENESS, REMEDIES, check_pairing, check_supplied, needed_inputs


def test_every_loss_and_every_correction_is_in_the_table() -> None:
    assert set(LOSS_STALENESS) == set(LOSSES) | set(CORRECTIONS)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_ignores_who_sampled_is_refused_above_a_bound_of_zero(name: str) -> None:
    loss = LossConfig(name=name)
    check_pairing(loss, 0)
    if LOSS_STALENESS[name].uses_behavior:
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


@pytest.mark.parametrize(
    "changes, name, option",
    [
        ({"correction": "seq_tis"}, "proximal_logprobs", r"loss\.correction seq_tis"),
        ({"name": "decoupled_ppo"}, "proximal_logprobs", r"loss\.name decoupled_ppo"),
        ({"kl_weight": 0.1, "kl_in": "reward"}, "token_advantages", r"loss\.kl_in reward"),
        ({"value_weight": 0.5}, "values", r"loss\.value_weight 0\.5"),
    ],
)
def test_what_the_trainer_does_not_supply_is_refused_with_a_remedy(
    changes: dict[str, Any], name: str, option: str
) -> None:
    loss = LossConfig(**changes)
    text = rf"{option} needs {name}, which the trainer does not supply yet; use "
    with pytest.raises(ConfigError, match=text):
        check_supplied(loss, set())
    check_supplied(loss, {name})
    assert set(needed_inputs(loss)) == {name}
    assert name in REMEDIES


def test_the_default_loss_needs_nothing() -> None:
    assert needed_inputs(LossConfig()) == {}
    assert needed_inputs(LossConfig(kl_weight=0.1)) == {}
    assert needed_inputs(LossConfig(kl_in="reward")) == {}  # weight 0: no KL at all
