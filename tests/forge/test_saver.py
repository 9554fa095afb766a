"""When checkpoints are begun, what waits for them, and what counts when one fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forge.checkpoints import Checkpoints, Saver
from forge.errors import ActorFailed, RunFolderError


class FakeTrainer:
    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.failure: Exception | None = None
        self.staged: list[str] = []

    async def stage_state(self, folder: str) -> None:
        self.staged.append(folder)

    async def wait_state(self) -> None:
        await self.may_finish.wait()
        if self.failure is not None:
            raise self.failure


class FakeReplay:
    def __init__(self) -> None:
        self.marks: list[int] = []
        self.pruned: list[int] = []
        self.failing: list[Exception] = []

    async def mark(self, version: int) -> None:
        self.marks.append(version)

    async def marked(self) -> int:
        if self.failing:
            raise self.failing.pop()
        return 100 + self.marks[-1]

    async def prune(self, before: int) -> None:
        self.pruned.append(before)


class Setting:
    def __init__(self, folder: Path, every: int = 2, keep: int = 1, **options: Any) -> None:
        self.trainer, self.replay = FakeTrainer(), FakeReplay()
        self.checkpoints = Checkpoints(folder / "checkpoints", keep)
        self.saver = Saver(self.checkpoints, self.trainer, self.replay, every, **options)

    @property
    def there(self) -> list[int]:
        return [checkpoint.version for checkpoint in self.checkpoints.list()]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_step_that_is_due_begins_one_and_waits_for_no_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        setting = Setting(tmp_path)
        setting.trainer.may_finish.clear()
        for version in (1, 2, 3, 4, 5):
            await setting.saver.after_step(version)
        assert setting.there == []
        assert (setting.replay.marks, setting.saver.skipped) == ([2], 1)
        setting.trainer.may_finish.set()
        await setting.saver.finish(5)
        assert setting.there == [5]
        assert setting.replay.marks == [2, 5]
        assert setting.replay.pruned == [102, 105]

    run(scenario)


def test_the_journal_is_kept_as_far_back_as_the_oldest_checkpoint_or_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        two = Setting(tmp_path / "two", every=1, keep=2)
        recorded = Setting(tmp_path / "recorded", every=1, record=True)
        for setting in (two, recorded):
            for version in (1, 2, 3):
                await setting.saver.after_step(version)
                await setting.saver.finish(version)
        assert (two.there, two.replay.pruned) == ([2, 3], [101, 101, 102])
        assert recorded.replay.pruned == []

    run(scenario)


@pytest.mark.parametrize(("every", "start", "last"), [(0, 0, 7), (2, 6, 6), (2, 0, 0)])
def test_nothing_is_written_where_nothing_is_asked_for_or_new(
    tmp_path: Path, every: int, start: int, last: int
) -> None:
    async def scenario() -> None:
        setting = Setting(tmp_path, every=every, start=start)
        for version in range(start + 1, last + 1):
            await setting.saver.after_step(version)
        await setting.saver.finish(last)
        assert setting.trainer.staged == []

    run(scenario)


def test_one_that_fails_does_not_count_and_ends_the_run_at_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        setting = Setting(tmp_path)
        await setting.saver.after_step(2)
        await setting.saver.finish(2)
        setting.trainer.failure = RunFolderError("cannot write: no space")
        await setting.saver.after_step(4)
        assert setting.saver._writing is not None
        await asyncio.wait([setting.saver._writing])
        with pytest.raises(RunFolderError, match="no space"):
            await setting.saver.after_step(5)
        assert setting.there == [2]
        assert setting.replay.pruned == [102], "what the last whole checkpoint needs was removed"

    run(scenario)


def test_one_that_the_trainer_died_over_is_written_once_more_at_the_end_and_nobody_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        setting, complaints = Setting(tmp_path), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what["message"]))
        setting.trainer.failure = ActorFailed("trainer", "killed")
        await setting.saver.after_step(4)
        await setting.saver.settle()
        gc.collect()
        assert complaints == []
        setting.trainer.failure = None  # another one, which was restored and came to the same step
        await setting.saver.finish(4)
        assert setting.there == [4]

    run(scenario)


def test_the_last_one_is_written_once_more_where_the_replay_dies_over_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        setting = Setting(tmp_path)
        setting.replay.failing = [ActorFailed("replay", "it died before its state for the checkpoint was on the disk")]
        await setting.saver.finish(3)
        assert (setting.there, setting.replay.marks, setting.saver.skipped) == ([3], [3, 3], 1)

    run(scenario)
