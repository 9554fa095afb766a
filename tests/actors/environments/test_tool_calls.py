"""Laws of tool calls: vLLM's parsers find them, and what is malformed is a result rather than the end of a run."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.environments.tool_calls import ToolCallParser
from apps.grpo.models import resolve_model
from forge.errors import ConfigError

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky", "times": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def hermes(tokenizer: PreTrainedTokenizerBase) -> ToolCallParser:
    return ToolCallParser("hermes", tokenizer)


def called(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def test_calls_and_content_are_told_apart(hermes: ToolCallParser) -> None:
    found = hermes.parse(f"I look twice. {CALL}\n{CALL}", [LOOK], number=3)
    assert found.content == "I look twice. "
    assert found.tool_calls == [called("look", 3, at="sky", times=2), called("look", 4, at="sky", times=2)]
    assert all(len(call["id"]) == 9 for call in found.tool_calls)
    assert found.error == ""
    plain = hermes.parse("Nothing to look at.", [LOOK])
    assert (plain.content, plain.tool_calls, plain.error) == ("Nothing to look at.", [], "")


def test_sampled_ids_are_read_like_their_text(hermes: ToolCallParser, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*tokenizer.encode(f"Look. {CALL}", add_special_tokens=False), tokenizer.eos_token_id]
    assert hermes.parse(ids, [LOOK]) == hermes.parse(f"Look. {CALL}", [LOOK])
    assert hermes.parse([*tokenizer.encode("Hi"), tokenizer.eos_token_id]).content == "Hi"
    assert hermes.parse([]).content == ""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('<tool_call>{"name": "look", "argu', "begins a tool call that hermes cannot read"),
        ('<tool_call>{"name": "look"}</tool_call>', "begins a tool call that hermes cannot read"),
        ("<tool_call>[1, 2]</tool_call>", "begins a tool call that hermes cannot read"),
        ("<tool_call>", "begins a tool call that hermes cannot read"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "begins a tool call that hermes cannot read"),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "arguments of look are [1]; give a JSON object"),
    ],
)
def test_what_is_no_call_is_a_result_that_says_so(
    hermes: ToolCallParser, caplog: pytest.LogCaptureFixture, said: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        found = hermes.parse(f"Look: {said}", [LOOK])
    assert reason in found.error
    assert found.content.startswith("Look: ")
    assert caplog.records == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(['{"name": "look", "arguments": ', "{}", "}", "<tool_call>", "</tool_call>", "a", "["]))
)
def test_nothing_that_a_policy_says_raises(hermes: ToolCallParser, pieces: list[str]) -> None:
    found = hermes.parse("".join(pieces), [LOOK])
    assert found.tool_calls or found.error or found.content == "".join(pieces)


def test_thoughts_are_no_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    thinker = copy.deepcopy(tokenizer)
    thinker.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    parser = ToolCallParser("hermes", thinker, reasoning="deepseek_r1")
    found = parser.parse(f"<think>\nShould I {CALL}?\n</think>\n\nYes. {CALL}", [LOOK])
    assert found.tool_calls == [called("look", at="sky", times=2)]
    assert "Should I" in found.reasoning
    assert found.content.strip() == "Yes."


def test_other_families_have_parsers_too(tokenizer: PreTrainedTokenizerBase) -> None:
    said = "<tool_call>\n<function=look>\n<parameter=at>\nsky\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    parser = ToolCallParser("qwen3_coder", tokenizer)
    assert parser.parse(f"{said}</function>\n</tool_call>", [LOOK]).tool_calls == [called("look", at="sky", times=2)]
    assert "cannot read" in parser.parse("<tool_call>garbage</tool_call>", [LOOK]).error
    pythonic = ToolCallParser("pythonic", tokenizer)
    assert pythonic.parse('[look(at="sky", times=2)]', [LOOK]).tool_calls == [called("look", at="sky", times=2)]


def test_a_parser_that_cannot_work_is_told_at_the_start(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"no parser 'hermit'; it has .*hermes"):
        ToolCallParser("hermit", tokenizer)
    with pytest.raises(ConfigError, match=r"no parser 'thinker'"):
        ToolCallParser("hermes", tokenizer, reasoning="thinker")
    with pytest.raises(ConfigError, match=r"'llama3_json' does not fit the tokenizer .*python_tag"):
        ToolCallParser("llama3_json", tokenizer)
