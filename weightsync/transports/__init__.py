"""The ways that weights can go, and which one is taken."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from forge.errors import ConfigError
from forge.segment import Segment
from weightsync.transports.base import Puller, Sender
from weightsync.transports.context import PullerContext, SenderContext

MAPPED = ("memory", "ipc")
"""Nothing is transferred: receivers read the trainer's own buffers."""
ORDER = ("ipc", "memory", "rdma", "collective", "file")
"""In which `choose` tries them: what moves least comes first; files, which somebody has to clear away, come last."""


def choose(wanted: str, *, same_host: bool, device: str, note: Callable[[str], None] = lambda line: None) -> str:
    """The transport between a trainer whose snapshots are on `device` and generators on the same host or not.

    "auto" takes the first of `ORDER` that these sides can use; a name is taken at its word. `note` is told which and
    why. Raises ConfigError when what is asked for cannot work.
    """
    reasons = why_not(same_host, device)
    if wanted != "auto":
        if reasons[wanted] and wanted in MAPPED:
            usable = ", ".join(name for name in ORDER if not reasons[name])
            raise ConfigError(f"weightsync.transport is {wanted}, but {reasons[wanted]}; use auto or one of {usable}")
        note(f"weights travel by {wanted}, as asked{f' ({reasons[wanted]})' if reasons[wanted] else ''}")
        return wanted
    name = next(name for name in ORDER if not reasons[name])
    skipped = "; ".join(f"not {other}: {reasons[other]}" for other in ORDER[: ORDER.index(name)])
    note(f"weights travel by {name}{f' ({skipped})' if skipped else ''}")
    return name


def why_not(same_host: bool, device: str) -> dict[str, str]:
    """Of each transport, in the order in which they are tried, what keeps these sides from using it; "": nothing."""
    return {name: _sender(name).available(same_host, device) for name in ORDER}


def make_sender(
    name: str, context: SenderContext, buffers: Sequence[torch.Tensor], segments: Sequence[Segment], shared: bool
) -> Sender:
    """A trainer rank's half. `buffers` are its snapshots with their stamps, `segments` what they may lie in."""
    kind: type = _sender(name)
    if name == "memory":
        sender: Sender = kind(segments, shared)
    elif name == "ipc":
        sender = kind(buffers)
    elif name == "rdma":
        sender = kind(context.buffers, context.payload)
    else:
        sender = kind(context)
    return sender


def make_puller(name: str, context: PullerContext) -> Puller:
    """A generator worker's half."""
    puller: Puller = _load(name, "Puller")(context)
    return puller


def _sender(name: str) -> type[Sender]:
    return _load(name, "Sender")


def _load(name: str, half: str) -> type:
    kind: type = getattr(importlib.import_module(f"weightsync.transports.{name}"), name.capitalize() + half)
    return kind
