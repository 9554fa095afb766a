"""Training an agent as a user starts it: a function written with the openai package, its tool, the loops of GRPO."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from app_run import EXACT, ROOT, AppRun
from openai import OpenAI

from actors.environments.template_check import check_template
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import ToolCallParser
from actors.gateway.config import GatewayConfig
from actors.gateway.gateway import Gateway
from actors.gateway.sessions import Session
from actors.model import Policy, load_hf
from actors.vllm_engine import Completion, EngineOptions, Sampling, VllmEngine
from apps.agent.config import AgentAppConfig, gateway_config, plan_run
from apps.agent.lookup import TOOLS, agent, asked_for, rows
from apps.grpo.lookups import lookup_tokenizer
from apps.grpo.models import resolve_model
from forge import config
from forge.episodes import EpisodeTokens
from forge.errors import ConfigError
from replay.recording import Recording

APP = ROOT / "apps/agent/main.py"
PRESET = ROOT / "apps/agent/tiny.yaml"
TASK = {"id": "0", "key": "abc", "value": "4071"}
CALL = '<tool_call>{"name": "look", "arguments": {"key": "%s"}}</tool_call>'


def parse(*options: str) -> AgentAppConfig:
    return config.parse(AgentAppConfig, list(options), default_config=PRESET, prog="", description="")


class Says:
    """A generator that answers with one text after the other."""

    def __init__(self, template: ChatTemplate, *texts: str) -> None:
        self.template, self.texts, self.asked = template, list(texts), list[str]()

    async def generate(
        self, prompts: Any, seeds: Any, max_new_tokens: Any = None, request_id: str = "", **options: Any
    ) -> list[Completion]:
        self.asked.append(self.template.decode(prompts[0]))
        ids = self.template.encode(self.texts.pop(0), inside=True) + self.template.end_of_turn[:1]
        return [Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")]


async def with_a_session(
    gateway: Gateway, work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[EpisodeTokens]]:
    """What `work` returns, in a thread whose plain `OpenAI()` speaks to a new session; and that session's samples."""
    async with gateway:
        session: Session = await gateway.open(seed=1)
        for name, value in gateway.environment(session).items():
            monkeypatch.setenv(name, value)
        result = await asyncio.wait_for(asyncio.to_thread(work), 120)
        return result, await gateway.close(session.id)


@pytest.mark.parametrize(
    ("texts", "reward", "shown"),
    [
        ((CALL % "abc", "4071"), 1.0, "<|tool|>4071<eos>"),
        ((CALL % "cba", "4000"), 0.5, "<|tool|>none<eos>"),
        (("4999",), 0.25, ""),
        ((CALL % "abc", CALL % "abc"), -0.1, "<|tool|>4071<eos>"),
    ],
    ids=["looked up", "wrong key", "guessed", "never answered"],
)
def test_the_agents_reward_rests_on_the_right_use_of_its_tool(
    texts: tuple[str, ...], reward: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = lookup_tokenizer(128)
    template = ChatTemplate(tokenizer)
    says = Says(template, *texts)
    gateway = Gateway(says, template, ToolCallParser("hermes", tokenizer), GatewayConfig(max_tokens=64))
    earned, (sample,) = asyncio.run(with_a_session(gateway, lambda: agent(TASK), monkeypatch))
    assert earned == reward
    assert says.asked[0] == "[look]<|user|>abc?<eos><|assistant|>"
    assert says.asked[-1].endswith(f"{shown}<|assistant|>") or not shown
    trained = [token for token, sampled in zip(sample.tokens, sample.mask, strict=True) if sampled]
    assert template.decode(trained) == "".join(f"{text}<eos>" for text in texts)


def test_the_model_of_the_example_has_a_template_that_only_appends_and_short_calls() -> None:
    tokenizer = lookup_tokenizer(128)
    report = check_template(tokenizer)
    assert not report.refused
    assert "an answer" not in report.differences
    assert len(tokenizer(CALL % "abc").input_ids) == 7
    assert max(tokenizer(CALL % "abc").input_ids) < 128


def test_arguments_that_are_none_ask_for_nothing() -> None:
    assert [asked_for(text) for text in ('{"key": "ab"}', '{"key": 1}', "{}", "[]", "x")] == ["ab", "1", "", "", ""]


def test_tasks_are_the_same_each_time_and_carry_what_the_agent_needs() -> None:
    first = rows(num_rows=3)
    assert first == rows(num_rows=3)
    assert all(row["prompt"] == f"{row['metadata']['key']}?" for row in first)


def test_the_gateway_samples_as_the_generators_do() -> None:
    cfg = parse("--generator.temperature=0.7", "--generator.top_p=0.9", "--generator.max_model_len=32")
    gateway = gateway_config(cfg)
    assert (gateway.temperature, gateway.top_p, gateway.max_tokens) == (0.7, 0.9, 32)


@pytest.mark.parametrize("preset", ["tiny.yaml", "repair.yaml"])
def test_the_presets_can_run(preset: str) -> None:
    cfg = config.parse(AgentAppConfig, [], default_config=PRESET.with_name(preset), prog="", description="")
    assert {"trainer", "generator"} <= plan_run(cfg, None).roles.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--agent.path="], "give one of them, and one only"),
        (["--agent.path=apps.agent.lookup:nothing"], "nothing"),
        (["--reward.model=nano"], "section reward names nano"),
        (["--gateway.journal=somewhere"], "gateway.journal is 'somewhere'"),
        (["--gateway.max_sessions=8"], "gateway.max_sessions is 8, .* may be open at once"),
        (
            ["--episodes.on_failure=shrink", "--episodes.smallest_group=0"],
            "episodes.smallest_group must be >= 1, got 0",
        ),
        (["--gateway.limits.max_turns=0"], "gateway.limits.max_turns"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(parse(*options), None)


# --- with a real engine


class OneEngine:
    """A generator: one engine, under the version that it has."""

    def __init__(self, engine: VllmEngine, stop_ids: list[int]) -> None:
        self.engine, self.stop_ids, self.answers = engine, stop_ids, list[tuple[list[int], Completion]]()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        **options: Any,
    ) -> list[Completion]:
        (prompt,), (seed,) = prompts, seeds
        limit = max_new_tokens or 64 - len(prompt)
        answer = await self.engine.generate(
            list(prompt), Sampling(), max_tokens=limit, seed=seed, stop_ids=self.stop_ids
        )
        self.answers.append((list(prompt), answer))
        return [answer]


def talk(stream: bool) -> list[Mapping[str, Any]]:
    """Ten short conversations with logprobs, tools and their results; what the client got of each answer."""
    got: list[Mapping[str, Any]] = []
    with OpenAI(timeout=60, max_retries=0) as client:
        for row in rows(num_rows=10):
            messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
            for _ in range(2):
                options: Any = {"model": "any", "messages": messages, "tools": TOOLS, "logprobs": True}
                got.append(heard(client.chat.completions.create(**options, stream=stream), stream))
                messages.append({"role": "assistant", "content": got[-1]["content"], "tool_calls": got[-1]["calls"]})
                if not got[-1]["calls"]:
                    break
                value = row["metadata"]["value"]
                messages += [{"role": "tool", "tool_call_id": c["id"], "content": value} for c in got[-1]["calls"]]
    return got


def heard(answer: Any, stream: bool) -> Mapping[str, Any]:
    if not stream:
        (choice,) = answer.choices
        whole = [call.model_dump() for call in choice.message.tool_calls or []]
        logprobs = [one.logprob for one in choice.logprobs.content]
        return {"content": choice.message.content or "", "calls": whole, "logprobs": logprobs}
    content, logprobs = "", []
    calls: dict[int, Any] = {}
    for chunk in answer:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            logprobs += [one.logprob for one in (choice.logprobs.content if choice.logprobs else [])]
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(
                    call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                known["id"] += call.id or ""
                known["function"]["name"] += call.function.name or ""
                known["function"]["arguments"] += call.function.arguments or ""
    return {"content": content, "calls": list(calls.values()), "logprobs": logprobs}


@pytest.mark.soak
def test_what_a_client_heard_of_a_real_engine_is_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model("lookup")
    tokenizer = lookup_tokenizer(128)
    template = ChatTemplate(tokenizer)

    async def test() -> None:
        engine = VllmEngine(
            EngineOptions(
                model=model,
                dtype="float32",
                max_model_len=64,
                max_num_seqs=8,
                kv_cache_bytes=1 << 26,
                enforce_eager=True,
                tensor_parallel=1,
                seed=0,
            )
        )
        await engine.start()
        try:
            for stream in (False, True):
                generator = OneEngine(engine, template.end_of_turn[:1])
                gateway = Gateway(
                    generator, template, ToolCallParser("hermes", tokenizer), GatewayConfig(max_tokens=64)
                )
                got, samples = await with_a_session(gateway, lambda: talk(stream), monkeypatch)  # noqa: B023
                assert any(answer["calls"] for answer in got), "the model half knows how to use its tool"
                for (_, answer), told in zip(generator.answers, got, strict=True):
                    assert told["logprobs"] == pytest.approx(answer.logprobs, abs=1e-6)
                check_samples(model, generator, samples)
        finally:
            engine.shutdown()

    asyncio.run(test())


def check_samples(model: str, generator: OneEngine, samples: list[EpisodeTokens]) -> None:
    """Each sampled token is trained once, as sampled, behind what the engine saw, and the trainer's model agrees."""
    trained = [token for sample in samples for token, own in zip(sample.tokens, sample.mask, strict=True) if own]
    assert trained == [token for _, answer in generator.answers for token in answer.token_ids]
    whole = [[*prompt, *answer.token_ids] for prompt, answer in generator.answers]
    assert all(sample.tokens in whole for sample in samples)
    policy = Policy(load_hf(model, torch.float32).eval())
    for sample in samples:
        tokens, mask = torch.tensor([sample.tokens]), torch.tensor([sample.mask])
        with torch.no_grad():
            expected, _ = policy(tokens, torch.arange(tokens.shape[1])[None], mask)
        torch.testing.assert_close(expected, torch.tensor(sample.logprobs), atol=1e-4, rtol=0)


@pytest.mark.soak
def test_a_model_learns_to_use_a_tool_by_way_of_an_unmodified_agent(tmp_path: Path) -> None:
    run = AppRun(tmp_path / "run", "--replay.record", EXACT, app=APP, preset=["--config", str(PRESET)])
    try:
        assert run.finish(1500) == 0, run.output
    finally:
        run.end()
    steps = run.rows()
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert steps[0]["extra/engine_mismatch"] < 1e-4, "the trainer sees what the generator saw"
    rewards = [step["reward/mean"] for step in steps]
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.2, rewards
    batches = Recording(run.folder / "journal")
    for group in (group for version in batches.versions for group in batches.batch(version).groups):
        assert len(group["rewards"]) == 8, "no session failed or branched"


TWICE = """
from apps.agent.lookup import agent

def twice(task):
    return (agent(task) + agent({**task, "key": task["key"][::-1]})) / 2
"""


@pytest.mark.soak
def test_sessions_of_two_conversations_are_groups_of_twice_as_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_talks.py").write_text(TWICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ["--trainer.steps=2", "--replay.record", "--agent.path=two_talks:twice"]
    run = AppRun(tmp_path / "run", *options, app=APP, preset=["--config", str(PRESET)])
    try:
        assert run.finish(900) == 0, run.output
    finally:
        run.end()
    assert len(run.rows()) == 2
    batches = Recording(run.folder / "journal")
    groups = [group for version in batches.versions for group in batches.batch(version).groups]
    assert groups
    for group in groups:
        assert len(group["rewards"]) == 16
        values = set(zip(group["rewards"].tolist(), group["advantages"].tolist(), strict=True))
        assert len(values) == len({reward for reward, _ in values}), "equal rewards, equal advantages"
