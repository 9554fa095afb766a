"""A pool frees what it lends, whatever environments do: hang, raise, die, or are forgotten by their clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from actors.environments.base import Action
from actors.environments.config import EnvironmentConfig
from actors.environments.places import Places
from actors.environments.pool import EnvironmentPool
from actors.environments.quarantine import Quarantine, task_key
from forge.errors import (
    ConfigError,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentRaised,
    EnvironmentTimeout,
    EpisodeEnded,
    QuarantinedError,
)

T = TypeVar("T")
ON, DONE = Action("on"), Action("done")
PATIENCE_S = 60.0

pytestmark = pytest.mark.usefixtures("worlds")


def waiting(**settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig("worlds:Waiting", **settings)


def plain(**settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig("worlds:Plain", **settings)


def with_pool(config: EnvironmentConfig, body: Callable[[EnvironmentPool], Awaitable[T]]) -> T:
    """Runs `body`; nothing that it began may be left when the pool is shut down."""

    async def main() -> T:
        async with asyncio.timeout(PATIENCE_S), EnvironmentPool(config, name="world") as pool:
            result = await body(pool)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    before = psutil.Process().children()
    result = asyncio.run(main())
    assert psutil.Process().children() == before
    return result


async def episode(pool: EnvironmentPool, task: dict[str, Any], *actions: Action) -> float:
    """A whole one; its reward."""
    name, _ = await pool.start(task)
    try:
        return sum([(await pool.step(name, action)).reward for action in actions])
    finally:
        await pool.close(name)


async def all_places_are_free(pool: EnvironmentPool, concurrency: int) -> None:
    """As many new episodes as there are places begin at once."""
    names = [(await pool.start({"id": f"probe {index}"}))[0] for index in range(concurrency)]
    assert pool.report().running == concurrency
    for name in names:
        await pool.close(name)
    assert pool.report().running == 0


@pytest.mark.parametrize("config", [waiting, plain])
def test_an_episode_runs_and_is_counted(config: Callable[..., EnvironmentConfig]) -> None:
    async def body(pool: EnvironmentPool) -> None:
        name, observation = await pool.start({"id": 7})
        assert observation.messages == [{"role": "user", "content": "hello"}]
        assert not (await pool.step(name, ON)).done
        assert (await pool.step(name, DONE)).done
        await pool.close(name)
        await pool.close(name)
        report = pool.report()
        assert (report.counts["episodes"], report.counts["steps"], report.running) == (1, 2, 0)
        turns = [line.turn for line in report.latency.lines() if line.part == "service"]
        assert turns == ["all", "turn0", "turn1", "turn2"]
        assert pool.report().counts["steps"] == 0
        assert report.row("extra/env/")["extra/env/world/episodes"] == 1

    with_pool(config(), body)


def test_places_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    async def body(pool: EnvironmentPool) -> None:
        first, _ = await pool.start({})
        order: list[int] = []

        async def next_one(index: int) -> None:
            name, _ = await pool.start({})
            order.append(index)
            await pool.close(name)

        tasks = []
        for index in range(20):
            tasks.append(asyncio.create_task(next_one(index)))
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert pool.report().waiting == 20
        tasks[5].cancel()
        await asyncio.wait([tasks[5]])
        assert pool.report().waiting == 19
        await pool.close(first)
        await asyncio.wait(tasks)
        assert order == [index for index in range(20) if index != 5]
        await all_places_are_free(pool, 1)

    with_pool(waiting(concurrency=1), body)


def test_no_more_episodes_than_places_run_at_once(worlds: Any) -> None:
    async def body(pool: EnvironmentPool) -> None:
        most = 0

        async def one() -> None:
            nonlocal most
            name, _ = await pool.start({})
            most = max(most, worlds.Waiting.alive)
            await pool.step(name, DONE)
            await pool.close(name)

        await asyncio.gather(*(one() for _ in range(50)))
        assert most == 3

    with_pool(waiting(concurrency=3), body)


def test_waiting_for_a_place_has_a_deadline_that_names_what_was_waited_for() -> None:
    async def body(pool: EnvironmentPool) -> None:
        await pool.start({})
        with pytest.raises(EnvironmentTimeout, match=r"world, task 'b', reset: waited 0.05 s for one of the 1 places"):
            await pool.start({"id": "b"})
        assert pool.report().waiting == 0

    with_pool(waiting(concurrency=1, place_timeout_s=0.05), body)


def test_a_plain_environment_that_sleeps_holds_up_nobody(tmp_path: Path) -> None:
    async def body(pool: EnvironmentPool) -> None:
        slow, _ = await pool.start({})
        sleeping = asyncio.create_task(pool.step(slow, Action("sleep")))
        for _ in range(5):
            assert await episode(pool, {}, ON, DONE) == 3.0
        assert not sleeping.done()
        assert (await sleeping).reward == 1.0

    with_pool(plain(concurrency=2), body)


@pytest.mark.parametrize("deed", ["hang", "raise", "quit", "time out"])
@pytest.mark.parametrize("where", ["reset", "turn 1"])
def test_a_failing_call_is_told_with_task_turn_and_cause_and_frees_all(deed: str, where: str, worlds: Any) -> None:
    async def body(pool: EnvironmentPool) -> None:
        in_reset = where == "reset"
        kind = EnvironmentTimeout if deed == "hang" else EnvironmentRaised
        with pytest.raises(kind, match=f"environment world, task 'bad', {where}: ") as caught:
            await episode(pool, {"id": "bad", "reset": deed if in_reset else ""}, Action(deed))
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.kind, error.task, error.turn) == ("world", "bad", 0 if in_reset else 1)
        told = {
            "hang": "took more than 0.05 s",
            "raise": "KeyError: ",
            "quit": "SystemExit: 5",
            "time out": "user's own",
        }
        assert told[deed] in str(error)
        assert ("worlds.py" in str(error)) == (deed != "hang")
        await all_places_are_free(pool, 2)

    limits = {"reset_timeout_s": 0.05, "turn_timeout_s": 0.05}
    with_pool(waiting(concurrency=2, retries=1, **limits), body)
    assert worlds.Waiting.alive == 0


@pytest.mark.parametrize(
    "deed, kind, told",
    [
        ("spin", EnvironmentTimeout, "turn 1: took more than 1.5 s; raise turn_timeout_s"),
        ("raise", EnvironmentRaised, "turn 1: KeyError: 'no such key'"),
        ("exit", EnvironmentDied, r"turn 1: its worker process ended \(exit code 3\)"),
        ("crash", EnvironmentDied, r"turn 1: its worker process ended \(killed by SIGSEGV\)"),
    ],
)
def test_a_failing_plain_environment_costs_its_own_episode_only(
    deed: str, kind: type[EnvironmentFailed], told: str, tmp_path: Path
) -> None:
    async def body(pool: EnvironmentPool) -> None:
        other, _ = await pool.start({})
        with pytest.raises(kind, match=told):
            await episode(pool, {"note": str(tmp_path / "pid")}, Action(deed))
        assert (await pool.step(other, ON)).reward == 1.0
        await pool.close(other)
        await all_places_are_free(pool, 2)

    with_pool(plain(concurrency=2, turn_timeout_s=1.5 if deed == "spin" else PATIENCE_S), body)


def test_a_reset_is_tried_again_with_a_fresh_environment_and_a_step_is_not(worlds: Any) -> None:
    async def body(pool: EnvironmentPool) -> None:
        tried: list[bool] = []
        name, _ = await pool.start({"reset": "once", "tried": tried})
        assert (worlds.Waiting.alive, worlds.Waiting.closed) == (1, 1)
        assert pool.report().counts["retries"] == 1
        tried.clear()
        with pytest.raises(EnvironmentRaised, match="the first try fails"):
            await pool.step(name, Action("once"))
        with pytest.raises(EpisodeEnded, match="it failed with EnvironmentRaised"):
            await pool.step(name, ON)

    with_pool(waiting(retries=1), body)


def test_a_plain_reset_is_tried_again_in_another_process(tmp_path: Path) -> None:
    async def body(pool: EnvironmentPool) -> None:
        name, _ = await pool.start({"reset": "once", "note": str(tmp_path / "pid")})
        assert (await pool.step(name, ON)).info["pid"] != int((tmp_path / "pid").read_text())

    with_pool(plain(retries=1), body)


@pytest.mark.parametrize("turns_of_the_loop", range(5))
def test_cancelling_a_call_anywhere_frees_all(turns_of_the_loop: int, worlds: Any) -> None:
    async def body(pool: EnvironmentPool) -> None:
        async def cancelled(call: Awaitable[Any]) -> None:
            task = asyncio.ensure_future(call)
            for _ in range(turns_of_the_loop):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        await cancelled(pool.start({"reset": "hang"}))
        await all_places_are_free(pool, 1)
        name, _ = await pool.start({})
        queued = asyncio.create_task(pool.start({}))
        await cancelled(pool.start({}))
        await cancelled(pool.step(name, Action("hang")))
        if turns_of_the_loop == 0:  # it had not begun
            await pool.close(name)
        next_name, _ = await queued
        await pool.close(next_name)
        await all_places_are_free(pool, 1)
        assert worlds.Waiting.alive == 0

    with_pool(waiting(concurrency=1), body)


def test_cancelling_a_plain_environments_calls_anywhere_leaves_no_process() -> None:
    """From before the process starts to the middle of its step; `with_pool` looks for processes."""

    async def body(pool: EnvironmentPool) -> None:
        for delay_ms in range(0, 150, 15):
            task = asyncio.create_task(episode(pool, {}, *[Action("sleep")] * 9))
            await asyncio.sleep(delay_ms / 1000)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.report().running == 0

    with_pool(plain(concurrency=1), body)


@pytest.mark.parametrize("verb", ["close", "shutdown"])
@pytest.mark.parametrize("where", ["place", "reset", "step"])
def test_closing_ends_a_call_in_progress_with_the_reason(where: str, verb: str, worlds: Any) -> None:
    async def body(pool: EnvironmentPool) -> None:
        if where == "place":
            await pool.start({})
        begun = pool.start({"reset": "hang" if where == "reset" else ""}, episode="mine")
        call: asyncio.Task[Any] = asyncio.create_task(begun)
        if where == "step":
            await call
            call = asyncio.create_task(pool.step("mine", Action("hang")))
        for _ in range(5):
            await asyncio.sleep(0)
        await (pool.close("mine") if verb == "close" else pool.shutdown())
        with pytest.raises(EpisodeEnded, match="its client closed it" if verb == "close" else "its pool is shut down"):
            await call
        assert worlds.Waiting.alive == (where == "place" and verb == "close")

    with_pool(waiting(concurrency=1), body)


def test_an_episode_that_was_closed_before_it_began_does_not_begin(worlds: Any) -> None:
    """A client that gives up names its episode; its messages may overtake each other."""

    async def body(pool: EnvironmentPool) -> None:
        await pool.close("mine")
        with pytest.raises(EpisodeEnded, match="mine is over: its client closed it"):
            await pool.start({}, episode="mine")
        assert worlds.Waiting.alive == 0

    with_pool(waiting(), body)


def test_two_steps_at_once_of_one_episode_are_refused() -> None:
    async def body(pool: EnvironmentPool) -> None:
        name, _ = await pool.start({})
        hanging = asyncio.create_task(pool.step(name, Action("hang")))
        await asyncio.sleep(0)
        with pytest.raises(EnvironmentFailed, match="turn 1 is under way"):
            await pool.step(name, ON)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging

    with_pool(waiting(), body)


@pytest.mark.parametrize("config", [waiting, plain])
def test_a_lease_that_nobody_closes_is_ended(config: Callable[..., EnvironmentConfig]) -> None:
    async def body(pool: EnvironmentPool) -> None:
        forgotten, _ = await pool.start({"id": "forgotten"})
        name, _ = await pool.start({})  # waits until the other's time is over
        assert pool.report().counts["expired"] == 1
        with pytest.raises(EpisodeEnded, match=r"nobody had closed it 0.3 s after its reset"):
            await pool.step(forgotten, ON)
        await pool.close(forgotten)
        await pool.close(name)

    with_pool(config(concurrency=1, episode_timeout_s=0.3), body)


def test_a_lease_ends_in_the_middle_of_a_step_too() -> None:
    async def body(pool: EnvironmentPool) -> None:
        name, _ = await pool.start({})
        with pytest.raises(EpisodeEnded, match="nobody had closed it"):
            await pool.step(name, Action("hang"))

    with_pool(waiting(episode_timeout_s=0.1), body)


def test_a_task_that_always_fails_is_quarantined_while_the_others_go_on(worlds: Any) -> None:
    async def body(pool: EnvironmentPool) -> None:
        bad = {"id": "bad", "reset": "hang"}
        good = [asyncio.create_task(episode(pool, {"id": index}, ON, DONE)) for index in range(30)]
        for _ in range(2):
            with pytest.raises(EnvironmentTimeout, match="task 'bad', reset"):
                await pool.start(bad)
        closed = worlds.Waiting.closed
        for _ in range(3):
            with pytest.raises(QuarantinedError, match=r"'bad' is in quarantine after 4 .*\n.*took more than 0.02 s"):
                await pool.start(bad)
        assert await asyncio.gather(*good) == [2.0] * 30
        assert worlds.Waiting.closed - closed <= 30
        report = pool.report()
        assert (report.counts["quarantined"], report.counts["refused"], report.counts["failures"]) == (1, 3, 4)
        assert report.counts["timeouts"] == 4
        ((key, failures),) = report.quarantine.items()
        assert (key, failures.count) == ("bad", 4)
        assert "took more than 0.02 s" in failures.last_error

    with_pool(waiting(concurrency=4, retries=1, quarantine_after=4, reset_timeout_s=0.02), body)


def test_a_task_whose_steps_fail_is_quarantined_and_who_waits_for_a_place_with_it_is_told() -> None:
    async def body(pool: EnvironmentPool) -> None:
        bad = {"prompt": "no id"}
        first, _ = await pool.start(bad)
        queued = asyncio.create_task(pool.start(bad))
        await asyncio.sleep(0)
        with pytest.raises(EnvironmentRaised):
            await pool.step(first, Action("raise"))
        with pytest.raises(QuarantinedError, match=task_key(bad)):
            await queued
        await all_places_are_free(pool, 1)

    with_pool(waiting(concurrency=1, quarantine_after=1), body)


def test_failures_with_good_episodes_between_them_do_not_add_up() -> None:
    async def body(pool: EnvironmentPool) -> None:
        for _ in range(5):
            with pytest.raises(EnvironmentRaised):
                await episode(pool, {"id": "flaky"}, Action("raise"))
            await episode(pool, {"id": "flaky"}, ON)
        assert pool.report().quarantine == {}

    with_pool(waiting(quarantine_after=2), body)


def test_an_episode_without_a_turn_is_no_good_episode() -> None:
    """Its reset works, and whatever would fail has not been tried."""

    async def body(pool: EnvironmentPool) -> None:
        for _ in range(2):
            await episode(pool, {"id": "bad"})
            with pytest.raises(EnvironmentRaised):
                await episode(pool, {"id": "bad"}, Action("raise"))
        assert list(pool.report().quarantine) == ["bad"]

    with_pool(waiting(quarantine_after=2), body)


def test_a_plain_environment_that_raised_is_closed_and_its_process_serves_no_other_episode(tmp_path: Path) -> None:
    async def body(pool: EnvironmentPool) -> None:
        name, _ = await pool.start({"close": "note", "note": str(tmp_path / "pid")})
        pid = (await pool.step(name, ON)).info["pid"]
        with pytest.raises(EnvironmentRaised):
            await pool.step(name, Action("raise"))
        assert int((tmp_path / "pid").read_text()) == pid
        name, _ = await pool.start({})
        assert (await pool.step(name, ON)).info["pid"] != pid

    with_pool(plain(), body)


def test_the_quarantine_forgets_the_oldest_failures_of_endlessly_many_tasks() -> None:
    quarantine = Quarantine(2)
    assert [quarantine.failed("first", "x" * 10_000) for _ in range(3)] == [False, True, False]
    assert "first" in quarantine
    assert len(quarantine["first"].last_error) < 5_000
    for index in range(20_000):
        quarantine.failed(str(index), "")
    assert "first" not in quarantine


def test_a_task_is_called_by_its_id_or_its_content() -> None:
    assert task_key({"id": 3, "prompt": "a"}) == "3"
    assert task_key({"a": 1, "b": {"c": [2]}}) == task_key({"b": {"c": [2]}, "a": 1})
    assert task_key({"a": 1}) != task_key({"a": 2})


@pytest.mark.parametrize("deed", ["hang", "raise"])
def test_an_environment_that_does_not_close_is_counted_and_frees_its_place(deed: str) -> None:
    async def body(pool: EnvironmentPool) -> None:
        assert await episode(pool, {"close": deed}, DONE) == 1.0
        assert pool.report().counts["close_failures"] == 1
        await all_places_are_free(pool, 1)

    with_pool(waiting(concurrency=1, close_timeout_s=0.05), body)


def test_an_environment_that_will_not_be_cancelled_is_left_behind_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("actors.environments.world._GRACE_S", 0.05)
    until = asyncio.Event()

    async def body(pool: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentTimeout):
            await episode(pool, {"until": until}, Action("stubborn"))
        assert "let CancelledError pass" in caplog.text
        await all_places_are_free(pool, 1)
        until.set()
        await asyncio.sleep(0.05)

    with_pool(waiting(concurrency=1, turn_timeout_s=0.05), body)


def test_latency_is_told_apart_by_the_tools_that_there_are() -> None:
    async def body(pool: EnvironmentPool) -> None:
        def calls(*names: str) -> Action:
            return Action(
                "", [{"id": "1", "type": "function", "function": {"name": n, "arguments": ""}} for n in names]
            )

        await episode(pool, {}, calls("search", "invented"), calls("search", "search"), ON)
        counts = {line.name: line.count for line in pool.report().latency.lines() if line.turn == "all"}
        assert counts == {"world": 4, "world/search": 2}

    with_pool(waiting(), body)


def test_a_thousand_short_episodes_leave_nothing_behind(worlds: Any) -> None:
    """Every seventh one fails, every eleventh is cancelled."""
    ours = psutil.Process()

    async def one(pool: EnvironmentPool, index: int) -> None:
        action = Action("raise") if index % 7 == 0 else DONE
        if index % 11:
            with contextlib.suppress(EnvironmentRaised):
                await episode(pool, {"id": index}, ON, action)
        else:
            task = asyncio.create_task(episode(pool, {"id": index}, ON, Action("hang")))
            for _ in range(index % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    async def body(pool: EnvironmentPool) -> None:
        await asyncio.gather(*(one(pool, index) for index in range(100)))
        await asyncio.sleep(0)  # the loop holds what it has just awaited
        gc.collect()
        files, objects = ours.num_fds(), len(gc.get_objects())
        await asyncio.gather(*(one(pool, index) for index in range(1000)))
        await asyncio.sleep(0)
        gc.collect()
        assert ours.num_fds() <= files
        assert len(gc.get_objects()) < objects + 1000
        assert worlds.Waiting.alive == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with_pool(waiting(concurrency=16), body)


def test_a_thousand_plain_episodes_share_two_processes_and_leave_nothing_behind() -> None:
    ours = psutil.Process()
    before = ours.num_fds()

    async def body(pool: EnvironmentPool) -> None:
        pids: set[int] = set()

        async def one() -> None:
            name, _ = await pool.start({})
            pids.add((await pool.step(name, DONE)).info["pid"])
            await pool.close(name)

        await asyncio.gather(*(one() for _ in range(1000)))
        assert len(pids) == 2
        assert {child.pid for child in ours.children()} >= pids

    with_pool(plain(concurrency=2), body)
    assert ours.num_fds() <= before + 1


def test_an_idle_process_that_died_is_replaced() -> None:
    async def body(pool: EnvironmentPool) -> None:
        name, _ = await pool.start({})
        pid = (await pool.step(name, ON)).info["pid"]
        await pool.close(name)
        os.kill(pid, 9)
        psutil.Process(pid).wait(20)
        assert await episode(pool, {}, ON) == 1.0
        assert pool.report().counts["failures"] == 0

    with_pool(plain(retries=0), body)


def test_a_place_that_comes_at_the_last_moment_is_not_lost() -> None:
    async def main() -> None:
        places = Places(1)
        await places.take(1)
        late = asyncio.create_task(places.take(1))
        await asyncio.sleep(0)
        places.give_back()
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert (places.free, places.waiting) == (1, 0)
        await places.take(1)

    asyncio.run(main())


@pytest.mark.parametrize(
    "config, told",
    [
        (EnvironmentConfig(), r"environment.path is empty; give module:name"),
        (EnvironmentConfig("no.such.module:f"), "'no.such.module:f', which cannot be imported .*; give module:name"),
        (EnvironmentConfig("__main__:f"), "'__main__:f', which another process cannot import"),
        (EnvironmentConfig("worlds:NOT_CALLABLE"), "which is a int"),
        (EnvironmentConfig("worlds:Mixed"), "of two kinds: reset is async, step is async, close is sync"),
        (EnvironmentConfig("worlds:NoStep"), "has no method step"),
        (EnvironmentConfig("worlds:WrongArguments"), "step of environment .* cannot take an action"),
        (EnvironmentConfig("worlds:silent_function"), "does not say what it returns"),
        (plain(kwargs={"greting": 3}), "'worlds:Plain' cannot be made with kwargs {'greting': 3}"),
        (waiting(concurrency=0), "environment.concurrency must be >= 1, got 0"),
        (waiting(retries=-1), "environment.retries must be >= 0, got -1"),
        (waiting(quarantine_after=0), "environment.quarantine_after must be >= 1, got 0"),
        (waiting(turn_timeout_s=0), "environment.turn_timeout_s must be > 0, got 0"),
    ],
)
def test_an_impossible_configuration_is_refused_before_any_process_starts(config: EnvironmentConfig, told: str) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=told):
        EnvironmentPool(config)
    assert psutil.Process().children() == before


def test_a_function_that_says_what_it_returns_makes_environments() -> None:
    async def body(pool: EnvironmentPool) -> None:
        _, observation = await pool.start({})
        assert observation.messages[0]["content"] == "made"

    with_pool(EnvironmentConfig("worlds:made_by_a_function"), body)
