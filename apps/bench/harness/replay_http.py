"""The peers of our actor in `apps.bench.replay`: buffers behind HTTP, and what a client of theirs does."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from tensordict import TensorDict

from apps.bench.harness.replay_buffers import Work
from apps.bench.peers import http_buffer
from forge.memory import peak_rss_bytes


class HttpBuffer:
    """A program that serves groups over HTTP, and a client with one connection that makes tensors of its answers."""

    def __init__(self, work: Work) -> None:
        self._per_batch = work.batch // work.group_size
        self._start([sys.executable, http_buffer.__file__], None)

    def _start(self, command: list[str], port: int | None) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = port or int(self._process.stdout.readline())
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def add(self, groups: list[TensorDict]) -> float:
        """Seconds until all are in."""
        start = time.perf_counter()
        for group in groups:
            self._ask("POST", "/scored_data", self._plain(group))
        return time.perf_counter() - start

    def sample(self) -> float:
        """Seconds until the batch is there as tensors."""
        start = time.perf_counter()
        groups = self._batch()
        for key in groups[0]:
            torch.tensor([row for group in groups for row in group[key]])
        return time.perf_counter() - start

    def peak_bytes(self) -> int:
        """Memory, at most, of the server."""
        return peak_rss_bytes(self._process.pid)

    def close(self) -> None:
        """Ends the program."""
        self._connection.close()
        self._process.communicate(timeout=60)

    def _plain(self, group: TensorDict) -> dict[str, Any]:
        return {key: value.tolist() for key, value in group.items()}

    def _batch(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._ask("GET", f"/batch/{self._per_batch}", None)
        return groups

    def _ask(self, method: str, path: str, value: Any) -> Any:
        body = None if value is None else json.dumps(value)
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        return json.loads(self._connection.getresponse().read())


class Atropos(HttpBuffer):
    """The server of Atropos, in the Python of a venv that has it. It has no place for versions."""

    _KEYS = ("tokens", "masks", "inference_logprobs", "scores")

    def __init__(self, work: Work, python: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = ["-m", "uvicorn", "atroposlib.api.server:app", "--host", "127.0.0.1", "--port", str(port)]
        self._start([python, *server, "--log-level", "warning", "--timeout-keep-alive", "600"], port)
        self._wait_until_it_serves()
        registration = {"wandb_group": "", "wandb_project": "", "batch_size": work.batch, "max_token_len": work.tokens}
        registration |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10**9}
        self._ask("POST", "/register", registration)
        self._ask("GET", "/batch", None)  # the trainer has started

    def close(self) -> None:
        """Ends the program."""
        self._connection.close()
        self._process.terminate()
        self._process.communicate(timeout=60)

    def _wait_until_it_serves(self, deadline_s: float = 60.0) -> None:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                self._ask("GET", "/", None)
                return
            except ConnectionRefusedError:
                self._connection.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Atropos does not serve after {deadline_s:g} s; see its output above") from None
                time.sleep(0.05)

    def _plain(self, group: TensorDict) -> dict[str, Any]:
        keys = ("tokens", "loss_mask", "behavior_logprobs", "rewards")
        values = {name: group[key].tolist() for name, key in zip(self._KEYS, keys, strict=True)}
        return values | {"masks": group["loss_mask"].long().tolist()}

    def _batch(self) -> list[dict[str, Any]]:
        return [{key: group[key] for key in self._KEYS} for group in self._ask("GET", "/batch", None)["batch"]]
