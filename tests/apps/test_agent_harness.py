"""mini-swe-agent, unmodified, from PyPI, runs sessions of the repair task through the gateway.

It wants other packages than we do: `python -m venv X; X/bin/pip install mini-swe-agent`, then

    FORGE_MINI_SWE_PYTHON=X/bin/python pytest tests/apps/test_agent_harness.py
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_run import ROOT
from talking import Calls, Talker, chat_template

from actors.environments.groups import GroupPolicy
from actors.environments.pool import EnvironmentPool
from actors.gateway.agents import AgentConfig
from actors.gateway.config import GatewayConfig
from actors.gateway.gateway import Gateway
from actors.gateway.rollout import AgentRollout
from actors.rollout import Rollout
from apps.agent.config import AgentAppConfig
from apps.agent.repair import passed, rows
from forge import config
from forge.data import Prompt

PYTHON = os.environ.get("FORGE_MINI_SWE_PYTHON", "")
PRESET = ROOT / "apps/agent/repair.yaml"
REPAIRS = {
    "total": "sed -i 's/values.1:./values/' figures.py",
    "largest": "sed -i 's/out = 0/out = max(values)/' figures.py",
}


def harness() -> AgentConfig:
    """The preset's agent, in the interpreter that has it."""
    cfg = config.parse(AgentAppConfig, [], default_config=PRESET, prog="", description="")
    command = [
        part for word in cfg.agent.command for part in ([PYTHON, "-m", "minisweagent"] if word == "mini" else [word])
    ]
    return replace(cfg.agent, command=command, timeout_s=240, concurrency=1)


def repairs(conversation: str, repair: str) -> str:
    """Looks, repairs, submits: one command an answer."""
    commands = ["cat figures.py", repair, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    turn = conversation.count("<|im_start|>assistant") - 1
    call = {"name": "bash", "arguments": {"command": commands[turn]}}
    return f"I go on.<tool_call>{json.dumps(call)}</tool_call>"


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("task", [row["metadata"] for row in rows()], ids=lambda task: str(task["id"]))
def test_a_repair_passes_and_what_was_given_does_not(task: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    write(folder, task["files"])
    assert passed(task, folder) == 0.0
    (folder / "test_figures.py").write_text("")
    assert passed(task, folder) == 0.0, "the test is the one that was given"
    code = task["files"]["figures.py"].replace("values[1:]", "values")
    (folder / "figures.py").write_text(code if task["id"] == "total" else code.replace("out = 0", "out = max(values)"))
    assert passed(task, folder) == 1.0


@pytest.mark.skipif(not PYTHON, reason="FORGE_MINI_SWE_PYTHON names no interpreter with mini-swe-agent")
@pytest.mark.parametrize("right", [True, False], ids=["repairs", "does nothing"])
def test_an_unmodified_coding_harness_is_trained_through_the_gateway(right: bool, tmp_path: Path) -> None:
    row = rows()[0]
    agent = harness()
    talker = Talker(lambda text: repairs(text, REPAIRS[row["metadata"]["id"]] if right else "true"))

    async def test() -> Rollout | None:
        async with (
            asyncio.timeout(280),
            Gateway(talker, chat_template(), Calls(), GatewayConfig(max_tokens=8192)) as gateway,
            EnvironmentPool(agent.environment(str(tmp_path))) as agents,
        ):
            rollout = AgentRollout(gateway, agents, agent, GroupPolicy(smallest_group=1), turn_rewards=False)
            prompt = Prompt(0, 0, row["prompt"], [1], metadata=row["metadata"])
            decode = chat_template().decode
            return await rollout(prompt, group_id=0, group_size=1, advantage="none", decode=decode, seed=0)

    rollout = asyncio.run(test())
    assert rollout is not None
    assert rollout.group["rewards"].tolist() == [float(right)]
    (sample,) = rollout.samples
    assert sample.finished
    assert sample.num_tokens == sum(map(len, talker.said)), "three answers in one conversation"
    assert len(talker.said) == 3
    assert list(tmp_path.iterdir()) == []
