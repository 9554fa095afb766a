"""Adapters of libraries that live in an interpreter of their own, on the real ones.

They want other versions than we do: `python -m venv X; X/bin/pip install openenv-core uvicorn` and
`python -m venv Y; Y/bin/pip install verifiers uv`, then

    FORGE_OPENENV_PYTHON=X/bin/python FORGE_VERIFIERS_PYTHON=Y/bin/python pytest tests/actors/environments -m ''
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from talking import Talker

from actors.environments.adapters import verifiers
from actors.environments.adapters.openenv import OpenEnv
from actors.environments.base import Action
from actors.environments.config import EnvironmentConfig
from actors.environments.pool import EnvironmentPool
from actors.gateway.config import GatewayConfig
from actors.gateway.gateway import Gateway
from forge.errors import ConfigError, EnvironmentFailed

OPENENV, VERIFIERS = os.environ.get("FORGE_OPENENV_PYTHON", ""), os.environ.get("FORGE_VERIFIERS_PYTHON", "")
needs_openenv = pytest.mark.skipif(not OPENENV, reason="FORGE_OPENENV_PYTHON names no interpreter with openenv-core")
needs_verifiers = pytest.mark.skipif(not VERIFIERS, reason="FORGE_VERIFIERS_PYTHON names no interpreter with verifiers")
PATH = "actors.environments.adapters.openenv:OpenEnv"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([OPENENV, str(program), request.param, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@needs_openenv
@pytest.mark.parametrize("server", ["echo"], indirect=True)
def test_an_openenv_server_is_played_through_a_pool(server: str) -> None:
    async def play() -> None:
        config = EnvironmentConfig(PATH, {"url": server, "say": "echo", "action": {"loud": True}}, concurrency=2)
        async with EnvironmentPool(config, name="echo") as pool:
            episode, said = await pool.start({"id": "a", "say": "Say something: ", "reset": {"word": "hi"}})
            other, _ = await pool.start({"id": "b"})
            assert said.messages == [{"role": "user", "content": "Say something: hi"}]
            steps = [await pool.step(episode, Action(text)) for text in ("x", "y", "z")]
            assert [step.observation.messages[0]["content"] for step in steps] == ["X", "Y", "Z"]
            assert [(step.reward, step.done) for step in steps] == [(0.5, False), (1.0, False), (1.5, True)]
            assert (await pool.step(other, Action("first"))).reward == 0.5  # a session of its own
            with pytest.raises(EnvironmentFailed, match=r"refused a step.*it broke"):
                await pool.step(other, Action("break"))
            await pool.close(episode)

    asyncio.run(play())


@needs_openenv
@pytest.mark.parametrize("server", ["tools"], indirect=True)
def test_the_tools_of_an_openenv_server_are_called(server: str) -> None:
    def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": f"call{number}", "type": "function", "function": function}

    async def play() -> None:
        world = OpenEnv(server, tools=True)
        offered = (await world.reset({})).tools
        assert [tool["function"]["name"] for tool in offered] == ["add"]
        assert set(offered[0]["function"]["parameters"]["properties"]) == {"a", "b"}
        step = await world.step(Action("", [call("add", 1, a=1, b=2), call("sub", 2)]))
        right, wrong = step.observation.messages
        assert right == {"role": "tool", "tool_call_id": "call1", "content": "3"}
        assert "Unknown tool" in wrong["content"]
        unread = await world.step(Action("", [call("add", 3)], error="the arguments of add are no JSON"))
        assert unread.observation.messages[0]["content"] == "the arguments of add are no JSON"
        await world.close()

    asyncio.run(play())


def test_an_openenv_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="localhost:8000"):
        OpenEnv("ftp://x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"no OpenEnv server answers at ws://127.0.0.1:{port}/ws"):
        asyncio.run(OpenEnv(f"http://127.0.0.1:{port}").reset({}))


@needs_verifiers
@pytest.mark.soak
def test_a_verifiers_environment_plays_through_the_gateway(tmp_path: Path) -> None:
    """Its own harness speaks to the policy, in a process of its own; what was said is on record, token by token."""
    config = {
        "taskset": {"id": "sums_taskset"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }

    async def play() -> tuple[Talker, list[Any]]:
        talker = Talker(lambda text: "6" if "3+3" in text else "?")
        async with Gateway(talker, talker.template, None, GatewayConfig()) as gateway:
            session = await gateway.open(max_turns=5)
            environment = os.environ | gateway.environment(session) | {"PYTHONPATH": str(Path(__file__).parent)}
            environment["PATH"] = f"{Path(VERIFIERS).parent}:{environment['PATH']}"
            command = [VERIFIERS, verifiers.__file__, json.dumps(config), "--index", "3"]
            program = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment)
            assert await asyncio.wait_for(program.wait(), 240) == 0
            await gateway.reward(session.id, verifiers.check({}, str(tmp_path)))
            return talker, await gateway.close(session.id)

    talker, samples = asyncio.run(play())
    (sample,) = samples
    assert sample.total == 1.0
    assert [t for t, own in zip(sample.tokens, sample.mask, strict=True) if own] == talker.said[0]


def test_a_failed_episode_of_verifiers_is_no_reward(tmp_path: Path) -> None:
    (tmp_path / verifiers.RESULT).write_text(json.dumps({"reward": 0.0, "errors": ["ProviderError: gone"]}))
    with pytest.raises(RuntimeError, match="task 'seven' failed: ProviderError: gone"):
        verifiers.check({"id": "seven"}, str(tmp_path))
