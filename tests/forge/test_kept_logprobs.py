"""Laws of log-probs over recorded supports: the truncated distribution that was sampled from, whatever it is now."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.errors import SchemaError
from forge.logprobs import token_logprobs

N, D, V, K = 13, 6, 40, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6, "top_p": 0.9},
    "softcap": {"softcap": 2.0, "temperature": 1.3, "top_k": 5},
}


def make(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, bias (float64 leaves), targets, and supports of 1 to K tokens with the target in each."""
    g = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in ((n, D), (V, D), (V,))]
    kept = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(n)]).int()
    sizes = torch.randint(1, K + 1, (n,), generator=g)
    kept[torch.arange(K) >= sizes[:, None]] = -1
    place = (torch.rand(n, generator=g) * sizes).long()
    return leaves[0], leaves[1], leaves[2], kept.gather(1, place[:, None])[:, 0].long(), kept


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, kept: Tensor, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """One token after the other, by autograd."""
    logits = hidden @ weight.T + bias
    if (cap := settings.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    logprobs, entropies = [], []
    for row, target, support in zip(logits / settings.get("temperature", 1.0), targets, kept, strict=True):
        of_kept = row[support[support >= 0].long()]
        logprobs.append(row[target] - of_kept.logsumexp(0))
        entropies.append(torch.distributions.Categorical(logits=of_kept.detach()).entropy())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("chunk_size", [1, 5, 512])
def test_values_and_gradients_are_those_of_the_softmax_over_the_recorded_tokens(
    settings: dict[str, Any], chunk_size: int
) -> None:
    hidden, weight, bias, targets, kept = make()
    upstream = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted, wanted_entropy = naive(hidden, weight, bias, targets, kept, settings)
    grads = torch.autograd.grad((wanted * upstream).sum(), (hidden, weight, bias))
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias=bias, chunk_size=chunk_size, kept=kept, **settings)
    torch.testing.assert_close(logprobs, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    own = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight, bias))
    for got, expected in zip(own, grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("some", [False, True], ids=["all recorded", "some recorded"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_gradient_equals_finite_differences(settings: dict[str, Any], some: bool) -> None:
    hidden, weight, bias, targets, kept = make(seed=3, n=4)
    if some:
        kept[1:3] = -1

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return token_logprobs(h, w, targets, bias=b, chunk_size=3, kept=kept, **settings)[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("settings", [{"top_p": 0.8}, {"top_k": K}, {"top_k": 4, "top_p": 0.9, "softcap": 2.0}])
def test_under_the_weights_that_sampled_it_gives_what_is_recomputed(settings: dict[str, Any]) -> None:
    hidden, weight, bias, _, _ = make()
    hidden = hidden * 3  # peaked, so that top-p leaves few
    logits = hidden @ weight.T + bias
    if cap := settings.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    kept = torch.full((N, V), -1, dtype=torch.int32)
    for i, row in enumerate(logits):
        ranked = row.sort(descending=True).indices[: settings.get("top_k", V)]
        before = row[ranked].softmax(0).cumsum(0) - row[ranked].softmax(0)
        inside = ranked[before < settings.get("top_p", 1.0)]
        kept[i, : len(inside)] = inside.int()
    targets = kept[:, 0].long()
    recomputed = token_logprobs(hidden, weight, targets, bias=bias, **settings)
    recorded = token_logprobs(hidden, weight, targets, bias=bias, kept=kept, **settings)
    assert (kept >= 0).sum(-1).max() < V
    for got, expected in zip(recorded, recomputed, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_sampled_token_that_newer_weights_exclude_has_the_ratio_over_what_it_was_sampled_from() -> None:
    """Old scores 2, 1, 0 with top-k 2: the second was sampled. Under the new ones 0, 1, 9 it is no longer kept."""
    one, second = torch.ones((1, 1)), torch.tensor([1])
    kept = torch.tensor([[0, 1]], dtype=torch.int32)

    def logprob(scores: list[float], kept: Tensor | None) -> float:
        return token_logprobs(one, torch.tensor(scores)[:, None], second, top_k=2, kept=kept)[0].item()

    behavior = logprob([2.0, 1.0, 0.0], None)
    assert behavior == pytest.approx(1 - math.log(math.e**2 + math.e), abs=1e-6)
    now = logprob([0.0, 1.0, 9.0], kept)
    assert now == pytest.approx(1 - math.log(1 + math.e), abs=1e-6)
    assert math.exp(now - behavior) == pytest.approx(math.e, rel=1e-5)  # .731 of now to .269 then
    assert logprob([0.0, 1.0, 9.0], None) < -7, "recomputed, the newcomer takes all"


def test_tokens_whose_support_was_not_recorded_are_recomputed_beside_the_others() -> None:
    hidden, weight, bias, targets, kept = make()
    gone = torch.arange(N) % 3 == 0
    settings: dict[str, Any] = {"top_p": 0.7, "temperature": 0.8, "chunk_size": 4}
    anew = token_logprobs(hidden, weight, targets, bias=bias, **settings)
    recorded = token_logprobs(hidden, weight, targets, bias=bias, kept=kept, **settings)
    mixed = token_logprobs(hidden, weight, targets, bias=bias, kept=kept.masked_fill(gone[:, None], -1), **settings)
    for got, a, b in zip(mixed, anew, recorded, strict=True):
        torch.testing.assert_close(got, torch.where(gone, a, b))
        assert not torch.allclose(a, b)
    none = token_logprobs(hidden, weight, targets, bias=bias, kept=torch.full_like(kept, -1), **settings)
    for got, a in zip(none, anew, strict=True):
        torch.testing.assert_close(got, a)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, and which operations there were."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_no_tensor_is_larger_than_one_chunk_of_logits_and_none_is_sorted() -> None:
    tokens, vocabulary, chunk = 64, 500, 4
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, 4), generator=g).requires_grad_()
    weight = torch.randn((vocabulary, 4), generator=g).requires_grad_()
    kept = torch.randint(0, vocabulary, (tokens, K), generator=g, dtype=torch.int32)
    with LargestTensor() as seen:
        logprobs, _ = token_logprobs(
            hidden, weight, kept[:, 0].long(), chunk_size=chunk, kept=kept, top_p=0.9, top_k=20
        )
        logprobs.sum().backward()
    assert seen.numel == chunk * vocabulary
    assert not seen.names & {"sort", "topk", "cumsum"}


def test_no_tokens_give_no_logprobs_and_a_zero_gradient() -> None:
    hidden, weight, _, targets, kept = make()
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0], kept=kept[:0])
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0.0


def test_supports_of_another_number_of_tokens_are_refused() -> None:
    hidden, weight, _, targets, kept = make()
    with pytest.raises(SchemaError, match=r"kept has shape \[12, 5\], expected \[13, K\]"):
        token_logprobs(hidden, weight, targets, kept=kept[1:])
