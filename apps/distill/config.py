"""The configuration of on-policy distillation: GRPO's, and a teacher."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import AutoTokenizer

from actors.reward import RewardConfig, RewardFunction
from apps.grpo.config import AppConfig
from apps.grpo.config import plan_run as plan_rollouts
from apps.grpo.models import check_model, resolve_model
from forge.errors import ConfigError
from forge.losses import LossConfig
from forge.placement import Placement


@dataclass
class DistillConfig(AppConfig):
    """On-policy distillation."""

    teacher: str = ""
    """The model whose log-probs are the signal, as --model takes it; with the vocabulary of the student, --model."""
    reward: RewardConfig = field(
        default_factory=lambda: RewardConfig(functions=[RewardFunction("apps.distill.tasks:nothing")])
    )
    """For metrics only: no reward is trained on."""
    loss: LossConfig = field(default_factory=lambda: LossConfig(name="reverse_kl"))
    """What the trainer minimises."""

    def validate(self) -> None:
        """Raises ConfigError before any process starts."""
        if not self.teacher:
            raise ConfigError("teacher is empty; give --teacher, such as the checkpoint/ of a run of apps/sft/main.py")
        try:
            check_model(self.teacher)
        except ConfigError as error:
            raise ConfigError(f"teacher: {error}") from error
        super().validate()
        if not self.loss.needs.reference:
            raise ConfigError(f"loss.name is {self.loss.name}, which reads no teacher; use reverse_kl, or your own")
        if self.loss.per_token:
            raise ConfigError(f"loss.token_advantages is {self.loss.token_advantages}, which nobody reads; use episode")
        if self.grpo.degenerate != "keep":
            raise ConfigError(
                "grpo.degenerate is drop: groups would be dropped by rewards that nobody trains on; use keep"
            )


def plan_run(cfg: DistillConfig, torchrun_slots: int | None, num_hosts: int = 1) -> Placement:
    """`apps.grpo.config.plan_run` for it."""
    return plan_rollouts(cfg, torchrun_slots, num_hosts)


def resolve_teacher(cfg: DistillConfig) -> str:
    """The teacher's folder or hub name. Raises ConfigError where a token id means something else to it."""
    teacher = resolve_model(cfg.teacher)
    names = (resolve_model(cfg.model), teacher)
    student_ids, teacher_ids = (AutoTokenizer.from_pretrained(name).get_vocab() for name in names)
    if student_ids == teacher_ids:
        return teacher
    first = min(token for token, _ in student_ids.items() ^ teacher_ids.items())
    raise ConfigError(
        f"teacher {cfg.teacher} and model {cfg.model} have vocabularies of {len(teacher_ids)} and {len(student_ids)} "
        f"tokens that differ, for one in {first!r}: {teacher_ids.get(first)} and {student_ids.get(first)}; log-probs "
        "of token ids need one tokenizer, use a teacher of the same family"
    )
