"""Weights through vLLM's own weight-transfer interface: the route that loads while decoding is paused.

    pause_generation ─► start_weight_update ─► update_weights({"version": v}) ─► finish_weight_update(v) ─► resume

The bytes are there already: `receiver.py` has pulled them behind decoding. vLLM knows this engine as "forge".
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.worker.shadow import load_layerwise


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: the receiver has connected."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which staged version to load."""

    version: int


class ForgeTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads what the worker's receiver has staged."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    staged: Callable[[int], Iterable[tuple[str, torch.Tensor]]]
    """The receiver's, set when it connects."""

    def init_transfer_engine(self, init_info: InitInfo) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            load_layerwise(self.model, self.staged(update_info.version), self.vllm_config)
        except Exception as error:
            # The engine passes on an error's text, and that of a failed assertion is empty.
            raise RuntimeError(traceback.format_exc()) from error

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...
