"""How a policy is spoken to: the chat template of a run, and the parser of the tool calls that its model makes."""

from __future__ import annotations

from typing import Protocol

from transformers import AutoTokenizer

from actors.environments.template_check import check_template
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import ToolCallParser
from apps.grpo.models import resolve_model
from forge.data import DataConfig


class Spoken(Protocol):
    """The part of a configuration that says it."""

    model: str
    data: DataConfig
    tool_parser: str
    chat_template: str


def make_language(cfg: Spoken) -> tuple[ChatTemplate, ToolCallParser | None]:
    """Chat template and parser; makes the model first. ConfigError where one of them does not fit the model."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(cfg.model))
    if cfg.chat_template:
        tokenizer.chat_template = cfg.chat_template
    check_template(tokenizer, cfg.data.template_args)
    parser = ToolCallParser(cfg.tool_parser, tokenizer) if cfg.tool_parser else None
    return ChatTemplate(tokenizer, cfg.data.template_args), parser
