"""A Hugging Face backbone with one number a token on top: what a critic expects, or what a reward model gives.

It is transformers' sequence classifier with one label, so that checkpoints go either way:

    causal LM --load--> backbone, a head of zeros
    sequence classifier --load--> backbone, its `score` --save--> the same, for AutoModelForSequenceClassification

A fresh head is zero rather than random: every value is 0 until the first update, so GAE begins as the plain return and
no seed adds noise to the first advantages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.attention import use_packed_attention
from actors.checkpoint import write_checkpoint
from actors.model import hidden_states, load_config, without_dropout
from forge.errors import ConfigError


class ValueModel(nn.Module):
    """Wraps a sequence classifier with one label: its backbone, and its head `[D] -> 1` in float32."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    @property
    def head(self) -> nn.Module:
        """The linear layer on top, without bias."""
        head: nn.Module = self.hf.score
        return head

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, *, after: bool = False
    ) -> torch.Tensor:
        """Values `[N]` (float32) of the N tokens where `mask` is True, row by row; arguments as of `Policy.forward`.

        From the hidden state before each token, as a critic sees it, or `after` it, as a reward model does.
        """
        read = slice(None) if after else slice(None, -1)  # the last column is before nothing
        hidden = hidden_states(self.hf, tokens[:, read], position_ids[:, read])
        rows, columns = mask.nonzero(as_tuple=True)
        values: torch.Tensor = self.head(hidden[rows, columns if after else columns - 1].float())
        return values.sum(dim=1)  # of the one label; no view, which FSDP2 would warn of


def load_value_model(
    model: str | Path, dtype: torch.dtype, device: str = "cpu", *, option: str, fresh_head: bool = True
) -> ValueModel:
    """From a folder or the hub: a causal LM, whose head begins as zeros, or a sequence classifier with one label.

    The backbone is in `dtype`, dropout is off. `option` is what the configuration calls `model`. Raises ConfigError
    naming it when transformers cannot load it, and without `fresh_head` where it has no head of its own.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    config = without_dropout(load_config(model, option))
    config.num_labels = 1
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # of heads that are left out or begin anew, as they should
    logging.disable_progress_bar()
    try:
        hf, info = AutoModelForSequenceClassification.from_pretrained(
            str(model), config=config, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{option} {model} is no model whose backbone transformers can load as a sequence classifier with one "
            f"label: {error}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ConfigError(f"{option} {model} is a {type(hf).__name__}, whose head is no linear layer `score`")
    _check_loaded(set(info["missing_keys"]), option, str(model), fresh_head=fresh_head)
    hf.score.float()
    if info["missing_keys"]:
        nn.init.zeros_(hf.score.weight)
    hf.to(device)
    use_packed_attention(hf)
    return ValueModel(hf)


def _check_loaded(missing: set[str], option: str, model: str, *, fresh_head: bool) -> None:
    if missing - {"score.weight"}:
        raise ConfigError(f"{option} {model} lacks {sorted(missing)[0]} and {len(missing) - 1} other weights")
    if missing and not fresh_head:
        raise ConfigError(
            f"{option} {model} has no score.weight, so it scores nothing; give a sequence classifier with one label"
        )


def save_value_model(model: ValueModel, folder: Path, source: str, dtype: torch.dtype, *, rank: int = 0) -> None:
    """Writes a checkpoint that AutoModelForSequenceClassification loads; whole or not at all.

    All ranks call it, rank 0 writes; config and tokenizer are those of the model `source`. Raises RunFolderError when
    it cannot be written.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model.hf, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        write_checkpoint(model.hf, state, folder, source, dtype)


def check_vocabulary(model: str, policy: str, *, option: str) -> None:
    """Raises ConfigError when `model` cannot read the token ids of `policy`; reads nothing but their configs."""
    named = ((model, option), (policy, "--model"))
    own, wanted = (load_config(name, key).get_text_config().vocab_size for name, key in named)
    if own != wanted:
        raise ConfigError(
            f"{option} {model} has a vocabulary of {own} tokens, the policy {policy} one of {wanted}; it reads the "
            "policy's token ids, so give one with the same tokenizer"
        )
