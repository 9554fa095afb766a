"""The replay behind Monarch: its client is like a local Replay, and no wait blocks another call."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator

import pytest
import torch
from monarch.actor import this_host, this_proc
from tensordict import TensorDict

from forge import channel
from forge.batch import make_group
from forge.errors import DeadlineExceeded, RewardError, SchemaError, StalenessError
from forge.packing import flatten
from replay.actor import Replay, ReplayActor, ReplayClient
from replay.config import ReplayConfig

GROUPS_PER_STEP = 2


def group(versions: list[int] | None = None, rewards: tuple[float, float] = (0.0, 1.0)) -> TensorDict:
    """Two episodes of 3000 tokens: too large to travel inside a message."""
    versions = versions or [0, 0]
    td = make_group([7], [[1] * 3000] * 2, [[-0.5] * 3000] * 2, [[version] * 3000 for version in versions], group_id=0)
    td["rewards"] = torch.tensor(rewards)
    return td


@contextlib.asynccontextmanager
async def replay_in(where: str, cfg: ReplayConfig) -> AsyncIterator[Replay | ReplayClient]:
    if where == "local":
        yield Replay(cfg, groups_per_step=GROUPS_PER_STEP, degenerate="drop")
    elif where == "debug":
        yield ReplayClient(this_proc().spawn("replay_debug", ReplayActor, cfg, GROUPS_PER_STEP, "drop"))
    else:
        procs = this_host().spawn_procs(name="replay")
        yield ReplayClient(procs.spawn("replay", ReplayActor, cfg, GROUPS_PER_STEP, "drop"))
        await procs.stop()


async def until(replay: Replay | ReplayClient, key: str, wanted: float) -> None:
    for _ in range(10_000):
        if (await replay.stats())[key] == wanted:
            return
        await asyncio.sleep(0)
    pytest.fail(f"{key} never became {wanted}: {await replay.stats()}")


async def everything(replay: Replay | ReplayClient) -> None:
    await waits_do_not_block_other_calls(replay)
    await errors_arrive_as_themselves(replay)
    await a_cancelled_reserve_leaves_no_slot_taken(replay)
    await close_ends_every_wait(replay)


async def waits_do_not_block_other_calls(replay: Replay | ReplayClient) -> None:
    sample = asyncio.create_task(replay.sample(0, num_shards=2))
    tickets = [await replay.reserve() for _ in range(GROUPS_PER_STEP)]
    waiting = asyncio.create_task(replay.reserve())
    for ticket in tickets:
        assert ticket is not None
        await replay.add(ticket, group())
    batch = await sample
    assert batch is not None
    assert batch.policy_version == 0
    assert batch.stats["tokens/trained"] == 12000
    shards = [channel.take(handle) for handle in batch.handles]
    assert [shard["group_id"].tolist() for shard in shards] == [[0, 1], [0, 1]]
    assert all(torch.equal(shard["tokens"], flatten(group())["tokens"]) for shard in shards)
    assert not waiting.done()
    await replay.release(1)
    ticket = await waiting
    assert ticket is not None
    assert (ticket.seq, ticket.version) == (2, 1)
    await replay.fail(ticket)


async def errors_arrive_as_themselves(replay: Replay | ReplayClient) -> None:
    with pytest.raises(StalenessError, match="policy_version 0 is behind 1"):
        await replay.sample(0)
    with pytest.raises(DeadlineExceeded, match="policy_version 1: 0 of the next 2 groups are complete"):
        await replay.sample(1)
    ticket = await replay.reserve()
    assert ticket is not None
    with pytest.raises(SchemaError, match="rewards is missing"):
        await replay.add(ticket, group().exclude("rewards"))
    for error in (None, RewardError):
        ticket = await replay.reserve()
        assert ticket is not None
        with pytest.raises(error, match="2 groups in a row") if error else contextlib.nullcontext():
            await replay.add(ticket, group(rewards=(1.0, 1.0)))


async def a_cancelled_reserve_leaves_no_slot_taken(replay: Replay | ReplayClient) -> None:
    tickets = [await replay.reserve() for _ in range(GROUPS_PER_STEP)]
    waiting = asyncio.create_task(replay.reserve())
    await until(replay, "replay/waiting_reserves", 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for ticket in tickets:
        assert ticket is not None
        await replay.fail(ticket)
    await until(replay, "replay/free_slots", GROUPS_PER_STEP)


async def close_ends_every_wait(replay: Replay | ReplayClient) -> None:
    tickets = [await replay.reserve() for _ in range(GROUPS_PER_STEP)]
    waits = [asyncio.create_task(replay.reserve()), asyncio.create_task(replay.sample(1))]
    await until(replay, "replay/waiting_reserves", 1)
    await replay.close()
    assert await asyncio.gather(*waits) == [None, None]
    assert await replay.reserve() is None
    assert tickets[0] is not None
    await replay.add(tickets[0], group())


@pytest.mark.parametrize("where", ["local", "debug", "process"])
def test_the_replay_works_the_same_in_the_caller_and_behind_monarch(where: str) -> None:
    async def main() -> None:
        cfg = ReplayConfig(max_staleness=0, reserve_timeout_s=30, sample_timeout_s=0.5, max_degenerate_in_a_row=2)
        async with asyncio.timeout(120), replay_in(where, cfg) as replay:
            await everything(replay)

    asyncio.run(main())


def test_the_client_has_every_method_of_the_replay() -> None:
    def public(cls: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(cls, inspect.isfunction)
        return {n: list(inspect.signature(m).parameters) for n, m in methods if not n.startswith("_")}

    assert public(ReplayClient) == public(Replay)
