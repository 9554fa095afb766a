"""Tool calls in what a policy said, found by vLLM's parsers: one for each family of models, kept up with them.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Qwen 2.5 and 3, Hermes
    qwen3_coder, llama3_json, mistral, pythonic, deepseek_v31, ...
    hf           as the tokenizer's own `response_template` says

What cannot be read as a call is a result like any other, with the reason in `error`: an environment tells the policy,
and the run goes on. Importing the parsers takes seconds and starts nothing; make a `ToolCallParser` at the start, in a
thread. Parsing takes 0.3 to 3 ms.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from forge.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKERS = (
    "tool_call_start_token",
    "tool_calls_start_token",
    "tool_start_token",
    "bot_token",
    "bot_string",
    "tc_start",
)
"""What vLLM's parsers call the text that begins a call."""


@dataclass(frozen=True)
class ParsedAnswer:
    """What a policy said, apart from its calls; and these in OpenAI's form, arguments as JSON text."""

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    """Its thoughts, where a parser of reasoning is set."""
    error: str = ""
    """Why something that begins like a call is none, or has no JSON object as arguments; "" where all is well."""


class Parses(Protocol):
    """Finds tool calls and thoughts in what was said: `ToolCallParser`, or another."""

    def parse(self, said: str, tools: Sequence[Mapping[str, Any]] = (), *, number: int = 0) -> ParsedAnswer:
        """See `ToolCallParser.parse`."""
        ...


class ToolCallParser:
    """vLLM's parser `name` for one tokenizer; one for all episodes of a run.

    With `reasoning`, vLLM's parser of that name takes thoughts out first, and calls in them do not count. Raises
    ConfigError for a name that vLLM does not know, and for a parser that does not fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, *, reasoning: str = "") -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        # What is malformed is a result here; vLLM would log each with its traceback.
        for logger in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        self._name, self._tokenizer = name, tokenizer
        self._request: Any = ChatCompletionRequest
        self._read = _OneVocabulary(tokenizer)
        self._tools = _known(name, ToolParserManager.list_registered(), ToolParserManager.get_tool_parser)
        self._thoughts: Any = None
        if reasoning:
            names = ReasoningParserManager.list_registered()
            self._thoughts = _known(reasoning, names, ReasoningParserManager.get_reasoning_parser)
        try:
            parser = self._tools(self._read, [])
            if self._thoughts is not None:
                self._thoughts(self._read)
        except Exception as error:  # of any kind
            raise ConfigError(
                f"the tool-call parser {name!r} does not fit the tokenizer {tokenizer.name_or_path}: {error}; "
                "name the one of the model's family"
            ) from error
        self._marks = tuple(
            {mark for name in _MARKERS if isinstance(mark := getattr(parser, name, None), str) and mark}
        )

    def parse(
        self, said: str | Sequence[int], tools: Sequence[Mapping[str, Any]] = (), *, number: int = 0
    ) -> ParsedAnswer:
        """Content and calls of what was `said`, as text or as sampled ids; arguments get the types of `tools`.

        Calls are numbered from `number` on: `call00000` in nine letters and digits, as some templates want them, and
        the same in every run.
        """
        text = said if isinstance(said, str) else self._text(said)
        request = self._request(model="", messages=[], tools=[dict(tool) for tool in tools] or None)
        reasoning, rest = "", text
        try:
            if self._thoughts is not None:
                thoughts, content = self._thoughts(self._read).extract_reasoning(text, request)
                reasoning, rest = thoughts or "", content or ""
            found = self._tools(self._read, request.tools).extract_tool_calls(rest, request)
        except Exception as error:  # of any kind: what a policy says must not end a run
            return ParsedAnswer(self._plain(rest), [], reasoning, f"the tool call cannot be read: {error}")
        calls = [
            {
                "id": f"call{number + n:05d}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for n, call in enumerate(found.tool_calls)
        ]
        content = found.content or ""
        wrong = "; ".join(filter(None, map(_wrong, calls)))
        if not calls and (any(mark in rest for mark in self._marks) or content.strip() != rest.strip()):
            content, wrong = rest, f"what was said begins a tool call that {self._name} cannot read: {rest[:200]!r}"
        return ParsedAnswer(self._plain(content), calls, reasoning, wrong)

    def _text(self, ids: Sequence[int]) -> str:
        """With the special tokens that mark calls, without the one that ended the answer."""
        ended = bool(ids) and ids[-1] in self._tokenizer.all_special_ids
        text = self._tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _plain(self, text: str) -> str:
        for special in self._tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text


class _OneVocabulary:
    """A tokenizer whose vocabulary is read once: parsers ask for it anew, at tens of milliseconds each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _known(name: str, names: Sequence[str], get: Any) -> Any:
    if name not in names:
        raise ConfigError(f"vLLM has no parser {name!r}; it has {', '.join(sorted(names))}")
    return get(name)


def _wrong(call: Mapping[str, Any]) -> str:
    """What is wrong with a call's arguments; "" for a JSON object."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        if isinstance(json.loads(arguments), dict):
            return ""
    except (TypeError, ValueError) as error:
        return f"the arguments of {name} are no JSON: {error}"
    return f"the arguments of {name} are {arguments[:200]}; give a JSON object"
