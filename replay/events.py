"""What the journal holds: the events of a run, and the state that a segment of it begins with.

Immutable by contract: the journal keeps a reference and writes it a moment later, so tensors and containers of an
event that was handed in are not changed any more. `prompt` and `state` hold anything: plain values (None, bool,
int, float, str, lists, tuples, dicts), tensors, TensorDicts and `forge.data.Prompt` are written as they are,
whatever else is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class Start:
    """The first record of a segment."""

    run: str
    """Names the run: a journal of another one is refused."""
    incarnation: int
    """How many times the run had been resumed before."""
    version: int
    """The trainer's version that the segment's snapshot belongs to."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """A ticket was given."""

    seq: int
    version: int
    """`Ticket.version`."""
    prompt: Any = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """What the event adds to the counters, {"groups_reserved": 1} say."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `ReplayState.state` that have a new value from here on; none of them without the event."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Progress of one episode of a running group."""

    seq: int
    episode: int
    """Its place in the group, from 0."""
    offset: int
    """Tokens of the completion before these; what was there from `offset` on is replaced."""
    tokens: torch.Tensor
    """`[n]` int32."""
    logprobs: torch.Tensor
    """`[n]` float32, under the distribution that was sampled from."""
    versions: torch.Tensor
    """`[n]` int32; -1 where the policy did not produce the token."""
    finish: str = ""
    """Why the episode ended here, stop or length say; empty while it goes on."""
    kept: torch.Tensor | None = None
    """`[n, K]` int32, the recorded supports (`forge/supports.py`); None where none are recorded."""


@dataclass(frozen=True, slots=True)
class Add:
    """A running group is complete. Its tokens so far are forgotten, the group has them."""

    seq: int
    group: TensorDict
    """A Group `[G]` in whatever layout the replay keeps."""
    counts: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gone:
    """A group left untrained: failed, straggled, expired, degenerate."""

    seq: int
    reason: str
    counts: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch was handed to the trainer. Written before any token of the version that it makes."""

    version: int
    """The version that it was sampled at; training it makes the next one."""
    seqs: Sequence[int]
    """Its groups, in order."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Row of metrics as the sampler got it; for the replay of a recording."""
    state: Mapping[str, Any] = field(default_factory=dict)


Event = Reserve | Tokens | Add | Gone | Trained


@dataclass(frozen=True, slots=True)
class Partial:
    """An episode of a running group, as far as it has come. Its tensors are those of `Tokens`."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    finish: str = ""
    kept: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A group that the replay holds: running, complete, or trained and kept for later batches."""

    seq: int
    version: int
    """`Ticket.version`."""
    prompt: Any = None
    group: TensorDict | None = None
    """None while it is running."""
    partials: Mapping[int, Partial] = field(default_factory=dict)
    """Of a running one: its episodes that have tokens."""
    uses: int = 0
    """Batches of versions before the state's that it was part of; 0 holds a slot."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was trained at a version that has been rolled back: served again, as it was, once."""

    version: int
    seqs: Sequence[int]
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class ReplayState:
    """The replay when the trainer stands at `version`: what a snapshot holds, and what recovery returns."""

    version: int
    next_seq: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    """By seq, those of `again` included."""
    again: list[Batch] = field(default_factory=list)
    """The batches of `version` and later that were trained already, in order. The first is served at its own
    version, and so on; only then does the policy choose again."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counters; the batches of `again` are not counted, they are when they are served."""
    state: dict[str, Any] = field(default_factory=dict)
    """Whatever else the owner needs back: the cursor of the prompts, seeds, ..."""
