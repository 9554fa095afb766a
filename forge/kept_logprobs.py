"""Log-probs over recorded supports: the scores of the kept tokens out of each block of logits, and nothing else of it.

    hidden [N, D] --chunk of C tokens--> logits [C, V] --gather--> [C, K] --softcap, temperature, softmax--> [C]

Neither sort nor top-k nor any pass over `[C, V]` but the matrix products. Part of `forge/logprobs.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.logits import HeadGradients, logits, spans


class _Scores(Protocol):
    """The part of the sampler that says what a token's score is."""

    @property
    def temperature(self) -> float: ...

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor | None]: ...


class KeptLogprobs(torch.autograd.Function):
    """Log-prob and entropy `[N]` of targets among their `kept` tokens `[N, K]`; each block of logits computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sampler: _Scores,
        chunk_size: int,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs, entropy, log_normaliser = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
        for span in spans(hidden.shape[0], chunk_size):
            chosen, scores, _ = _scores(logits(hidden[span], weight, bias), targets[span], kept[span], sampler)
            log_normaliser[span] = scores.logsumexp(dim=-1)
            logprobs[span] = chosen - log_normaliser[span]
            entropy[span] = torch.special.entr(scores.sub_(log_normaliser[span, None]).exp_()).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, kept)
        ctx.sampler, ctx.chunk_size = sampler, chunk_size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, kept = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], grad.dtype)
        for span in spans(hidden.shape[0], ctx.chunk_size):
            block = logits(hidden[span], weight, bias)
            _, scores, slope = _scores(block, targets[span], kept[span], ctx.sampler)
            # d logprob / d score = [v is the target] - p(v)
            share = scores.sub_(log_normaliser[span, None]).exp_().neg_()
            share.add_(kept[span] == targets[span, None]).mul_(grad[span, None]).div_(ctx.sampler.temperature)
            if slope is not None:
                share.mul_(slope)
            # What stands for "no token" adds nothing to token 0.
            block = block.zero_().scatter_add_(-1, _ids(kept[span]), share)
            gradients.add(span, block)
            del block  # or the next one would be made beside it
        return *gradients.sums(), None, None, None, None


def _ids(kept: Tensor) -> Tensor:
    return kept.clamp(min=0).long()


def _scores(block: Tensor, targets: Tensor, kept: Tensor, sampler: _Scores) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores of targets `[C]` and kept tokens `[C, K]`, -inf where there is none, and the softcap's slope at these."""
    ids = torch.cat([targets[:, None], _ids(kept)], dim=-1)
    scores, slope = sampler.scores(block.gather(-1, ids))
    return scores[:, 0], scores[:, 1:].masked_fill(kept < 0, -torch.inf), None if slope is None else slope[:, 1:]
