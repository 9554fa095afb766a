from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest

from forge import processes
from forge.processes import RANK_ENV, RUN_ID_ENV, DeathWatch, kill_marked, marked_processes

SLEEPER = "import time; print(1, flush=True); time.sleep(600)"


def start(mark: str, program: str = SLEEPER, rank: int = 0) -> subprocess.Popen[str]:
    """A process with the mark, running `program`, which has printed its first line."""
    env = os.environ | {RUN_ID_ENV: mark, RANK_ENV: str(rank)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_only_processes_with_the_mark_are_found_and_killed() -> None:
    judge, other = start("some-run/judge", rank=3), start("some-run/judge_1")
    try:
        (found,) = marked_processes("some-run", name="judge")
        assert (found.pid, found.parent, found.rank) == (judge.pid, os.getpid(), 3)
        assert {process.pid for process in marked_processes("some-run")} == {judge.pid, other.pid}
        assert kill_marked("another-run") == 0
        assert kill_marked("some-run", name="judge") == 1
        assert judge.wait(timeout=20) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        end(judge, other)


@pytest.mark.parametrize(
    ("program", "num_ranks", "reason"),
    [
        ("print(1, flush=True); input(); raise SystemExit(5)", 1, "its process exited with code 5"),
        (
            "import os; print(1, flush=True); input(); os.kill(os.getpid(), 15)",
            2,
            "rank 1 of 2: its process was killed by SIGTERM",
        ),
    ],
)
def test_a_death_is_told_with_its_cause_and_leaves_the_process_to_its_parent(
    program: str, num_ranks: int, reason: str
) -> None:
    process = start("death-run/judge", program, rank=1)

    async def main() -> tuple[str, str]:
        news: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        watch = DeathWatch(lambda name, reason: news.set_result((name, reason)))
        watch.watch("judge", "death-run", num_ranks, {os.getpid()})
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        try:
            return await asyncio.wait_for(news, 20)
        finally:
            watch.close()

    try:
        assert asyncio.run(main()) == ("judge", reason)
        assert process.wait(timeout=20) != 0
    finally:
        end(process)


def reason_of_one_that_another_reaped() -> str:
    process = start("reaped-run/judge")

    async def main() -> str:
        news: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watch = DeathWatch(lambda _, reason: news.set_result(reason))
        watch.watch("judge", "reaped-run", 1, {os.getpid()})
        process.kill()
        process.wait()
        try:
            return await asyncio.wait_for(news, 20)
        finally:
            watch.close()

    try:
        return asyncio.run(main())
    finally:
        end(process)


def test_a_death_whose_cause_another_has_taken_is_told_after_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeathWatch, "grace_s", 0.01)
    monkeypatch.setattr(processes, "_remembered_exit", lambda handle: "")  # as kernels before 6.15 do
    assert reason_of_one_that_another_reaped() == "its process ended"


LINUX = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


@pytest.mark.skipif(LINUX < (6, 15), reason="this kernel forgets how a reaped process ended")
def test_a_death_whose_cause_another_has_taken_is_told_by_the_kernel_without_delay() -> None:
    assert reason_of_one_that_another_reaped().startswith("its process was killed by SIGKILL")


def test_processes_that_others_started_are_not_watched() -> None:
    process = start("foreign-run/judge")

    async def main() -> None:
        watch = DeathWatch(lambda name, _: pytest.fail(f"{name} was watched"))
        watch.watch("judge", "foreign-run", 1, {os.getpid() + 1})
        process.kill()
        process.wait()
        await asyncio.sleep(0.05)
        watch.close()

    try:
        asyncio.run(main())
    finally:
        end(process)
