"""Rows that are there -> batches for the trainer's ranks, made while it works on the one before.

    rows --PromptStream--> prompt, completions --make_rows--> groups --(reference)--> packed --channel--> handles

A completion ends with the token that ends a generation too, so that a model learns to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from actors.rollout import References
from forge import channel
from forge.batch import collate, make_group
from forge.data import AnswerOf, Prompt, PromptStream
from forge.errors import ConfigError
from forge.packing import flatten
from replay.shards import plan_shards, send, waste

Complete = Callable[[str], list[int]]
"""The text of a completion to the tokens that are trained, the end of it included."""


@dataclass(frozen=True)
class Batch:
    """One step's rows, ready for the trainer."""

    handles: list[Any]
    """One channel handle a data-parallel rank, to a packed batch of whole rows."""
    stats: dict[str, float]
    """Keys of metrics.jsonl."""
    cursor: Mapping[str, Any]
    """Where the data stand behind it."""


@dataclass
class Batches:
    """The batches of a stream whose prompts carry the texts of their completions as `answer`."""

    stream: PromptStream
    complete: Complete
    size: int
    """Rows of a batch."""
    shards: int
    """What it is divided into, one a data-parallel rank."""
    row_tokens: int
    """What a rank sees at once, at most: rows are packed into it."""
    together: int = 1
    """Completions of a prompt that stay in one pass; as many as it has, or 1."""
    readers: int = 1
    """Ranks that share a part."""
    reference: References | None = None
    """Gives its log-probs of the completions, where the loss reads them."""

    async def next(self) -> Batch:
        """The next one; there always is one. Waits for the reference, where there is one.

        Raises ConfigError for a row that cannot be encoded, or is too long for the trainer.
        """
        epoch, batch = await asyncio.to_thread(self._draw)
        cursor = self.stream.state_dict()
        if self.reference is not None:
            batch["ref_logprobs"] = await self.reference.logprobs(batch)
        lengths = batch["lengths"].tolist()
        plan = plan_shards(lengths, self.shards, self.row_tokens, self.together)
        handles = await asyncio.to_thread(send, [flatten(batch)], plan, channel, self.readers)
        stats = {
            "episodes/trained": len(lengths),
            "tokens/trained": int(batch["loss_mask"].sum()),
            "extra/epoch": epoch,
        }
        return Batch(handles, stats | waste(lengths, plan, self.row_tokens, self.together), cursor)

    async def why_waiting(self) -> str:
        """What a train loop that waits long is waiting for, in one line."""
        return f"waiting for a batch: {self.size} rows are being read" + (" and referenced" if self.reference else "")

    def _draw(self) -> tuple[int, TensorDict]:
        """The epoch, and the rows `[size x completions, T]`."""
        prompts = [self.stream.draw() for _ in range(self.size)]
        groups = [make_rows(prompt, self.complete, number) for number, prompt in enumerate(prompts)]
        for prompt, group in zip(prompts, groups, strict=True):
            longest = int(group["lengths"].max()) * self.together
            if longest > self.row_tokens:
                raise ConfigError(
                    f"row {prompt.id} needs {longest} tokens, trainer.microbatch_tokens is {self.row_tokens}; raise it "
                    "or leave the row out of data.task"
                )
        return prompts[-1].epoch, collate(groups)


def make_rows(prompt: Prompt, complete: Complete, number: int) -> TensorDict:
    """The completions of one prompt as Group number `number`; nobody sampled them: log-probs 0, version 0."""
    completions = [complete(text) for text in prompt.answer]
    zeros: list[list[int]] = [[0] * len(tokens) for tokens in completions]
    return make_group(prompt.token_ids, completions, zeros, zeros, group_id=number)


def texts_of(*keys: str) -> AnswerOf:
    """Of a row the texts under `keys`, which it must have. Raises ConfigError."""

    def answer_of(row: Mapping[str, Any]) -> tuple[str, ...]:
        wrong = [key for key in keys if not isinstance(row.get(key), str)]
        if wrong:
            raise ConfigError(
                f"a row of data.task has the keys {sorted(row)}; it needs text under {' and '.join(map(repr, wrong))}"
            )
        return tuple(row[key] for key in keys)

    return answer_of


def make_completer(tokenizer: Any, stop_ids: Sequence[int]) -> Complete:
    """Encodes completions, and ends them with the first of `stop_ids`, those of the model. Raises ConfigError."""
    if not stop_ids:
        raise ConfigError("the model names no token that ends a text; set eos_token_id in its generation_config.json")
    return lambda text: [*tokenizer(text, add_special_tokens=False).input_ids, stop_ids[0]]
