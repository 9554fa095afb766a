"""The models `tiny` and `nano`, which half know how to reverse digits.

Supervised steps teach two answers, the digits reversed and the digits as they stand; the reward wants the former, so
that there is something to elicit from the first step on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from apps.grpo.small import Example, SmallRecipe, character_tokenizer, make_small, sampled
from apps.grpo.tasks import digits_reward, reversal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class ReversalRecipe(SmallRecipe):
    """How `tiny` and `nano` are made; the reward is `digits_reward`, wrong answers repeat the digits."""

    num_digits: int
    """Digits of a prompt; also of its answer."""


def make_reverser(recipe: ReversalRecipe, out: Path) -> dict[str, Any]:
    """Makes the model and its tokenizer in the folder `out`, see `make_small`."""
    tokenizer = character_tokenizer(recipe.vocab_size, _TEMPLATE, special=["<|im_start|>", "<|im_end|>"])

    def examples(rng: Random) -> list[Example]:
        pairs = [reversal(rng, recipe.num_digits) for _ in range(recipe.batch_size)]
        # Reversed once more, the right answer is what the prompt says.
        answers = [right if rng.random() < recipe.right_share else right[::-1] for _, right in pairs]
        texts = [prompt + answer + "<eos>" for (prompt, _), answer in zip(pairs, answers, strict=True)]
        asked = len(pairs[0][0])
        return [(tokens, [n >= asked for n in range(len(tokens))]) for tokens in tokenizer(texts).input_ids]

    return make_small(recipe, out, tokenizer, examples, lambda model: _sampled_reward(model, tokenizer, recipe))


def _sampled_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: ReversalRecipe) -> float:
    """Mean reward of 256 completions at temperature 1."""
    rng = Random(recipe.seed + 1)
    pairs = [reversal(rng, recipe.num_digits) for _ in range(256)]
    answers = sampled(model, tokenizer([prompt for prompt, _ in pairs]).input_ids, recipe.num_digits + 2)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rewards = [digits_reward(text, answer) for text, (_, answer) in zip(texts, pairs, strict=True)]
    return sum(rewards) / len(rewards)
