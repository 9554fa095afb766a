"""Chat messages in one form, so that those of a request can be told apart from those on record. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from actors.environments.templates import Message
from forge.errors import GatewayError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")


def plain_messages(messages: Any) -> list[Message]:
    """What counts of a request's messages: role, content as one text, name, calls and the id that a result is for.

    Raises GatewayError (400) for what is no conversation, or has anything but text.
    """
    if not isinstance(messages, list) or not messages:
        raise GatewayError(400, "messages must be a list of at least one message", param="messages")
    plain = [_plain(message, f"messages[{n}]") for n, message in enumerate(messages)]
    if plain[-1]["role"] == "assistant":
        raise GatewayError(
            400,
            "the last message is the assistant's; a chat call answers a user, a tool or the system, so leave it out "
            "or add what is to be answered",
            param=f"messages[{len(plain) - 1}]",
        )
    return plain


def message_key(message: Message) -> str:
    """The same for messages that say the same: what `name` an assistant has, and how arguments are spaced, does not."""
    shown = {key: value for key, value in message.items() if key != "name" or message["role"] != "assistant"}
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            [call["id"], call["function"]["name"], _parsed(call["function"]["arguments"])]
            for call in message["tool_calls"]
        ]
    return json.dumps(shown, sort_keys=True)


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """The same for equal tools."""
    return json.dumps(list(tools), sort_keys=True)


def _plain(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise GatewayError(
            400, f"{where} must be an object with a role of {', '.join(_ROLES)}, got {_shown(message)}", param=where
        )
    plain: Message = {"role": _ROLES[message["role"]], "content": _text(message.get("content"), where)}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise GatewayError(400, f"{where}.{key} must be a string, got {_shown(message[key])}", param=where)
            plain[key] = message[key]
    if message.get("tool_calls") is not None and plain["role"] == "assistant":
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise GatewayError(400, f"{where}.tool_calls must be a list, got {_shown(calls)}", param=where)
        if calls:
            plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return plain


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for n, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise GatewayError(
                400,
                f"{where}.content[{n}] is {_shown(part)}; the policy reads text alone: give a string, or parts of "
                "type text",
                param=f"{where}.content",
            )
    return "".join(part["text"] for part in parts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not all(
        isinstance(text, str) for text in (call.get("id"), function.get("name"), function.get("arguments"))
    ):
        raise GatewayError(
            400,
            f"{where} must have an id and a function with name and arguments, all strings, got {_shown(call)}",
            param=where,
        )
    function = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _shown(value: Any) -> str:
    return repr(value)[:200]
