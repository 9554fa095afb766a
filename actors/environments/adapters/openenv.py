"""Environments behind a server that speaks OpenEnv's protocol over a WebSocket, wherever it runs.

environment path  actors.environments.adapters.openenv:OpenEnv
kwargs            {url: "http://localhost:8000", text_field: message, say: echoed_message}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from actors.environments.base import Action, Observation, Step
from forge.errors import ConfigError

MAX_BYTES = 16 * 2**20
"""Of one message; a longer one ends the episode."""
_USER = {"role": "user"}


class OpenEnv:
    """Asynchronous; an episode is one session of the server. The pool has the time limits.

    `task["reset"]`, if given, are the arguments of the server's reset; `task["say"]` is put before what is seen first.
    An answer becomes the field `text_field` of the server's action, beside those of `action`. `say` is the field of
    its observations that the policy sees; empty: all of them, as JSON. With `tools` it is offered the server's.
    """

    def __init__(
        self, url: str, text_field: str = "message", action: Mapping[str, Any] | None = None, say: str = "",
        tools: bool = False,
    ) -> None:  # fmt: skip
        scheme, _, place = url.rstrip("/").partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not place:
            raise ConfigError(f"OpenEnv url is {url!r}; give the server's, such as http://localhost:8000")
        self._url = f"{scheme.replace('http', 'ws')}://{place}/ws"
        self._text_field, self._action, self._say, self._tools = text_field, dict(action or {}), say, tools
        self._socket: ClientConnection | None = None

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """What the server says first. Raises ConnectionError when there is none, or it has no room."""
        try:
            self._socket = await connect(self._url, max_size=MAX_BYTES)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"no OpenEnv server answers at {self._url}: {error}") from error
        tools = (await self._ask("step", {"type": "list_tools"}))["observation"]["tools"] if self._tools else []
        seen = (await self._ask("reset", task.get("reset", {})))["observation"]
        said = [{"role": "user", "content": f"{task.get('say', '')}{self._told(seen)}"}]
        return Observation(said, [_offered(tool) for tool in tools])

    async def step(self, action: Action) -> Step:
        """One action: what was said, or every tool that was called, one after the other; rewards add up."""
        roles: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": c["id"]} for c in action.tool_calls]
        if action.error:  # the policy hears it, the server does not
            return Step(Observation([{**role, "content": action.error} for role in roles or [_USER]]), 0.0, done=False)
        asked: list[dict[str, Any]] = [_called(call["function"]) for call in action.tool_calls]
        messages, reward, done = [], 0.0, False
        for role, data in zip(
            roles or [_USER], asked or [{**self._action, self._text_field: action.text}], strict=True
        ):
            answer = await self._ask("step", data)
            messages.append({**role, "content": self._told(answer["observation"])})
            reward, done = reward + float(answer["reward"] or 0), bool(answer["done"])
            if done:
                break
        return Step(Observation(messages), reward, done)

    async def close(self) -> None:
        """Ends the server's session."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "reset comes first"
        try:
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer: dict[str, Any] = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"the OpenEnv server at {self._url} hung up over a {kind}: {error}") from error
        if answer["type"] == "error":
            raise RuntimeError(f"the OpenEnv server at {self._url} refused a {kind}: {answer['data']}")
        return dict(answer["data"])

    def _told(self, seen: Mapping[str, Any]) -> str:
        if "tool_name" in seen:  # OpenEnv's answer to a call: what MCP says came of it, or what went wrong with it
            result = seen["error"] or seen["result"]
            return "\n".join(part.get("text", "") for part in result.get("content", [])) or json.dumps(result)
        return str(seen.get(self._say, "")) if self._say else json.dumps(seen)


def _offered(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _called(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": function["name"], "arguments": json.loads(function["arguments"])}
