"""What a chat request asks for, and what of it cannot be had. Pure.

Tokens are sampled as the trainer computes their log-probs: by the generators' own temperature and top_p. An option that
would change that is refused, or by `gateway.unsupported` ignored, and never half done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.environments.templates import Message
from actors.gateway.config import GatewayConfig
from actors.gateway.conversations import plain_messages
from forge.errors import GatewayError

_MAX_STOPS = 16
_READ = {
    *("messages", "tools", "tool_choice", "stream", "stream_options", "stop", "seed", "n"),
    *("max_tokens", "max_completion_tokens", "logprobs", "temperature", "top_p"),
}
_WITHOUT_EFFECT = {
    *("model", "user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "reasoning_effort", "verbosity"),
}
"""They change nothing about what a policy samples."""
_NEUTRAL: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "functions": [[]],
    "function_call": ["none"],
}
"""Values that ask for nothing; others cannot be had, and neither can any value of an option not named here."""


@dataclass(frozen=True)
class ChatRequest:
    """A chat call, checked."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    usage_chunk: bool = False
    """Whether a stream ends in a chunk of the usage."""


def chat_request(body: Mapping[str, Any], config: GatewayConfig) -> ChatRequest:
    """Raises GatewayError (400) that names the option, its value and the remedy."""
    given = {key: value for key, value in body.items() if value is not None}
    messages = plain_messages(given.get("messages"))
    if config.unsupported == "refuse":
        _refuse(given, config)
    choice = given.get("tool_choice", "auto")
    tools = [] if choice == "none" else _tools(given.get("tools", []))
    limits = [_integer(given, name, 1) for name in ("max_tokens", "max_completion_tokens")]
    options = given.get("stream_options", {})
    return ChatRequest(
        messages,
        tools,
        _stops(given.get("stop", [])),
        min((limit for limit in limits if limit is not None), default=None),
        _integer(given, "seed", None),
        _flag(given, "logprobs"),
        _flag(given, "stream"),
        isinstance(options, dict) and _flag(options, "include_usage"),
    )


def read_json(body: bytes) -> dict[str, Any]:
    """The object of a request's body; {} of an empty one. Raises GatewayError (400)."""
    try:
        value = json.loads(body or b"{}")
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the body is no JSON: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise GatewayError(400, f"the body must be a JSON object, got {str(value)[:100]}")
    return value


def _refuse(given: Mapping[str, Any], config: GatewayConfig) -> None:
    for name in ("temperature", "top_p"):
        own = getattr(config, name)
        if given.get(name, own) != own:
            raise _unsupported(
                name,
                given[name],
                f"the policy is sampled and trained with {name} {own:g}: leave it out, or set generator.{name} "
                f"and gateway.{name} for the run",
            )
    if given.get("n", 1) != 1:
        raise _unsupported("n", given["n"], "ask once for each answer: equal calls become branches of one tree")
    if given.get("tool_choice", "auto") not in ("auto", "none"):
        raise _unsupported(
            "tool_choice", given["tool_choice"], "nothing forces the policy's tokens: leave it auto, or say it in words"
        )
    for name, value in given.items():
        if name not in _READ | _WITHOUT_EFFECT and value not in _NEUTRAL.get(name, []):
            raise _unsupported(name, value, "leave it out")


def _unsupported(name: str, value: Any, remedy: str) -> GatewayError:
    text = f"{name} {str(value)[:100]!r} cannot be had: {remedy}; or have it ignored by gateway.unsupported=ignore"
    return GatewayError(400, text, code="unsupported_value", param=name)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise GatewayError(400, f"tools must be a list, got {str(tools)[:100]!r}", param="tools")
    for n, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise GatewayError(
                400,
                f"tools[{n}] must be of type function, with a function that has a name, got {str(tool)[:200]!r}",
                param=f"tools[{n}]",
            )
    return tools


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > _MAX_STOPS:
        raise GatewayError(
            400, f"stop must be a text or up to {_MAX_STOPS} of them, none empty, got {str(stop)[:200]!r}", param="stop"
        )
    return stops


def _integer(given: Mapping[str, Any], name: str, least: int | None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        limit = "" if least is None else f" >= {least}"
        raise GatewayError(400, f"{name} must be an integer{limit}, got {str(value)[:100]!r}", param=name)
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name) or False
    if not isinstance(value, bool):
        raise GatewayError(400, f"{name} must be true or false, got {str(value)[:100]!r}", param=name)
    return value
