"""Log-probs of sampled tokens, without ever building logits for all of them.

    hidden [N, D] --chunk of C tokens--> logits [C, V] --softcap, temperature, top-k, top-p--> logprobs [N]

One `[C, V]` block lives at a time; the backward pass computes it again. The distribution is the one
the sampler drew from, so at equal weights the trainer's log-prob equals the recorded one:

1. logits, soft-capped where the model does so, in float32;
2. divided by the temperature;
3. top-k: what is below the k-th largest leaves (ties with it stay);
4. top-p: in ascending order, what has a cumulative probability <= 1 - p leaves; the largest stays;
5. the sampled token stays: newer weights could put it outside, which would make its log-prob -inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge.errors import ConfigError, SchemaError

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature when a smaller positive one is asked for."""


@dataclass(frozen=True)
class _Sampler:
    temperature: float
    top_k: int
    top_p: float
    softcap: float | None

    def __post_init__(self) -> None:
        if self.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"temperature must be >= {MIN_TEMPERATURE}, got {self.temperature}; a greedy choice has no "
                "log-prob to train on, sample the training episodes at a temperature"
            )
        if self.top_k < -1:
            raise ConfigError(f"top_k must be >= 1, or 0 or -1 for off, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}; 1 is off")

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores `[C, V]` before truncation, made in place, and d score / d logit where it is not constant."""
        slope = None
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_()
            slope = logits.square().neg_().add_(1.0)
            logits = logits.mul_(self.softcap)
        return logits.div_(self.temperature), slope

    def dropped(self, scores: Tensor, targets: Tensor) -> Tensor | None:
        """bool `[C, V]`, True where top-k and top-p exclude a token; None when both are off."""
        top_k = self.top_k if 0 < self.top_k < scores.shape[-1] else 0
        if self.top_p < 1.0:
            out = self._outside_top_p(scores, top_k)
        elif top_k:
            out = scores < scores.topk(top_k, dim=-1).values[:, -1:]
        else:
            return None
        return out.scatter_(-1, targets[:, None], False)

    def _outside_top_p(self, scores: Tensor, top_k: int) -> Tensor:
        ascending, order = scores.sort(dim=-1)
        if top_k:
            ascending.masked_fill_(ascending < ascending[:, -top_k, None], -torch.inf)
        # The sampler computes 1 - p in float32; a token that falls exactly on the limit needs the same.
        limit = float(1.0 - torch.tensor(self.top_p, dtype=torch.float32))
        out = ascending.softmax(dim=-1).cumsum(dim=-1) <= limit
        out[:, -1] = False
        return torch.zeros_like(out).scatter_(-1, order, out)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 512,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (nats) of its distribution: two float32 `[N]`.

    `hidden` `[N, D]` are the final hidden states of the positions *before* the targets `[N]`, `weight`
    `[V, D]` and `bias` `[V]` the output head. The matrix product runs in the dtype of `weight`, the rest
    in float32 (float64 for float64 weights). `top_k` 0 or -1 and `top_p` 1 are off; `softcap` is the
    model's final logit cap. Gradients reach hidden, weight and bias; the entropy is detached. Peak
    memory is a few blocks of `chunk_size` x V, whatever N is.

    Raises ConfigError for a sampler setting without a density (temperature 0 is greedy), SchemaError
    for shapes that do not fit.
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size must be >= 1 token, got {chunk_size}")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        shapes = f"{list(hidden.shape)}, {list(weight.shape)}, {list(targets.shape)}"
        raise SchemaError(f"hidden, weight, targets have shapes {shapes}; expected [N, D], [V, D], [N]")
    sampler = _Sampler(temperature, top_k, top_p, softcap)
    # A matrix product with sliced (not contiguous) rows copies the whole head for each row.
    rows = hidden.to(weight.dtype).contiguous()
    logprobs, entropy = _TokenLogprobs.apply(rows, weight.contiguous(), bias, targets, sampler, chunk_size)
    return logprobs, entropy


def sequence_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, loss_mask: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` for a padded batch: `logprobs[b, t]` belongs to `tokens[b, t]`, 0 outside the mask.

    `hidden` `[B, T, D]`, `tokens` and `loss_mask` `[B, T]`; `settings` as in `token_logprobs`. Only
    tokens under the mask cost anything. Raises SchemaError when the mask covers position 0, which
    nothing predicts.
    """
    if bool(loss_mask[:, 0].any()):
        raise SchemaError("loss_mask is set at position 0; the first token has no log-prob, start at 1")
    row, position = loss_mask.nonzero(as_tuple=True)
    values = token_logprobs(hidden[row, position - 1], weight, tokens[row, position], **settings)
    logprobs, entropy = (v.new_zeros(loss_mask.shape).index_put((row, position), v) for v in values)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Saves its inputs and one log-normaliser a token; computes each block of logits twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sampler: _Sampler,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs, entropy, log_normaliser = hidden.new_empty((3, hidden.shape[0]), dtype=dtype).unbind()
        for span in _spans(hidden.shape[0], chunk_size):
            scores, _ = sampler.scores(_logits(hidden[span], weight, bias))
            if (dropped := sampler.dropped(scores, targets[span])) is not None:
                scores.masked_fill_(dropped, -torch.inf)
            chosen = scores.gather(-1, targets[span, None])[:, 0]
            top = scores.amax(dim=-1)
            mass = scores.sub_(top[:, None]).exp_()  # in place from here: the block is the peak of the memory
            total = mass.sum(dim=-1)
            log_normaliser[span] = top + total.log()
            logprobs[span] = chosen - log_normaliser[span]
            probabilities = mass.div_(total[:, None])
            entropy[span] = torch.special.entr(probabilities, out=probabilities).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser)
        ctx.sampler, ctx.chunk_size = sampler, chunk_size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser = ctx.saved_tensors
        sampler: _Sampler = ctx.sampler
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Many chunks are added up: in float32 even when the head is bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=grad.dtype) if wants_bias else None
        for span in _spans(hidden.shape[0], ctx.chunk_size):
            scores, slope = sampler.scores(_logits(hidden[span], weight, bias))
            dropped = sampler.dropped(scores, targets[span])
            block = scores.sub_(log_normaliser[span, None]).exp_()
            if dropped is not None:
                block.masked_fill_(dropped, 0.0)
            # d logprob / d score = [v is the target] - p(v)
            block.mul_(-grad[span, None]).scatter_add_(-1, targets[span, None], grad[span, None])
            block.div_(sampler.temperature)
            if slope is not None:
                block.mul_(slope)
            if grad_bias is not None:
                grad_bias += block.sum(dim=0)
            block = block.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(block, weight, out=grad_hidden[span])
            if grad_weight is not None:
                _add_product(grad_weight, block, hidden[span])
        out = (grad_hidden, grad_weight, grad_bias)
        return *(g if g is None else g.to(t.dtype) for g, t in zip(out, (hidden, weight, bias), strict=True)), None, None, None


def _spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A fresh `[C, V]` block, at least float32, that the caller may overwrite."""
    with torch.autocast(hidden.device.type, enabled=False):  # forward and backward must agree
        logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _add_product(total: Tensor, block: Tensor, hidden: Tensor) -> None:
    """`total += block^T hidden`, without a temporary `[V, D]` where the dtypes allow it."""
    if total.dtype == block.dtype:
        total.addmm_(block.T, hidden)
    else:
        total += block.T @ hidden
