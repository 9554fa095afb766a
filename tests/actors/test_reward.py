"""Rewards run in processes of their own: whatever they do, the event loop and the run live on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from child_processes import gone, read_pid

from actors.reward import RewardActor, RewardClient, RewardConfig, RewardFunction, RewardScorer, Sample
from forge.errors import ConfigError, RewardError

T = TypeVar("T")
ROOT = Path(__file__).parents[2]

USER_REWARDS = """
import os, re, signal, subprocess, sys, threading, time
from pathlib import Path

NOT_A_FUNCTION = 3

def length(sample): return len(sample.completion)
def constant(sample): return 10
def where(sample): return os.getpid()
def thread(sample): return threading.get_ident()
def imports_heavy(sample): return sum(name in sys.modules for name in ("torch", "monarch", "transformers"))

def spins_on_x(sample):
    if sample.completion == "x":
        Path(sample.answer).write_text(str(os.getpid()))
        while True:
            pass
    return 1.0

def holds_the_interpreter(sample):
    Path(sample.answer).write_text(str(os.getpid()))
    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))

def starts_a_program(sample):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sample.answer).write_text(str(child.pid))
    time.sleep(600)

def waits_for_the_other(sample):
    mine, other = sample.answer
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    return 1.0

def raises(sample):
    if sample.completion == "x":
        inner = {}
        return inner["no such key"]
    return 1.0

def quits(sample): sys.exit(5)
def exits(sample): os._exit(3)
def crashes(sample): os.kill(os.getpid(), signal.SIGSEGV)
def crashes_once(sample):
    if not os.path.exists(sample.answer):
        open(sample.answer, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(sample.completion))
def interrupted(sample): os.kill(os.getpid(), signal.SIGINT); return 1.0
def gives_nan(sample): return float("nan")
def gives_none(sample): return None
def gives_text(sample): return "1.0"
async def is_async(sample): return 1.0
def takes_two(sample, other): return 1.0
def outer():
    def inner(sample): return 1.0
    return inner
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module, importable here and in workers; its name is new for every test."""
    name = f"user_rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def config(module: str, *functions: str, **settings: Any) -> RewardConfig:
    return RewardConfig([RewardFunction(f"{module}:{name}") for name in functions], **settings)


def samples(*completions: str, answer: Any = None) -> list[Sample]:
    return [Sample(prompt="a question", completion=text, answer=answer) for text in completions]


def with_scorer(cfg: RewardConfig, body: Callable[[RewardScorer], Awaitable[T]]) -> T:
    async def main() -> T:
        async with RewardScorer(cfg) as scorer:
            return await body(scorer)

    return asyncio.run(main())


def test_the_total_is_the_weighted_sum_and_the_parts_are_the_bare_values(user_module: str) -> None:
    cfg = config(user_module, "length", "constant")
    cfg.functions[0].weight, cfg.functions[1].weight = 2.0, -0.5
    scores = with_scorer(cfg, lambda s: s.score(samples("", "abc")))
    assert scores.parts == {"length": [0.0, 3.0], "constant": [10.0, 10.0]}
    assert scores.total == [-5.0, 1.0]
    assert scores.timeouts == 0


def test_functions_of_one_name_are_told_apart_by_their_path(user_module: str) -> None:
    cfg = RewardConfig([RewardFunction(f"{user_module}:length"), RewardFunction("operator:length_hint")])
    assert cfg.names() == ["length", "length_hint"]
    cfg.functions[1].path = f"{user_module}.sub:length"
    assert cfg.names() == [f"{user_module}:length", f"{user_module}.sub:length"]


def test_no_samples_give_no_scores(user_module: str) -> None:
    scores = with_scorer(config(user_module, "length"), lambda s: s.score([]))
    assert (scores.total, scores.parts) == ([], {"length": []})


def test_an_endless_loop_is_killed_and_costs_only_its_own_sample(user_module: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    cfg = config(user_module, "spins_on_x", timeout_s=1.0, timeout_reward=-7.0)
    scores = with_scorer(cfg, lambda s: s.score(samples("a", "x", "b", answer=str(note))))
    assert scores.total == [1.0, -7.0, 1.0]
    assert scores.timeouts == 1
    assert gone(read_pid(note))


def test_a_time_out_names_the_function(user_module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(user_module, "spins_on_x", timeout_s=0.3)
    with_scorer(cfg, lambda s: s.score(samples("x", answer=str(tmp_path / "pid"))))
    assert f"{user_module}:spins_on_x took more than 0.3 s" in caplog.text


def test_a_time_out_also_kills_the_programs_that_the_reward_started(user_module: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    cfg = config(user_module, "starts_a_program", timeout_s=2.0)
    scores = with_scorer(cfg, lambda s: s.score(samples("x", answer=str(note))))
    assert scores.timeouts == 1
    assert gone(read_pid(note))


def test_the_event_loop_goes_on_while_a_reward_burns_the_cpu(user_module: str, tmp_path: Path) -> None:
    async def body(scorer: RewardScorer) -> int:
        ticks = 0
        scoring = asyncio.create_task(scorer.score(samples("x", answer=str(tmp_path / "pid"))))
        while not scoring.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert (await scoring).timeouts == 1
        return ticks

    assert with_scorer(config(user_module, "spins_on_x", timeout_s=1.0), body) > 5


def test_a_cancelled_call_kills_its_worker_and_the_next_call_gets_its_own_answer(
    user_module: str, tmp_path: Path
) -> None:
    note = tmp_path / "pid"

    async def body(scorer: RewardScorer) -> list[float]:
        scoring = asyncio.create_task(scorer.score(samples("x", answer=str(note))))
        await asyncio.to_thread(read_pid, note)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        return (await scorer.score(samples("a", "b", "c"))).total

    assert with_scorer(config(user_module, "spins_on_x", timeout_s=300), body) == [1.0, 1.0, 1.0]
    assert gone(read_pid(note))


def test_an_exception_arrives_with_the_users_traceback_and_the_sample(user_module: str) -> None:
    async def body(scorer: RewardScorer) -> str:
        with pytest.raises(RewardError) as caught:
            await scorer.score(samples("fine", "x", answer="the answer"))
        assert (await scorer.score(samples("fine"))).total == [1.0]
        return str(caught.value)

    text = with_scorer(config(user_module, "raises"), body)
    assert text.startswith(f"{user_module}:raises raised KeyError: 'no such key'")
    assert "'a question'" in text
    assert "'x'" in text
    assert "the answer" in text
    assert 'return inner["no such key"]' in text
    assert "reward_worker.py" not in text


def test_one_failing_function_is_told_even_when_others_succeed(user_module: str) -> None:
    async def body(scorer: RewardScorer) -> None:
        with pytest.raises(RewardError, match="raised KeyError"):
            await scorer.score(samples("x"))

    with_scorer(config(user_module, "length", "raises", "constant"), body)


@pytest.mark.parametrize(
    "function, told",
    [
        ("exits", "exit code 3"),
        ("crashes", "killed by SIGSEGV"),
        ("quits", "raised SystemExit: 5"),
        ("gives_nan", "returned nan"),
        ("gives_none", "returned None"),
        ("gives_text", "returned '1.0'"),
    ],
)
def test_a_worker_that_dies_or_answers_no_number_is_an_error_that_names_the_function(
    user_module: str, function: str, told: str
) -> None:
    async def body(scorer: RewardScorer) -> None:
        for _ in range(2):
            with pytest.raises(RewardError, match=told) as caught:
                await scorer.score(samples("a"))
            assert f"{user_module}:{function}" in str(caught.value)
            assert "'a question'" in str(caught.value)

    with_scorer(config(user_module, function), body)


def test_a_worker_that_is_killed_is_asked_once_more(user_module: str, tmp_path: Path) -> None:
    async def body(scorer: RewardScorer) -> list[float]:
        return (await scorer.score(samples("abc", answer=str(tmp_path / "been_here")))).total

    assert with_scorer(config(user_module, "crashes_once"), body) == [3.0]


def test_samples_that_cannot_go_to_another_process_are_an_error(user_module: str) -> None:
    async def body(scorer: RewardScorer) -> None:
        with pytest.raises(RewardError, match="cannot go to another process"):
            await scorer.score(samples("a", answer=lambda: 0))
        assert (await scorer.score(samples("abc"))).total == [3.0]

    with_scorer(config(user_module, "length"), body)


def test_workers_run_side_by_side(user_module: str, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    async def body(scorer: RewardScorer) -> list[float]:
        pairs = ((one, two), (two, one))
        both = await asyncio.gather(*(scorer.score(samples("a", answer=pair)) for pair in pairs))
        return [scores.total[0] for scores in both]

    cfg = config(user_module, "waits_for_the_other", workers=2, timeout_s=60)
    assert with_scorer(cfg, body) == [1.0, 1.0]


def test_a_worker_is_kept_from_call_to_call_and_is_another_process(user_module: str) -> None:
    async def body(scorer: RewardScorer) -> set[float]:
        return {pid for _ in range(5) for pid in (await scorer.score(samples("a", "b"))).total}

    pids = with_scorer(config(user_module, "where"), body)
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_a_worker_imports_nothing_heavy_by_itself(user_module: str) -> None:
    assert with_scorer(config(user_module, "imports_heavy"), lambda s: s.score(samples("a"))).total == [0.0]


def test_a_worker_ignores_the_terminals_interrupt(user_module: str) -> None:
    assert with_scorer(config(user_module, "interrupted"), lambda s: s.score(samples("a"))).total == [1.0]


def test_closing_ends_a_call_in_progress_and_later_calls(user_module: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def body() -> None:
        scorer = RewardScorer(config(user_module, "spins_on_x", timeout_s=300))
        scoring = asyncio.create_task(scorer.score(samples("x", answer=str(note))))
        await asyncio.to_thread(read_pid, note)
        await scorer.close()
        with pytest.raises(RewardError, match="closed"):
            await scoring
        with pytest.raises(RewardError, match="closed"):
            await scorer.score(samples("a"))
        await scorer.close()

    asyncio.run(body())
    assert gone(read_pid(note))


def test_closing_while_workers_start_leaves_none_behind(user_module: str) -> None:
    async def body(turns: int) -> None:
        scorer = RewardScorer(config(user_module, "length", workers=2))
        starting = asyncio.create_task(scorer.setup())
        for _ in range(turns):
            await asyncio.sleep(0)
        await scorer.close()
        with pytest.raises(RewardError, match="closed"):
            await starting
        assert psutil.Process().children() == before

    before = psutil.Process().children()
    for turns in range(6):
        asyncio.run(body(turns))


def test_inline_rewards_run_in_the_callers_thread_without_any_process(user_module: str) -> None:
    async def main() -> None:
        async with RewardScorer(config(user_module, "thread", "where"), inline=True) as scorer:
            scores = await scorer.score(samples("a"))
            assert scores.parts == {"thread": [threading.get_ident()], "where": [os.getpid()]}
        async with RewardScorer(config(user_module, "raises"), inline=True) as scorer:
            with pytest.raises(RewardError, match="raises raised KeyError") as caught:
                await scorer.score(samples("x"))
            assert isinstance(caught.value.__cause__, KeyError)

    asyncio.run(main())


@pytest.mark.parametrize(
    "function, told",
    [
        ("missing", "has no attribute 'missing'"),
        ("NOT_A_FUNCTION", "which is a int"),
        ("is_async", "an async function"),
        ("takes_two", "cannot take one Sample"),
        ("outer.<locals>.inner", "cannot be imported"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused_before_any_process_starts(
    user_module: str, function: str, told: str
) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=told) as caught:
        RewardScorer(config(user_module, function))
    assert f"{user_module}:{function}" in str(caught.value)
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    "cfg, told",
    [
        (RewardConfig(), "functions is empty"),
        (RewardConfig([RewardFunction("no.such.module:f")]), "No module named 'no'"),
        (RewardConfig([RewardFunction("just_a_name")]), "module:function"),
        (RewardConfig([RewardFunction("__main__:f")]), "__main__:f"),
        (RewardConfig([RewardFunction("builtins:float")] * 2), "names builtins:float 2 times"),
        (RewardConfig([RewardFunction("builtins:float", float("nan"))]), "must be finite, got nan"),
        (RewardConfig([RewardFunction("builtins:float")], workers=0), "workers must be >= 1, got 0"),
        (RewardConfig([RewardFunction("builtins:float")], timeout_s=0), "timeout_s must be > 0, got 0"),
    ],
)
def test_an_impossible_configuration_is_refused(cfg: RewardConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RewardScorer(cfg)


def test_workers_end_with_their_parent_even_while_a_reward_holds_the_interpreter(
    user_module: str, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(tmp_path)!r})
from actors.reward import RewardConfig, RewardFunction, RewardScorer, Sample
cfg = RewardConfig([RewardFunction("{user_module}:holds_the_interpreter")], timeout_s=300)
asyncio.run(RewardScorer(cfg).score([Sample("a question", "x", {str(note)!r})]))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    worker = read_pid(note)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=20)
    assert gone(worker)


def test_the_actor_scores_and_its_errors_arrive_as_themselves() -> None:
    from monarch.actor import this_host

    async def main() -> None:
        procs = this_host().spawn_procs(per_host={"procs": 1})
        cfg = RewardConfig([RewardFunction("apps.grpo.tasks:last_number")])
        client = RewardClient(procs.spawn("reward", RewardActor, cfg))
        await client.setup()
        assert (await client.score(samples("3 + 4 = 7", "8", answer="7"))).total == [1.0, 0.0]
        with pytest.raises(RewardError, match="last_number raised"):
            await client.score(samples("7", answer="seven"))
        await client.shutdown()
        await procs.stop()

    asyncio.run(main())
