"""A server of the real openenv-core, run by its own interpreter: `python openenv_server.py echo|tools PORT`."""

import sys

import uvicorn
from fastmcp import FastMCP  # type: ignore[import-not-found]
from openenv.core.env_server.http_server import create_fastapi_app  # type: ignore[import-not-found]
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_environment import MCPEnvironment  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]


class Said(Action):
    message: str
    loud: bool = False


class Heard(Observation):
    echo: str


class Echo(Environment):
    """Says back what was said; three times, then it is over."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, word="hello", **kwargs):  # type: ignore[no-untyped-def]
        self.count = 0
        return Heard(echo=word)

    def step(self, action, timeout_s=None, **kwargs):  # type: ignore[no-untyped-def]
        if action.message == "break":
            raise ValueError("it broke")
        self.count += 1
        text = action.message.upper() if action.loud else action.message
        return Heard(echo=text, reward=0.5 * self.count, done=self.count == 3)

    @property
    def state(self):  # type: ignore[no-untyped-def]
        return State()


class Sums(MCPEnvironment):
    """Offers a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):  # type: ignore[no-untyped-def]
        tools = FastMCP("sums")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs):  # type: ignore[no-untyped-def]
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):  # type: ignore[no-untyped-def]
        return Observation()

    @property
    def state(self):  # type: ignore[no-untyped-def]
        return State()


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    app = (
        create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
        if kind == "echo"
        else create_fastapi_app(Sums, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
