"""What running requests have sampled so far, read where vLLM keeps it.

vLLM's own stream would hand every token of every request through the event loop, and says only at the end which
version sampled which token. Reading its request states costs nothing until somebody asks. They are no public
interface: `tests/actors/test_progress.py` notices when they move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def running_tokens(engine: Any, request_ids: Iterable[str]) -> dict[str, tuple[list[int], list[float], list[str]]]:
    """Of each running request of an AsyncLLM: token ids, their log-probs, the label of the weights that sampled each.

    A request that has sampled nothing yet, or has ended, is left out. To be called on the engine's event loop.
    """
    states = {state.external_req_id: state for state in engine.output_processor.request_states.values()}
    begun = (name for name in request_ids if name in states and states[name].weight_version_starts)
    return {name: _tokens(states[name]) for name in begun}


def _tokens(state: Any) -> tuple[list[int], list[float], list[str]]:
    tokens = list(state.detokenizer.output_token_ids)
    entries = state.logprobs_processor.logprobs or []
    logprobs = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
    labels: list[str] = []
    starts = state.weight_version_starts
    for (label, start), (_, end) in zip(starts, [*starts[1:], ("", len(tokens))], strict=True):
        labels += [label] * (end - start)
    return tokens, logprobs, labels
