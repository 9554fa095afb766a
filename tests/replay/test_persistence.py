"""A replay that is made again from its journal: what it had, what it serves, and in which order tickets come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from forge import channel
from forge.batch import make_group
from forge.data import PromptStream
from forge.errors import ConfigError, RunFolderError
from replay.config import ReplayConfig
from replay.events import Tokens
from replay.persistence import JournalPlace
from replay.service import Replay, SampledBatch
from replay.staleness import Ticket

B = 2


def prompts(rows: int = 5) -> PromptStream:
    return PromptStream([{"prompt": f"p{i}"} for i in range(rows)], lambda row: (row["prompt"], [1]), seed=1)


def make(folder: Path, resume_from: int | None = None, *, rows: int = 5, run: str = "a run", **options: Any) -> Replay:
    return Replay(
        ReplayConfig(**{"max_staleness": 1, "reserve_timeout_s": 5.0, "sample_timeout_s": 5.0, **options}),
        groups_per_step=B,
        start_version=resume_from or 0,
        prompts=prompts(rows),
        journal=JournalPlace(str(folder / "journal"), run, resume_from),
    )


def group(ticket: Ticket, version: int, rewards: tuple[float, float] = (0.0, 1.0)) -> TensorDict:
    made = make_group([1], [[7, 8], [9]], [[-1.0, -2.0], [-3.0]], [[version] * 2, [version]], group_id=ticket.seq)
    made["rewards"] = torch.tensor(rewards)
    return made


def tokens(ticket: Ticket, place: int, offset: int, ids: list[int], version: int = 0) -> Tokens:
    count = len(ids)
    columns = torch.tensor(ids).int(), torch.full((count,), -1.0), torch.full((count,), version).int()
    return Tokens(ticket.seq, place, offset, *columns)


async def reserve(replay: Replay) -> Ticket:
    ticket = await replay.reserve()
    assert ticket is not None
    return ticket


async def sample(replay: Replay, version: int) -> tuple[list[int], SampledBatch]:
    batch = await replay.sample(version)
    assert batch is not None
    return sorted(set(channel.open(batch.handles[0])["group_id"].tolist())), batch


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_what_was_complete_trained_and_unfinished_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = make(tmp_path)
        assert await first.setup() == ""
        a, b, c, d = [await reserve(first) for _ in range(4)]
        for ticket in (a, b, c):
            await first.add(ticket, group(ticket, 0))
        await first.progress([tokens(d, 0, 0, [5, 6]), tokens(d, 1, 0, [7]), tokens(a, 0, 0, [1])])
        await first.progress([tokens(d, 0, 2, [8])])
        assert (await sample(first, 0))[0] == [0, 1]
        await first.release(1)
        e, f = await reserve(first), await reserve(first)
        assert (e.version, f.version) == (1, 1)
        await first.shut_down()

        second = make(tmp_path, resume_from=0)
        assert "3 complete groups, of which 1 batches are trained again, and 3 unfinished ones with 4 tokens" in (
            await second.setup()
        )
        again = await reserve(second)
        assert (again.seq, again.prompt) == (d.seq, d.prompt)
        assert {place: part.tokens.tolist() for place, part in again.begun.items()} == {0: [5, 6, 8], 1: [7]}
        waiting = asyncio.create_task(second.reserve())
        await asyncio.sleep(0.05)
        assert not waiting.done(), "a ticket of version 1 was given out while the generators hold version 0"
        assert (await sample(second, 0))[0] == [0, 1]
        await second.release(1)
        later = await waiting
        assert later is not None
        assert (later.seq, later.prompt, later.version, dict(later.begun)) == (e.seq, e.prompt, 1, {})
        await second.add(again, group(again, 0))
        seqs, batch = await sample(second, 1)
        assert seqs == [2, 3]
        assert batch.stats["episodes/trained"] == 4
        assert batch.stats["staleness/max"] == 1
        await second.shut_down()

    run(scenario)


def test_the_stream_of_prompts_goes_on_behind_the_last_ticket(tmp_path: Path) -> None:
    async def scenario() -> None:
        whole = [(p.epoch, p.id) for p in (stream.draw() for stream in [prompts()] for _ in range(12))]
        drawn: list[tuple[int, int]] = []
        version = 0
        for incarnation in range(3):
            replay = make(tmp_path, resume_from=version if incarnation else None)
            for _ in range(2):
                pair = [await reserve(replay) for _ in range(B)]
                drawn += [(t.prompt.epoch, t.prompt.id) for t in pair]
                for ticket in pair:
                    await replay.add(ticket, group(ticket, version))
                await sample(replay, version)
                version += 1
                await replay.mark(version)
                await replay.release(version)
                assert await replay.marked() >= 0
            await replay.shut_down()
        assert drawn == whole

    run(scenario)


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_prompts_than_a_step_are_used_in_further_epochs(tmp_path: Path, rows: int) -> None:
    async def scenario() -> None:
        replay = make(tmp_path, rows=rows)
        tickets = [await reserve(replay) for _ in range(2 * B)]
        epochs = [ticket.prompt.epoch for ticket in tickets]
        assert epochs == [i // rows for i in range(2 * B)]
        await replay.shut_down()

    run(scenario)


def test_a_prompt_that_cannot_be_read_takes_no_slot(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = Replay(
            ReplayConfig(),
            groups_per_step=B,
            prompts=PromptStream([{"prompt": "a"}], lambda row: ("", []), shuffle=False),
        )
        with pytest.raises(ConfigError, match="row 0 has 0 tokens"):
            await replay.reserve()
        assert (await replay.stats())["replay/free_slots"] == (await replay.stats())["replay/slots"]

    run(scenario)


def test_groups_that_left_stay_gone_and_what_they_counted_stays_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = make(tmp_path)
        tickets = [await reserve(first) for _ in range(4)]
        await first.fail(tickets[0])
        await first.add(tickets[1], group(tickets[1], 0))
        await first.shut_down()
        second = make(tmp_path, resume_from=0)
        stats = await second.stats()
        assert stats["replay/running_groups"] == 2
        assert stats["replay/queued_groups"] == 1
        assert (stats["total/groups_reserved"], stats["total/groups_failed"], stats["total/groups_added"]) == (4, 1, 1)
        assert [(await reserve(second)).seq for _ in range(3)] == [2, 3, 4]
        await second.shut_down()

    run(scenario)


def test_the_first_figures_of_a_resumed_run_are_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = make(tmp_path)
        for version in range(2):
            for ticket in [await reserve(first) for _ in range(B)]:
                await first.add(ticket, group(ticket, version))
            await sample(first, version)
            await first.release(version + 1)
        await first.mark(2)
        await first.marked()
        await first.shut_down()
        second = make(tmp_path, resume_from=2)
        for ticket in [await reserve(second) for _ in range(B)]:
            await second.add(ticket, group(ticket, 2))
        _, batch = await sample(second, 2)
        assert batch.stats["episodes/trained"] == 2 * B
        assert (await second.stats())["total/groups_trained"] == 3 * B
        await second.shut_down()

    run(scenario)


def test_what_cannot_be_gone_on_with_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(RunFolderError, match="holds no journal"):
            make(tmp_path / "nothing", resume_from=0)
        first = make(tmp_path)
        await first.shut_down()
        with pytest.raises(RunFolderError, match="belongs to the run a run, not to another"):
            make(tmp_path, resume_from=0, run="another")
        with pytest.raises(RunFolderError, match="no whole snapshot of version 7; it has those of"):
            make(tmp_path, resume_from=7)

    run(scenario)


def test_a_replay_without_a_journal_ignores_progress_and_marks(tmp_path: Path) -> None:
    async def scenario() -> None:
        replay = Replay(ReplayConfig(), groups_per_step=B)
        ticket = await reserve(replay)
        await replay.progress([tokens(ticket, 0, 0, [1])])
        await replay.mark(0)
        assert await replay.marked() == -1
        await replay.prune(3)
        await replay.shut_down()
        assert ticket.prompt is None

    run(scenario)
