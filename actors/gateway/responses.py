"""An answer in OpenAI's form: whole, or in chunks; and errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.environments.templates import Message
from actors.gateway.answers import Piece, Spoken, deltas
from forge.errors import GatewayError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class ChatAnswer:
    """What a chat call is answered with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    message: Message
    reasoning: str
    spoken: Spoken
    prompt_tokens: int

    @property
    def finish(self) -> str:
        """OpenAI's finish_reason."""
        if self.spoken.answer.finish_reason != "stop":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


def whole(answer: ChatAnswer, *, logprobs: bool) -> dict[str, Any]:
    """A `chat.completion`."""
    message: Message = {**answer.message, "refusal": None}
    if answer.message.get("tool_calls") and not answer.message["content"]:
        message["content"] = None
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    tokens = (0, len(answer.spoken.token_bytes))
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish,
        "logprobs": _logprobs(answer, *tokens) if logprobs else None,
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def chunks(answer: ChatAnswer, *, logprobs: bool, usage: bool) -> Iterator[dict[str, Any]]:
    """The same as `chat.completion.chunk`s: the role, texts, tool calls, the reason it ended, and its usage."""

    def chunk(delta: dict[str, Any], finish: str | None = None, piece: Piece | None = None) -> dict[str, Any]:
        shown = _logprobs(answer, piece.first, piece.end) if logprobs and piece is not None else None
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": shown}
        return {**_head(answer, "chat.completion.chunk"), "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    for piece in deltas(answer.message["content"], answer.spoken.pieces):
        if piece.text or logprobs:
            yield chunk({"content": piece.text}, piece=piece)
    for n, call in enumerate(answer.message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": n, **call}]})
    yield chunk({}, answer.finish)
    if usage:
        yield {**_head(answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)}


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def error_body(error: GatewayError) -> dict[str, Any]:
    """As the openai client reads it."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    shown = {"message": str(error), "type": kind, "param": error.param or None, "code": error.code or None}
    return {"error": shown}


def _head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    said = len(answer.spoken.answer.token_ids)
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": said}
    return {**counts, "total_tokens": answer.prompt_tokens + said}


def _logprobs(answer: ChatAnswer, first: int, end: int) -> dict[str, Any]:
    """Of all sampled tokens in this range, the end of the turn included."""
    some = answer.spoken.token_bytes[first:end]
    values = answer.spoken.answer.logprobs[first:end]
    rows = [
        {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw), "top_logprobs": []}
        for raw, value in zip(some, values, strict=True)
    ]
    return {"content": rows, "refusal": None}
