"""How the small models of `models.py` are made: a random Qwen3 and a tokenizer of characters, taught by halves.

Made for tests, examples and benchmarks, where a policy must improve within seconds. Supervised steps end once the
reward sampled at temperature 1 reaches a target, so that reinforcement learning starts with something to build on and
room to rise. `reversal.py` and `lookups.py` say what is taught.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
_IGNORED = -100
"""A label that counts for nothing."""

Example = tuple[list[int], list[bool]]
"""Tokens, and which of them are taught."""


@dataclass(frozen=True, kw_only=True)
class SmallRecipe:
    """The shape of a small model, and how long it is taught."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lr: float
    batch_size: int
    max_steps: int
    first_check: int
    """The step after which the reward is sampled first; from then on every `check_every` steps."""
    check_every: int
    target_reward: float
    """Mean reward at temperature 1 that ends the training."""
    right_share: float
    """Share of training answers that are as the reward wants them."""
    version: int = 1
    seed: int = 0
    vocab_size: int = 128


def character_tokenizer(
    vocab_size: int, chat_template: str, *, special: Sequence[str] = (), pieces: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """One token a printable ASCII character, and one each of `pieces` and of the `special` tokens.

    The rest of the ids have names, so that every id decodes.
    """
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIALS, *special, *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n", *pieces]
    names += [f"<unused_{i}>" for i in range(len(names), vocab_size)]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, pieces), r"[\s\S]"])), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def make_small(
    recipe: SmallRecipe,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    examples: Callable[[Random], list[Example]],
    reward: Callable[[PreTrainedModel], float],
) -> dict[str, Any]:
    """Makes a model, teaches it batches of `examples` up to a sampled `reward`, writes it and its tokenizer to `out`.

    Returns what came of it. Raises RuntimeError when `max_steps` do not suffice.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        **ids,
    )
    with _reproducible(recipe.seed):
        model = Qwen3ForCausalLM(config).float()
        steps, reached = _warm_up(model, recipe, examples, reward)
    # Not `save_pretrained` of the model, which draws a progress bar. Named parameters hold tied weights once.
    save_file(dict(model.named_parameters()), out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    GenerationConfig(**ids).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "steps": steps,
        "reward_at_temperature_1": reached,
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
    }


def sampled(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> torch.Tensor:
    """What the model says at temperature 1 behind prompts of one length, `[B, max_new_tokens]` or shorter, padded."""
    import torch

    tokens = torch.tensor(prompts)
    with torch.no_grad():
        whole = model.generate(  # type: ignore[operator]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
        )
    answers: torch.Tensor = whole[:, tokens.shape[1] :]
    return answers


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """The same numbers whatever the caller did before, and nothing of his changed; sums depend on threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _warm_up(
    model: PreTrainedModel,
    recipe: SmallRecipe,
    examples: Callable[[Random], list[Example]],
    reward: Callable[[PreTrainedModel], float],
) -> tuple[int, float]:
    """Supervised steps until the sampled reward reaches the target; returns (steps, reward)."""
    import torch

    rng = Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    reached = 0.0
    for step in range(1, recipe.max_steps + 1):
        tokens, labels = _batch(examples(rng), model.config.pad_token_id)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= recipe.first_check and step % recipe.check_every == 0:
            reached = reward(model)
            if reached >= recipe.target_reward:
                return step, reached
    raise RuntimeError(
        f"warm-up ended at reward {reached:.2f}, below {recipe.target_reward} after {recipe.max_steps} steps"
    )


def _batch(examples: Sequence[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels `[B, T]`, padded behind."""
    import torch

    width = max(len(tokens) for tokens, _ in examples)
    rows, labels = [], []
    for tokens, taught in examples:
        rest = width - len(tokens)
        rows.append([*tokens, *[pad] * rest])
        labels.append([*(t if own else _IGNORED for t, own in zip(tokens, taught, strict=True)), *[_IGNORED] * rest])
    return torch.tensor(rows), torch.tensor(labels)
