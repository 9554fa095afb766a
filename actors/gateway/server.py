"""HTTP in front of a gateway: OpenAI's routes for agents, and a harness's to open, reward and end sessions.

    POST /v1/chat/completions   the session's api_key as Bearer token
    GET  /v1/models             the same
    POST /sessions              the gateway's token as Bearer token, from here on
    POST /sessions/ID/reward    {"reward": 1.0}, of one answer with "completion_id"
    POST /sessions/ID/end       -> what came of it
    GET  /sessions/ID           -> the same, so far
    DELETE /sessions/ID
    GET  /healthz               no token

Errors have OpenAI's form, so that its client raises its own exceptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from actors.gateway.requests import ChatRequest, chat_request, read_json
from actors.gateway.responses import ChatAnswer, chunks, error_body, event, whole
from forge.errors import ConfigError, DeadlineExceeded, GatewayError

if TYPE_CHECKING:
    from actors.gateway.gateway import Gateway

_START_S = 30.0
_STOP_S = 5.0
_READ_S = 60.0
"""Seconds that a request's body may take to arrive."""
_LONG_BODY = 2**18
_WAITING = 2048
"""Connections that may wait to be accepted."""
_GONE = 499
"""For a client that went away; nobody reads it."""
_RETRIES = "x-stainless-retry-count"
"""How often the openai client has sent this request before."""
_log = logging.getLogger(__name__)


class Server:
    """Listens for one gateway, in its event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._config = gateway.config
        self._uvicorn: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        """Once it listens."""

    async def start(self) -> None:
        """Raises ConfigError where the address is taken or is none of this machine's."""
        host, port = self._config.host, self._config.port
        try:
            listener = _listener(host, port)
        except OSError as error:
            raise ConfigError(
                f"the gateway cannot listen at {host} port {port}: {error}; set gateway.host to an address of this "
                "machine, gateway.port to 0 for a free port"
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        options |= {"lifespan": "off", "ws": "none", "http": "h11", "timeout_graceful_shutdown": 1}
        self._uvicorn = _Uvicorn(uvicorn.Config(routes(self._gateway), **options))
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]), name="gateway server")
        deadline = asyncio.get_running_loop().time() + _START_S
        while not self._uvicorn.started:
            if self._serving.done():
                self._serving.result()
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded(f"waited {_START_S:g} s for the gateway to listen at {self.url}, in vain")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Answers what can be answered at once, and closes the rest."""
        if self._uvicorn is None or self._serving is None:
            return
        self._uvicorn.should_exit = True
        await asyncio.wait([self._serving], timeout=_STOP_S)
        if not self._serving.done():
            self._uvicorn.force_exit = True
            self._serving.cancel()
            await asyncio.wait([self._serving], timeout=_STOP_S)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    # Of this protocol by name: asyncio leaves others with Nagle's algorithm, which costs an answer 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the program that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def routes(gateway: Gateway) -> FastAPI:
    """The application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(GatewayError, _refused)
    app.add_exception_handler(ConfigError, _refused)
    for status in (404, 405):
        app.add_exception_handler(status, _refused)
    app.add_exception_handler(Exception, _refused)

    def harness(request: Request) -> None:
        if not secrets.compare_digest(_bearer(request).encode(), gateway.token.encode()):
            raise GatewayError(401, "the token is not the gateway's; give it as a Bearer token", code="invalid_api_key")

    async def healthz() -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        gateway.session_of_key(_bearer(request))
        model = {"id": gateway.config.model, "object": "model", "created": 0, "owned_by": "meshforge"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(request: Request) -> Response:
        session = gateway.session_of_key(_bearer(request))
        asked = chat_request(await _body(request, gateway.config.max_request_bytes), gateway.config)
        retried = request.headers.get(_RETRIES, "0") != "0"
        answer = await _unless_gone(request, gateway.chat(session, asked, retried=retried))
        if answer is None:
            return Response(status_code=_GONE)
        if asked.stream:
            return StreamingResponse(_events(answer, asked), media_type="text/event-stream")
        return JSONResponse(whole(answer, logprobs=asked.logprobs))

    async def open_session(request: Request) -> Response:
        harness(request)
        session = await gateway.open(**await _body(request, gateway.config.max_request_bytes))
        return JSONResponse({"id": session.id, "api_key": session.key, "base_url": gateway.base_url})

    async def reward(request: Request, id: str) -> Response:
        harness(request)
        body = await _body(request, gateway.config.max_request_bytes)
        await gateway.reward(id, body.get("reward", "nothing"), str(body.get("completion_id") or ""))
        return JSONResponse(gateway.session(id).summary())

    async def end(request: Request, id: str) -> Response:
        harness(request)
        return JSONResponse(await gateway.end(id))

    async def show(request: Request, id: str) -> Response:
        harness(request)
        return JSONResponse(gateway.session(id).summary())

    async def delete(request: Request, id: str) -> Response:
        harness(request)
        await gateway.forget(id)
        return JSONResponse({"id": id, "deleted": True})

    handlers: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("GET", "/healthz", healthz),
        ("GET", "/v1/models", models),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/sessions", open_session),
        ("POST", "/sessions/{id}/reward", reward),
        ("POST", "/sessions/{id}/end", end),
        ("GET", "/sessions/{id}", show),
        ("DELETE", "/sessions/{id}", delete),
    ]
    for method, path, handler in handlers:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


async def _unless_gone(request: Request, answer: Awaitable[ChatAnswer]) -> ChatAnswer | None:
    """The answer; None when the client went away before, and then it is cancelled. Nothing runs on behind."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        if task.cancelled():
            raise GatewayError(400, "the session has ended; open another", code="session_ended")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(answer: ChatAnswer, asked: ChatRequest) -> AsyncIterator[bytes]:
    for chunk in chunks(answer, logprobs=asked.logprobs, usage=asked.usage_chunk):
        yield event(chunk)
    yield event("[DONE]")


async def _body(request: Request, most: int) -> dict[str, Any]:
    body = bytearray()
    try:
        async with asyncio.timeout(_READ_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise GatewayError(
                        413, f"the body has more than {most} bytes; shorten it, or raise gateway.max_request_bytes"
                    )
    except TimeoutError as error:
        raise GatewayError(408, f"the body did not arrive within {_READ_S:g} s; send it at once") from error
    # A long one takes its time, and others wait for the event loop.
    return await asyncio.to_thread(read_json, bytes(body)) if len(body) > _LONG_BODY else read_json(bytes(body))


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _refused(request: Request, error: Exception) -> Response:
    """An error in OpenAI's form. Its client tries again by itself only where that may help."""
    if isinstance(error, ConfigError):
        error = GatewayError(400, str(error))
    elif status := getattr(error, "status_code", 0):
        error = GatewayError(status, f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}")
    elif not isinstance(error, GatewayError):
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        error = GatewayError(500, f"the gateway failed: {type(error).__name__}; its log says why")
    again = {"x-should-retry": "true" if error.retry else "false"}
    return JSONResponse(error_body(error), status_code=error.status, headers=again)
