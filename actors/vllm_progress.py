"""What requests have sampled, read where vLLM keeps it: of running ones in its own states.

vLLM's own stream would hand every token of every request through the event loop, and says only at the end which
version sampled which token. Reading its request states costs nothing until somebody asks. They are no public
interface: `tests/actors/test_progress.py` notices when they move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forge.supports import whole_supports

Tokens = tuple[list[int], list[float], list[str], torch.Tensor | None]
"""Token ids, their log-probs, the label of the weights that sampled each, and the recorded supports, if any."""


def running_tokens(engine: Any, skips: Mapping[str, int]) -> dict[str, Tokens]:
    """What running requests of an AsyncLLM have sampled behind so many tokens; by request id, as `skips`.

    A request that has sampled nothing yet, or has ended, is left out. To be called on the engine's event loop.
    """
    states = {state.external_req_id: state for state in engine.output_processor.request_states.values()}
    begun = (name for name in skips if name in states and states[name].weight_version_starts)
    return {name: _tokens(states[name], skips[name]) for name in begun}


def _tokens(state: Any, skip: int) -> Tokens:
    tokens = list(state.detokenizer.output_token_ids)
    labels: list[str] = []
    starts = state.weight_version_starts
    for (label, start), (_, end) in zip(starts, [*starts[1:], ("", len(tokens))], strict=True):
        labels += [label] * (end - start)
    logprobs, kept = read_logprobs(state.logprobs_processor.logprobs, len(tokens), skip)
    return tokens[skip:], logprobs, labels[skip:], kept


def read_logprobs(flat: Any, count: int, skip: int = 0) -> tuple[list[float], torch.Tensor | None]:
    """Log-probs of `count` sampled tokens but the first `skip`, and their supports where more than they were asked for.

    `flat` are vLLM's FlatLogprobs: of each token its own entry, then those of the likeliest.
    """
    starts = flat.start_indices if flat is not None else []
    assert len(starts) == count, f"{count} tokens have log-probs of {len(starts)}"
    logprobs = [flat.logprobs[start] for start in starts[skip:]]
    if not logprobs or (width := flat.end_indices[0] - starts[0]) == 1:
        return logprobs, None
    ids, values = (
        np.array(column[starts[skip] :]).reshape(-1, width)[:, 1:] for column in (flat.token_ids, flat.logprobs)
    )
    return logprobs, whole_supports(ids, values)
