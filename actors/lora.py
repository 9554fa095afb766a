"""LoRA: the base stays as it is; small matrices beside its linear layers are trained, published and saved.

A layer computes `base(x) + scaling * B(A(x))`. PEFT puts `A` (random) and `B` (zero) into the model in place, so that
it stays the Hugging Face class that it was; they are float32, the base may be kept in the compute type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.model import load_config
from forge.errors import ConfigError
from weightsync.adapters import ENGINE_RANKS, AdapterSpec, adapter_parameters, adapter_spec
from weightsync.layout import clean_name, is_adapter

ADAPTER_FOLDER = "adapter"
"""Where in a checkpoint the adapter lies in PEFT's own format."""
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass
class LoraConfig:
    """Low-rank adapters in place of training all weights."""

    rank: int = 0
    """Rank of the adapters' matrices, 1 to 512; 0 trains the model itself. With it only adapters are trained,
    published and kept for a resume; the generators' side follows by itself."""
    alpha: float = 32.0
    """An adapter's output is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which suits large ranks."""
    targets: list[str] = field(default_factory=list)
    """Linear layers to adapt, by the last part of their names, such as q_proj; empty adapts all but the head. Of these
    trainer.trainable takes those whose weights it matches."""
    dropout: float = 0.0
    """Only 0: log-probs must be those of the sampler, and that one samples without dropout."""

    @property
    def scaling(self) -> float:
        """What B(A(x)) is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        if not 0 <= self.rank <= ENGINE_RANKS[-1]:
            raise ConfigError(
                f"trainer.lora.rank must lie in 0..{ENGINE_RANKS[-1]}, what the engine serves, got {self.rank}; "
                "0 trains the model itself"
            )
        if not self.alpha > 0:
            raise ConfigError(f"trainer.lora.alpha must be > 0, got {self.alpha}")
        if self.dropout:
            raise ConfigError(
                f"trainer.lora.dropout must be 0, got {self.dropout}: the generators sample without dropout, and the "
                "trainer's log-probs would be those of another distribution"
            )


def linear_layers(hf: Any) -> list[str]:
    """The last parts of the names of all linear layers but the head, sorted."""
    layers = (name for name, module in hf.base_model.named_modules() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in layers})


def targets_of(hf: Any, config: LoraConfig) -> list[str]:
    """The layers of `hf` to adapt, as `config.targets` names them. Raises ConfigError where there is no such layer."""
    found = linear_layers(hf)
    if not found:
        raise ConfigError(f"trainer.lora.rank is {config.rank}, and {type(hf).__name__} has no linear layers to adapt")
    if unknown := sorted(set(config.targets) - set(found)):
        raise ConfigError(
            f"trainer.lora.targets has {', '.join(unknown)}; the linear layers of {type(hf).__name__} are "
            f"{', '.join(found)}"
        )
    return sorted(set(config.targets)) or found


def targets_of_model(model: str, config: LoraConfig) -> list[str]:
    """`targets_of` a model in a folder or on the hub, of which only the config is read."""
    from transformers import AutoModelForCausalLM

    model_config = load_config(model)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(model_config)
    return targets_of(hf, config)


@dataclass(frozen=True)
class Lora:
    """The adapter of one model: what it adapts, and its matrices in other forms.

    `targets` are names of layers, or the last parts of them where all that are called so are adapted.
    """

    config: LoraConfig
    targets: tuple[str, ...]

    def peft_config(self, base: str = "") -> Any:
        """PEFT's description of the adapter, for the model `base`."""
        from peft import LoraConfig as PeftConfig
        from peft import TaskType

        alpha = float(self.config.alpha)  # as other programs write it, where it can be
        return PeftConfig(
            task_type=TaskType.CAUSAL_LM,
            base_model_name_or_path=base or None,
            r=self.config.rank,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
            use_rslora=self.config.rslora,
            target_modules=list(self.targets),
            lora_dropout=0.0,
            bias="none",
        )

    def published(self, hf: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], AdapterSpec]:
        """What a publisher sends in place of all weights, and what receivers are told of it."""
        parameters = adapter_parameters(hf.named_parameters())
        return parameters, adapter_spec(self.peft_config(), parameters)

    def merged(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The state dict of a plain model in `dtype` that computes what base and adapter of `state` do together.

        `W + scaling * B @ A`, in float32, rounded once.
        """
        whole = {}
        for name, value in state.items():
            if is_adapter(name):
                continue
            module = name.removesuffix(".base_layer.weight")
            if module != name and module + _A in state:
                delta = state[module + _B].float() @ state[module + _A].float()
                value = value.float() + self.config.scaling * delta
            whole[clean_name(name)] = value.to(dtype)
        return whole

    def write(self, state: Mapping[str, torch.Tensor], folder: Path, base: str) -> None:
        """The adapter of `state` in PEFT's own format, float32, for the model `base`; makes `folder`."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        matrices = {
            f"base_model.model.{name.replace('.default.', '.')}": value.float().contiguous()
            for name, value in state.items()
            if is_adapter(name)
        }
        save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = self.peft_config(base)
        config.inference_mode = True
        config.save_pretrained(folder)


def _layers_to_adapt(hf: nn.Module, targets: list[str]) -> list[str]:
    layers = {name: module for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    called = [name for name in layers if name.rpartition(".")[2] in targets]
    chosen = [name for name in called if layers[name].weight.requires_grad]
    if not chosen:
        raise ConfigError(f"trainer.trainable leaves none of the layers {', '.join(targets)} to adapt; leave it empty")
    return targets if chosen == called else chosen


def add_lora(hf: Any, config: LoraConfig, seed: int) -> Lora:
    """Puts float32 adapters beside the linear layers of `hf` that are not frozen, in place, and freezes all else.

    Every rank gets the same ones from the same `seed`. Raises ConfigError where there is nothing to adapt.
    """
    from peft import inject_adapter_in_model

    lora = Lora(config, tuple(_layers_to_adapt(hf, targets_of(hf, config))))
    torch.manual_seed(seed)
    hf.requires_grad_(False)
    inject_adapter_in_model(lora.peft_config(), hf)
    for name, parameter in hf.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return lora
