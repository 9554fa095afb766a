"""Groups of agents' sessions: what a session's rows are worth, what a failed agent does, how agents are run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from talking import Talker, chat_template

from actors.environments.base import Action, Observation, Step
from actors.environments.groups import GroupPolicy
from actors.environments.pool import EnvironmentPool
from actors.gateway.agents import AgentConfig, agent_task, filled
from actors.gateway.config import GatewayConfig
from actors.gateway.gateway import Gateway
from actors.gateway.rollout import AgentRollout, Ran, group_of_sessions
from actors.rollout import Rollout
from forge.batch import check_batch
from forge.data import Prompt
from forge.episodes import EpisodeTokens
from forge.errors import ConfigError, EnvironmentFailed, EnvironmentRaised

PATIENCE_S = 240.0
PROMPT = Prompt(0, 0, "ab", [1], metadata={"id": "one", "text": "ab"})


def run(test: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test

    asyncio.run(in_time())


# --- what a session's rows are worth


def row(*sampled: int) -> EpisodeTokens:
    episode = EpisodeTokens()
    episode.given([1, 2])
    episode.sampled(list(sampled), [-1.0] * len(sampled), [0] * len(sampled))
    return episode


def test_a_session_that_branches_weighs_no_more_in_the_baseline() -> None:
    ran = [Ran([row(5), row(6, 7), row(8)], 3.0, True), Ran([row(9)], 1.0, True), Ran([row(9)], 2.0, True)]
    group, owners = group_of_sessions(ran, 4, "dr_grpo", turn_rewards=False)
    assert owners.tolist() == [0, 0, 0, 1, 2]
    assert group["rewards"].tolist() == [3.0, 3.0, 3.0, 1.0, 2.0]
    assert group["advantages"].tolist() == [1.0, 1.0, 1.0, -1.0, 0.0]
    assert group["group_id"].tolist() == [4] * 5
    check_batch(group)


def test_a_row_that_trains_nothing_is_left_out_and_its_session_still_compared() -> None:
    silent = row()
    ran = [Ran([silent, row(5)], 1.0, True), Ran([row(6)], 0.0, True)]
    group, owners = group_of_sessions(ran, 0, "dr_grpo", turn_rewards=False)
    assert owners.tolist() == [0, 1]
    assert group["advantages"].tolist() == [0.5, -0.5]


# --- with a gateway


class InPlace:
    """Agents that run where they are asked, each a coroutine of a client and its task."""

    def __init__(self, agent: Callable[[AsyncOpenAI, Mapping[str, Any]], Awaitable[float | None]]) -> None:
        self.agent = agent
        self.running: dict[str, Mapping[str, Any]] = {}

    async def start(self, task: Mapping[str, Any]) -> tuple[str, Observation]:
        name = str(len(self.running)) + task["variables"]["OPENAI_API_KEY"]
        self.running[name] = task
        return name, Observation([])

    async def step(self, episode: str, action: Action) -> Step:
        task = self.running[episode]
        variables = task["variables"]
        client = AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0)
        async with client:
            reward = await self.agent(client, task["task"])
        return Step(Observation([]), reward or 0.0, True, {"scored": reward is not None})

    async def close(self, episode: str) -> None:
        del self.running[episode]


async def say(client: AsyncOpenAI, *texts: str) -> str:
    messages: list[Any] = [{"role": "user", "content": text} for text in texts]
    answer = await client.chat.completions.create(model="any", messages=messages)
    return str(answer.choices[0].message.content)


async def rolled(
    agents: Any, talker: Talker, agent: AgentConfig | None = None, policy: GroupPolicy | None = None, **options: Any
) -> Rollout | None:
    """A rollout, after which no session is open and no agent runs."""
    agent = agent or AgentConfig(path="x:y")
    async with Gateway(talker, chat_template(), None, GatewayConfig()) as gateway:
        rollout = AgentRollout(gateway, agents, agent, policy or GroupPolicy(), turn_rewards=False)
        try:
            return await rollout(
                PROMPT, group_id=3, group_size=2, advantage="dr_grpo", decode=chat_template().decode, seed=0, **options
            )
        finally:
            assert gateway.state() == []
            assert getattr(agents, "running", {}) == {}


def test_each_session_is_an_agent_and_its_rows_are_a_group() -> None:
    async def test() -> None:
        numbers = iter(range(2))

        async def agent(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
            number = next(numbers)
            assert await say(client, task["text"]) == "hi"
            if number:
                await say(client, "another conversation")
            return float(number)

        talker = Talker(lambda text: "hi")
        rollout = await rolled(InPlace(agent), talker)
        assert rollout is not None
        assert sorted(rollout.group["rewards"].tolist()) == [0.0, 1.0, 1.0]
        assert sorted(rollout.group["advantages"].tolist()) == [-0.5, 0.5, 0.5]
        assert len(rollout.records()) == 3
        assert len(set(talker.seeds)) == 3, "each samples under a seed of its own"
        assert rollout.num_tokens == sum(map(len, talker.said)) == int(rollout.group["loss_mask"].sum())

    run(test())


async def _one_fails(client: AsyncOpenAI, task: Mapping[str, Any], failed: list[int]) -> float:
    await say(client, task["text"])
    failed.append(1)
    if len(failed) == 1:
        raise EnvironmentRaised("agent, task 'one', turn 1: it raised")
    return 1.0


@pytest.mark.parametrize("partial", ["drop", "keep"])
def test_a_failed_agents_session_is_dropped_or_trained_as_far_as_it_came(partial: Any) -> None:
    async def test() -> None:
        failed: list[int] = []
        agents = InPlace(lambda client, task: _one_fails(client, task, failed))
        config = AgentConfig(path="x:y", partial=partial, partial_reward=-1.0)
        rollout = await rolled(agents, Talker(lambda text: "hi"), config, GroupPolicy(smallest_group=1))
        assert rollout is not None
        assert sorted(rollout.group["rewards"].tolist()) == ([1.0] if partial == "drop" else [-1.0, 1.0])
        assert sorted(sample.finished for sample in rollout.samples) == ([True] if partial == "drop" else [False, True])

    run(test())


def test_a_group_without_enough_agents_is_dropped_and_too_many_of_them_end_the_run() -> None:
    async def test() -> None:
        async def agent(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
            raise EnvironmentRaised("agent, task 'one', turn 1: it raised")

        assert await rolled(InPlace(agent), Talker(lambda text: "hi")) is None
        policy = GroupPolicy(max_dropped_in_a_row=1)
        async with Gateway(Talker(lambda text: "hi"), chat_template(), None, GatewayConfig()) as gateway:
            rollout = AgentRollout(gateway, InPlace(agent), AgentConfig(path="x:y"), policy, turn_rewards=False)
            options: Any = {"group_size": 2, "advantage": "grpo", "decode": str, "seed": 0}
            assert await rollout(PROMPT, group_id=0, **options) is None
            with pytest.raises(EnvironmentFailed, match="2 groups in a row were dropped"):
                await rollout(PROMPT, group_id=1, **options)

    run(test())


def test_a_reward_that_was_posted_counts_where_the_agent_has_none() -> None:
    async def test() -> None:
        async def agent(client: AsyncOpenAI, task: Mapping[str, Any]) -> None:
            await say(client, task["text"])

        rollout = await rolled(InPlace(agent), Talker(lambda text: "hi"))
        assert rollout is not None
        assert rollout.group["rewards"].tolist() == [0.0, 0.0]
        assert torch.equal(rollout.group["advantages"], torch.zeros(2))

    run(test())


# --- agents in processes

AGENT = """
from openai import OpenAI

def agent(task):
    with OpenAI() as client:
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task["text"]}])
    return len(answer.choices[0].message.content)

def check(task, folder):
    return float((folder / "out").read_text())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_agent"


def test_a_plain_function_in_a_process_of_its_own_is_trained(module: str) -> None:
    async def test() -> None:
        config = AgentConfig(path=f"{module}:agent", concurrency=1)
        async with EnvironmentPool(config.environment()) as agents:
            rollout = await rolled(agents, Talker(lambda text: "four"), config)
        assert rollout is not None
        assert rollout.group["rewards"].tolist() == [4.0, 4.0]

    run(test())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.02)


def programs(module: str, code: str, **options: Any) -> AgentConfig:
    command = [sys.executable, "-c", code, "{text}"]
    return AgentConfig(command=command, check=f"{module}:check", concurrency=1, **options)


def one_run(config: AgentConfig, folder: Path, task: dict[str, Any]) -> Step:
    folder.mkdir()

    async def ran() -> Step:
        async with asyncio.timeout(PATIENCE_S), EnvironmentPool(config.environment(str(folder))) as agents:
            episode, _ = await agents.start(agent_task("one", task, {"OPENAI_API_KEY": "secret"}))
            try:
                return await agents.step(episode, Action(""))
            finally:
                await agents.close(episode)

    return asyncio.run(ran())


def test_a_program_is_run_in_a_folder_of_its_own_and_leaves_nothing(module: str, tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(left.pid, sys.argv[1], os.environ['OPENAI_API_KEY'])\n"
        "open('out', 'w').write(open('sub/in').read())\n"
    )

    step = one_run(programs(module, code), tmp_path / "runs", {"text": "hi", "files": {"sub/in": "0.5"}})
    assert (step.reward, step.info["exit_code"]) == (0.5, 0)
    pid, *said = step.info["output"].split()
    assert said == ["hi", "secret"]
    wait_until_gone(int(pid))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_program_over_its_time_is_killed_with_what_it_started(module: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, time\n"
        "other = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        "print('so far', flush=True); time.sleep(600)\n"
    )

    with pytest.raises(EnvironmentRaised, match=r"ran for more than 1 s(?s:.)*so far"):
        one_run(programs(module, code, timeout_s=1.0), tmp_path / "runs", {"text": "hi"})
    wait_until_gone(*map(int, pids.read_text().split()))


def test_a_tasks_file_stays_inside_of_the_folder(module: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRaised, match="give a name inside of the agent's folder"):
        one_run(programs(module, "pass"), tmp_path / "runs", {"text": "hi", "files": {"../x": "1"}})
    assert not (tmp_path / "x").exists()


def test_the_command_is_filled_by_the_task() -> None:
    task = {"prompt": "say {x}", "n": 3, "files": {}}
    assert filled(["a", "{prompt}", "--n={n}", "{files} {other}"], task) == ["a", "say {x}", "--n=3", "{files} {other}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of them, and one only"),
        ({"path": "a:b", "command": ["c"]}, "give one of them, and one only"),
        ({"path": "no_such_module:agent"}, "agent.path"),
        ({"command": ["true"]}, "agent.check"),
        ({"path": "os.path:join", "timeout_s": 0.0}, "agent.timeout_s must be > 0, got 0"),
        ({"path": "os.path:join", "concurrency": 0}, "agent.concurrency must be >= 1, got 0"),
        ({"path": "os.path:join", "partial": "half"}, "agent.partial must be drop or keep, got half"),
    ],
)
def test_what_cannot_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentConfig(**options).validate()
    assert "OPENAI_API_KEY" not in os.environ
