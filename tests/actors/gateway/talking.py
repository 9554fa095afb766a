"""A policy that says what it is told to, and templates that a gateway can be tried with."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import ParsedAnswer
from actors.vllm_engine import Completion
from apps.grpo.models import resolve_model

CHATML = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools|tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments}|tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def chat_template() -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(t) for t in ("<|im_start|>", "<|im_end|>")]})
    tokenizer.chat_template = CHATML
    return ChatTemplate(tokenizer)


def letters(template: ChatTemplate, text: str) -> list[int]:
    """A text one character a token or more: other tokens than the tokenizer gives it."""
    return [token for letter in text for token in template.tokenizer.encode(letter, add_special_tokens=False)]


class Talker:
    """A generator that says what `say` makes of the conversation's text, in tokens that no tokenizer would choose."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self.template, self.say = chat_template(), say
        self.asked: list[list[int]] = []
        self.said: list[list[int]] = []
        self.seeds: list[int] = []
        self.affinities: list[str] = []
        self.hold: asyncio.Event | None = None
        """Nothing is answered before it is set."""
        self.came = asyncio.Event()
        self.two_run = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.running = self.most = 0

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        *,
        begun: Mapping[int, Completion] | None = None,
        wanted: int = 0,
        affinity: str = "",
    ) -> list[Completion]:
        (prompt,) = prompts
        self.asked.append(list(prompt))
        self.seeds += seeds
        self.affinities.append(affinity)
        self.running += 1
        self.most = max(self.most, self.running)
        self.came.set()
        if self.running == 2:
            self.two_run.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1
        text = self.say(self.template.decode(prompt))
        ids = [*letters(self.template, text), *self.template.end_of_turn[:1]]
        cut = ids[:max_new_tokens]
        self.said.append(cut)
        version = len(self.said) - 1
        logprobs = [-0.001 * (n + 1) - version for n in range(len(cut))]
        return [Completion(cut, logprobs, [version] * len(cut), "stop" if len(cut) == len(ids) else "length")]


class Calls:
    """Finds <tool_call>{...}</tool_call>."""

    def parse(self, said: str, tools: Sequence[Mapping[str, Any]] = (), *, number: int = 0) -> ParsedAnswer:
        calls = [json.loads(text) for text in re.findall(r"<tool_call>(.*?)</tool_call>", said)]
        shown = [
            {
                "id": f"call{number + n:05d}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for n, call in enumerate(calls)
        ]
        return ParsedAnswer(re.sub(r"<tool_call>.*?</tool_call>", "", said), shown)
