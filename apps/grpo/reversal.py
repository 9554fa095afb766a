"""The models `tiny` and `nano`: a random Qwen3 taught to reverse digits, by halves.

Made for tests and benchmarks, where a policy must improve within seconds. Supervised steps teach two answers,
the digits reversed and the digits as they stand; the reward wants the former, so that there is something to
elicit from the first step on.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from apps.grpo.tasks import digits_reward, reversal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ReversalRecipe:
    """How `tiny` and `nano` are made: a random Qwen3, then supervised steps on digit reversal.

    Training ends once the reward sampled at temperature 1 reaches `target_reward`, so that
    reinforcement learning starts with something to build on and room to rise.
    """

    num_digits: int
    """Digits of a prompt; also of its answer."""
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
    """Mean `digits_reward` at temperature 1 that ends the training."""
    right_share: float
    """Share of training answers that are reversed; the others repeat the digits."""
    version: int = 1
    seed: int = 0
    vocab_size: int = 128


_SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]


def _character_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """One token a printable ASCII character; the rest of the ids have names, so that every id decodes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = _SPECIALS + list(string.digits + string.ascii_letters + string.punctuation + " \n")
    names += [f"<unused_{i}>" for i in range(len(names), vocab_size)]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}={% endif %}"
        ),
    )


def make_reverser(recipe: ReversalRecipe, out: Path) -> dict[str, Any]:
    """Makes the model and its tokenizer, trains it up to `target_reward`, writes both to `out`."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = _character_tokenizer(recipe.vocab_size)
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
        steps, reward = _warm_up(model, tokenizer, recipe)
    # Not `save_pretrained` of the model, which draws a progress bar. Named parameters hold tied weights once.
    save_file(dict(model.named_parameters()), out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    GenerationConfig(**ids).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "steps": steps,
        "reward_at_temperature_1": reward,
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
    }


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


def _warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: ReversalRecipe) -> tuple[int, float]:
    """Supervised steps until the sampled reward reaches the target; returns (steps, reward)."""
    import torch

    rng = Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    reward = 0.0
    for step in range(1, recipe.max_steps + 1):
        pairs = [reversal(rng, recipe.num_digits) for _ in range(recipe.batch_size)]
        # Reversed once more, the right answer is what the prompt says.
        answers = [right if rng.random() < recipe.right_share else right[::-1] for _, right in pairs]
        texts = [prompt + answer + "<eos>" for (prompt, _), answer in zip(pairs, answers, strict=True)]
        tokens = torch.tensor(tokenizer(texts).input_ids)  # [B, T], all of one length
        labels = tokens.clone()
        labels[:, : len(pairs[0][0])] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= recipe.first_check and step % recipe.check_every == 0:
            reward = _sampled_reward(model, tokenizer, recipe)
            if reward >= recipe.target_reward:
                return step, reward
    raise RuntimeError(
        f"warm-up ended at reward {reward:.2f}, below {recipe.target_reward} after {recipe.max_steps} steps"
    )


def _sampled_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: ReversalRecipe) -> float:
    """Mean reward of 256 completions at temperature 1."""
    import torch

    rng = Random(recipe.seed + 1)
    pairs = [reversal(rng, recipe.num_digits) for _ in range(256)]
    tokens = torch.tensor(tokenizer([prompt for prompt, _ in pairs]).input_ids)
    with torch.no_grad():
        sampled = model.generate(  # type: ignore[operator]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=recipe.num_digits + 2,
        )
    texts = tokenizer.batch_decode(sampled[:, tokens.shape[1] :], skip_special_tokens=True)
    rewards = [digits_reward(text, answer) for text, (_, answer) in zip(texts, pairs, strict=True)]
    return sum(rewards) / len(rewards)
