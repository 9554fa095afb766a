"""Router replay: the trainer's routers choose the experts that the generator's chose (Rollout Routing Replay, R3).

In a mixture of experts a rounding error can send a token to another expert, and the log-prob jumps: trainer and
generator disagree at equal weights. Replayed, a router still computes its scores with the weights of now, and its
gradient, but takes the recorded experts in place of the k best (Ma et al. 2025, arXiv:2510.11370).

    hidden -> router's scores -> [top-k, or the recorded ids] -> weights of the chosen -> experts

How a family turns scores into weights is its own affair: only its call of `torch.topk` is answered differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from forge.errors import ConfigError, SchemaError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RouterReplay:
    """The routers of one Hugging Face causal LM; changes their forward passes in place."""

    def __init__(self, hf: Any) -> None:
        """Raises ConfigError when the model has no routers, or some that do not take what is recorded."""
        self._routers = dict(_routers(hf))
        if not self._routers:
            raise ConfigError(_REFUSED.format(type(hf).__name__, "has no routers that name their experts per token"))
        self._experts = _num_experts(hf.config)
        self._routes: torch.Tensor | None = None
        for layer, router in self._routers.items():
            router.forward = _Replayed(router.forward, self._experts, partial(self._of, layer))
        self._check(hf)

    def use(self, routes: torch.Tensor | None) -> None:
        """What the passes from now on replay, `[R, L, layers, k]` along their tokens; None: the routers' own choice.

        It has to stand until the backward pass, which may compute activations again. Raises SchemaError when the model
        has other layers.
        """
        if routes is not None and routes.shape[2] <= max(self._routers):
            raise SchemaError(
                f"routed_experts has {routes.shape[2]} layers, the model routes in layer {max(self._routers)}; "
                "generator and trainer must load the same architecture"
            )
        self._routes = routes

    def _of(self, layer: int) -> torch.Tensor | None:
        return None if self._routes is None else self._routes[:, :, layer].flatten(0, 1).long()

    @torch.no_grad()
    def _check(self, hf: Any) -> None:
        """Other experts than their own, on a few tokens, have to come out of all routers."""
        tokens = torch.arange(1, 5, device=hf.device)[None] % hf.config.vocab_size
        chosen: dict[int, torch.Tensor] = {}
        hooks = [
            router.register_forward_hook(lambda _, __, out, layer=layer: chosen.update({layer: out[-1]}))
            for layer, router in self._routers.items()
        ]
        try:
            hf.base_model(input_ids=tokens, use_cache=False)
            other = {layer: (ids + 1) % self._experts for layer, ids in chosen.items()}
            routes = torch.stack([other.get(layer, other[max(other)]) for layer in range(max(other) + 1)], dim=1)
            self.use(routes[None])
            hf.base_model(input_ids=tokens, use_cache=False)
        finally:
            self.use(None)
            for hook in hooks:
                hook.remove()
        for layer, ids in chosen.items():
            if not torch.equal(ids.sort().values, other[layer].sort().values):
                raise ConfigError(_REFUSED.format(type(hf).__name__, f"takes other experts in layer {layer}"))


_REFUSED = "generator.keep_routes is true, but {} {}; set it to false, the trainer's routers choose for themselves then"


def check_routed(config: Any) -> None:
    """Raises ConfigError when the model of a Hugging Face config is no mixture of experts."""
    if not _num_experts(config):
        raise ConfigError(_REFUSED.format(f"a {config.model_type} model", "is no mixture of experts"))


def _num_experts(config: Any) -> int:
    """Experts of a layer; 0 in a dense model."""
    text = config.get_text_config()
    counts = (getattr(text, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((count for count in counts if count), 0)


def _routers(hf: Any) -> Iterator[tuple[int, nn.Module]]:
    for path, module in hf.base_model.named_modules():
        if re.search(r"Top_?KRouter$", type(module).__name__, re.IGNORECASE) and (found := _LAYER.search(f"{path}.")):
            yield int(found.group(1)), module


class _Replayed:
    """A router's forward pass, whose choice of experts is the recorded one where there is one."""

    def __init__(self, forward: Callable[..., Any], experts: int, recorded: Callable[[], torch.Tensor | None]) -> None:
        self._forward, self._experts, self._recorded = forward, experts, recorded

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        ids = self._recorded()
        if ids is None:
            return self._forward(*arguments, **keywords)
        with _Chosen(ids, self._experts):
            return self._forward(*arguments, **keywords)


class _Chosen(TorchFunctionMode):
    """Inside, the k best of the scores `[N, E]` of `experts` are those of `ids` `[N, k]`, where a row has some."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._ids, self._experts = ids, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.shape != self._ids.shape:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._experts:  # a choice of groups of experts comes first in some families
            return result
        chosen = torch.where(self._ids >= 0, self._ids, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
