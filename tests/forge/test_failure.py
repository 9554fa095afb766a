from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forge.errors import ActorFailed, ConfigError, RewardError, StalenessError
from forge.failure import describe, explain, logged_error, print_failure, root_cause

LOG = """\
INFO 11-30 [model.py:2] loaded
(EngineCore pid=7) ERROR 11-30 18:00:59 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-30 18:00:59 [core.py:1510]   File "cache.py", line 1, in check
(EngineCore pid=7) ERROR 11-30 18:00:59 [core.py:1510] ValueError: No available memory.
Traceback (most recent call last):
  File "async_llm.py", line 2, in start
    raise RuntimeError(
torch.OutOfMemoryError: and later another one
"""


class SupervisionError(RuntimeError):
    """Stands for Monarch's, which cannot be constructed here; only the name of the type is looked at."""


class ActorError(Exception):
    """Stands for Monarch's: the remote exception, and its traceback as text."""

    def __init__(self, exception: BaseException) -> None:
        super().__init__(f"Actor call reward.score failed.\n Traceback (remote)\n  {exception!r}")
        self.exception = exception


DEAD = ActorFailed("generator_0", "its process was killed by SIGKILL")
CONSEQUENCE = SupervisionError("Endpoint call generator_0.generate() failed")
MINE = ValueError("a reward must be finite")


def test_of_a_log_the_first_error_behind_a_place_is_told(tmp_path: Path) -> None:
    log = tmp_path / "generator_0.log"
    assert logged_error(log) == ""
    log.write_text(LOG)
    assert logged_error(log) == "ValueError: No available memory."
    assert logged_error(log, LOG.index("Traceback")) == "torch.OutOfMemoryError: and later another one"
    assert logged_error(log, len(LOG)) == ""


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([CONSEQUENCE, DEAD, CONSEQUENCE], DEAD),
        ([CONSEQUENCE, DEAD, MINE], MINE),
        ([ExceptionGroup("inner", [CONSEQUENCE, ExceptionGroup("innermost", [DEAD])]), CONSEQUENCE], DEAD),
        ([CONSEQUENCE], CONSEQUENCE),
        ([MINE, KeyError("later")], MINE),
    ],
)
def test_the_cause_is_the_users_error_then_the_dead_actor_then_failed_calls(
    members: list[Exception], expected: Exception
) -> None:
    assert root_cause(ExceptionGroup("tasks", members)) is expected


def test_a_cancellation_is_never_the_cause_while_there_is_another() -> None:
    assert root_cause(BaseExceptionGroup("tasks", [asyncio.CancelledError(), CONSEQUENCE])) is CONSEQUENCE


def test_an_error_of_user_code_is_shown_with_its_traceback_and_without_the_group() -> None:
    try:
        raise StalenessError("too stale")
    except StalenessError as error:
        text = describe(root_cause(ExceptionGroup("tasks", [error])))
    assert text.startswith("Traceback (most recent call last)")
    assert "test_failure.py" in text
    assert "ExceptionGroup" not in text


@pytest.mark.parametrize("error", [ConfigError("procs must be >= 1"), DEAD, RewardError("f raised")])
def test_errors_that_explain_themselves_are_shown_without_a_traceback(error: Exception) -> None:
    assert describe(error) == f"{type(error).__name__}: {error}"


def test_a_remote_error_is_shown_with_the_remote_traceback_alone() -> None:
    assert describe(ActorError(KeyError("x"))) == str(ActorError(KeyError("x")))
    shown = describe(ActorError(ActorError(RewardError("f raised on prompt 'What is'"))))
    assert shown == "RewardError: f raised on prompt 'What is'\n(Actor call reward.score failed)"


def test_failures_are_printed_once_with_the_dead_actor_beside_the_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert print_failure(ExceptionGroup("tasks", [CONSEQUENCE, MINE, DEAD])) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["ValueError: a reward must be finite", f"at the same time: {DEAD}"]


def test_a_config_error_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_failure(ExceptionGroup("tasks", [ConfigError("procs must be >= 1, got 0")])) == 2
    assert capsys.readouterr().err == "ConfigError: procs must be >= 1, got 0\n"


def test_monarchs_reports_are_put_into_words() -> None:
    head = "The actor <root>.<probes.Probe trainer_0{'procs': 1/2}> and all its descendants have failed:\n  "
    alone = head.replace("1/2", "0/1")
    assert explain(head + "the process this actor was running on failed: Killed(sig=9)") == (
        "rank 1 of 2: its process was killed by SIGKILL; the kernel does that when memory runs out, see dmesg"
    )
    nodes = head.replace("{'procs'", "{'hosts': 1/2, 'procs'")
    assert explain(nodes + "the process exited with non-zero code 1").startswith("rank 3 of 4: ")
    assert explain(alone + "the process failed: Killed(sig=11)") == "its process was killed by SIGSEGV"
    assert explain(alone + "the process failed: Killed(sig=99)") == "its process was killed by signal 99"
    assert explain(alone + "the process exited with non-zero code 3") == "its process exited with code 3"
    raised = explain(alone + "actor explicitly aborted due to: Traceback ...\n  ValueError: bad\n")
    assert raised == "it raised where no caller waits for the answer\nTraceback ...\n  ValueError: bad"
    stopped = explain(alone + "timeout waiting for message from proc mesh agent while querying for x")
    assert stopped.startswith("its process does not answer: it is stopped")
    assert explain("a text of some later version") == "a text of some later version"
