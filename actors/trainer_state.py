"""All that a trainer goes on from: parameters, optimizer, version, random numbers; saved while training goes on.

    step v ─► stage(v): one copy in memory ─► step v + 1 ...
                  └─► a thread writes and syncs the copy ─► saved

Every rank writes its own shards (torch.distributed.checkpoint), so another number of ranks can load them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from forge.errors import ConfigError, DeadlineExceeded, RunFolderError
from forge.run_folder import folder_error
from weightsync.layout import is_adapter

# Said by torch's writing thread in every run with one rank.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class TrainerState:
    """Saves and loads one rank's part of the state of `model` and `optimizer`; every call is of all ranks together.

    With `adapters_only` the base model is left out: it comes from where it came from at first.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    world: int
    adapters_only: bool = False

    def __post_init__(self) -> None:
        # A group of its own: the writing thread's messages must not pair up with those of a step.
        self._group = dist.new_group(backend="gloo") if self.world > 1 else None
        self._saving: Future[Any] | None = None
        self._folder = Path()

    def stage(self, folder: Path, policy_version: int) -> None:
        """Copies the state to memory and returns; a thread goes on to write it to `folder`, see `wait`.

        Raises RunFolderError when the disk has no room for it.
        """
        assert self._saving is None, "the last state is still being written; wait for it first"
        self._folder = folder
        state = self._state(policy_version)
        with _explained(folder, "write"):
            _check_space(folder, state)
            self._saving = dcp.async_save(  # type: ignore[assignment]
                state,
                checkpoint_id=folder,
                process_group=self._group,
                no_dist=self.world == 1,
            )

    def wait(self, timeout_s: float) -> None:
        """Until the staged state is on the disk.

        Raises RunFolderError when it cannot be written, DeadlineExceeded after `timeout_s`.
        """
        saving = self._saving
        assert saving is not None, "stage comes before wait"
        try:
            with _explained(self._folder, "write"):
                saving.result(timeout_s)
        except FutureTimeout as error:
            raise DeadlineExceeded(f"waited {timeout_s:g} s for {self._folder} to be written, in vain") from error
        finally:
            self._saving = None

    def load(self, folder: Path) -> int:
        """Restores model, optimizer and random numbers; returns the policy version.

        Raises ConfigError when the state does not fit the model, RunFolderError when it cannot be read.
        """
        if not (folder / ".metadata").is_file():
            raise ConfigError(f"{folder} holds no state of a trainer; resume from a checkpoint that is whole")
        state = self._state(0)
        with _explained(folder, "read"):
            dcp.load(state, checkpoint_id=folder, process_group=self._group, no_dist=self.world == 1)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=not self.adapters_only),
        )
        torch.set_rng_state(state["rng"])
        return int(state["policy_version"])

    def _state(self, policy_version: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if self.adapters_only:
            model = {name: value for name, value in model.items() if is_adapter(name)}
        return {
            "model": model,
            "optimizer": optimizer,
            "policy_version": torch.tensor(policy_version),
            "rng": torch.get_rng_state(),
        }


@contextlib.contextmanager
def _explained(folder: Path, verb: str) -> Iterator[None]:
    """Inside, what goes wrong with `folder` is one of the project's errors; torch's own is no Exception."""
    try:
        yield
    except OSError as error:
        raise folder_error(folder, error, verb) from error
    except dcp.CheckpointException as error:
        cause: BaseException = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise folder_error(folder, cause, verb) from error
        if verb == "write":  # torch has its own words for what a disk refuses
            raise RunFolderError(f"cannot write {folder}: {cause}; give --run.dir another folder") from error
        raise ConfigError(
            f"cannot {verb} the trainer's state in {folder}: {cause}; resume with the model and the trainable "
            "parameters of the run that wrote it"
        ) from error


def _check_space(folder: Path, state: dict[str, Any]) -> None:
    """Raises OSError when this rank's part of `state` does not fit; torch would say something else."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    needed = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, the trainer's state needs {needed} bytes")
