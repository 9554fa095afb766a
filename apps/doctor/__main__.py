"""Looks at this machine before a run does: what is wrong with it, and what to do.

    python -m apps.doctor                 # all checks, an engine's start included; one to three minutes
    python -m apps.doctor --engine=false  # without the engine
    python -m apps.doctor --only memory,limits
    python -m apps.doctor --json          # one object, for scripts

Exit code 0 unless something is wrong; warnings are none. Nothing is changed and nothing killed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apps.doctor.checks import Check, Result, answer_inside, exit_code, run

CHECKS = (
    Check("versions", "apps.doctor.software:versions", 30),
    Check("libraries", "apps.doctor.machine:libraries"),
    Check("cpu", "apps.doctor.machine:cpu"),
    Check("memory", "apps.doctor.machine:memory"),
    Check("shared memory", "apps.doctor.machine:shared_memory"),
    Check("limits", "apps.doctor.machine:limits"),
    Check("loopback", "apps.doctor.machine:loopback", 20),
    Check("environment", "apps.doctor.machine:environment"),
    Check("hub", "apps.doctor.machine:hub", 20),
    Check("leftovers", "apps.doctor.leftovers:leftovers", 30),
    Check("sandbox", "apps.doctor.machine:sandbox", 120),
    Check("devices", "apps.doctor.software:devices", 120, alone=True),
    Check("transports", "apps.doctor.transports:transports", 180, alone=True),
    Check("monarch", "apps.doctor.engines:monarch", 180, alone=True),
    Check("engine", "apps.doctor.engines:engine", 600, alone=True),
)
_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red", "skipped": "dim"}


def main(words: Sequence[str]) -> int:
    """Runs the checks that `words` ask for, tells each as it ends; returns the exit code."""
    if words[:1] == ["--inside"]:
        answer_inside(*words[1:])
        return 0
    args = _parser().parse_args(words)
    console = Console()
    checks = chosen(args.only, args.engine)
    width = max(len(check.name) for check in checks)
    results = []
    for check in checks:
        if not args.json and console.is_terminal:
            console.print(f"{check.name} ...", style="dim", end="\r")
        results.append(run(check, args.patience))
        if not args.json:
            console.print(line_of(results[-1], width))
    if args.json:
        print(json.dumps({"ok": not exit_code(results), "checks": [asdict(result) for result in results]}))
    else:
        console.print(f"\n{summary(results)}", style="bold")
    return exit_code(results)


def _parser() -> argparse.ArgumentParser:
    description, _, examples = (__doc__ or "").partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("apps.doctor", description=description, epilog=examples, formatter_class=kind)
    boolean = {"true": True, "false": False}
    parser.add_argument("--engine", type=boolean.__getitem__, default=True, metavar="true|false", help="start vLLM")
    parser.add_argument("--only", default="", metavar="NAMES", help=", ".join(check.name for check in CHECKS))
    parser.add_argument("--patience", type=float, default=1.0, help="factor of every deadline, for a busy machine")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the lines")
    return parser


def chosen(only: str, engine: bool) -> list[Check]:
    """The checks to run. An unknown name ends the program with the known ones. Pure otherwise."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"apps.doctor: error: no check is called {unknown[0]!r}; there are {', '.join(known)}")
    wanted = [known[name] for name in names] or list(CHECKS)
    return [check for check in wanted if engine or check.name != "engine"]


def line_of(result: Result, width: int) -> Table:
    """State, name and what was found, with the remedy below it."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=7, style=_STYLES[result.state])
    row.add_column(width=width)
    row.add_column(overflow="fold")
    row.add_row(result.state, result.name, Text(result.found))
    if result.remedy:
        row.add_row("", "", Text.assemble(("do: ", "bold"), result.remedy))
    return row


def summary(results: Sequence[Result]) -> str:
    """One line. Pure."""
    counts = {state: sum(result.state == state for result in results) for state in _STYLES}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    if counts["wrong"]:
        return f"{told}: a run will not work here before that is mended"
    return f"{told}: a run will work here" + (", with what the warnings say" if counts["warning"] else "")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a check that hangs in a thread would hold the interpreter up
