"""One GPU box: the receivers map the trainer's snapshots in device memory, through CUDA's inter-process handles."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.transports.base import Sender
from weightsync.transports.memory import MemoryPuller


class IpcSender(Sender):
    """Says where a rank's snapshot buffers lie on its device."""

    name = "ipc"

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    @staticmethod
    def available(same_host: bool, device: str) -> str:
        if device != "cuda" or not torch.cuda.is_available():
            return "the trainer's snapshots are not in device memory (weightsync.staging)"
        return "" if same_host else "trainer and generators run on different hosts"

    def link(self) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        handles = [reduce_tensor(buffer) for buffer in self._buffers]
        return {"buffers": [{"handle": base64.b64encode(pickle.dumps(h)).decode()} for h in handles], "shared": False}


class IpcPuller(MemoryPuller):
    """As for host memory; the pieces of several ranks are put together on the device."""

    def _map(self, ref: Mapping[str, Any]) -> torch.Tensor:
        rebuild, arguments = pickle.loads(base64.b64decode(ref["handle"]))
        buffer: torch.Tensor = rebuild(*arguments)
        return buffer
