"""Log-probs of sampled tokens, without ever building logits for all of them.

    hidden [N, D] --chunk of C tokens--> logits [C, V] --softcap, temperature, top-k, top-p--> logprobs [N]

One `[C, V]` block lives at a time; the backward pass computes it again. The distribution is the one
the sampler drew from, so at equal weights the trainer's log-prob equals the recorded one:

1. logits, soft-capped where the model does so, in float32;
2. divided by the temperature;
3. top-k: what is below the k-th largest leaves (ties with it stay);
4. top-p: in ascending order, what has a cumulative probability <= 1 - p leaves; the largest stays;
5. the sampled token stays: newer weights could put it outside, which would make its log-prob -inf.

Where the generator has recorded which tokens stayed (`forge/supports.py`), 3 to 5 are these tokens, whatever the
weights of now would keep: then a ratio is one of two distributions over the same tokens at any staleness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.errors import ConfigError, SchemaError
from forge.kept_logprobs import KeptLogprobs
from forge.logits import HeadGradients, logits, spans

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature when a smaller positive one is asked for."""

CANDIDATES = 1024
"""Top-p sorts this many of the likeliest tokens, and all of them only where these hold too little: a tenth
of the time."""


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
        """Scores `[C, V]` before truncation, made in place, and the slope of the softcap if there is one."""
        slope = None
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_()
            slope = logits.square().neg_().add_(1.0)
            logits = logits.mul_(self.softcap)
        return logits.div_(self.temperature), slope

    def truncates(self, vocabulary: int) -> bool:
        """Whether top-k or top-p excludes anything at all."""
        return self.top_p < 1.0 or 0 < self.top_k < vocabulary

    def limits(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Score and id, both `[C]`, of the lowest token that stays; None when top-k and top-p are off.

        Of equal scores the lower id is the lower token. Which of them the sampler keeps is an accident of
        its sort, how many is not: the sampled token counts as one of those. Two numbers a row name the
        whole support, so that the backward pass need not search again.
        """
        if not self.truncates(scores.shape[-1]):
            return None
        score = torch.full_like(scores[:, 0], -torch.inf)
        if 0 < self.top_k < scores.shape[-1]:
            score = scores.topk(self.top_k, dim=-1).values[:, -1]
        if self.top_p == 1.0:
            return score, torch.zeros_like(targets)
        allowed = scores.masked_fill(scores < score[:, None], -torch.inf) if self.top_k > 0 else scores
        score, kept, too_few = self._top_p(allowed, CANDIDATES)
        score[too_few], kept[too_few], _ = self._top_p(allowed[too_few], scores.shape[-1])
        tied = scores == score[:, None]
        surplus = tied.count_nonzero(dim=-1) - kept
        rows = surplus.nonzero()[:, 0]  # rare, and counting ranks is slow
        rank = tied[rows].cumsum(dim=-1, dtype=torch.int32)
        token = torch.zeros_like(targets)
        token[rows] = (rank <= surplus[rows, None].int()).count_nonzero(dim=-1)
        token += tied.gather(-1, targets[:, None])[:, 0].logical_and_(targets < token)
        return score, token

    def _top_p(self, scores: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Lowest score that stays, how many tokens with it do, and where `size` was too small; each `[C]`."""
        if size < scores.shape[-1]:
            ascending = scores.topk(size, dim=-1).values.flip(-1)
            share = (ascending.logsumexp(dim=-1) - scores.logsumexp(dim=-1)).exp()[:, None]
        else:
            ascending, share = scores.sort(dim=-1).values, torch.ones_like(scores[:, :1])
        # The sampler computes 1 - p in float32; a token that falls exactly on the limit needs the same.
        limit = float(1.0 - torch.tensor(self.top_p, dtype=torch.float32))
        leaves = ascending.softmax(dim=-1).cumsum(dim=-1).mul_(share).add_(1.0 - share) <= limit
        leaves[:, -1] = False
        score = ascending.gather(-1, leaves.count_nonzero(dim=-1)[:, None])
        kept = (ascending == score).logical_and_(~leaves).count_nonzero(dim=-1)
        return score[:, 0], kept, (1.0 - share > limit)[:, 0]


def _outside(scores: Tensor, targets: Tensor, score: Tensor, token: Tensor) -> Tensor:
    """bool `[C, V]`, True for what lies below the limits of its row; never for the sampled token."""
    ids = torch.arange(scores.shape[-1], device=scores.device)
    tied_below = (scores == score[:, None]).logical_and_(ids < token[:, None])
    return tied_below.logical_or_(scores < score[:, None]).scatter_(-1, targets[:, None], False)


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
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (nats) of its distribution: two float32 `[N]`.

    `hidden` `[N, D]` are the final hidden states of the positions *before* the targets `[N]`, `weight`
    `[V, D]` and `bias` `[V]` the output head. The matrix product runs in the dtype of `weight`, the rest
    in float32 (float64 for float64 weights). `top_k` 0 or -1 and `top_p` 1 are off; `softcap` is the
    model's final logit cap. `kept` `[N, K]` are the recorded supports: token ids, the target among them, -1 behind
    them; a row of -1 alone leaves its support to `top_k` and `top_p`. Gradients reach hidden, weight and bias; the
    entropy is detached. Peak memory is a few blocks of `chunk_size` x V, whatever N is.

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
    rows, weight = hidden.to(weight.dtype).contiguous(), weight.contiguous()
    if kept is None:
        return _anew(rows, weight, bias, targets, sampler, chunk_size)
    if kept.dim() != 2 or kept.shape[0] != targets.shape[0]:
        raise SchemaError(f"kept has shape {list(kept.shape)}, expected [{targets.shape[0]}, K]")
    recorded = (kept >= 0).any(dim=-1)
    if recorded.all():
        return _recorded(rows, weight, bias, targets, sampler, chunk_size, kept)
    here, there = recorded.nonzero()[:, 0], (~recorded).nonzero()[:, 0]
    of_kept = _recorded(rows[here], weight, bias, targets[here], sampler, chunk_size, kept[here])
    others = _anew(rows[there], weight, bias, targets[there], sampler, chunk_size)
    order = torch.cat([here, there]).argsort()
    logprobs, entropy = (torch.cat(both)[order] for both in zip(of_kept, others, strict=True))
    return logprobs, entropy


def _anew(*arguments: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropy = _TokenLogprobs.apply(*arguments)
    return logprobs, entropy


def _recorded(*arguments: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropy = KeptLogprobs.apply(*arguments)
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
        logprobs, entropy, log_normaliser = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
        score, token = torch.empty_like(log_normaliser), torch.empty_like(targets)
        for span in spans(hidden.shape[0], chunk_size):
            scores = sampler.scores(logits(hidden[span], weight, bias))[0]
            if (limits := sampler.limits(scores, targets[span])) is not None:
                score[span], token[span] = limits
                scores.masked_fill_(_outside(scores, targets[span], *limits), -torch.inf)
            chosen = scores.gather(-1, targets[span, None])[:, 0]
            top = scores.amax(dim=-1)
            mass = scores.sub_(top[:, None]).exp_()  # in place from here: the block is the peak of the memory
            total = mass.sum(dim=-1)
            log_normaliser[span] = top + total.log()
            logprobs[span] = chosen - log_normaliser[span]
            probabilities = mass.div_(total[:, None])
            entropy[span] = torch.special.entr(probabilities, out=probabilities).sum(dim=-1)
            del scores, mass, probabilities  # or the next block would be made beside this one
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, score, token)
        ctx.sampler, ctx.chunk_size = sampler, chunk_size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, score, token = ctx.saved_tensors
        sampler: _Sampler = ctx.sampler
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], grad.dtype)
        for span in spans(hidden.shape[0], ctx.chunk_size):
            scores, slope = sampler.scores(logits(hidden[span], weight, bias))
            if sampler.truncates(scores.shape[-1]):
                scores.masked_fill_(_outside(scores, targets[span], score[span], token[span]), -torch.inf)
            block = scores.sub_(log_normaliser[span, None]).exp_()
            # d logprob / d score = [v is the target] - p(v)
            block.mul_(-grad[span, None]).scatter_add_(-1, targets[span, None], grad[span, None])
            block.div_(sampler.temperature)
            if slope is not None:
                block.mul_(slope)
            gradients.add(span, block)
            del scores, block, slope
        return *gradients.sums(), None, None, None
