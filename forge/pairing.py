"""Which loss goes with which staleness bound. Pure.

At a bound of 0 every token is sampled by the weights that it trains. Above, a loss has to know who sampled it.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.corrections import CORRECTIONS
from forge.errors import ConfigError
from forge.loss_config import LossConfig


@dataclass(frozen=True)
class Pairing:
    """What a loss does about the policy that sampled a token; without `uses_behavior` it holds at a bound of 0 only,
    unless what it says holds for tokens from `anyone`."""

    uses_behavior: bool
    how: str
    anyone: bool = False


LOSS_STALENESS: dict[str, Pairing] = {
    "ppo_clip": Pairing(True, "ratio to the sampler, clipped: one token"),
    "gspo": Pairing(True, "ratio to the sampler, clipped: one sequence"),
    "cispo": Pairing(True, "ratio to the sampler as a clipped weight"),
    "decoupled_ppo": Pairing(True, "weight to the sampler, ratio to the start of the step"),
    "reinforce": Pairing(False, "ignores the sampler"),
    "nll": Pairing(False, "ignores the sampler; for data that no policy sampled"),
    "dpo": Pairing(False, "compares two answers, whoever wrote them", anyone=True),
    "reverse_kl": Pairing(True, "ratio to the sampler, clipped: one token"),
    "tis": Pairing(True, "weight of a token, truncated above"),
    "seq_tis": Pairing(True, "weight of a sequence, truncated above"),
    "icepop": Pairing(True, "weight of a token, 0 outside two limits"),
    "seq_mask": Pairing(True, "sequences whose product of ratios is far off are left out"),
    "geo_mask": Pairing(True, "sequences whose mean ratio is far off are left out"),
}
"""Losses and corrections. A loss of your own is not listed and not judged."""


def check_pairing(loss: LossConfig, max_staleness: int) -> None:
    """Raises ConfigError when tokens may be stale and neither the loss nor its correction knows who sampled them.

    `loss.allow_off_policy` turns this off.
    """
    if max_staleness == 0 or loss.allow_off_policy or loss.name not in LOSS_STALENESS:
        return
    if LOSS_STALENESS[loss.name].anyone:
        return
    if any(LOSS_STALENESS[name].uses_behavior for name in (loss.name, loss.correction) if name in LOSS_STALENESS):
        return
    others = ", ".join(name for name, pairing in LOSS_STALENESS.items() if pairing.uses_behavior and name in _LOSSES)
    raise ConfigError(
        f"replay.max_staleness is {max_staleness}, loss.name {loss.name}, which ignores the policy that sampled a "
        f"token: the bound must be 0; use {others}, a loss.correction, replay.max_staleness 0, "
        "or loss.allow_off_policy to train it all the same"
    )


_LOSSES = set(LOSS_STALENESS) - set(CORRECTIONS)
