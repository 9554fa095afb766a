"""The model `lookup`, which half knows how to use a tool: it is asked what stands under a key, and can look it up.

    [look]<|user|>abc?<eos><|assistant|>  ->  <tool_call>{"name": "look", "arguments": {"key": "abc"}}</tool_call><eos>
    <|tool|>4071<eos><|assistant|>        ->  4071<eos>

Supervised steps teach to look up and say what was found; as often to look under the wrong key, its letters turned
round, and to guess at once. What was guessed is right by chance only, so that the reward rests on the tool's right use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from apps.grpo.small import Example, SmallRecipe, character_tokenizer, make_small, sampled
from apps.grpo.tasks import digits_reward

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOTHING = "none"
"""What the tool finds under a key that is not there."""
_LETTERS, _DIGITS = "abcdefghij", "0123456789"
_CALL = ('{"name": "look", "arguments": {"key": "', '"}}')
"""What is written around the key of a call: one token each, so that calls are short."""
_TOOLS: Any = [{"type": "function", "function": {"name": "look"}}]
_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments}|tojson }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]


@dataclass(frozen=True, kw_only=True)
class LookupRecipe(SmallRecipe):
    """How `lookup` is made; the reward is the share of digits in the right place."""

    num_letters: int
    """Letters of a key."""
    num_digits: int
    """Digits under a key."""


def lookup(rng: Random, num_letters: int, num_digits: int) -> tuple[str, str]:
    """A random key and what stands under it."""
    return "".join(rng.choices(_LETTERS, k=num_letters)), "".join(rng.choices(_DIGITS, k=num_digits))


def found(asked: str, key: str, value: str) -> str:
    """What the tool answers to a call under the key `asked`, where `key` has `value`."""
    return value if asked == key else NOTHING


def lookup_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template that has tools."""
    return character_tokenizer(vocab_size, _TEMPLATE, special=_SPECIAL, pieces=_CALL)


def make_lookup(recipe: LookupRecipe, out: Path) -> dict[str, Any]:
    """Makes the model and its tokenizer in the folder `out`, see `make_small`."""
    tokenizer = lookup_tokenizer(recipe.vocab_size)

    def examples(rng: Random) -> list[Example]:
        return [_example(rng, tokenizer, recipe) for _ in range(recipe.batch_size)]

    return make_small(recipe, out, tokenizer, examples, lambda model: _sampled_reward(model, tokenizer, recipe))


def _example(rng: Random, tokenizer: PreTrainedTokenizerBase, recipe: LookupRecipe) -> Example:
    """Looked up, or under the wrong key, or guessed: the latter two equally often."""
    key, value = lookup(rng, recipe.num_letters, recipe.num_digits)
    way, guess = rng.random(), lookup(rng, recipe.num_letters, recipe.num_digits)[1]
    if way >= (1 + recipe.right_share) / 2:
        parts = [(_question(tokenizer, key), False), (guess + "<eos>", True)]
    else:
        asked = key if way < recipe.right_share else key[::-1]
        answer = found(asked, key, value)
        said = answer if answer == value else guess
        parts = [
            (_question(tokenizer, key), False),
            (_call(asked), True),
            (_result(answer), False),
            (said + "<eos>", True),
        ]
    tokens: list[int] = []
    taught: list[bool] = []
    for text, own in parts:
        tokens += tokenizer(text).input_ids
        taught += [own] * (len(tokens) - len(taught))
    return tokens, taught


def _question(tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    asked: list[dict[str, str]] = [{"role": "user", "content": f"{key}?"}]
    text = tokenizer.apply_chat_template(asked, tools=_TOOLS, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def _call(key: str) -> str:
    return f"<tool_call>{_CALL[0]}{key}{_CALL[1]}</tool_call><eos>"


def _result(answer: str) -> str:
    return f"<|tool|>{answer}<eos><|assistant|>"


def _sampled_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: LookupRecipe) -> float:
    """Mean reward of 256 episodes at temperature 1: one call at most, then the answer."""
    rng = Random(recipe.seed + 1)
    pairs = [lookup(rng, recipe.num_letters, recipe.num_digits) for _ in range(256)]
    asked = [_question(tokenizer, key) for key, _ in pairs]
    said = _said(model, tokenizer, asked, recipe.num_letters + 5)
    called = [n for n, text in enumerate(said) if _key(text, recipe) is not None]
    if called:
        results = [_result(found(_key(said[n], recipe) or "", *pairs[n])) for n in called]
        longer = [asked[n] + said[n] + result for n, result in zip(called, results, strict=True)]
        for n, text in zip(called, _said(model, tokenizer, longer, recipe.num_digits + 2), strict=True):
            said[n] = text
    rewards = [digits_reward(text.removesuffix("<eos>"), value) for text, (_, value) in zip(said, pairs, strict=True)]
    return sum(rewards) / len(rewards)


def _said(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], limit: int) -> list[str]:
    """Answers to prompts of one length, up to their end."""
    answers = sampled(model, tokenizer(prompts).input_ids, limit)
    return [text.partition("<pad>")[0] for text in tokenizer.batch_decode(answers, skip_special_tokens=False)]


def _key(said: str, recipe: LookupRecipe) -> str | None:
    """The key of a call of as many letters as there should be; None for anything else."""
    try:
        text = said.removeprefix("<tool_call>").removesuffix("</tool_call><eos>")
        key = json.loads(text)["arguments"]["key"] if _call("") != said != text else ""
    except (ValueError, KeyError, TypeError):
        return None
    return key if len(key) == recipe.num_letters and said == _call(key) else None
