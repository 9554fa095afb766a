"""A gateway that is killed by SIGKILL in the middle of a session, and another process that goes on with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from openai import OpenAI
from talking import chat_template

HERE = Path(__file__).parent
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def gateways() -> Iterator[tuple[IO[str], IO[str]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "dying.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )
    watch = threading.Timer(280.0, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.stdin, process.stdout
    finally:
        watch.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


def told(gateways: tuple[IO[str], IO[str]], order: Any) -> Any:
    """A line, and the line that answers it."""
    orders, answers = gateways
    orders.write(json.dumps(order) + "\n")
    orders.flush()
    return json.loads(answers.readline())


@pytest.mark.parametrize("when", ["generation", "record"])
def test_a_killed_gateways_session_goes_on_in_another_process_as_one_sample(
    when: str, gateways: tuple[IO[str], IO[str]], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    order = {"port": port, "journal": str(tmp_path), "die": when, "open": True}
    first = told(gateways, order)
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    answers: list[Any] = []

    def agent() -> None:
        with OpenAI(base_url=first["url"], api_key=first["key"], max_retries=20, timeout=PATIENCE_S) as client:
            for _ in range(2):
                answer = client.chat.completions.create(model="any", messages=messages)
                messages.extend([answer.choices[0].message, {"role": "user", "content": "cd"}])
                answers.append(answer)

    running = threading.Thread(target=agent)
    running.start()
    # The first process dies at the agent's second call, and only then is this line read.
    second = told(gateways, {**order, "die": "", "open": False})
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert (second["id"], second["url"]) == (first["id"], first["url"])
    assert second["pid"] != first["pid"]
    assert [answer.choices[0].message.content for answer in answers] == ["one", "two"]
    result = told(gateways, "close")
    (sample,) = result["samples"]
    trained = [token for token, sampled in zip(sample["tokens"], sample["mask"], strict=True) if sampled]
    assert chat_template().decode(trained) == "one<|im_end|>two<|im_end|>"
    assert sample["total"] == 1.0
    assert result["generated"] == (1 if when == "generation" else 0), "an answer on record is not sampled again"
    assert list(tmp_path.iterdir()) == []
