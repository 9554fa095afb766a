"""Laws of evaluation during training: one version each, nobody waits, nothing is counted twice or half."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.evaluator import Answers, EvaluationConfig, Evaluations, summary, unevaluated
from actors.generator import GeneratorConfig
from actors.generators import Generators, Replica
from apps.grpo.config import AppConfig
from apps.grpo.evaluation import evaluator_config, start_evaluators
from forge.data import Prompt
from forge.errors import ConfigError, RewardError
from forge.failure import root_cause
from forge.metrics import Row
from forge.pass_at_k import bootstrap, ks_of, pass_at_1, pass_at_k, wilson


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


# --- estimates


@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_one_that_passed(num_samples: int) -> None:
    for passed in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations([1] * passed + [0] * (num_samples - passed), k))
            want = sum(map(max, draws)) / len(draws)
            assert pass_at_k(num_samples, passed, k) == pytest.approx(want, abs=1e-12)


def test_pass_at_k_holds_for_numbers_whose_binomials_no_float_holds() -> None:
    want = 1 - math.comb(9_990, 2_000) / math.comb(10_000, 2_000)
    assert pass_at_k(10_000, 10, 2_000) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 5), (4, 0, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_counts_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        pass_at_k(n, c, k)


def test_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks_of(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_wilson_is_the_published_interval_and_sound_at_the_ends() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I: 81 of 263, and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(20, 20)[1] == 1.0


def test_samples_of_one_prompt_count_as_one_trial_where_they_agree_and_as_many_where_prompts_make_no_difference() -> (
    None
):
    agreeing = pass_at_1(8, [8, 0] * 25)
    assert agreeing[1] == pytest.approx(wilson(25, 50), abs=5e-3)
    alike = pass_at_1(8, [4] * 50)
    assert alike[1] == pytest.approx(wilson(25, 50))  # no variance to be seen: the careful one
    even = pass_at_1(8, [3, 5] * 25)
    assert even[1] == pytest.approx(wilson(200, 400), abs=1e-9)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of prompts that differ in how hard they are; 100 seeded evaluations, wanted 95 %."""
    dice, held = random.Random(3), Counter[str]()
    for trial in range(100):
        hardness = [dice.betavariate(0.6, 0.9) for _ in range(40)]
        passed = [sum(dice.random() < p for _ in range(4)) for p in hardness]
        truth = 0.6 / 1.5
        low, high = pass_at_1(4, passed)[1]
        held["wilson"] += low <= truth <= high
        low, high = bootstrap([c / 4 for c in passed], seed=trial)[1]
        held["bootstrap"] += low <= truth <= high
    assert held["wilson"] >= 89
    assert held["bootstrap"] >= 87


def test_a_seed_gives_the_same_interval() -> None:
    values = [i * i / 100 for i in range(17)]
    assert bootstrap(values, 1) == bootstrap(values, 1) != bootstrap(values, 2)


def test_a_summary_tells_rewards_passes_and_lengths() -> None:
    one = Answers([1.0, 0.0, 0.5, 1.0], num_tokens=10, num_unfinished=1, versions=frozenset({3}))
    none = Answers([0.0] * 4, num_tokens=2, num_unfinished=0, versions=frozenset({3}))
    row = summary([one, none, none], passed=1.0)
    assert row["eval/pass@1"] == pytest.approx(1 / 6)
    assert row["eval/pass@2"] == pytest.approx((1 - 1 / 6) / 3)
    assert row["eval/pass@4"] == pytest.approx(1 / 3)
    assert row["eval/reward"] == pytest.approx(2.5 / 12)
    assert (row["eval/prompts"], row["eval/samples"], row["eval/tokens_mean"]) == (3, 4, 14 / 12)
    assert row["eval/unfinished_share"] == pytest.approx(1 / 12)
    for key in ("eval/reward", "eval/pass@1", "eval/pass@2", "eval/pass@4"):
        told = [float(row[name] or 0.0) for name in (f"{key}/low", key, f"{key}/high")]
        assert told == sorted(told)


# --- the loop


class Scene:
    """Evaluations over a policy whose version is a number; answers wait until they may come."""

    def __init__(self, prompts: int = 5, replicas: int = 2, **options: Any) -> None:
        self.version, self.pinned = 0, 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.asked: list[int] = []
        self.under_way = self.most = 0
        self.failing: list[Exception] = []
        cfg = EvaluationConfig(every=1, samples=2, **options)
        self.evaluations = Evaluations(
            cfg,
            [Prompt(i, 0, str(i), [i + 1]) for i in range(prompts)],
            replicas,
            bring=self.bring,
            answer=self.answer,
            record=self.rows.append,
            note=self.notes.append,
        )

    async def __aenter__(self) -> Scene:
        self.loop = asyncio.create_task(self.evaluations.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.loop.cancel()
        await asyncio.wait([self.loop])

    async def bring(self) -> int:
        self.pinned = self.version
        return self.pinned

    async def answer(self, number: int, prompt: Prompt) -> Answers:
        self.asked.append(prompt.id)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.may_answer.wait()
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.failing:
            raise self.failing.pop(0)
        return Answers([1.0, 0.0], 3, 0, frozenset({self.pinned}))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - the condition is anything
            await asyncio.sleep(0)

    def steps(self) -> Sequence[object]:
        return [row["step"] for row in self.rows]


def test_every_prompt_is_asked_once_and_no_more_at_a_time_than_the_limit() -> None:
    async def scenario() -> None:
        async with Scene(prompts=5, replicas=2, concurrent=1) as scene:
            scene.evaluations.due(0)
            await scene.until(lambda: scene.rows)
            assert sorted(scene.asked) == [0, 1, 2, 3, 4]
            assert scene.most == 2
            assert scene.rows[0]["eval/prompts"] == 5

    run(scenario)


def test_an_evaluation_that_is_due_while_another_runs_is_skipped_and_counted_and_nobody_waits() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.may_answer.clear()
            for scene.version in (0, 1, 2):
                scene.evaluations.due(scene.version)  # a plain call: it could not wait
                await asyncio.sleep(0)
            await scene.until(lambda: scene.asked)
            scene.may_answer.set()
            await scene.until(lambda: scene.rows)
            await scene.until(lambda: not scene.under_way)
            await asyncio.sleep(0)
            scene.version = 3
            scene.evaluations.due(3)
            await scene.until(lambda: len(scene.rows) == 2)
        assert scene.rows[-1]["step"] == 3
        assert scene.rows[-1]["eval/skipped"] == scene.evaluations.skipped == 2
        assert any("version 1 skipped" in note for note in scene.notes)

    run(scenario)


def test_a_result_that_mixes_versions_is_refused_and_says_which() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.may_answer.clear()
            scene.evaluations.due(0)
            await scene.until(lambda: scene.asked)
            scene.pinned = 7  # what sampled is not what was brought
            scene.may_answer.set()
            await scene.until(lambda: scene.evaluations.failed)
        assert scene.rows == []
        assert "evaluation of version 0 holds tokens of [7]" in scene.notes[-1]

    run(scenario)


def test_an_evaluation_that_fails_or_hangs_ends_nothing_and_the_next_one_runs() -> None:
    async def scenario() -> None:
        async with Scene(timeout_s=0.05) as scene:
            scene.failing = [RewardError("the reward raised")]
            scene.evaluations.due(0)
            await scene.until(lambda: scene.evaluations.failed == 1)
            assert "the reward raised" in scene.notes[-1]
            scene.may_answer.clear()
            await scene.until(lambda: scene.evaluations._idle.is_set())
            scene.evaluations.due(1)
            await scene.until(lambda: scene.evaluations.failed == 2)
            assert "evaluation.timeout_s" in scene.notes[-1]
        async with Scene() as scene:
            scene.version = 2
            scene.evaluations.due(2)
            await scene.until(lambda: scene.rows)
            assert scene.steps() == [2]

    run(scenario)


def test_the_end_waits_for_what_runs_and_evaluates_the_last_version() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.may_answer.clear()
            scene.evaluations.due(0)
            await scene.until(lambda: scene.asked)
            scene.version = 4
            ending = asyncio.create_task(scene.evaluations.finish(4))
            await asyncio.sleep(0)
            assert not ending.done()
            scene.may_answer.set()
            await ending
            assert scene.steps() == [0, 4]
            await scene.evaluations.finish(4)
            scene.evaluations.due(4)
            await asyncio.sleep(0)
            assert scene.steps() == [0, 4], "a version was evaluated twice"

    run(scenario)


def test_a_resumed_run_knows_which_results_it_lacks() -> None:
    assert unevaluated([0, 11, 30], every=10, start=50) == [20, 40]
    assert unevaluated([], every=10, start=0) == []


def test_prompts_that_do_not_divide_by_the_replicas_are_spread_over_all_of_them() -> None:
    async def scenario() -> None:
        counts = Counter[str]()
        holding = asyncio.Event()

        class Mesh:
            def __init__(self, name: str) -> None:
                self.name, self.generate = name, self

            async def call_one(self, prompts: Any, *_: Any) -> list[Any]:
                counts[self.name] += 1
                await holding.wait()
                return [None] * len(prompts)

        config = GeneratorConfig()
        generators = Generators([Replica(Mesh(name), name, config) for name in ("a", "b", "c")])
        calls = [asyncio.ensure_future(generators.generate([[1]], [0])) for _ in range(7)]
        for _ in range(50):
            await asyncio.sleep(0)
        holding.set()
        await asyncio.gather(*calls)
        assert sorted(counts.values()) == [2, 2, 3]

    run(scenario)


# --- the configuration


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": -1}, r"evaluation.every must be >= 0 steps, got -1"),
        ({"samples": 0}, r"evaluation.samples must be >= 1, got 0"),
        ({"temperature": 0.0}, r"evaluation.temperature is 0.0, evaluation.samples 4"),
        ({"temperature": float("nan")}, r"evaluation.temperature is nan"),
        ({"timeout_s": 0.0}, r"evaluation.timeout_s must be > 0"),
        ({"args": {"num_digits": 3}}, r"without evaluation.task"),
        ({"task": "apps.grpo.tasks:reverse_digits", "args": {"digits": 3}}, r"cannot be called with"),
        ({"task": "apps.grpo.tasks:nothing_here"}, r"evaluation.task"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EvaluationConfig(**options).validate()


def test_its_engines_sample_as_evaluations_do_and_hold_no_more_than_runs_at_once() -> None:
    rollouts = GeneratorConfig(temperature=0.7, top_p=0.9, keep_support=4, max_new_tokens=8, max_model_len=32)
    own = evaluator_config(EvaluationConfig(temperature=0.0, samples=1, max_new_tokens=16), rollouts)
    assert (own.temperature, own.top_p, own.top_k, own.keep_support) == (0.0, 1.0, 0, 0)
    assert (own.max_new_tokens, own.max_model_len, own.max_num_seqs) == (16, 40, 4)


def test_one_that_cannot_start_ends_the_starts_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.grpo.evaluation.evaluation_prompts", lambda cfg, tokenizer: [Prompt(0, 0, "p", [1])])
    ended: list[int] = []

    async def spawn(*_: Any, replica: int, **__: Any) -> None:
        try:
            await asyncio.sleep(0.01 if replica == 1 else 60)
            raise ConfigError("no such model")
        except asyncio.CancelledError:
            ended.append(replica)
            raise

    async def scenario() -> None:
        cfg, spec = replace(AppConfig(), evaluation=EvaluationConfig(every=1)), SimpleNamespace(path="m", dtype="f")
        cluster: Any = SimpleNamespace(procs=lambda role: 1, replicas=lambda role: 3, spawn=spawn)
        options: Any = spec, GeneratorConfig(), None, [], {}, print
        with pytest.raises((ConfigError, ExceptionGroup)) as caught:
            await start_evaluators(cfg, cluster, *options)
        assert str(root_cause(caught.value)) == "no such model"
        await asyncio.sleep(0)
        assert sorted(ended) == [0, 2]

    run(scenario)
