"""Laws of actors/reward_pools.py: each task its pool, and a pool that stalls is nobody else's delay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from judges import Judge

from actors.reward import RewardConfig, RewardFunction, RewardPool, RewardScorer, Sample, Scores
from actors.reward_judge import ChatJudge
from actors.reward_pools import JudgePool, RewardPools
from actors.reward_sandbox import CodeTests, code_in
from forge.errors import ConfigError, RewardError, RewardTimeout

LIMIT_S = 60


def sample(answer: Any, pool: str | None = None, **metadata: Any) -> Sample:
    return Sample("prompt", "completion", answer, metadata if pool is None else {"reward": pool, **metadata})


class Everywhere:
    """The functions that score every sample: 10 each."""

    async def score(self, samples: list[Sample]) -> Scores:
        return Scores([10.0] * len(samples), {"all": [10.0] * len(samples)})

    async def shutdown(self) -> None:
        pass


def pools(everywhere: bool = True, **configs: RewardPool) -> RewardPools:
    each = {name: JudgePool(name, config) for name, config in configs.items()}
    return RewardPools(Everywhere() if everywhere else None, each, configs)


def judge(**options: Any) -> RewardPool:
    pool = RewardPool(judge="judges:Judge", **options)
    pool.validate("reward.pools.a")
    return pool


def test_a_sample_is_scored_by_the_pool_of_its_task_besides_the_functions_for_all() -> None:
    rewards = pools(a=judge(weight=2.0), b=judge(kwargs={"plus": 1.0}))
    scores = asyncio.run(rewards.score([sample(3, "a"), sample(4), sample(5, "b"), sample(6, "a")]))
    assert scores.total == [16.0, 10.0, 16.0, 22.0]
    assert scores.parts == {"all": [10.0] * 4, "a": [3.0, 0.0, 0.0, 6.0], "b": [0.0, 0.0, 6.0, 0.0]}


def test_without_functions_and_pools_rewards_are_zero_and_an_unknown_pool_is_named() -> None:
    assert asyncio.run(pools(everywhere=False).score([sample(1)])) == Scores([0.0], {})
    with pytest.raises(ConfigError, match=r"has reward 'c'; reward\.pools has a; name one"):
        asyncio.run(pools(a=judge()).score([sample(1, "c")]))


def test_a_judge_that_hangs_delays_only_the_samples_of_its_pool() -> None:
    async def work() -> tuple[list[str], list[float]]:
        rewards = pools(stalled=judge(timeout_s=3600.0), quick=judge())
        order: list[str] = []

        async def score(name: str, answer: Any) -> list[float]:
            total = (await rewards.score([sample(answer, name)])).total
            order.append(name)
            return total

        hanging = asyncio.create_task(score("stalled", "hang"))
        async with asyncio.timeout(LIMIT_S):
            totals = await asyncio.gather(*(score("quick", number) for number in range(20)))
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        return order, [total[0] for total in totals]

    order, totals = asyncio.run(work())
    assert order == ["quick"] * 20
    assert totals == [10.0 + number for number in range(20)]


def test_what_takes_too_long_is_worth_timeout_reward_or_ends_the_run_by_policy() -> None:
    tolerant = pools(a=judge(timeout_s=0.05, timeout_reward=-1.0, weight=2.0))
    scores = asyncio.run(tolerant.score([sample("hang", "a"), sample(1, "a")]))
    assert (scores.total, scores.timeouts) == ([8.0, 12.0], 1)
    strict = pools(a=judge(timeout_s=0.05, on_timeout="fail"))
    with pytest.raises(
        RewardTimeout, match=r"reward pool a took more than 0\.05 s for 'prompt'; raise reward\.pools\.a"
    ):
        asyncio.run(strict.score([sample(1, "a"), sample("hang", "a")]))


def test_functions_of_a_pool_that_are_late_fail_by_the_same_policy() -> None:
    class Late(Everywhere):
        async def score(self, samples: list[Sample]) -> Scores:
            return Scores([0.0], {"f": [0.0]}, timeouts=1)

    config = RewardPool([RewardFunction("judges:one")], on_timeout="fail")
    config.validate("reward.pools.a")
    with pytest.raises(RewardTimeout, match="1 of 1 samples"):
        asyncio.run(RewardPools(None, {"a": Late()}, {"a": config}).score([sample(1, "a")]))


def test_a_pool_has_no_more_samples_at_once_than_it_may_and_closes_its_judge() -> None:
    async def work() -> None:
        rewards = pools(a=judge(concurrency=3))
        await rewards.score([sample(number, "a") for number in range(20)])
        await rewards.shutdown()

    Judge.most = Judge.closed = 0
    asyncio.run(work())
    assert (Judge.most, Judge.closed) == (3, 1)


def test_an_error_of_a_judge_arrives_as_one_that_names_the_pool() -> None:
    with pytest.raises(RewardError, match="reward pool a: KeyError: 'no verdict'"):
        asyncio.run(pools(a=judge()).score([sample("fail", "a"), sample(1, "a")]))
    with pytest.raises(RewardError, match="reward pool a returned nan"):
        asyncio.run(pools(a=judge()).score([sample("nan", "a")]))


def test_pools_of_turns_score_turns_and_nothing_else() -> None:
    rewards = pools(prm=judge(turns=True))
    assert rewards.scores_turns({"reward": "prm"})
    assert not rewards.scores_turns({})
    assert asyncio.run(rewards.score([sample(5, "prm")])).total == [10.0]
    assert asyncio.run(rewards.score_turn(sample(5, "prm"))) == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"has 0 functions and judge ''; give one of both"),
        ({"judge": "judges:Plain"}, r"pools\.a\.judge judges:Plain has no async method score"),
        ({"judge": "judges:Judge", "kwargs": {"minus": 1}}, r"kwargs does not suit judges:Judge: .*minus"),
        ({"judge": "judges:Judge", "timeout_s": 0.0}, r"pools\.a\.timeout_s must be > 0, got 0\.0"),
        ({"judge": "judges:Judge", "concurrency": 0}, r"pools\.a\.concurrency must be >= 1, got 0"),
        ({"judge": "judges:Judge", "on_timeout": "hope"}, r"on_timeout must be value or fail, got hope"),
        ({"judge": "judges:Judge", "turns": True}, r"pools\.a\.turns is true, and episodes here have one turn"),
        ({"functions": [RewardFunction("judges:none")]}, r"reward\.pools\.a\.functions has 'judges:none'"),
    ],
)
def test_a_pool_that_cannot_work_is_named_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardConfig(pools={"a": RewardPool(**options)}).validate()


def test_pools_alone_are_rewards_enough() -> None:
    config = RewardConfig(pools={"a": judge()})
    config.validate()
    assert asyncio.run(RewardScorer(config, inline=True).score([sample(1)])).total == [0.0]


def test_the_program_of_an_answer_is_its_last_block() -> None:
    assert code_in("so\n```python\na = 1\n```\nno:\n```\nb = 2\n```\n") == "b = 2\n"
    assert code_in("print(1)") == "print(1)"


def test_code_is_worth_the_share_of_its_tests_that_it_passes() -> None:
    async def work() -> list[float]:
        tests = CodeTests(wall_s=20.0)
        cases = [{"stdin": "ab", "stdout": "ba\n"}, {"code": "assert flip('xy') == 'yx'"}]
        reads = "if __name__ == '__main__':\n    import sys\n    print(flip(sys.stdin.read()))\n"
        right = f"```python\nflip = lambda s: s[::-1]\n{reads}```"
        answers = [right, "print('ba')", "raise SystemExit(0)"]
        return [await tests.score(Sample("p", answer, None, {"tests": cases})) for answer in answers]

    assert asyncio.run(work()) == [1.0, 0.5, 0.0], "a program that ends early passes nothing"


def test_a_judge_model_s_verdict_is_a_number_and_braces_of_the_policy_stay_as_they_are() -> None:
    asked: list[dict[str, Any]] = []

    class Completions:
        def __init__(self, verdict: str) -> None:
            self.chat, self.completions, self.verdict = self, self, verdict

        async def create(self, **request: Any) -> Any:
            asked.append(request)
            message = type("Message", (), {"content": self.verdict})
            return type("Answer", (), {"choices": [type("Choice", (), {"message": message})]})

    def judge_of(verdict: str, **options: Any) -> ChatJudge:
        chat = ChatJudge("http://127.0.0.1:1/v1", "judge", **options)
        chat._client = Completions(verdict)  # type: ignore[assignment]
        return chat

    said = Sample("{answer}", "{x}", "42")
    assert asyncio.run(judge_of("8.5 of 10").score(said)) == pytest.approx(0.85)
    assert "Answer:\n{x}\n" in asked[0]["messages"][0]["content"]
    assert "Task:\n{answer}\n" in asked[0]["messages"][0]["content"]
    assert asyncio.run(judge_of("grade: 2", pattern=r"grade: (\d)", scale=1.0).score(said)) == 2.0
    with pytest.raises(RewardError, match="the judge judge said 'fine'"):
        asyncio.run(judge_of("fine").score(said))
    with pytest.raises(ConfigError, match="no regular expression"):
        judge_of("", pattern="(")
