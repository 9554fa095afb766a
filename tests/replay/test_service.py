"""The waits of a run: who wakes whom, deadlines, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from forge import channel
from forge.batch import check_packed, collate, make_group
from forge.errors import ConfigError, DeadlineExceeded, RewardError, SchemaError, StalenessError
from forge.packing import pad
from replay.config import ReplayConfig
from replay.policies import POLICIES, View
from replay.service import Replay, SampledBatch
from replay.staleness import Ticket, num_slots


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `main`; what hangs fails instead of stopping the suite."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def group(*versions: list[int], rewards: list[float] | None = None) -> TensorDict:
    """A group with one episode for each list of token versions; two fresh ones of version 0 by default."""
    versions = versions or ([0, 0], [0])
    tokens = [[1] * len(v) for v in versions]
    td = make_group([7, 8], tokens, [[-0.5] * len(v) for v in versions], versions, group_id=0)
    td["rewards"] = torch.tensor(rewards or [float(i) for i in range(len(versions))])
    return td


def make(max_staleness: int = 0, groups_per_step: int = 1, timeout_s: float = 30, **options: Any) -> Replay:
    cfg = ReplayConfig(max_staleness, reserve_timeout_s=timeout_s, sample_timeout_s=timeout_s)
    return Replay(cfg, groups_per_step=groups_per_step, **options)


async def reserved(replay: Replay) -> Ticket:
    ticket = await replay.reserve()
    assert ticket is not None
    return ticket


async def sampled(replay: Replay, policy_version: int, num_shards: int = 1) -> SampledBatch:
    batch = await replay.sample(policy_version, num_shards)
    assert batch is not None
    return batch


def group_ids(batch: SampledBatch) -> list[int]:
    """The group of each episode of the first rank."""
    return sorted(channel.take(batch.handles[0])["group_id"].tolist())


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_waiting_reserve_is_woken_by_a_release_in_the_order_of_asking() -> None:
    async def main() -> None:
        replay = make(0, 2)
        for _ in range(2):
            await replay.add(await reserved(replay), group())
        await sampled(replay, 0)
        order: list[int] = []

        async def ask(name: int) -> None:
            if await replay.reserve():
                order.append(name)

        tasks = [asyncio.create_task(ask(name)) for name in range(3)]
        await settle()
        assert order == []
        await replay.release(1)
        await settle()
        assert order == [0, 1]
        await replay.close()
        await asyncio.gather(*tasks)
        assert order == [0, 1], "a slot was granted after the end"

    run(main)


@pytest.mark.parametrize("how", ["fail", "degenerate", "malformed"])
def test_a_waiting_reserve_is_woken_by_a_group_that_leaves(how: str) -> None:
    async def main() -> None:
        replay = make(0, 1, degenerate="drop")
        ticket = await reserved(replay)
        waiting = asyncio.create_task(replay.reserve())
        await settle()
        assert not waiting.done()
        match how:
            case "fail":
                await replay.fail(ticket)
            case "degenerate":
                await replay.add(ticket, group(rewards=[0.35, 0.35]))
            case "malformed":
                with pytest.raises(SchemaError, match="rewards is missing"):
                    await replay.add(ticket, group().exclude("rewards"))
        assert await waiting == Ticket(1, 0)

    run(main)


@pytest.mark.parametrize("batch_follows", [False, True])
def test_a_waiting_reserve_is_woken_when_sampling_drops_a_stale_group(batch_follows: bool) -> None:
    async def main() -> None:
        replay = make(1, 1, start_version=4)
        for _ in range(2):
            await replay.add(await reserved(replay), group([4, 3], [4]))
        await sampled(replay, 4)
        await replay.release(5)
        third = await reserved(replay)
        waiting = asyncio.create_task(replay.reserve())
        await settle()
        assert not waiting.done()
        if batch_follows:
            await replay.add(third, group([5], [5]))
        sample = asyncio.create_task(replay.sample(5))
        assert await waiting == Ticket(3, 5)
        if not batch_follows:
            await replay.add(third, group([5], [5]))
        batch = await sample
        assert batch is not None
        assert (batch.stats["episodes/dropped"], batch.stats["tokens/wasted"]) == (2, 3)

    run(main)


def test_a_waiting_sample_is_woken_by_the_last_group_of_its_batch() -> None:
    async def main() -> None:
        replay = make(0, 2)
        tickets = [await reserved(replay) for _ in range(2)]
        waiting = asyncio.create_task(replay.sample(0))
        await replay.add(tickets[1], group())
        await settle()
        assert not waiting.done()
        await replay.add(tickets[0], group([0]))
        batch = await waiting
        assert batch is not None
        assert group_ids(batch) == [0, 1, 1]

    run(main)


def test_a_group_may_come_as_a_handle_or_as_a_tensordict() -> None:
    async def main() -> None:
        replay = make(0, 2)
        sent = group()
        await replay.add(await reserved(replay), channel.put(sent))
        await replay.add(await reserved(replay), sent)
        received = channel.take((await sampled(replay, 0)).handles[0])
        check_packed(received)
        assert received["group_id"].tolist() == [0, 1, 0, 1]  # longest first
        back, twice = pad([received]), collate([sent, sent])[torch.tensor([0, 2, 1, 3])]
        for key in ("tokens", "token_versions", "behavior_logprobs", "loss_mask", "rewards"):
            assert torch.equal(back[key], twice[key]), key
        assert sent["group_id"].tolist() == [0, 0], "the caller's group was changed"

    run(main)


def test_each_rank_gets_its_own_whole_episodes() -> None:
    async def main() -> None:
        replay = make(0, 2)
        for _ in range(2):
            await replay.add(await reserved(replay), group([0] * 9, [0] * 3, [0] * 3))
        batch = await sampled(replay, 0, num_shards=3)
        shards = [channel.take(handle) for handle in batch.handles]
        assert sorted(int(shard["lengths"].sum()) for shard in shards) == [11, 15, 16]
        assert sum(len(shard["lengths"]) for shard in shards) == 6
        for shard in shards:
            check_packed(shard)

    run(main)


def test_more_ranks_than_episodes_is_an_error() -> None:
    async def main() -> None:
        replay = make(0, 1)
        await replay.add(await reserved(replay), group())
        with pytest.raises(ConfigError, match="num_shards is 3, the batch has 2 episodes"):
            await replay.sample(0, num_shards=3)

    run(main)


def test_the_stats_of_a_batch_speak_of_its_episodes_and_of_the_time_since_the_last() -> None:
    async def main() -> None:
        replay = make(2, 2, degenerate="drop", start_version=7)
        tickets = [await reserved(replay) for _ in range(6)]
        await replay.add(tickets[0], group([6, 7], [7], rewards=[0.0, 1.0]))
        await replay.add(tickets[1], group([7], [7], rewards=[0.5, 0.5]))
        await replay.add(tickets[2], group([4], [7, 7], rewards=[0.0, 1.0]))
        await replay.add(tickets[3], group([5, 5], [7, 7], rewards=[2.0, 1.0]))
        await replay.add(tickets[4], group([7], [7, 7, 7, 7], rewards=[0.0, 1.0]))
        stats = (await sampled(replay, 7)).stats
        assert stats.pop("replay/admission_wait_s") >= 0
        assert stats.pop("queue/age_max_s") >= stats.pop("queue/age_mean_s") > 0
        assert stats == {
            "staleness/mean": 0.75,
            "staleness/max": 2.0,
            "staleness/bound": 2.0,
            "staleness/hist/0": 0.5,
            "staleness/hist/1": 0.25,
            "staleness/hist/2": 0.25,
            "reward/mean": 1.0,
            "reward/std": pytest.approx(0.5**0.5),
            "tokens/trained": 7.0,
            "tokens/wasted": 5.0,
            "waste/share": pytest.approx(5 / 12),
            "episodes/trained": 4.0,
            "episodes/dropped": 4.0,
            "groups/degenerate": 1.0,
            "groups/degenerate_share": 0.2,
            "groups/expired": 1.0,
            "groups/straggled": 0.0,
            "groups/failed": 0.0,
            "discard/q1": 1.0,
            "discard/q2": 0.5,
            "discard/q3": 0.5,
            "discard/q4": 0.0,
            "replay/queued_groups": 1.0,
            "replay/running_groups": 1.0,
            "replay/held_bytes": 9 * 21 + 2 * 24,  # of the queued group: 9 tokens, 2 episodes
            "pack/waste": 1 - 15 / 4096,
            "pack/padded_waste": 1 / 16,
        }
        await replay.add(tickets[5], group([7], [7]))
        later = (await sampled(replay, 8)).stats
        assert (later["tokens/wasted"], later["groups/degenerate"], later["staleness/max"]) == (0, 0, 1)

    run(main)


def test_an_episode_that_trains_no_token_does_not_enter_the_staleness() -> None:
    async def main() -> None:
        replay = make(1, 1, start_version=5)
        await replay.add(await reserved(replay), group([4, 5], []))
        stats = (await sampled(replay, 5)).stats
        assert (stats["staleness/mean"], stats["staleness/max"]) == (1, 1)
        assert stats["episodes/trained"] == 2

    run(main)


def test_reserve_gives_up_at_its_deadline_naming_who_holds_the_slots() -> None:
    async def main() -> None:
        replay = make(0, 1, timeout_s=0.05)
        await replay.add(await reserved(replay), group())
        await sampled(replay, 0)
        with pytest.raises(
            DeadlineExceeded, match=r"waited 0\.05 s for a free replay slot: .*\(versions: 1; released: 0"
        ):
            await replay.reserve()
        await replay.release(1)
        assert await replay.reserve() == Ticket(1, 1), "the reserve that gave up kept a slot"

    run(main)


def test_sample_gives_up_at_its_deadline_naming_the_missing_groups() -> None:
    async def main() -> None:
        replay = make(0, 2, timeout_s=0.05)
        await replay.add(await reserved(replay), group())
        late = await reserved(replay)
        with pytest.raises(
            DeadlineExceeded, match=r"policy_version 0: 1 of the next 2 .* running: seq 1 since 0\.\d s"
        ):
            await replay.sample(0)
        await replay.add(late, group())
        assert await replay.sample(0) is not None

    run(main)


def test_close_ends_every_wait_and_what_comes_later() -> None:
    async def main() -> None:
        replay = make(0, 2)
        tickets = [await reserved(replay) for _ in range(2)]
        waits = [asyncio.create_task(replay.reserve()) for _ in range(3)]
        sample = asyncio.create_task(replay.sample(0))
        await settle()
        await replay.close()
        assert [await wait for wait in waits] == [None] * 3
        assert await sample is None
        assert await replay.reserve() is None
        assert await replay.sample(0) is None
        await replay.add(tickets[0], channel.put(group()))
        await replay.fail(tickets[1])
        await replay.release(1)
        await replay.close()

    run(main)


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_cancelled_reserve_leaves_no_slot_taken(granted_first: bool) -> None:
    async def main() -> None:
        replay = make(0, 1)
        ticket = await reserved(replay)
        waiting = asyncio.create_task(replay.reserve())
        await settle()
        if granted_first:
            await replay.fail(ticket)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await replay.fail(ticket)
        assert await replay.reserve() is not None

    run(main)


def test_a_second_sampler_is_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        replay = make(0, 1)
        ticket = await reserved(replay)
        first = asyncio.create_task(replay.sample(0))
        await settle()
        with pytest.raises(StalenessError, match="another sample waits"):
            await replay.sample(0)
        await replay.add(ticket, group())
        assert await first is not None

    run(main)


def test_a_cancelled_sample_may_be_asked_again() -> None:
    async def main() -> None:
        replay = make(0, 1)
        ticket = await reserved(replay)
        waiting = asyncio.create_task(replay.sample(0))
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await replay.add(ticket, group())
        assert await replay.sample(0) is not None

    run(main)


def test_a_filter_that_rejects_everything_ends_in_an_error_not_in_a_hang() -> None:
    async def main() -> None:
        cfg = ReplayConfig(max_degenerate_in_a_row=20)
        replay = Replay(cfg, groups_per_step=2, degenerate="drop", reward_name="apps.x:flat")

        async def rollout() -> None:
            while ticket := await replay.reserve():
                await replay.add(ticket, group(rewards=[1.0, 1.0]))

        waiting = asyncio.create_task(replay.sample(0))
        with pytest.raises(RewardError, match=r"20 groups in a row .*apps\.x:flat"):
            await rollout()
        waiting.cancel()

    run(main)


# --- stragglers and policies


def patient(straggler_timeout_s: float, max_staleness: int = 0, groups_per_step: int = 1, **options: Any) -> Replay:
    """A replay whose train loop waits so long for a straggler, and much longer for a batch."""
    cfg = ReplayConfig(max_staleness, straggler_timeout_s=straggler_timeout_s, **options)
    return Replay(cfg, groups_per_step=groups_per_step)


def test_when_127_of_128_arrive_the_last_is_dropped_and_its_slot_makes_another() -> None:
    async def main() -> None:
        replay = patient(0.2, groups_per_step=128)
        tickets = [await reserved(replay) for _ in range(128)]
        replacing = asyncio.create_task(replay.reserve())
        sample = asyncio.create_task(replay.sample(0))
        for ticket in tickets[1:]:
            await replay.add(ticket, group())
        fresh = await replacing
        assert fresh is not None
        assert fresh.seq == 128
        await replay.add(fresh, group())
        batch = await sample
        assert batch is not None
        assert (batch.stats["groups/straggled"], batch.stats["groups/failed"]) == (1, 0)
        assert batch.stats["tokens/wasted"] == 0, "what it cost is not known before it comes"
        await replay.release(1)
        await replay.add(tickets[0], group())
        await replay.add(await reserved(replay), group([1], [1]))
        totals = await replay.stats()
        assert (totals["total/tokens_wasted"], totals["total/groups_added"]) == (3, 129)

    run(main)


def test_rollout_loops_that_vanish_stall_the_run_for_their_timeout_and_no_longer() -> None:
    async def main() -> None:
        replay = patient(0.2, max_staleness=1, groups_per_step=2)
        vanished = [await reserved(replay) for _ in range(4)]

        async def rollout() -> None:
            while ticket := await replay.reserve():
                await replay.add(ticket, group([ticket.version] * 2, [ticket.version]))

        working = asyncio.create_task(rollout())
        for version in range(6):
            batch = await sampled(replay, version)
            assert batch.stats["staleness/max"] <= 1
            await replay.release(version + 1)
        await replay.close()
        await working
        assert (await replay.stats())["total/groups_straggled"] == len(vanished)

    run(main)


def test_a_straggler_is_given_its_time_also_where_it_was_reserved_after_the_train_loop_began_to_wait() -> None:
    async def main() -> None:
        replay = patient(0.2)
        sample = asyncio.create_task(replay.sample(0))
        await settle()
        lost = await reserved(replay)
        fresh = await reserved(replay)
        assert (lost.seq, fresh.seq) == (0, 1), "the slot came back when the first one was dropped"
        await replay.add(fresh, group())
        batch = await sample
        assert batch is not None
        assert batch.stats["groups/straggled"] == 1

    run(main)


def test_a_group_that_ran_for_long_before_the_train_loop_waited_is_given_its_time_all_the_same() -> None:
    async def main() -> None:
        replay = patient(5.0)
        ticket = await reserved(replay)
        state = replay._buffer.state_dict()  # the age of a group, without sleeping for it
        state["slots"][0]["reserved_s_ago"] = 100.0
        replay._buffer.load_state_dict(state)
        sample = asyncio.create_task(replay.sample(0))
        for _ in range(3):
            await asyncio.sleep(0.01)
        await replay.add(ticket, group())
        batch = await sample
        assert batch is not None
        assert batch.stats["groups/straggled"] == 0

    run(main)


def test_a_sample_that_waits_for_a_straggler_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counting(view: View) -> list[int]:
        nonlocal asked
        asked += 1
        return list(view.groups)

    async def main() -> None:
        monkeypatch.setitem(POLICIES, "counting", counting)
        replay = patient(0.2, policy="counting")
        sample = asyncio.create_task(replay.sample(0))
        await asyncio.sleep(0.15)
        await reserved(replay)
        await replay.add(await reserved(replay), group())
        await sample
        assert asked < 50

    run(main)


def test_a_straggler_that_may_still_come_later_stalls_nothing() -> None:
    async def main() -> None:
        replay = patient(600.0, max_staleness=2, groups_per_step=1)
        slow = await reserved(replay)
        for version in range(2):
            fresh = await reserved(replay)
            await replay.add(fresh, group([fresh.version], [fresh.version]))
            assert group_ids(await sampled(replay, version)) == [fresh.seq] * 2
            await replay.release(version + 1)
        last = await reserved(replay)
        await replay.add(last, group([2], [2]))
        due = asyncio.create_task(replay.sample(2))
        await settle()
        assert not due.done(), "no later batch may hold the slow group"
        await replay.add(slow, group([0], [1]))
        batch = await due
        assert batch is not None
        assert (batch.stats["staleness/max"], batch.stats["staleness/bound"]) == (2, 2)

    run(main)


def test_past_its_deadline_sample_fails_before_a_straggler_timeout_that_is_longer() -> None:
    async def main() -> None:
        replay = patient(600.0, sample_timeout_s=0.05)
        await reserved(replay)
        with pytest.raises(DeadlineExceeded, match="0 of the next 1 groups are complete; running: seq 0"):
            await replay.sample(0)
        assert (await replay.stats())["total/groups_straggled"] == 0

    run(main)


@pytest.mark.parametrize("policy", ["fifo", "uniform", "advantage", "staleness", "replay.policies:fifo"])
def test_a_policy_of_the_configuration_orders_the_batches(policy: str) -> None:
    async def main() -> None:
        replay = Replay(ReplayConfig(1, policy=policy), groups_per_step=2, seed=3)
        tickets = [await reserved(replay) for _ in range(4)]
        for ticket, size in zip(tickets, (0.0, 0.5, 2.0, 1.0), strict=True):
            td = group()
            td["advantages"] = torch.tensor([-size, size])
            await replay.add(ticket, td)
        got = group_ids(await sampled(replay, 0))
        if policy == "advantage":
            assert got == [2, 2, 3, 3]
        elif policy != "uniform":
            assert got == [0, 0, 1, 1]

    run(main)


def test_an_unknown_policy_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"replay\.policy is 'lifo'"):
        Replay(ReplayConfig(policy="lifo"), groups_per_step=1)


def test_the_slots_are_those_of_the_configured_window() -> None:
    async def main() -> None:
        replay = Replay(ReplayConfig(max_staleness=3, window=0.5), groups_per_step=2)
        assert (await replay.stats())["replay/slots"] == num_slots(3, 2, 0.5) == 5
        assert "of 5 slots (max_staleness 3, 2 groups a step, window 0.5)" in replay._buffer.describe_slots()
        assert await replay.why_waiting() == "0 of 2 groups are there, 0 run"

    asyncio.run(main())


KEYS = [
    *("max_staleness", "window", "straggler_timeout_s", "max_uses", "memory_bytes", "journal_interval_s"),
    *("reserve_timeout_s", "sample_timeout_s", "max_degenerate_in_a_row"),
]


@pytest.mark.parametrize("name", KEYS)
def test_a_config_that_cannot_work_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match=f"replay.{name} must .*, got -1"):
        ReplayConfig(**{name: -1})  # type: ignore[arg-type]
