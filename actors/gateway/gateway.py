"""Sessions, generators and journals together: what a trainer opens, and what the server calls.

    async with Gateway(generators, ChatTemplate(tokenizer), parser, GatewayConfig()) as gateway:
        session = await gateway.open(max_turns=20)
        await run_the_agent(env=gateway.environment(session))     # OPENAI_BASE_URL, OPENAI_API_KEY
        await gateway.reward(session.id, 1.0)
        samples = await gateway.close(session.id)                 # list[EpisodeTokens]

All of it runs in one event loop. What tokenises, or writes a journal, runs one after the other in a thread of its own,
with a tokenizer of its own.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import Parses
from actors.gateway.chat import Policy
from actors.gateway.config import GatewayConfig
from actors.gateway.journal import Journal
from actors.gateway.requests import ChatRequest
from actors.gateway.responses import ChatAnswer
from actors.gateway.saved import Entry, heading, reward_entry, session_of, state_of, turn_entry
from actors.gateway.server import Server
from actors.gateway.sessions import Session
from actors.rollout import Generates
from forge.episodes import EpisodeTokens
from forge.errors import GatewayError, RunFolderError

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Gateway:
    """The sessions of one policy, and their server; an async context manager that leaves nothing behind."""

    def __init__(
        self, generators: Generates, template: ChatTemplate, parser: Parses | None, config: GatewayConfig
    ) -> None:
        """parser: None leaves answers as they are, tool calls too. Raises ConfigError."""
        config.validate()
        self.config = config
        self.token = secrets.token_urlsafe(32)
        """For the routes of the harness."""
        template = copy.copy(template)
        template.tokenizer = copy.deepcopy(template.tokenizer)  # no two threads may use one
        self._sessions: dict[str, Session] = {}
        self._keys: dict[str, Session] = {}
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self._journal = Journal(config.journal) if config.journal else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gateway")
        self._policy = Policy(generators, template, parser, config, self._thread)
        self._server = Server(self)

    async def __aenter__(self) -> Gateway:
        """Reads the journal and listens. ConfigError where it cannot listen at its address."""
        for session in self._journal.load() if self._journal else ():
            session.resumed()
            self._add(session)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for id in list(self._running):
            await self._cancel(id)
        await self._server.stop()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    @property
    def base_url(self) -> str:
        """What an openai client takes."""
        return f"{self._server.url}/v1"

    def environment(self, session: Session) -> dict[str, str]:
        """Variables that a plain `OpenAI()` reads."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": session.key}

    # --- sessions

    async def open(self, *, seed: int | None = None, **limits: Any) -> Session:
        """A session with these of `SessionLimits`, the others as configured.

        seed: equal conversations under an equal one sample alike; None takes one at random. Raises ConfigError for a
        limit that cannot be, and GatewayError (429) when there are too many sessions.
        """
        now = time.time()
        limit = self.config.limits.changed(**limits)
        if len(self._sessions) >= self.config.max_sessions:
            self._forget_old(now)
        if len(self._sessions) >= self.config.max_sessions:
            raise GatewayError(
                429,
                f"{len(self._sessions)} sessions are open, gateway.max_sessions is {self.config.max_sessions}; close "
                "some",
                code="sessions",
                retry=True,
            )
        session = Session(
            uuid.uuid4().hex,
            secrets.token_urlsafe(32),
            limit,
            now + limit.deadline_s,
            seed=secrets.randbits(31) if seed is None else seed,
        )
        self._add(session)
        await self._write(session, heading(session))
        return session

    async def reward(self, id: str, value: float, turn: str = "") -> None:
        """See `Session.reward`; also of a session that has ended."""
        session = self.session(id)
        session.reward(value, turn)
        await self._write(session, reward_entry(value, turn))

    async def end(self, id: str) -> dict[str, Any]:
        """No further call is answered, and those under way are cancelled; its summary. Again: the same."""
        session = self.session(id)
        if not session.ended:
            session.ended = True
            await self._cancel(id)
            await self._write(session, {"ended": True})
        return session.summary()

    async def close(self, id: str) -> list[EpisodeTokens]:
        """Ends a session and forgets it; its samples."""
        session = self.session(id)
        await self.end(id)
        samples = session.samples()
        await self.forget(id)
        return samples

    async def forget(self, id: str) -> None:
        """Ends a session and drops it, its journal too."""
        session = self.session(id)
        session.ended = True
        del self._sessions[id], self._keys[session.key]
        await self._cancel(id)
        if self._journal:
            await self._in_thread(self._journal.forget, id)

    def session(self, id: str) -> Session:
        """Raises GatewayError (404) where there is none."""
        if id not in self._sessions:
            raise GatewayError(404, f"there is no session {id[:100]!r}; it was closed, or never opened", code="session")
        return self._sessions[id]

    def session_of_key(self, key: str) -> Session:
        """Raises GatewayError (401)."""
        if key not in self._keys:
            raise GatewayError(
                401,
                "the api_key is of no open session; use the one that the session was opened with, as a Bearer token",
                code="invalid_api_key",
            )
        return self._keys[key]

    def state(self) -> list[list[Entry]]:
        """All sessions as plain values, their keys included; `restore` of another gateway goes on with them."""
        return [state_of(session) for session in self._sessions.values()]

    async def restore(self, state: Sequence[Sequence[Entry]]) -> None:
        """Sessions of `state`, with their keys and deadlines; one that is there already stays as it is."""
        for entries in state:
            session = session_of(entries)
            if session.id not in self._sessions:
                session.resumed()
                self._add(session)
                for entry in entries:
                    await self._write(session, entry)

    def _add(self, session: Session) -> None:
        self._sessions[session.id] = self._keys[session.key] = session

    def _forget_old(self, now: float) -> None:
        for session in [s for s in self._sessions.values() if now > s.expires + self.config.keep_s]:
            session.ended = True
            del self._sessions[session.id], self._keys[session.key]
            if self._journal:
                self._thread.submit(self._journal.forget, session.id)
            _log.warning("session %s is forgotten: nobody closed it, and its time is long over", session.id)

    # --- a chat call

    async def chat(self, session: Session, request: ChatRequest, *, retried: bool = False) -> ChatAnswer:
        """Answers a call and puts it on record. Cancelled before that, nothing is.

        A call that is `retried` gets the answer that a server had on record when it died, if there is one.

        Raises GatewayError where a limit is reached, the template refuses the messages, the generators fail, or the
        time is over.
        """
        session.check_open(time.time())
        if retried and (turn := session.unheard(request.messages, request.tools)) is not None:
            return await self._policy.again(session, turn, request)
        call = session.begin(request.messages, request.tools, time.time())
        task = asyncio.current_task()
        assert task is not None
        running = self._running.setdefault(session.id, set())
        running.add(task)
        seconds = min(self.config.request_timeout_s, session.expires - time.time())
        try:
            async with asyncio.timeout(seconds) as scope:
                answer, turn = await self._policy.answer(session, call, request)
                await self._write(session, lambda: turn_entry(turn))
                return answer
        except TimeoutError as error:
            if not scope.expired():
                raise GatewayError(503, f"the generators failed: {error}", code="generators", retry=True) from error
            session.check_open(time.time())
            raise GatewayError(
                504,
                f"no answer within {seconds:.3g} s, gateway.request_timeout_s is {self.config.request_timeout_s:g}; "
                "ask for fewer tokens, or raise it",
                code="timeout",
            ) from error
        finally:
            session.finish(call)
            running.discard(task)
            if not running:
                self._running.pop(session.id, None)

    # --- waits

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _write(self, session: Session, entry: Entry | Callable[[], Entry]) -> None:
        """Into the journal, in the order of calls, since they get to the thread before anything is waited for."""
        if self._journal is None or session.id not in self._sessions:
            return
        journal = self._journal

        def write() -> None:
            journal.write(session.id, entry() if callable(entry) else entry)

        try:
            await self._in_thread(write)
        except RunFolderError as error:
            session.ended = True  # what came after would have no parent on file
            raise GatewayError(500, f"{error}; the session {session.id} has ended", code="journal") from error

    async def _cancel(self, id: str) -> None:
        """Cancels the calls of a session and waits until they hold nothing."""
        own = asyncio.current_task()
        tasks = {task for task in self._running.get(id, ()) if task is not own}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.request_timeout_s)
