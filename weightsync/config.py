"""The options of weight sync, one section of an app's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.errors import ConfigError

TransportName = Literal["auto", "ipc", "memory", "rdma", "collective", "file"]
KvMode = Literal["keep", "recompute", "drain", "abort"]


@dataclass
class WeightSyncConfig:
    """How new weights travel from the trainer to the generators."""

    transport: TransportName = "auto"
    """What carries the bytes: memory and ipc within a host, rdma, collective or file anywhere; auto takes the first
    that these sides can use."""
    kv: KvMode = "keep"
    """What a flip does to running requests: keep their KV cache, recompute it, drain them first, or abort and go on
    from what they have."""
    shadow: bool = True
    """Keep a second copy of the model in the generator and flip to it; false loads while decoding is paused."""
    delta: bool = False
    """Send only elements whose bits have changed, where that is less; for collective, rdma and file."""
    checksums: bool = True
    """Check what arrived against what was sent."""
    staging: Literal["host", "device"] = "host"
    """Where the trainer keeps its snapshots; device needs room for two on the GPU."""
    flips_at_once: int = 1
    """Replicas that may flip at the same time; the others go on decoding."""
    deadline_s: float = 300.0
    """Seconds that a snapshot, a transfer, the staging or a flip may take, each; in a colocated run also an
    engine's going to sleep, or waking."""
    max_failures: int = 1
    """Failed updates in a row that end the run; until then the old weights serve and the newest is tried again."""
    folder: str = ""
    """Folder of the file transport, on a file system that both sides see; empty puts it into the run folder."""

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and its limit."""
        for name in ("deadline_s", "flips_at_once", "max_failures"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"weightsync.{name} must be > 0, got {getattr(self, name)}")
        if self.delta and self.transport in ("memory", "ipc"):
            raise ConfigError(
                f"weightsync.delta is true with transport {self.transport}, which maps the trainer's memory and moves "
                "nothing; use collective, rdma or file, or leave delta off"
            )
