"""What a chat template does to conversations that only grow, found out before a run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.environments.templates import ChatTemplate, Message
from actors.environments.transcript import Difference, Transcript
from actors.vllm_engine import Completion
from forge.errors import ConfigError, TranscriptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TemplateReport:
    """What a chat template does to conversations that only grow."""

    end_of_turn: list[int]
    """What it writes behind an answer. A generator has to stop at the first of them."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """Kinds of conversations that it rewrites, and the first token of each that it would have otherwise."""
    refused: dict[str, str] = field(default_factory=dict)
    """Kinds of conversations that it does not take, and what it says."""

    @property
    def stable(self) -> bool:
        """Whether transcripts are what the template makes of whole conversations."""
        return not self.differences

    def __str__(self) -> str:
        lines = [f"{kind}: {difference}" for kind, difference in self.differences.items()]
        lines += [f"{kind}: {why}" for kind, why in self.refused.items()]
        return "\n".join(lines) or "the chat template only appends"


_QUESTION: Message = {"role": "user", "content": "A question?"}
_ASK: Message = {"role": "user", "content": "And what else?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
_RESULT: Message = {"role": "tool", "content": "It is blue.", "tool_call_id": "call00000", "name": "look"}
_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _PARAMETERS}}
_THOUGHTS = "<think>\nThoughts.\n</think>\n\nAn answer."


def check_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> TemplateReport:
    """Tries short conversations, and says what of them a transcript would have otherwise than the template.

    Raises ConfigError where the template cannot be continued at all: there is none, or it refuses a second question.
    """
    template = ChatTemplate(tokenizer, options)
    try:
        found = {"an answer": _probe(template, "An answer.", _ASK)}
    except TranscriptError as error:
        raise ConfigError(f"{error}; conversations of several turns need one") from error
    report = TemplateReport(template.end_of_turn)
    for kind, text, then, tools in (
        ("an answer with thoughts", _THOUGHTS, _ASK, []),
        ("a tool's result", _THOUGHTS, _RESULT, [_TOOL]),
        ("a question when there are tools", "An answer.", _ASK, [_TOOL]),
    ):
        try:
            found[kind] = _probe(template, text, then, tools)
        except TranscriptError as error:
            report.refused[kind] = str(error)
    report.differences.update({kind: difference for kind, difference in found.items() if difference is not None})
    return report


def _probe(
    template: ChatTemplate, text: str, then: Message, tools: Sequence[Mapping[str, Any]] = ()
) -> Difference | None:
    """A question, an answer of this `text`, and what comes then."""
    message: Message | None = None
    text = template.lead + text
    if then["role"] == "tool":
        try:
            template.behind([then], tools)
        except TranscriptError:  # then with what it writes for a call
            message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
            start = template.render([_QUESTION], tools, invite=True)
            text = template.render([_QUESTION, message], tools, invite=False).removeprefix(start)
            text = text.removesuffix(template.end_text)
    transcript = Transcript(template, tools)
    transcript.observe([_QUESTION])
    said = template.encode(text, inside=True) + template.end_of_turn[:1]
    transcript.sampled(Completion(said, [0.0] * len(said), [0] * len(said), "stop"), message)
    transcript.observe([then])
    return transcript.compare().difference
