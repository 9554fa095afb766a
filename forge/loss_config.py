"""The section `loss` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from forge.corrections import CORRECTIONS
from forge.errors import ConfigError
from forge.kl import KL_ESTIMATORS, KlEstimator
from forge.loss_input import Needs, needs_of
from forge.policy_losses import LOSSES
from forge.preference_losses import check_dpo
from forge.registry import lookup
from forge.token_advantages import TOKEN_ADVANTAGES

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
EPISODE = "episode"
"""What `token_advantages` is called where every token gets the advantage of its episode."""
CorrectionName: TypeAlias = Literal["none", "tis", "seq_tis", "icepop", "seq_mask", "geo_mask"]


@dataclass
class LossConfig:
    """What the trainer minimises."""

    name: str = "ppo_clip"
    """Loss per token: ppo_clip, decoupled_ppo, gspo, cispo, reinforce, nll, dpo, reverse_kl, or module:function for
    your own."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low; a fraction in [0, 1]."""
    clip_high: float = 0.28
    """The probability ratio is clipped above at 1 + clip_high; a fraction >= 0."""
    dual_clip: float | None = None
    """Bound on the loss of a token with negative advantage, times -advantage (3 is usual); null: off."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number."""
    norm_length: int | None = None
    """Tokens; the constant length that seq_mean_token_sum_norm divides by, usually the new-token budget."""
    correction: CorrectionName = "none"
    """Weight of each token for the gap between the policy that sampled it and the trainer's at the start of the
    step; with one, the ratio is against the latter. none: the ratio is against the policy that sampled."""
    weight_low: float | None = None
    """Lower limit of the weight under icepop (null: 0.5), seq_mask (0.5) and geo_mask (0.99), >= 0."""
    weight_high: float | None = None
    """Upper limit of the weight under tis and seq_tis (null: 2), icepop (5), seq_mask (2), geo_mask (1.01), and of
    decoupled_ppo (5), > 0."""
    weight_over: Literal["mask", "clamp"] = "mask"
    """What decoupled_ppo does with a token whose weight is above weight_high."""
    kl_weight: float = 0.0
    """Weight of the KL divergence to the reference policy, >= 0; 0: no reference is needed."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL from one sample; in the loss, the gradient of k1 is zero in expectation."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where that KL goes: added to the loss, or taken from the reward of each token (usual with k1), which
    token_advantages must read then."""
    token_advantages: str = "episode"
    """How an episode's advantage becomes one of each token: episode (the same for all), reinforce_pp (returns) or gae
    (with a critic), whitened over the batch, or module:function of your own."""
    gamma: float = 1.0
    """Discount of what the next token earns, under reinforce_pp and gae; in [0, 1]."""
    lam: float = 1.0
    """GAE's decay; in [0, 1]."""
    allow_off_policy: bool = False
    """Train a loss that ignores the policy that sampled at a staleness bound above 0 all the same."""
    params: dict[str, float] = field(default_factory=dict)
    """Free numbers for a loss of your own, read as cfg.params['x']; dpo reads beta and label_smoothing."""

    @property
    def per_token(self) -> bool:
        """Whether the tokens of an episode have advantages of their own."""
        return self.token_advantages != EPISODE

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads log-probs under the weights at the start of the step."""
        return self.correction != "none" or self.name == "decoupled_ppo"

    @property
    def needs(self) -> Needs:
        """What the loss asks of trainer and rollouts."""
        return needs_of(lookup(self.name, LOSSES, "loss.name"))

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference has to give its log-probs."""
        return self.kl_weight > 0 or self.needs.reference

    def validate(self) -> None:
        """Raises ConfigError naming the first field that cannot work."""
        lookup(self.name, LOSSES, "loss.name")
        if self.name == "dpo":
            check_dpo(self)
        _require(self.clip_low, 0.0 <= self.clip_low <= 1.0, "loss.clip_low", "in [0, 1]")
        _require(self.clip_high, self.clip_high >= 0.0, "loss.clip_high", ">= 0")
        dual_ok = self.dual_clip is None or self.dual_clip > 1.0
        _require(self.dual_clip, dual_ok, "loss.dual_clip", "> 1, or null")
        _require(self.kl_weight, self.kl_weight >= 0.0, "loss.kl_weight", ">= 0; 0 turns it off")
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            _require(value, 0.0 <= value <= 1.0, f"loss.{name}", "in [0, 1]; 1 discounts nothing")
        _require(self.aggregation, self.aggregation in AGGREGATIONS, "loss.aggregation", f"in {AGGREGATIONS}")
        _require(self.kl_estimator, self.kl_estimator in KL_ESTIMATORS, "loss.kl_estimator", "k1, k2 or k3")
        length_ok = self.aggregation != "seq_mean_token_sum_norm" or (self.norm_length or 0) >= 1
        limit = ">= 1 with seq_mean_token_sum_norm; generator.max_new_tokens is usual"
        _require(self.norm_length, length_ok, "loss.norm_length", limit)
        self._validate_weights()
        if self.per_token:
            lookup(self.token_advantages, TOKEN_ADVANTAGES, "loss.token_advantages")
        elif self.kl_weight and self.kl_in == "reward":
            raise ConfigError(
                "loss.kl_in is reward, loss.token_advantages episode, which reads no reward of a token; use kl_in loss "
                f"or token_advantages {' or '.join(TOKEN_ADVANTAGES)}"
            )

    def _validate_weights(self) -> None:
        names = ("none", *CORRECTIONS)
        _require(self.correction, self.correction in names, "loss.correction", f"one of {', '.join(names)}")
        if self.correction != "none" and self.name == "decoupled_ppo":
            raise ConfigError(
                f"loss.correction is {self.correction}, loss.name decoupled_ppo, which already weighs tokens by the "
                "policy that sampled them; use correction none or loss ppo_clip"
            )
        known = CORRECTIONS.get(self.correction)
        low, high = self.weight_low, self.weight_high
        if low is not None and (known is None or known.low is None):
            raise ConfigError(f"loss.weight_low is {low}, correction {self.correction} has none; leave it out")
        if high is not None and known is None and self.name != "decoupled_ppo":
            raise ConfigError(f"loss.weight_high is {high}, correction none has none; leave it out or set a correction")
        low, high = known.limits(low, high) if known else (0.0, high)
        _require(low, low >= 0.0, "loss.weight_low", ">= 0")
        if high is not None:
            _require(high, high > 0.0 and high >= low, "loss.weight_high", f"> 0 and >= weight_low {low}; raise it")


def _require(value: object, ok: bool, option: str, limit: str) -> None:
    if not ok:
        must, _, remedy = limit.partition("; ")
        raise ConfigError(f"{option} must be {must}, got {value}" + (f"; {remedy}" if remedy else ""))
