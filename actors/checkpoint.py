"""Writes a model as a Hugging Face checkpoint that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from actors.lora import ADAPTER_FOLDER, Lora
from forge.errors import RunFolderError
from forge.run_folder import folder_error


def write_checkpoint(
    hf: Any, state: dict[str, Any], folder: Path, source: str, dtype: torch.dtype, *, lora: Lora | None = None
) -> None:
    """Safetensors of `state` in `dtype`, with the config and the tokenizer of the model `source`.

    With `lora` its adapter is merged into the weights, and lies beside them in PEFT's own format.

    Raises RunFolderError, naming the folder, when the disk is full or cannot be written.
    """
    try:
        _write(hf, state, folder, source, dtype, lora)
    except OSError as error:
        raise folder_error(folder, error) from error
    except SafetensorError as error:  # carries the system's words, not its error number
        raise RunFolderError(f"cannot write {folder}: {error}; give --run.dir another folder") from error


def _write(hf: Any, state: dict[str, Any], folder: Path, source: str, dtype: torch.dtype, lora: Lora | None) -> None:
    from transformers import AutoConfig, AutoTokenizer

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    free, needed = shutil.disk_usage(folder.parent).free, sum(v.numel() for v in state.values()) * dtype.itemsize
    if free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, the model needs {needed} bytes")
    tied = hf.config.tie_word_embeddings
    whole = lora.merged(state, dtype) if lora else state
    weights = {k: v.to(dtype) for k, v in whole.items() if not (tied and k == "lm_head.weight")}
    own = hf.config
    hf.config = AutoConfig.from_pretrained(source)  # with the dropout that training leaves out
    if hf.config.num_labels != own.num_labels:  # of a value model
        hf.config.num_labels = own.num_labels
    hf.config.dtype = dtype
    try:
        hf.save_pretrained(partial, state_dict=weights, safe_serialization=True)
    finally:
        hf.config = own  # training may go on, with the attention that is named there
    AutoTokenizer.from_pretrained(source).save_pretrained(partial)
    if lora:
        lora.write(state, partial / ADAPTER_FOLDER, source)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
