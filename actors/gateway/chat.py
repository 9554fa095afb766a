"""One chat call: from what is new in a conversation to an answer on record."""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from actors.environments.templates import ChatTemplate, Message
from actors.environments.tool_calls import Parses
from actors.gateway.answers import Spoken, spoken
from actors.gateway.config import GatewayConfig
from actors.gateway.requests import ChatRequest
from actors.gateway.responses import ChatAnswer
from actors.gateway.sessions import Call, Session, Turn
from actors.rollout import Generates
from actors.vllm_engine import Completion
from forge.errors import ForgeError, GatewayError, TranscriptError


@dataclass(frozen=True)
class Policy:
    """What answers: generators, and how their tokens become text. No thread but `thread` uses the template."""

    generators: Generates
    template: ChatTemplate
    parser: Parses | None
    config: GatewayConfig
    thread: ThreadPoolExecutor

    async def answer(self, session: Session, call: Call, request: ChatRequest) -> tuple[ChatAnswer, Turn]:
        """The answer, and the turn that it is in the session; nothing is waited for behind the recording.

        Raises GatewayError where the template refuses the messages, they are too long, or the generators fail.
        """
        loop = asyncio.get_running_loop()
        try:
            given = await loop.run_in_executor(self.thread, call.given, self.template)
        except TranscriptError as error:
            raise GatewayError(400, str(error), code="chat_template", param="messages") from error
        prompt = [*call.before, *given]
        limit = self._room(session, len(prompt))
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        seed = session.next_seed(prompt) if request.seed is None else request.seed & 0x7FFFFFFF
        answer = await self._generate(prompt, seed, limit, f"{session.id}/{call.conversation}")
        said = await loop.run_in_executor(self.thread, spoken, self.template, answer, request.stop, len(prompt))
        message, reasoning = self._message(said, call.tools, call.number)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        turn = session.record(id, call, given, said.answer, message)
        return self._answer(id, message, reasoning, said, len(prompt)), turn

    async def again(self, session: Session, turn: Turn, request: ChatRequest) -> ChatAnswer:
        """The answer of a turn that is on record."""
        prompt = len(session.tokens(turn.parent)) + len(turn.given)
        read = asyncio.get_running_loop().run_in_executor
        said = await read(self.thread, spoken, self.template, turn.answer, request.stop, prompt)
        _, reasoning = self._message(said, turn.tools, 0)
        return self._answer(turn.id, turn.message, reasoning, said, prompt)

    def _answer(self, id: str, message: Message, reasoning: str, said: Spoken, prompt: int) -> ChatAnswer:
        return ChatAnswer(id, int(time.time()), self.config.model, message, reasoning, said, prompt)

    def _room(self, session: Session, prompt: int) -> int:
        most = min(session.limits.max_tokens or self.config.max_tokens, self.config.max_tokens)
        if prompt < most:
            return most - prompt
        raise GatewayError(
            400,
            f"the conversation has {prompt} tokens, at most {most} fit with an answer; shorten it, or raise the "
            "session's max_tokens or gateway.max_tokens",
            code="context_length_exceeded",
            param="messages",
        )

    async def _generate(self, prompt: list[int], seed: int, limit: int, affinity: str) -> Completion:
        try:
            (answer,) = await self.generators.generate([prompt], [seed], limit, affinity=affinity)
        except ForgeError as error:
            raise GatewayError(503, f"the generators failed: {error}", code="generators", retry=True) from error
        if answer.finish_reason not in ("stop", "length"):
            raise GatewayError(
                503, f"the answer was ended early ({answer.finish_reason}); ask again", code="generators", retry=True
            )
        return answer

    def _message(self, said: Spoken, tools: list[dict[str, Any]], number: int) -> tuple[Message, str]:
        """The answer as the agent gets it, and its thoughts. Text that only looks like a call stays text."""
        if self.parser is None:
            return {"role": "assistant", "content": said.text}, ""
        parsed = self.parser.parse(said.text, tools, number=number)
        if parsed.tool_calls and not tools:
            return {"role": "assistant", "content": said.text}, ""
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        return message, parsed.reasoning
