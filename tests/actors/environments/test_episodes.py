"""Laws of actors/environments/episodes.py: what was sampled is trained, nobody holds two places."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from guessing import Guessing
from talking import chat_template

from actors.environments.config import EnvironmentConfig
from actors.environments.episodes import EnvironmentRollout, EpisodesConfig, Player
from actors.environments.parking import Parking
from actors.environments.pool import EnvironmentPool
from actors.environments.templates import ChatTemplate
from actors.environments.tool_calls import ParsedAnswer
from actors.reward import Sample, Scores
from actors.rollout import Rollout
from actors.vllm_engine import Completion
from forge.batch import check_batch
from forge.data import Prompt
from forge.errors import ConfigError, EnvironmentFailed


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return chat_template()


class Scripted:
    """A generator that says what `answers` has for its turn, and counts who holds a place."""

    def __init__(self, template: ChatTemplate, answers: Sequence[str], *, delay_s: float = 0.0) -> None:
        self.template, self.answers, self.delay_s = template, answers, delay_s
        self.asked: list[list[int]] = []
        self.affinities: list[str] = []
        self.all_asked = asyncio.Event()
        """Four prompts have come."""
        self.running = self.most = 0
        self.version = 0

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int | None = None,
        request_id: str = "",
        *,
        begun: Mapping[int, Completion] | None = None,
        wanted: int = 0,
        affinity: str = "",
    ) -> list[Completion]:
        (prompt,) = prompts
        self.asked.append(list(prompt))
        self.affinities.append(affinity)
        if len(self.asked) == 4:
            self.all_asked.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        turn = self.template.decode(prompt).count("<|im_start|>assistant") - 1
        text = self.answers[min(turn, len(self.answers) - 1)] + "<|im_end|>"
        ids = self.template.encode(text, inside=True)
        cut = ids[:max_new_tokens]
        finish = "stop" if len(cut) == len(ids) else "length"
        return [Completion(cut, [-0.5] * len(cut), [self.version + turn] * len(cut), finish)]


class Bench:
    """A pool, a scripted generator and a rollout over them."""

    def __init__(
        self, template: ChatTemplate, answers: Sequence[str], *, delay_s: float = 0.0, room: int = 400, **options: Any
    ) -> None:
        Guessing.tries.clear()
        Guessing.open = 0
        config = EnvironmentConfig(path="guessing:Guessing", retries=0, concurrency=64, quarantine_after=100)
        self.pool = EnvironmentPool(config, name="guessing")
        self.generator = Scripted(template, answers, delay_s=delay_s)
        episodes = EpisodesConfig(**options)
        episodes.validate()
        self.player = Player(self.pool, self.generator, template, episodes, room)
        self.rollout = EnvironmentRollout(self.player, turn_rewards=True)

    def run(self, size: int = 3, oversample: int = 0, **task: Any) -> Rollout | None:
        return asyncio.run(self.go(size, oversample, **task))

    async def go(self, size: int = 3, oversample: int = 0, group_id: int = 4, **task: Any) -> Rollout | None:
        prompt = Prompt(0, 0, "", [1], metadata={"id": "task", "number": 7, **task})
        return await self.rollout(
            prompt,
            self.generator,
            group_id=group_id,
            group_size=size,
            advantage="grpo",
            decode=self.player.template.decode,
            seed=0,
            oversample=oversample,
        )


def test_episodes_of_several_turns_become_a_group_of_what_was_sampled(template: ChatTemplate) -> None:
    bench = Bench(template, ["3", "9", "7"])
    rollout = bench.run()
    assert rollout is not None
    td = rollout.group
    check_batch(td)
    assert td["rewards"].tolist() == pytest.approx([0.8] * 3)
    for row in range(3):
        tokens, mask = td["tokens"][row], td["loss_mask"][row]
        assert template.decode(tokens[mask].tolist()) == "3<|im_end|>9<|im_end|>7<|im_end|>"
        assert sorted(set(td["token_versions"][row][mask].tolist())) == [0, 1, 2], "each turn under its own weights"
        earned = td["token_rewards"][row]
        assert earned[earned != 0].tolist() == pytest.approx([-0.1, -0.1, 1.0])
        assert bool(mask[earned != 0].all())
    whole = template.decode(td["tokens"][0].tolist())
    assert whole.startswith("<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\n")
    assert whole.endswith("<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n7<|im_end|>")
    assert rollout.num_tokens == int(td["loss_mask"].sum())
    assert len({*bench.generator.affinities}) == 3, "an episode finds its prefix by a name of its own"
    assert Guessing.open == 0


def test_each_turn_continues_exactly_what_the_one_before_had(template: ChatTemplate) -> None:
    bench = Bench(template, ["3", "9", "7"])
    rollout = bench.run(size=1)
    assert rollout is not None
    first, second, third = bench.generator.asked
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert rollout.group["tokens"][0, : len(third)].tolist() == third


def test_a_slow_world_holds_no_place_in_the_generator(template: ChatTemplate) -> None:
    slow, quick = Bench(template, ["3"] * 3 + ["7"]), Bench(template, ["7"])

    async def both() -> tuple[int, int]:
        waiting = asyncio.create_task(slow.go(4, slow_s=30.0))
        async with asyncio.timeout(20):
            await slow.generator.all_asked.wait()
        await asyncio.sleep(0.05)
        held = slow.generator.running
        done = await quick.go(4, group_id=5)
        assert done is not None
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await slow.pool.shutdown()
        await quick.pool.shutdown()
        return held, Guessing.open

    held, still_open = asyncio.run(both())
    assert held == 0, "four episodes wait for their worlds"
    assert still_open == 0, "cancelled episodes close theirs"


def test_limits_end_an_episode_and_say_which(template: ChatTemplate) -> None:
    turns = Bench(template, ["3"], max_turns=2).run()
    assert turns is not None
    assert turns.group["rewards"].tolist() == pytest.approx([-0.2] * 3)
    assert not any(sample.finished for sample in turns.samples)
    tight = Bench(template, ["3333333333333333333333"], room=40, max_turns=50).run()
    assert tight is not None
    assert int(tight.group["lengths"].max()) <= 40
    short = Bench(template, ["33333333 3333333 333"], turn_tokens=2, max_turns=2).run()
    assert short is not None
    per_turn = short.group["loss_mask"][0].sum()
    assert int(per_turn) == 4
    text = template.decode(short.group["tokens"][0].tolist())
    assert text.count("<|im_end|>") == 3, "the cut answer's end was added, the last one's is not there"


@pytest.mark.parametrize("policy", ["retry", "shrink", "drop"])
def test_what_a_failing_episode_does_to_its_group(template: ChatTemplate, policy: str) -> None:
    bench = Bench(template, ["7"], on_failure=policy, retries=2, smallest_group=2)
    rollout = bench.run(size=4, fail_first=1)
    if policy == "drop":
        assert rollout is None
    else:
        assert rollout is not None
        assert rollout.group.batch_size[0] == (4 if policy == "retry" else 3)
    assert Guessing.open == 0


def test_a_group_with_too_few_episodes_is_dropped_and_too_many_of_them_end_the_run(template: ChatTemplate) -> None:
    bench = Bench(template, ["3"], smallest_group=2, max_dropped_in_a_row=2)

    async def three() -> None:
        assert await bench.go(fail_at=1) is None
        assert await bench.go(fail_at=1) is None
        with pytest.raises(EnvironmentFailed, match=r"3 groups in a row were dropped.*is 2; the last: (?s:.*)broke"):
            await bench.go(fail_at=1)

    asyncio.run(three())
    assert Guessing.open == 0


def test_of_more_episodes_than_wanted_the_first_to_end_make_the_group(template: ChatTemplate) -> None:
    bench = Bench(template, ["3", "7"], delay_s=0.01)

    async def run() -> Rollout | None:
        slow = iter([30.0, 0.0, 0.0, 30.0, 0.0])
        start = bench.pool.start

        async def started(task: Mapping[str, Any]) -> Any:
            return await start({**task, "slow_s": next(slow)})

        bench.pool.start = started  # type: ignore[method-assign, assignment]
        async with asyncio.timeout(20):
            return await bench.go(3, oversample=2)

    rollout = asyncio.run(run())
    assert rollout is not None
    assert rollout.group.batch_size[0] == 3
    assert Guessing.open == 0, "the slow ones were cancelled and closed"


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"episodes\.max_turns must be >= 1, got 0"):
        EpisodesConfig(max_turns=0).validate()
    with pytest.raises(ConfigError, match=r"episodes\.on_failure must be retry, shrink or drop, got hope"):
        EpisodesConfig(on_failure="hope").validate()  # type: ignore[arg-type]


def test_advantages_are_those_of_the_episodes_that_are_left(template: ChatTemplate) -> None:
    bench = Bench(template, ["7"], smallest_group=1)
    rollout = bench.run(size=1)
    assert rollout is not None
    assert torch.isfinite(rollout.group["advantages"]).all()


class Brackets:
    """Takes `[name]` for a call, and `[` without an end for a broken one."""

    def parse(
        self, said: str | Sequence[int], tools: Sequence[Mapping[str, Any]] = (), *, number: int = 0
    ) -> ParsedAnswer:
        assert isinstance(said, str)
        assert [tool["function"]["name"] for tool in tools] == ["f"]
        if not said.startswith("["):
            return ParsedAnswer(said)
        if not said.endswith("]"):
            return ParsedAnswer(said, error="no end")
        call = {"id": f"call{number}", "type": "function", "function": {"name": said[1:-1], "arguments": "{}"}}
        return ParsedAnswer("", [call])


def test_tool_calls_reach_the_world_numbered_and_broken_ones_with_the_reason(template: ChatTemplate) -> None:
    async def run() -> Any:
        async with EnvironmentPool(EnvironmentConfig(path="guessing:Calling"), name="calling") as pool:
            generator = Scripted(template, ["[f", "[f]", "[f]"])
            player = Player(pool, generator, template, EpisodesConfig(), 400, Brackets())
            return await player.play({}, seed=0)

    played = asyncio.run(run())
    assert (played.finish, played.turns) == ("done", 3)
    assert played.info["ids"] == ["call0", "call1"]
    assert played.tokens.total == pytest.approx(0.0)
    assert [m["role"] for m in played.messages] == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert played.messages[2]["content"] == "no call: no end"
    text = template.decode(played.tokens.tokens)
    assert text.count("[f]") == 2, "what was sampled stands there, not what was made of it"


class Rewards:
    """Scores turns of a task by its `plus`, and whole episodes by 100; the first turns' scores come last."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, str]] = []

    def scores_turns(self, metadata: Mapping[str, Any]) -> bool:
        return "plus" in metadata

    async def score_turn(self, sample: Sample) -> float:
        self.turns.append((sample.prompt, sample.completion))
        await asyncio.sleep(0.05 / len(self.turns))
        return float(sample.metadata["plus"]) * len(sample.prompt)

    async def score(self, samples: list[Sample]) -> Scores:
        return Scores([100.0] * len(samples), {"judge": [100.0] * len(samples)})


def test_turns_are_scored_while_later_ones_are_generated_and_earn_at_their_last_token(template: ChatTemplate) -> None:
    bench, rewards = Bench(template, ["3", "9", "7"]), Rewards()
    bench.player = replace(bench.player, rewards=rewards)
    played = asyncio.run(bench.player.play({"id": "task", "number": 7, "plus": 1e-3}, seed=0))
    prompts = [prompt for prompt, _ in rewards.turns]
    assert [said for _, said in rewards.turns] == [f"{number}<|im_end|>" for number in (3, 9, 7)]
    earned = [value for value in played.tokens.earned if value]
    own = [-0.1, -0.1, 1.0]
    assert earned == pytest.approx([a + 1e-3 * len(b) for a, b in zip(own, prompts, strict=True)])
    assert played.tokens.total == pytest.approx(sum(earned))


def test_rewards_for_whole_episodes_are_added_to_what_the_environment_gives(template: ChatTemplate) -> None:
    async def run() -> Rollout | None:
        bench = Bench(template, ["7"])
        prompt = Prompt(0, 0, "", [1], metadata={"id": "task", "number": 7})
        options: dict[str, Any] = {"group_id": 0, "group_size": 2, "advantage": "grpo", "seed": 0}
        return await bench.rollout(prompt, bench.generator, Rewards(), decode=template.decode, **options)

    rollout = asyncio.run(run())
    assert rollout is not None
    assert rollout.group["rewards"].tolist() == pytest.approx([101.0, 101.0])
    assert rollout.scores.parts == {"environment": [1.0, 1.0], "judge": [100.0, 100.0]}


def test_parked_episodes_come_to_their_end_turn_by_turn(template: ChatTemplate) -> None:
    bench = Bench(template, ["3", "9", "7"], delay_s=0.001, round_tokens=1)
    bench.player = replace(bench.player, parking=Parking(1, places=2))
    bench.rollout = EnvironmentRollout(bench.player, turn_rewards=True)
    rollout = bench.run(size=6)
    assert rollout is not None
    assert bench.player.parking.row()["extra/episodes/parked"] > 0
    assert rollout.group["rewards"].tolist() == pytest.approx([0.8] * 6)
