"""Laws of forge/logprobs.py: the plain computation, in blocks, on the support that the sampler had."""

from __future__ import annotations

import ast
import importlib.util
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.errors import ConfigError, SchemaError
from forge.logprobs import token_logprobs

N, D, V = 13, 6, 40

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 2.0, "temperature": 1.3},
    "top-k": {"top_k": 5, "temperature": 0.6},
    "top-p": {"top_p": 0.9, "temperature": 0.6},
    "top-k and top-p": {"top_k": 12, "top_p": 0.7, "temperature": 0.6},
    "everything": {"top_k": 12, "top_p": 0.9, "temperature": 1.3, "softcap": 2.0},
}


def make(
    seed: int = 0, dtype: torch.dtype = torch.float64, n: int = N, d: int = D, v: int = V
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states `[n, d]`, weight `[v, d]`, bias `[v]` (all leaves) and targets `[n]`."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((n, d), (v, d), (v,))
    leaves = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return leaves[0], leaves[1], leaves[2], torch.randint(0, v, (n,), generator=g)


def kept_tokens(row: Tensor, target: int, top_k: int, top_p: float) -> set[int]:
    """The sampler's rule, token by token, for one row of scores without ties."""
    ranked = sorted(range(len(row)), key=lambda v: float(row[v]))
    if top_k > 0:
        ranked = ranked[-top_k:]
    mass = row[ranked].exp() / row[ranked].exp().sum()
    below, kept = 0.0, {ranked[-1], target}
    for token, share in zip(ranked, mass.tolist(), strict=True):
        below += share
        if below > 1.0 - top_p:
            kept.add(token)
    return kept


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """All logits at once, by autograd."""
    logits = hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scores = logits / temperature
    mask = torch.full(scores.shape, -torch.inf, dtype=scores.dtype)
    for i, row in enumerate(scores.detach()):
        mask[i, list(kept_tokens(row, int(targets[i]), top_k, top_p))] = 0.0
    distribution = torch.distributions.Categorical(logits=scores + mask)
    probs = distribution.probs.detach()
    entropy = -(probs * torch.where(probs > 0, probs, 1.0).log()).sum(-1)
    return (scores + mask).log_softmax(-1).gather(-1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("chunk_size", [1, 5, 512])
@pytest.mark.parametrize("candidates", [4, 1024])
def test_values_and_gradients_equal_the_plain_computation(
    settings: dict[str, Any], chunk_size: int, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge.logprobs.CANDIDATES", candidates)
    hidden, weight, bias, targets = make()
    upstream = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted, wanted_entropy = naive(hidden, weight, bias, targets, **settings)
    grads = torch.autograd.grad((wanted * upstream).sum(), (hidden, weight, bias))
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias=bias, chunk_size=chunk_size, **settings)
    torch.testing.assert_close(logprobs, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    own = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight, bias))
    for got, expected in zip(own, grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_gradient_equals_finite_differences(settings: dict[str, Any]) -> None:
    hidden, weight, bias, targets = make(seed=3, n=4, d=3, v=15)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return token_logprobs(h, w, targets, bias=b, chunk_size=3, **settings)[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias), eps=1e-7, atol=1e-5)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, _, targets = make()
    frozen = weight.detach()
    logprobs, entropy = token_logprobs(hidden, frozen, targets)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    assert hidden.grad is not None
    logprobs, _ = token_logprobs(hidden.detach(), weight, targets)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not token_logprobs(hidden.detach(), frozen, targets)[0].requires_grad


def test_the_entropy_lies_between_zero_and_that_of_the_uniform_distribution() -> None:
    hidden, weight, _, targets = make()
    _, uniform = token_logprobs(hidden, torch.zeros_like(weight), targets)
    torch.testing.assert_close(uniform, torch.full((N,), math.log(V), dtype=torch.float64))
    _, certain = token_logprobs(hidden * 1e4, weight, targets)
    assert bool((certain >= 0).all())
    assert bool(certain.isfinite().all())


# Memory and layout


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_no_tensor_is_larger_than_one_chunk_of_logits(settings: dict[str, Any]) -> None:
    tokens, vocabulary, chunk = 64, 500, 4
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, 4), generator=g).requires_grad_()
    weight = torch.randn((vocabulary, 4), generator=g).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=g)
    with LargestTensor() as seen:
        token_logprobs(hidden, weight, targets, chunk_size=chunk, **settings)[0].sum().backward()
    assert seen.numel == chunk * vocabulary  # and it does see the block


class LiveBlocks(TorchDispatchMode):
    """Remembers how many tensors of `numel` numbers, each with memory of its own, were there at the same time."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel, self._live, self.most = numel, dict[int, weakref.ref[Tensor]](), 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == self._numel:
            self._live[id(out)] = weakref.ref(out)
        alive = [tensor for ref in self._live.values() if (tensor := ref()) is not None]
        self.most = max(self.most, len({tensor.data_ptr() for tensor in alive}))
        return out


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_one_block_of_logits_lives_at_a_time(softcap: float | None) -> None:
    hidden, weight = torch.randn(64, 3, requires_grad=True), torch.randn(500, 3, requires_grad=True)
    with LiveBlocks(4 * 500) as seen:
        logprobs, _ = token_logprobs(hidden, weight, torch.arange(64), chunk_size=4, softcap=softcap)
        forward = seen.most
        logprobs.sum().backward()
    assert forward == (1 if softcap is None else 2), "with a softcap its slope is a block, too"
    assert seen.most == forward


def test_nothing_of_vocabulary_size_is_kept_for_the_backward_pass_but_the_head() -> None:
    hidden, weight, bias, targets = make()
    saved: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        token_logprobs(hidden, weight, targets, bias=bias, temperature=0.6, top_p=0.9)
    heads = {weight.data_ptr(), bias.data_ptr()}
    assert max(v.numel() for v in saved if v.data_ptr() not in heads) <= N * D


class LinearLayout(TorchDispatchMode):
    """Whether every matrix product got rows that lie next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.strided = 0, 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.linear.default):
            self.calls += 1
            self.strided += not args[0].is_contiguous()
        return func(*args, **(kwargs or {}))


def test_a_sliced_hidden_state_is_made_contiguous_before_the_head() -> None:
    hidden, weight, _, targets = make()
    wide = torch.cat([hidden, hidden], dim=1).detach()
    assert not wide[:, :D].is_contiguous()
    with LinearLayout() as seen, torch.no_grad():
        logprobs, _ = token_logprobs(wide[:, :D], weight, targets, chunk_size=5)
    assert seen.calls >= 3
    assert seen.strided == 0
    torch.testing.assert_close(logprobs, token_logprobs(hidden, weight, targets)[0])


def test_no_tokens_give_no_logprobs_and_a_zero_gradient() -> None:
    hidden, weight, _, _ = make()
    logprobs, entropy = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), top_p=0.9)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0.0


# Precision


def test_a_bfloat16_head_gives_float32_logprobs_and_a_gradient_added_up_in_float32() -> None:
    """1,024 equal contributions: a bfloat16 sum would stop growing after 256 of them."""
    rows = 1024
    hidden = torch.ones((rows, 1), dtype=torch.bfloat16)
    weight = torch.zeros((2, 1), dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.int64), chunk_size=1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad[:, 0].tolist() == [rows / 2, -rows / 2]


def test_a_hidden_state_of_another_dtype_is_cast_to_that_of_the_head() -> None:
    hidden, weight, _, targets = make(dtype=torch.float32)
    logprobs, _ = token_logprobs(hidden.bfloat16(), weight, targets)
    torch.testing.assert_close(logprobs, token_logprobs(hidden.bfloat16().float(), weight, targets)[0])


def test_autocast_around_it_changes_nothing() -> None:
    hidden, weight, _, targets = make(dtype=torch.float32)
    wanted = torch.autograd.grad(token_logprobs(hidden, weight, targets)[0].sum(), weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(hidden, weight, targets)
        grad = torch.autograd.grad(logprobs.sum(), weight)[0]
    assert torch.equal(logprobs, token_logprobs(hidden, weight, targets)[0])
    assert torch.equal(grad, wanted)


def test_large_logits_stay_finite() -> None:
    hidden, weight, _, targets = make(dtype=torch.float32)
    logprobs, _ = token_logprobs(hidden * 1e4, weight, targets, temperature=0.01)
    assert bool(logprobs.isfinite().all())


# The sampler's support


def of_scores(scores: list[float], target: int, **settings: Any) -> float:
    """Log-prob of `target` where the logits are `scores`."""
    head = torch.tensor(scores, dtype=torch.float32)[:, None]
    return token_logprobs(torch.ones((1, 1)), head, torch.tensor([target]), **settings)[0].item()


def test_top_k_keeps_every_token_that_ties_with_the_last_one() -> None:
    scores = [0.0, 1.0, 1.0, 2.0]
    expected = 1.0 - math.log(2 * math.e + math.e**2)
    assert of_scores(scores, 1, top_k=2) == pytest.approx(expected, abs=1e-6)


def test_top_p_drops_a_tail_that_holds_exactly_one_minus_p() -> None:
    """Probabilities 1/4, 1/4, 1/2 and p = 1/2: both quarters go, since their sum is not above 1 - p."""
    scores = [0.0, 0.0, math.log(2.0)]
    assert of_scores(scores, 2, top_p=0.5) == pytest.approx(0.0, abs=1e-6)
    assert of_scores(scores, 2, top_p=0.51) == pytest.approx(math.log(2 / 3), abs=1e-6)


def test_top_p_measures_what_top_k_has_left() -> None:
    """Of 1/2, 1/4, 1/8, 1/8 top-k leaves 2/3 and 1/3; p = 0.6 then leaves the first alone."""
    scores = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert of_scores(scores, 0, top_k=2, top_p=0.6) == pytest.approx(0.0, abs=1e-6)
    assert of_scores(scores, 0, top_p=0.6) == pytest.approx(math.log(2 / 3), abs=1e-6)


@pytest.mark.parametrize("settings", [{"top_p": 1e-9}, {"top_k": 1}, {"top_k": 1, "top_p": 0.5}])
def test_at_least_the_likeliest_token_stays(settings: dict[str, Any]) -> None:
    assert of_scores([0.0, 3.0, 1.0], 1, **settings) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_k": 1}, {"top_k": 2, "top_p": 0.5}])
def test_a_sampled_token_outside_the_support_is_kept_with_a_finite_logprob(settings: dict[str, Any]) -> None:
    expected = 0.0 - math.log(1.0 + math.exp(5.0))
    assert of_scores([0.0, 5.0, 1.0], 0, **settings) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": V}, {"top_k": V + 5}, {"top_p": 1.0}])
def test_truncation_that_is_off_changes_nothing(off: dict[str, Any]) -> None:
    hidden, weight, _, targets = make()
    wanted = token_logprobs(hidden, weight, targets)[0]
    assert torch.equal(token_logprobs(hidden, weight, targets, **off)[0], wanted)


def engine_rule() -> Callable[..., Tensor]:
    """The installed engine's own two functions, without the ten seconds that importing the engine takes."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    path = Path(spec.submodule_search_locations[0]) / "v1/sample/ops/topk_topp_sampler.py"
    names = ("apply_top_k_top_p_pytorch", "apply_top_k_only")
    body: list[ast.stmt] = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert len(body) == len(names), f"{path} has moved its functions; forge/logprobs.py states their rule"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body, []), str(path), "exec"), scope)
    return scope[names[0]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("candidates", [16, 1024])
@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (0, 0.9), (0, 0.3), (12, 0.7), (1, 0.5), (290, 0.99)])
def test_the_support_is_that_of_the_installed_engine(
    top_k: int, top_p: float, candidates: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coarse logits, as bfloat16 gives, tie at the limits; the sampled token is one of those kept."""
    monkeypatch.setattr("forge.logprobs.CANDIDATES", candidates)
    rows, vocabulary, temperature = 256, 300, 0.6
    logits = torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(1)) * 3
    if ties:
        logits = logits.round()
    k = torch.full((rows,), top_k, dtype=torch.int32) if top_k else None
    p = torch.full((rows,), top_p, dtype=torch.float32) if top_p < 1 else None
    processed = engine_rule()(logits / temperature, k, p, allow_cpu_sync=True).log_softmax(-1)
    targets = processed.exp().multinomial(1, generator=torch.Generator().manual_seed(2))[:, 0]
    # One-hot rows times a head that holds the logits give the logits exactly.
    logprobs, entropy = token_logprobs(
        torch.eye(rows), logits.T, targets, temperature=temperature, top_k=top_k, top_p=top_p
    )
    wanted = processed.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy, torch.special.entr(processed.exp()).sum(-1), rtol=0, atol=1e-5)


def test_a_token_within_rounding_of_the_limit_goes_where_the_engine_puts_it() -> None:
    """1 - p is 0.10000002 in float32 and 0.1 in float64: what lies between them tells the two apart."""
    tail = torch.rand((20_000, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tail = tail / tail.sum(-1, keepdim=True) / 9.0
    rows = torch.cat([tail, torch.ones(20_000, 1)], dim=-1).log().float().sort(-1).values
    mass = rows.softmax(-1).cumsum(-1)[:, 2]
    rows = rows[(mass > 0.1) & (mass <= 0.10000002)]
    assert len(rows) > 10
    p = torch.full((len(rows),), 0.9)
    wanted = engine_rule()(rows.clone(), None, p).log_softmax(-1)[:, 3]
    targets = torch.full((len(rows),), 3)
    logprobs, _ = token_logprobs(torch.eye(len(rows)), rows.T, targets, top_p=0.9)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_probabilities_of_the_support_sum_to_one(settings: dict[str, Any]) -> None:
    """Each token as the target in turn; a token outside gets in only because it is asked for."""
    hidden, weight, bias, _ = make()
    logits = hidden[:1].detach() @ weight.detach().T + bias.detach()
    if (cap := settings.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    row = logits[0] / settings.get("temperature", 1.0)
    best = int(row.argmax())
    kept = sorted(kept_tokens(row, best, settings.get("top_k", 0), settings.get("top_p", 1.0)))
    repeated = hidden[:1].expand(len(kept), D)
    logprobs, _ = token_logprobs(repeated, weight, torch.tensor(kept), bias=bias, **settings)
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-9)


# What a user gets wrong


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"temperature": 0.0}, r"temperature must be >= 0\.01, got 0\.0; a greedy choice has no log-prob"),
        ({"temperature": -1.0}, r"temperature must be >= 0\.01, got -1\.0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0\.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1\.1"),
        ({"top_k": -2}, "top_k must be >= 1, or 0 or -1 for off, got -2"),
        ({"chunk_size": 0}, "chunk_size must be >= 1 token, got 0"),
    ],
)
def test_a_sampler_setting_without_a_density_is_refused(settings: dict[str, Any], text: str) -> None:
    hidden, weight, _, targets = make()
    with pytest.raises(ConfigError, match=text):
        token_logprobs(hidden, weight, targets, **settings)


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, _, targets = make()
    with pytest.raises(SchemaError, match=r"\[13, 6\], \[40, 6\], \[12\]"):
        token_logprobs(hidden, weight, targets[1:])
    with pytest.raises(SchemaError, match=r"\[13, 5\]"):
        token_logprobs(hidden[:, 1:], weight, targets)
