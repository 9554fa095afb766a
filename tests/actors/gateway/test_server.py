"""The gateway with the real openai client: what an unmodified agent says and is told, and what is on record then."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from talking import Calls, Talker, chat_template

from actors.gateway.config import GatewayConfig, SessionLimits
from actors.gateway.gateway import Gateway
from actors.gateway.server import _listener
from actors.gateway.sessions import Session
from actors.reward import Sample
from actors.reward_judge import ChatJudge
from forge.episodes import EpisodeTokens
from forge.errors import ConfigError, EnvironmentFailed, GatewayError, RewardError

PATIENCE_S = 30.0
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def run(test: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test

    asyncio.run(in_time())


@asynccontextmanager
async def served(talker: Talker, **options: Any) -> AsyncIterator[Gateway]:
    async with Gateway(talker, chat_template(), Calls(), GatewayConfig(**options)) as gateway:
        yield gateway


@asynccontextmanager
async def client_of(gateway: Gateway, session: Session) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.base_url, api_key=session.key, max_retries=0) as client:
        yield client


async def ask(client: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="gpt", messages=messages, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def echo(text: str) -> str:
    """What the last message says, backwards."""
    return text.rsplit("<|im_end|>\n<|im_start|>assistant", 1)[0].rsplit("\n", 1)[-1][::-1]


def trained(sample: EpisodeTokens) -> str:
    return chat_template().decode([t for t, sampled in zip(sample.tokens, sample.mask, strict=True) if sampled])


async def control(gateway: Gateway, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
    """The harness's side: status and what was answered."""
    url = gateway.base_url.removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {gateway.token if token is None else token}"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method=method)

    def call() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(call)


def test_a_judge_may_be_the_policy_behind_its_own_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with served(Talker(lambda text: "7 of 10" if "seven times six" in text else "no idea")) as gateway:
            session = await gateway.open()
            monkeypatch.setenv("JUDGE_KEY", session.key)
            options: dict[str, Any] = {"temperature": None, "key_variable": "JUDGE_KEY"}
            judge = ChatJudge(gateway.base_url, "policy", **options)
            assert await judge.score(Sample("seven times six", "42", "42")) == pytest.approx(0.7)
            with pytest.raises(RewardError, match="the judge policy said 'no idea'"):
                await judge.score(Sample("seven times seven", "42", "49"))
            await judge.close()
            strict = ChatJudge(gateway.base_url, "policy", key_variable="JUDGE_KEY")
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await strict.score(Sample("seven times six", "42", "42"))
            await strict.close()

    run(test())


def test_a_conversation_is_recorded_token_by_token() -> None:
    async def test() -> None:
        talker = Talker(echo)
        async with served(talker) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                assert [model.id async for model in client.models.list()] == ["policy"]
                messages: list[Any] = [{"role": "developer", "content": "be brief"}, user("ab")]
                first = await ask(client, messages)
                assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("ba", "stop")
                assert first.usage is not None
                assert first.usage.prompt_tokens == len(talker.asked[0])
                assert first.usage.completion_tokens == 3
                # As agents do: the message object itself, with all that the client adds to it.
                second = await ask(client, [*messages, first.choices[0].message, user("cd")], max_tokens=1)
                assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("d", "length")
            await gateway.reward(session.id, 2.0)
            (sample,) = await gateway.close(session.id)
            assert talker.asked[1][: len(talker.asked[0]) + 3] == [*talker.asked[0], *talker.said[0]]
            assert sample.tokens == [*talker.asked[1], *talker.said[1]]
            assert trained(sample) == "ba<|im_end|>d"
            assert sample.versions == [0, 0, 0, 1]
            assert sample.total == 2.0
            assert len(set(talker.affinities)) == 1

    run(test())


def test_a_plain_synchronous_client_finds_the_gateway_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with served(Talker(echo)) as gateway:
            session = await gateway.open()
            for name, value in gateway.environment(session).items():
                monkeypatch.setenv(name, value)

            def agent() -> str | None:
                with OpenAI() as client:
                    answer = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "ab"}])
                return answer.choices[0].message.content

            assert await asyncio.to_thread(agent) == "ba"
            assert len(await gateway.close(session.id)) == 1

    run(test())


SIGNS = "naïve 👩\N{ZERO WIDTH JOINER}🚀 日本 ok"


def test_a_stream_says_the_same_in_whole_characters() -> None:
    async def test() -> None:
        talker = Talker(lambda text: SIGNS)
        async with served(talker) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                stream = await ask(
                    client, [user("a")], stream=True, logprobs=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
                assert "".join(deltas) == SIGNS
                assert len(deltas) > 10, "piece by piece"
                assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)
                rows = [
                    row for c in chunks if c.choices and c.choices[0].logprobs for row in c.choices[0].logprobs.content
                ]
                assert bytes(byte for row in rows for byte in row.bytes).decode() == f"{SIGNS}<|im_end|>"
                assert any("\N{REPLACEMENT CHARACTER}" in row.token for row in rows), "characters span tokens"
                assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
                assert chunks[-1].usage is not None
                assert chunks[-1].usage.completion_tokens == len(talker.said[0])
                again = await ask(client, [user("a"), {"role": "assistant", "content": "".join(deltas)}, user("b")])
                assert again.choices[0].message.content == SIGNS
            (sample,) = await gateway.close(session.id)
            assert sample.num_sampled == len(talker.said[0]) + len(talker.said[1])

    run(test())


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async def test() -> None:
        talker = Talker(echo)
        async with served(talker) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                choice = (await ask(client, [user("ab")], logprobs=True)).choices[0]
                assert [row.token for row in choice.logprobs.content] == ["b", "a", "<|im_end|>"]
                shown = [row.logprob for row in choice.logprobs.content]
                assert (await ask(client, [user("ab")])).choices[0].logprobs is None
            assert (await gateway.close(session.id))[0].logprobs == shown

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_go_there_and_back(stream: bool) -> None:
    def say(text: str) -> str:
        return (
            "It is blue." if "sky is" in text else 'So: <tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
        )

    async def test() -> None:
        talker = Talker(say)
        async with served(talker) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                if stream:
                    async with client.chat.completions.stream(
                        model="gpt", messages=[{"role": "user", "content": "?"}], tools=[LOOK]
                    ) as events:
                        async for _ in events:
                            pass
                        answer: Any = await events.get_final_completion()
                else:
                    answer = await ask(client, [user("?")], tools=[LOOK])
                choice = answer.choices[0]
                assert choice.finish_reason == "tool_calls"
                assert choice.message.content == "So: "
                (call,) = choice.message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
                result = {"role": "tool", "tool_call_id": call.id, "content": "The sky is blue."}
                sent = {
                    "role": "assistant",
                    "content": choice.message.content,
                    "tool_calls": [call.model_dump(exclude_none=True)],
                }
                last = await ask(client, [user("?"), sent, result], tools=[LOOK])
                assert last.choices[0].message.content == "It is blue."
                plain = await ask(client, [user("?")])
                assert plain.choices[0].message.tool_calls is None, "no tools were given"
                assert plain.choices[0].message.content.endswith("</tool_call>")
            first, other = await gateway.close(session.id)
            assert trained(first).startswith("So: <tool_call>")
            assert trained(first).endswith("It is blue.<|im_end|>")
            assert other.tokens[: len(talker.asked[2])] == talker.asked[2]

    run(test())


def test_branches_of_one_prefix_train_it_once_and_an_altered_answer_is_given() -> None:
    async def test() -> None:
        talker = Talker(echo)
        async with served(talker) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                start = [user("ab"), {"role": "assistant", "content": "ba"}]
                await ask(client, start[:1])
                await asyncio.gather(ask(client, [*start, user("cd")]), ask(client, [*start, user("ef")]))
                await ask(client, [user("ab"), {"role": "assistant", "content": "BA"}, user("gh")])
            samples = await gateway.close(session.id)
            texts = sorted(map(trained, samples))
            assert len(texts) == 3
            assert sum("ba<|im_end|>" in text for text in texts) == 1
            assert {text.removeprefix("ba<|im_end|>") for text in texts} == {
                f"{t}<|im_end|>" for t in ("dc", "fe", "hg")
            }
            assert len(set(talker.affinities)) == 2, "two conversations"
            saw = [[*asked, *said] for asked, said in zip(talker.asked, talker.said, strict=True)][1:]
            assert sorted(sample.tokens for sample in samples) == sorted(saw)

    run(test())


def test_two_sessions_at_once_do_not_mix() -> None:
    async def test() -> None:
        talker = Talker(echo)
        talker.hold = asyncio.Event()
        async with served(talker) as gateway:
            one, two = await gateway.open(), await gateway.open()
            async with client_of(gateway, one) as first, client_of(gateway, two) as second:
                asking = asyncio.gather(*(ask(client, [user("ab")]) for client in (first, second)))
                await talker.two_run.wait()
                talker.hold.set()
                await asking
                await ask(first, [user("ab"), {"role": "assistant", "content": "ba"}, user("cd")])
            await gateway.reward(one.id, 1.0)
            (a,), (b,) = await gateway.close(one.id), await gateway.close(two.id)
            assert (trained(a), trained(b)) == ("ba<|im_end|>dc<|im_end|>", "ba<|im_end|>")
            assert (a.total, b.total) == (1.0, 0.0)
            assert talker.seeds[0] != talker.seeds[1]
            assert len(set(talker.affinities)) == 2

    run(test())


def test_wrong_keys_and_tokens_are_refused() -> None:
    async def test() -> None:
        async with served(Talker(echo)) as gateway:
            session = await gateway.open()
            for key in ("wrong", gateway.token):
                async with AsyncOpenAI(base_url=gateway.base_url, api_key=key) as client:
                    with pytest.raises(openai.AuthenticationError, match="of no open session"):
                        await ask(client, [user("ab")])
            assert (await control(gateway, "POST", "/v1/chat/completions", token="clé"))[0] == 401
            for token in ("", "wrong", "clé", session.key):
                for method, path in (("POST", "/sessions"), ("DELETE", f"/sessions/{session.id}")):
                    status, body = await control(gateway, method, path, token=token)
                    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert (await control(gateway, "GET", "/nowhere"))[0] == 404
            assert (await control(gateway, "POST", "/healthz"))[1]["error"]["type"] == "invalid_request_error"
            assert gateway.session(session.id) is session

    run(test())


def test_limits_become_the_client_s_own_exceptions() -> None:
    async def test() -> None:
        talker = Talker(echo)
        async with served(talker, limits=SessionLimits(max_turns=2, max_calls=1)) as gateway:
            session = await gateway.open(max_tokens=40)
            async with client_of(gateway, session) as client:
                talker.hold = asyncio.Event()
                held = asyncio.create_task(ask(client, [user("ab")]))
                await talker.came.wait()
                with pytest.raises(openai.RateLimitError, match="max_calls is 1"):
                    await ask(client, [user("ab")])
                talker.hold.set()
                await held
                with pytest.raises(openai.BadRequestError, match="at most 40 fit") as raised:
                    await ask(client, [user("a b " * 30)])
                assert raised.value.code == "context_length_exceeded"
                await ask(client, [user("ab")])
                with pytest.raises(openai.BadRequestError, match="max_turns is 2"):
                    await ask(client, [user("ab")])
                with pytest.raises(openai.BadRequestError, match=r"temperature '0\.3' cannot be had") as raised:
                    await ask(client, [user("ab")], temperature=0.3)
                assert raised.value.param == "temperature"
            late = await gateway.open(deadline_s=1e-9)
            async with client_of(gateway, late) as client:
                with pytest.raises(openai.BadRequestError, match="over its deadline"):
                    await ask(client, [user("ab")])
            with pytest.raises(ConfigError, match="no limit turns"):
                await gateway.open(turns=3)
        async with served(Talker(echo), max_sessions=1, max_request_bytes=300, unsupported="ignore") as gateway:
            session = await gateway.open()
            with pytest.raises(GatewayError, match=r"gateway\.max_sessions is 1"):
                await gateway.open()
            async with client_of(gateway, session) as client:
                await ask(client, [user("ab")], temperature=0.3)
                with pytest.raises(openai.APIStatusError, match="more than 300 bytes"):
                    await ask(client, [user("ab" * 300)])

    run(test())


@pytest.mark.parametrize("how", ["the client goes away", "the session ends", "time is over", "the deadline passes"])
def test_what_nobody_waits_for_is_cancelled_and_not_on_record(how: str) -> None:
    async def test() -> None:
        talker = Talker(echo)
        talker.hold = asyncio.Event()
        seconds = 1.0 if how == "time is over" else 600.0
        async with served(talker, request_timeout_s=seconds) as gateway:
            session = await gateway.open(deadline_s=1.0 if how == "the deadline passes" else 60.0)
            async with client_of(gateway, session) as client:
                held = asyncio.create_task(ask(client, [user("ab")]))
                await talker.came.wait()
                if how == "the client goes away":
                    held.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await held
                elif how == "the session ends":
                    await gateway.end(session.id)
                    with pytest.raises(openai.BadRequestError, match="has ended"):
                        await held
                    with pytest.raises(openai.BadRequestError, match="has ended"):
                        await ask(client, [user("ab")])
                elif how == "time is over":
                    with pytest.raises(openai.InternalServerError, match=r"no answer within 1 s"):
                        await held
                else:
                    with pytest.raises(openai.BadRequestError, match="over its deadline"):
                        await held
                await talker.cancelled.wait()
            assert await gateway.close(session.id) == []

    run(test())


def test_failures_of_the_generators_and_of_the_template_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(text: str) -> str:
        raise EnvironmentFailed("out of order")

    async def test() -> None:
        talker = Talker(break_down)
        async with served(talker) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                with pytest.raises(openai.InternalServerError, match="generators failed: out of order"):
                    await ask(client, [user("ab")])
                talker.say = echo
                template = gateway._policy.template.tokenizer
                monkeypatch.setattr(template, "chat_template", "{{ raise_exception('users first') }}")
                with pytest.raises(openai.BadRequestError, match="users first"):
                    await ask(client, [user("ab")])
            assert await gateway.close(session.id) == []

    run(test())


def test_a_harness_opens_rewards_and_ends_sessions_over_http() -> None:
    async def test() -> None:
        async with served(Talker(echo)) as gateway:
            status, opened = await control(gateway, "POST", "/sessions", {"max_turns": 5, "seed": 1})
            assert status == 200
            async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
                answer = await ask(client, [user("ab")])
            path = f"/sessions/{opened['id']}"
            await control(gateway, "POST", f"{path}/reward", {"reward": 0.5, "completion_id": answer.id})
            await control(gateway, "POST", f"{path}/reward", {"reward": 1})
            status, wrong = await control(gateway, "POST", f"{path}/reward", {"reward": "much"})
            assert (status, wrong["error"]["message"]) == (400, "a reward must be a finite number, got 'much'")
            status, summary = await control(gateway, "POST", f"{path}/end")
            assert (summary["turns"], summary["sampled_tokens"], summary["reward"]) == (1, 3, 1.5)
            assert summary == (await control(gateway, "GET", path))[1]
            (sample,) = gateway.session(opened["id"]).samples()
            assert (sample.total, sample.earned) == (1.5, [0.0, 0.0, 1.5])
            assert (await control(gateway, "DELETE", path))[1]["deleted"]
            assert (await control(gateway, "GET", path))[0] == 404
            assert (await control(gateway, "POST", "/sessions", {"max_turns": "many"}))[0] == 400
            assert (await control(gateway, "GET", "/healthz", token=""))[1] == {"status": "ok"}

    run(test())


@pytest.mark.parametrize("by", ["journal", "state"])
def test_a_session_survives_its_server(by: str, tmp_path: Path) -> None:
    async def test() -> None:
        talker = Talker(echo)
        options = {"journal": str(tmp_path)} if by == "journal" else {}
        messages: list[Any] = [user("ab")]
        async with served(talker, **options) as gateway:
            session = await gateway.open()
            first_url = gateway.base_url
            async with client_of(gateway, session) as client:
                messages += [(await ask(client, messages)).choices[0].message, user("cd")]
                await gateway.reward(session.id, 0.5)
                talker.came.clear()
                talker.hold = asyncio.Event()
                lost = asyncio.create_task(ask(client, messages))
                await talker.came.wait()
                state = json.loads(json.dumps(gateway.state()))
                await gateway._server.stop()  # in the middle of an answer
                with pytest.raises(openai.APIError):
                    await lost
        talker.hold = None
        async with served(talker, **options) as gateway:
            assert gateway.base_url != first_url
            if by == "state":
                await gateway.restore(state)
            async with client_of(gateway, session) as client:
                await ask(client, messages)
            await gateway.reward(session.id, 0.25)
            (sample,) = await gateway.close(session.id)
            assert trained(sample) == "ba<|im_end|>dc<|im_end|>"
            assert sample.tokens == [*talker.asked[-1], *talker.said[-1]]
            assert talker.asked[-1][: len(talker.asked[0])] == talker.asked[0]
            assert sample.total == 0.75

    run(test())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_session_and_keeps_what_was_said(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(Talker(echo), journal=str(tmp_path / "journal")) as gateway:
            session = await gateway.open()
            async with client_of(gateway, session) as client:
                await ask(client, [user("ab")])
                (file,) = (tmp_path / "journal").iterdir()
                file.unlink()
                file.mkdir()
                with pytest.raises(openai.InternalServerError, match="cannot be written"):
                    await ask(client, [user("cd")])
                with pytest.raises(openai.BadRequestError, match="has ended"):
                    await ask(client, [user("ef")])
            file.rmdir()
            assert len(await gateway.close(session.id)) == 2

    run(test())


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """asyncio turns Nagle's algorithm off for sockets that name their protocol."""
    with _listener("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_an_address_that_is_taken_is_named() -> None:
    async def test() -> None:
        async with served(Talker(echo)) as gateway:
            port = int(gateway.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
            with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1 port {port}"):
                async with served(Talker(echo), port=port):
                    pass

    run(test())
