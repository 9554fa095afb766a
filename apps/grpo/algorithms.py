"""Algorithms by name: what `--algorithm=NAME` stands for on the command line.

A name is nothing but options written out, so that any of them given too wins. Whatever an algorithm leaves alone
keeps the value of the preset.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.errors import ConfigError

PREFIX = "--algorithm"

ALGORITHMS: dict[str, tuple[str, ...]] = {
    # Shao et al. 2024: a mean over episodes of means over tokens, symmetric clipping.
    "grpo": ("grpo.advantage=grpo", "loss.name=ppo_clip", "loss.aggregation=seq_mean_token_mean", "loss.clip_high=0.2"),
    # Liu et al. 2025: no division by the std, none by the length; needs loss.norm_length.
    "dr_grpo": (
        *("grpo.advantage=dr_grpo", "loss.name=ppo_clip", "loss.clip_high=0.2"),
        "loss.aggregation=seq_mean_token_sum_norm",
    ),
    # Yu et al. 2025: clip higher, mean over tokens, groups that teach nothing are replaced.
    "dapo": (
        *("grpo.advantage=grpo", "loss.name=ppo_clip", "loss.clip_low=0.2", "loss.clip_high=0.28"),
        *("loss.aggregation=token_mean", "grpo.degenerate=drop"),
    ),
    # Zheng et al. 2025.
    "gspo": (
        *("grpo.advantage=grpo", "loss.name=gspo", "loss.clip_low=3e-4", "loss.clip_high=4e-4"),
        "loss.aggregation=seq_mean_token_mean",
    ),
    # MiniMax 2025: clipped above only.
    "cispo": (
        *("grpo.advantage=grpo", "loss.name=cispo", "loss.clip_low=1", "loss.clip_high=4"),
        "loss.aggregation=token_mean",
    ),
    # Ahmadian et al. 2024: the log-prob of an episode is the sum of its tokens'.
    "rloo": ("grpo.advantage=rloo", "loss.name=ppo_clip", "loss.aggregation=seq_mean_token_sum"),
    # Schulman et al. 2017, with a critic; no group is compared with itself.
    "ppo": (
        *("grpo.advantage=none", "loss.token_advantages=gae", "loss.gamma=1", "loss.lam=0.95"),
        *("loss.name=ppo_clip", "loss.clip_high=0.2", "trainer.updates=2"),
    ),
    # Hu 2025: returns of tokens, the KL divergence in the reward.
    "reinforce_pp": (
        *("grpo.advantage=none", "loss.token_advantages=reinforce_pp", "loss.name=ppo_clip"),
        *("loss.kl_in=reward", "loss.kl_estimator=k1"),
    ),
    # The mean of the group is taken from the rewards first.
    "reinforce_pp_baseline": (
        *("grpo.advantage=dr_grpo", "loss.token_advantages=reinforce_pp", "loss.name=ppo_clip"),
        *("loss.kl_in=loss", "loss.kl_estimator=k2"),
    ),
    # Fu et al. 2025: three policies; the third is one of its own from the second update of a step on.
    "decoupled_ppo": ("grpo.advantage=grpo", "loss.name=decoupled_ppo", "loss.clip_high=0.2", "trainer.updates=2"),
}


def expand(words: Sequence[str]) -> list[str]:
    """The command line with `--algorithm=NAME` (or `--algorithm NAME`) written out, before every other option.

    Raises ConfigError for an unknown name, a missing one, and two of them.
    """
    rest = list(words)
    places = [i for i, word in enumerate(rest) if word == PREFIX or word.startswith(f"{PREFIX}=")]
    if not places:
        return rest
    known = ", ".join(ALGORITHMS)
    if len(places) > 1:
        raise ConfigError(f"algorithm is given {len(places)} times (command line); give one of {known}")
    word = rest.pop(places[0])
    following = places[0] < len(rest) and not rest[places[0]].startswith("--")
    name = word.partition("=")[2] if "=" in word else rest.pop(places[0]) if following else ""
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm is {name!r} (command line), allowed: {known}; write {PREFIX}=NAME")
    return [*(f"--{option}" for option in ALGORITHMS[name]), *rest]
